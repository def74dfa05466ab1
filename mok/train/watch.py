"""Lets every rank see where the others are, and ends a rank that waits too long, with a line that says for whom.

A thread of each rank publishes its step, stage and pulse in the store of the launch and reads those of the others. It works
while the main thread is stuck in an exchange, which is the point: gloo and NCCL cannot say who is missing, or where. Knows
nothing of models. Read next: `mok/transport/progress.py` for what is published, `mok/train/processes.py` for who starts it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from mok.errors import RankError
from mok.transport.progress import Progress

__all__ = ["Watch"]

PULSE_S = 0.25
"""Seconds between two publications of a rank."""

LOST_AFTER_PULSES = 6
"""An exchange broke and a rank has been silent for so many pulses: it is the one that was lost."""


@dataclass
class Sighting:
    """What one rank last published, and when (this rank's clock) its pulse, and its progress, last changed."""

    content: dict[str, Any]
    pulse_at: float
    progress_at: float


class Watch:
    """Start with `start`, end with `stop`; between them `explain` turns an error of an exchange into a RankError.

    store: shared by all ranks of the launch. timeout_s: how long a rank waits in one exchange.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, progress: Progress, timeout_s: float) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._progress, self._timeout_s = progress, timeout_s
        self._seen: dict[int, Sighting] = {}
        self._pulse = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mok-watch", daemon=True)

    def start(self) -> None:
        """Publish once, so that every rank that starts can be seen by all, and go on in the background."""
        self._publish()
        self._thread.start()

    def stop(self) -> None:
        """This rank leaves in good order."""
        self._stopping.set()
        self._thread.join()

    def failed(self, reason: str) -> None:
        """Tell the others that this rank ends because of an error of its own, which it reports itself."""
        self._stopping.set()
        self._blame(f"rank {self._rank} failed at {self._place(self._rank)}: {reason}")

    def explain(self, error: BaseException) -> RankError | None:
        """An exchange raised `error`: who is missing, and where it was last seen. None where no rank is.

        The message is the same on all ranks: the first one that finds out lets the others know.
        """
        for _ in range(2 * LOST_AFTER_PULSES):
            message = self._blamed() or self._blame_lost()
            if message:
                return RankError(message)
            time.sleep(PULSE_S)
            if not self._thread.is_alive():
                self._look()
        return None

    def _run(self) -> None:
        started_waiting, known_count = time.monotonic(), -1
        while not self._stopping.wait(PULSE_S):
            try:
                self._publish()
                self._look()
                now = time.monotonic()
                if not self._progress.waits or self._progress.count != known_count:
                    started_waiting, known_count = now, self._progress.count
                elif now - started_waiting > self._timeout_s:
                    self._end(self._blamed() or self._blame_stalled())
            except (RuntimeError, OSError):
                # The store lives in the launcher, or in rank 0 under a launcher without one.
                if not self._stopping.is_set():
                    self._end("the launcher was lost: its store does not answer any more")

    def _publish(self) -> None:
        self._pulse += 1
        progress = self._progress
        content = {
            "pulse": self._pulse,
            "step": progress.step,
            "stage": progress.stage,
            "waits": progress.waits,
            "count": progress.count,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        self._store.set(f"mok/watch/{self._rank}", json.dumps(content))

    def _look(self) -> None:
        now = time.monotonic()
        for rank in range(self._world_size):
            key = f"mok/watch/{rank}"
            if not self._store.check([key]):
                continue
            content = json.loads(self._store.get(key))
            known = self._seen.get(rank)
            if known is None:
                self._seen[rank] = Sighting(content, now, now)
                continue
            if content["pulse"] != known.content["pulse"]:
                known.pulse_at = now
            if content["count"] != known.content["count"]:
                known.progress_at = now
            known.content = content

    def _blamed(self) -> str:
        """What another rank, or this one, has already said."""
        return self._store.get("mok/blame").decode() if self._store.check(["mok/blame"]) else ""

    def _blame(self, message: str) -> str:
        """Make `message` the reason for the end of the run, unless there is one already; what is kept is the same for all."""
        return self._store.compare_set("mok/blame", "", message).decode()

    def _blame_lost(self) -> str:
        """An exchange broke: blame the first rank whose pulse has stopped."""
        now = time.monotonic()
        for rank, sighting in sorted(self._seen.items()):
            if rank != self._rank and now - sighting.pulse_at > LOST_AFTER_PULSES * PULSE_S:
                return self._blame(f"rank {rank} was lost at {self._place(self._rank)}")
        return ""

    def _blame_stalled(self) -> str:
        """This rank has waited too long: blame the rank that is silent, or at work, and has stood still for longest."""
        now = time.monotonic()
        others = {rank: sighting for rank, sighting in self._seen.items() if rank != self._rank}
        if not others:
            return self._blame(f"no other rank was seen; rank {self._rank} waited at {self._place(self._rank)}")
        silent = {rank: s for rank, s in others.items() if now - s.pulse_at > LOST_AFTER_PULSES * PULSE_S}
        busy = {rank: s for rank, s in others.items() if not s.content["waits"]}
        candidates = silent or busy or others
        rank = min(candidates, key=lambda rank: (candidates[rank].progress_at, rank))
        # A stopped process published nothing after its last pulse; this rank waits for it in the exchange it has reached.
        place = self._place(self._rank if rank in silent else rank)
        message = f"rank {rank} stalled at {place}: the others waited for {self._timeout_s:g} s"
        kept = self._blame(message)
        content = others[rank].content
        if kept == message and content["host"] == socket.gethostname():
            # Stopped or stuck, it would outlive the run.
            with suppress(ProcessLookupError):
                os.kill(content["pid"], signal.SIGKILL)
        return kept

    def _place(self, rank: int) -> str:
        if rank == self._rank:
            return f"step {self._progress.step}, stage {self._progress.stage}"
        content = self._seen[rank].content
        return f"step {content['step']}, stage {content['stage']}"

    def _end(self, message: str) -> None:
        """End this process from the watching thread: the main thread cannot be reached inside an exchange."""
        print(f"Error: {message}", file=sys.stderr, flush=True)
        os._exit(RankError.exit_code)
