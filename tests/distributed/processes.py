"""Processes for tests: `run_distributed`, a function on several gloo ranks under a hard time limit, and `ForkingWorkshop`."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mok.determinism.axes import Workshop

__all__ = ["ForkingWorkshop", "run_distributed"]

# The server imports everything once, before it has threads; each rank is forked from it in milliseconds and shares nothing.
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["mok.determinism.arm", "mok.dcp"])


def run_distributed(function: Callable[..., Any], world_size: int, *arguments: Any, limit_s: float = 60.0) -> list[Any]:
    """Run `function(rank, world_size, *arguments)` on every rank and return what each returned, in rank order.

    function: a function of a module (it travels by name); what it returns must pickle, tensors included.
    limit_s: after so long every rank is killed and TimeoutError raised.
    Raises RuntimeError with the traceback of the first rank that failed, once all have ended or are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            FORKSERVER.Process(target=_rank, args=(function, rank, world_size, folder, limit_s, arguments), daemon=True)
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + limit_s
        try:
            while any(process.is_alive() for process in ranks) and not list(Path(folder).glob("*.error")):
                if time.monotonic() > deadline:
                    late = [rank for rank, process in enumerate(ranks) if process.is_alive()]
                    raise TimeoutError(f"ranks {late} of {world_size} still ran after {limit_s:g} s")
                time.sleep(0.01)
            if errors := sorted(Path(folder).glob("*.error"), key=lambda path: path.stat().st_mtime_ns):
                raise RuntimeError(f"rank {errors[0].stem} failed\n{errors[0].read_text()}")
            if dead := [(rank, process.exitcode) for rank, process in enumerate(ranks) if process.exitcode]:
                raise RuntimeError(f"rank {dead[0][0]} died with exit code {dead[0][1]}")
        finally:
            for process in ranks:
                process.kill()
                process.join()
        return [pickle.loads((Path(folder) / f"{rank}.result").read_bytes()) for rank in range(world_size)]


def _rank(function: Callable[..., Any], rank: int, world_size: int, folder: str, limit_s: float, arguments: tuple) -> None:
    try:
        torch.set_num_threads(1)
        store = dist.FileStore(f"{folder}/store", world_size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=datetime.timedelta(seconds=limit_s)
        )
        result = function(rank, world_size, *arguments)
        Path(folder, f"{rank}.result").write_bytes(pickle.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        partial = Path(folder, f"{rank}.partial")
        partial.write_text(traceback.format_exc())
        partial.rename(partial.with_suffix(".error"))
        raise


class ForkingWorkshop(Workshop):
    """Runs the one-process arms of `mok verify-determinism` forked from the server, which spares each the imports."""

    def start(self, folder: Path) -> Any:
        return _Forked(folder / "spec.json")


class _Forked:
    """What `Workshop` needs of subprocess.Popen."""

    def __init__(self, spec: Path) -> None:
        self._process = FORKSERVER.Process(target=_arm, args=(str(spec),))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(min(timeout or 120.0, 120.0))
        assert self._process.exitcode is not None, "an arm hangs"
        return self._process.exitcode


def _arm(spec: str) -> None:
    from mok.determinism.arm import guarded

    os.setsid()
    with Path(spec).with_name("output.txt").open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        raise SystemExit(guarded(spec))
