"""A measurement in a child process, watched: a transfer that never ends becomes a failed record, not a hung command.

Owns the reading of the child's events and their time limits. Read next: `__main__.py`, the child.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from typing import IO, Any

from mok.topology.measure.plan import Plan
from mok.topology.measure.runner import Record
from mok.topology.measurement import Exchange, Measurement, Transfer
from mok.topology.model import from_plain
from mok.topology.sources import child_environment

__all__ = ["measure"]

START_LIMIT_S = 180.0
"""For importing torch, making a context on every GPU and compiling the kernels."""

COMMAND = (sys.executable, "-m", "mok.topology.measure")


def measure(plan: Plan, command: tuple[str, ...] = COMMAND, start_limit_s: float = START_LIMIT_S) -> Measurement:
    """Carry out `plan` on the visible GPUs of this host. Never hangs, never raises for a GPU that fails."""
    begin = time.monotonic()
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [*command, json.dumps(dataclasses.asdict(plan))], stdout=subprocess.PIPE, stderr=errors, env=child_environment()
        )
        assert child.stdout is not None
        lines: queue.Queue[bytes] = queue.Queue()
        reader = threading.Thread(target=_read, args=(child.stdout, lines), daemon=True)
        reader.start()
        records: list[Record] = []
        pending: Record | None = None
        unfinished, limit = "", start_limit_s
        while True:
            try:
                line = lines.get(timeout=limit)
            except queue.Empty:
                unfinished = f"no end within {limit:g} s"
                break
            if not line:
                unfinished = _last_words(child, errors)
                break
            event = json.loads(line)
            limit = plan.limit_s
            if event["event"] == "done":
                break
            if event["event"] == "begin":
                pending = _record(event)
            elif event["event"] == "end":
                records.append(_record(event))
                pending = None
        child.kill()
        # One that is stuck in the driver may not even die, so it is not waited for long.
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=5.0)
            reader.join()
            child.stdout.close()
    if pending is not None:
        records.append(dataclasses.replace(pending, verdict="FAILED", detail=unfinished))
        unfinished = f"stopped at {_name(pending)}: {unfinished}"
    elif unfinished:
        unfinished = f"the measuring process gave nothing more: {unfinished}"
    return Measurement(
        tuple(record for record in records if isinstance(record, Transfer)),
        tuple(record for record in records if isinstance(record, Exchange)),
        round(time.monotonic() - begin, 3),
        unfinished,
    )


def _read(stream: IO[bytes], lines: queue.Queue[bytes]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(b"")


def _record(event: dict[str, Any]) -> Record:
    return from_plain(Transfer, event["transfer"]) if "transfer" in event else from_plain(Exchange, event["exchange"])


def _name(record: Record) -> str:
    if isinstance(record, Transfer):
        return f"{record.method} from {record.source} to {record.target}"
    return f"the {record.routing} all-to-all"


def _last_words(child: subprocess.Popen[bytes], errors: IO[bytes]) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=5.0)
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return f"it ended with code {child.returncode}" + (f" ({lines[-1]})" if lines else "")
