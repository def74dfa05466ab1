"""Where a rank is: step, stage, and whether it waits for others. Owns three facts and a count, no thread and no process.

Read next: `mok/train/watch.py`, which lets the ranks see one another's progress.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Progress"]


class Progress:
    """step: 0 before the first. stage: "start", "data", "dispatch", "combine", "gradients", "save" and so on.

    waits: whether the rank is inside an exchange now. count: rises whenever the rank moves on, so that a rank that is slow
    differs from one that stands still.
    """

    def __init__(self) -> None:
        self.step = 0
        self.stage = "start"
        self.waits = False
        self.count = 0

    def enter(self, stage: str, step: int | None = None) -> None:
        """The rank now works on `stage` (of `step`, if given)."""
        self.stage = stage
        self.step = self.step if step is None else step
        self.count += 1

    @contextmanager
    def waiting(self, stage: str) -> Iterator[None]:
        """An exchange: a rank that stays here waits for another. An error inside leaves the stage as it is."""
        before = self.stage
        self.enter(stage)
        self.waits = True
        yield
        self.waits = False
        self.enter(before)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Inside `waiting`, where somebody else's code enters the exchanges: a time in which this rank works by itself."""
        before, self.waits = self.waits, False
        try:
            yield
        finally:
            self.waits = before
            self.count += 1
