"""What a peer's maker raises where the peer is not installed: the others are measured without it."""

from __future__ import annotations

from mok.errors import UsageError

__all__ = ["Absent"]


class Absent(UsageError):
    """The message says what to install."""
