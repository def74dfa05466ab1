"""What adding gradients over ranks in the order of the contract costs, beside the backend's own all-reduce of the same bytes.

Runs as every rank of a launch: `python -m mok.bench.reduction SPEC.json`. Times whole steps, the ordered sums with the
gathering of updated weights, and an all-reduce of the same gradients, in turns. Read next: `mok/train/reduction.py`.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from mok.bench.train import GivenBatches, random_tokens
from mok.config import Recipe
from mok.errors import CheckFailed
from mok.grid import Grid, Layout, split_ranks
from mok.recipe import dump_toml, load
from mok.train.device import choose_device
from mok.train.memory import keep_freed_memory
from mok.train.processes import join, launch, launched_ranks
from mok.train.state import TrainState
from mok.train.step import train_step

__all__ = ["ReductionCost", "bench_reduction", "layout_of"]


@dataclass(frozen=True)
class ReductionCost:
    """Medians in milliseconds, after a barrier, of rank 0. ordered_ms: the ordered sums, and the gathering of the weights that
    each rank updated a shard of. all_reduce_ms: `backend` adds the same gradients, after which every rank would update
    everything. gradient_bytes: of one rank."""

    replicas: int
    ep: int
    backend: str
    step_ms: float
    ordered_ms: float
    all_reduce_ms: float
    gradient_bytes: int

    @property
    def share_of_step(self) -> float:
        """What the order costs, as a share of a step; negative where it is the faster of the two."""
        return (self.ordered_ms - self.all_reduce_ms) / self.step_ms


def bench_reduction(recipe: Recipe, nproc: int, *, vocab_size: int, repeats: int, device: str) -> ReductionCost:
    """Time `recipe` on `nproc` ranks of this machine, `repeats` times. Raises UsageError where they do not fit its grid."""
    layout_of(recipe, nproc)
    with tempfile.TemporaryDirectory(prefix="mok-bench-") as folder:
        spec, result = Path(folder, "spec.json"), Path(folder, "result.json")
        Path(folder, "recipe.toml").write_text(dump_toml(recipe), encoding="utf-8")
        content = {"vocab_size": vocab_size, "repeats": repeats, "device": device}
        spec.write_text(json.dumps(content), encoding="utf-8")
        if launch("mok.bench.reduction", [str(spec)], nproc) or not result.is_file():
            raise CheckFailed("a rank of the benchmark ended; its error is above")
        return ReductionCost(**json.loads(result.read_text(encoding="utf-8")))


def layout_of(recipe: Recipe, nproc: int, rank: int = 0) -> Layout:
    """How `nproc` ranks share the grid of `recipe`. Raises UsageError where they do not fit it."""
    replicas, ep = split_ranks(recipe, nproc)
    return Layout(Grid.of(recipe, replicas, ep), replicas, ep, rank)


def main(path: str) -> None:
    """One rank."""
    spec = json.loads(Path(path).read_text(encoding="utf-8"))
    recipe = load(str(Path(path).with_name("recipe.toml")))
    launched = launched_ranks()
    assert launched is not None
    rank, world_size = launched
    layout = layout_of(recipe, world_size, rank)
    device = choose_device(spec["device"])
    if device.type == "cuda":
        device = torch.device("cuda", rank)
    keep_freed_memory()
    ranks = join(layout, device, recipe.distributed.timeout_s)
    with ranks.guard():
        state = TrainState(recipe, spec["vocab_size"], ranks, device)
        batches = GivenBatches(layout.grid)
        ids = random_tokens(recipe, spec["vocab_size"])[0]
        batches.inputs, batches.targets = ids[:, :-1], ids[:, 1:]
        groups = [(group.bank.experts, grads) for group, grads in zip(state.optimizer.groups, state.store.grads, strict=True)]
        lanes = ranks.mesh.get_group("replica")

        def ordered() -> None:
            state.store.finish(ranks.exchange)
            state.gather_weights()

        def all_reduce() -> None:
            for experts, grads in groups:
                if not experts or layout.replicas > 1:
                    dist.all_reduce(grads, group=lanes if experts else None)

        works: dict[str, Callable[[], object]] = {
            "step_ms": lambda: train_step(state, batches),
            "ordered_ms": ordered,
            "all_reduce_ms": all_reduce,
        }
        seconds: dict[str, list[float]] = {name: [] for name in works}
        for turn in range(spec["repeats"] + 1):
            for name, work in works.items():
                dist.barrier()
                started = time.perf_counter()
                work()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                if turn:  # the first turn warms up
                    seconds[name].append(time.perf_counter() - started)
                for _, grads in groups:
                    grads.zero_()  # sums of sums would overflow in the end
        if rank == 0:
            cost = ReductionCost(
                replicas=layout.replicas,
                ep=layout.ep,
                backend=dist.get_backend(ranks.mesh.get_group("ep")),
                gradient_bytes=sum(grads.nbytes for _, grads in groups),
                **{name: statistics.median(values) * 1e3 for name, values in seconds.items()},
            )
            Path(path).with_name("result.json").write_text(json.dumps(asdict(cost)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
