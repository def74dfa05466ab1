"""What a command prints: a JSON report if asked for, text for people otherwise, and never both on one stream.

Owns `--json [FILE]`, the schema version and the choice of stream. Knows nothing about any one command's report.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click

from mok.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["SCHEMA_VERSION", "Output", "examples", "json_option"]

F = TypeVar("F", bound=Callable[..., Any])

SCHEMA_VERSION = 1
"""Version of every JSON report. Names in it are added, never renamed; a change of meaning raises it."""


class Output:
    """Where one command's words go.

    destination: None (no JSON), "-" (JSON alone on standard output, the rest on standard error), or a file's path.
    Raises UsageError at once if the file cannot be written, not after the work.
    """

    def __init__(self, destination: str | None = None) -> None:
        self.destination = destination
        self.stream: TextIO = sys.stderr if destination == "-" else sys.stdout
        if destination not in (None, "-"):
            folder = Path(destination).absolute().parent
            if Path(destination).is_dir() or not os.access(folder, os.W_OK):
                raise UsageError(
                    f"--json {destination}: cannot be written; name a file in a folder that exists and is writable"
                )

    def line(self, text: str = "") -> None:
        """Print one line for people."""
        click.echo(text, file=self.stream)

    def console(self) -> Console:
        """A rich console on the stream for people: colour and progress on a terminal only, NO_COLOR honoured."""
        from rich.console import Console  # here, because it costs more than all of `mok --help`

        return Console(file=self.stream, highlight=False, soft_wrap=not self.stream.isatty())

    def report(self, data: Mapping[str, Any]) -> None:
        """Write `data` as JSON with its schema version, if JSON was asked for. NaN and infinities become null."""
        if self.destination is None:
            return
        text = json.dumps(_finite({"schema_version": SCHEMA_VERSION, **data}), indent=2, allow_nan=False) + "\n"
        if self.destination == "-":
            sys.stdout.write(text)
        else:
            Path(self.destination).write_text(text, encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def json_option(command: F) -> F:
    """Add `--json [FILE]` to a command; it receives an `Output` as `output`."""
    return click.option(
        "--json",
        "output",
        is_flag=False,
        flag_value="-",
        metavar="[FILE]",
        callback=lambda context, parameter, value: Output(value),
        help="Report as JSON, to FILE or alone on standard output.",
    )(command)


def examples(*lines: str) -> str:
    """An epilog that shows each line as it is to be typed."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
