"""How a source is asked: in a child process, with a time limit, so that a broken driver cannot take the caller with it.

Owns the protocol between `ask` and the modules that it runs: one JSON object on standard output. A library that kills or
hangs its process costs one answer, never the picture.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sized
from dataclasses import dataclass
from pathlib import Path

from mok.topology.model import Reading, Source, from_plain, to_plain

__all__ = ["Question", "Unavailable", "answer", "ask", "child_environment", "count_of", "last_line"]


class Unavailable(Exception):
    """A source that has no answer; the text is the reason."""


def count_of(gpus: Sized) -> str:
    return f"{len(gpus)} GPU{'s' if len(gpus) != 1 else ''}"


def answer(read: Callable[[], Reading]) -> None:
    """Child side: print what `read` returns, or why it has nothing."""
    try:
        document = {"reading": to_plain(read())}
    except Unavailable as reason:
        document = {"unavailable": str(reason)}
    sys.stdout.write(json.dumps(document))


def child_environment() -> dict[str, str]:
    """The environment for a child that imports this very mok, installed or not."""
    roots = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(root for root in roots if root)}


@dataclass
class Question:
    """A source being asked: the child is running, `result` waits for it no longer than `limit_s` in all."""

    name: str
    limit_s: float
    child: subprocess.Popen[bytes]

    def result(self) -> tuple[Reading | None, Source]:
        try:
            output, errors = self.child.communicate(timeout=self.limit_s)
        except subprocess.TimeoutExpired:
            self._give_up()
            return None, Source(self.name, False, f"no answer within {self.limit_s:g} s")
        try:
            document = json.loads(last_line(output))
        except ValueError:
            lines = errors.decode(errors="replace").strip().splitlines()
            return None, Source(self.name, False, _ending(self.child.returncode) + (f": {lines[-1]}" if lines else ""))
        if "unavailable" in document:
            return None, Source(self.name, False, document["unavailable"])
        reading = from_plain(Reading, document["reading"])
        return reading, Source(self.name, True, reading.detail)

    def _give_up(self) -> None:
        """Kill the child. One that is stuck in the driver may not even die, so it is not waited for long."""
        self.child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(timeout=2.0)
        for pipe in (self.child.stdout, self.child.stderr):
            if pipe is not None:
                pipe.close()


def last_line(output: bytes) -> bytes:
    """Where the JSON is: libraries may print before it."""
    return output.strip().rpartition(b"\n")[2]


def _ending(code: int) -> str:
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with code {code} and no answer"


def ask(name: str, module: str, limit_s: float) -> Question:
    """Start asking the source `module`, a module path whose main calls `answer`."""
    child = subprocess.Popen(
        [sys.executable, "-m", module],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        env=child_environment(),
    )
    return Question(name, limit_s, child)
