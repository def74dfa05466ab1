"""`python -m mok_cli` is the `mok` command."""

from __future__ import annotations

from mok_cli.main import main

if __name__ == "__main__":
    main()
