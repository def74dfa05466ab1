"""The ranks of a benchmark: processes of this machine that meet, time something together, and leave one report.

Owns the launch, the groups and the clock that counts the slowest rank. Ranks that share a GPU measure its memory and
scheduling, not a link, and the report says so. Knows nothing of what is timed. Read next: `mok/bench/exchange.py` and
`mok/bench/layer_ranks.py`.
"""

from __future__ import annotations

import datetime
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mok.errors import CheckFailed, RankError
from mok.topology.own_gpu import own_gpu, ranks_of_a_gpu, share_memory_of_one_gpu
from mok.train.processes import launch, launched_ranks

__all__ = ["TIMEOUT_S", "BenchRank", "run_ranks"]

TIMEOUT_S = 60.0


def run_ranks(module: str, spec: dict[str, Any], nproc: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Run `module` with `spec` as `nproc` ranks; what rank 0 has `report`ed. spec["device"]: cpu or cuda. Raises CheckFailed if
    a rank was lost."""
    gpus = torch.cuda.device_count() if spec["device"] == "cuda" else 0
    if gpus and gpus < nproc:
        say(f"note: {nproc} ranks share {gpus} GPU(s): no link is measured")
    with tempfile.TemporaryDirectory(prefix="mok-bench-") as folder:
        path, result = Path(folder, "spec.json"), Path(folder, "result.json")
        path.write_text(json.dumps(spec), encoding="utf-8")
        if launch(module, [str(path)], nproc) or not result.is_file():
            raise CheckFailed("a rank of the benchmark ended; its error is above")
        return json.loads(result.read_text(encoding="utf-8"))


class BenchRank:
    """This rank, once all have met. group: the `ep` ranks that share experts, one of several beside each other; member: its
    place there. nccl: whether tensors of GPUs can go through collectives, for which each rank needs its own."""

    def __init__(self, path: str, ep: int | None = None) -> None:
        """path: of the spec that `run_ranks` wrote. ep: None for all ranks."""
        self.path = Path(path)
        self.spec = json.loads(self.path.read_text(encoding="utf-8"))
        launched = launched_ranks()
        assert launched is not None
        self.rank, self.world_size = launched
        self.device = torch.device(self.spec["device"])
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            self.device = own_gpu()
            torch.cuda.set_device(self.device)
            share_memory_of_one_gpu()
        self.shared = on_gpu and ranks_of_a_gpu() > 1
        self.nccl = on_gpu and not self.shared
        backend = "cpu:gloo,cuda:nccl" if self.nccl else "gloo"
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=2 * TIMEOUT_S))
        self.ranks = ep or self.world_size
        self.member = self.rank % self.ranks
        groups = [
            dist.new_group(list(range(first, first + self.ranks))) for first in range(0, self.world_size, self.ranks)
        ]  # each is made by all ranks
        self.group: dist.ProcessGroup = groups[self.rank // self.ranks]

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def agree(self, problem: str) -> None:
        """Raises RankError on every rank if one of them has a problem."""
        problems: list[str] = [""] * self.world_size
        dist.all_gather_object(problems, problem)
        if any(problems):
            rank = next(rank for rank, found in enumerate(problems) if found)
            raise RankError(f"rank {rank}: {problems[rank]}")

    def times(self, work: Callable[[int], Any], calls: int, before: Callable[[], Any] | None = None) -> tuple[float, float]:
        """(median, distance of the quartiles) in ms, over `calls`, of the slowest rank's time for `work(i)`, all beginning
        together; after two calls that do not count. before: each time first, not timed."""
        seconds = []
        for turn in range(calls + 2):
            if before is not None:
                before()
            self.synchronize()
            dist.barrier()
            started = time.perf_counter()
            work(turn)
            self.synchronize()
            if turn >= 2:
                seconds.append(time.perf_counter() - started)
        everyone: list[list[float]] = [[]] * self.world_size
        dist.all_gather_object(everyone, seconds)
        slowest = sorted(max(call) * 1e3 for call in zip(*everyone, strict=True))
        return statistics.median(slowest), slowest[len(slowest) * 3 // 4] - slowest[len(slowest) // 4]

    def environment(self) -> dict[str, Any]:
        """What it was measured on."""
        return {
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            "ranks": self.world_size,
            "ranks_share_a_gpu": self.shared,
            "torch": torch.__version__,
        }

    def report(self, content: dict[str, Any]) -> None:
        """The end of this rank; rank 0's content is the report."""
        if self.rank == 0:
            self.path.with_name("result.json").write_text(json.dumps(content), encoding="utf-8")
        dist.barrier()
        dist.destroy_process_group()
