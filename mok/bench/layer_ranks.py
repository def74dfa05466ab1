"""One expert layer over several ranks: every result against float64 before it is timed, then the slowest rank's time.

Runs as every rank of a launch: `python -m mok.bench.layer_ranks SPEC.json`. Owns who is timed: ours over peer memory and over
all-to-all, and what people put together from all-to-all and torch's grouped products. Read next: `mok/bench/layer.py` for one
rank, `mok/bench/exchange.py` for what the exchange alone takes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from mok.backends import choose
from mok.bench.layer import Inputs, Problem, Truth, call_of, first_line, make_problem, make_rank_truth, worst_error
from mok.bench.peers import layer as peers
from mok.bench.peers.over_ranks import GroupedOverRanks
from mok.bench.ranks import TIMEOUT_S, BenchRank, run_ranks
from mok.errors import CheckFailed, UsageError
from mok.grid import CallGrid
from mok.shapes import LayerShape, WorkspaceShape
from mok.train.device import choose_device
from mok.transport.collective import CollectiveTransport
from mok.transport.peer import PeerTransport

__all__ = ["RanksReport", "RanksRow", "bench_layer_over_ranks"]

BACKENDS = {"peer": ("staged", "mega"), "collective": ("torch",)}
"""Whose rows can travel so."""


@dataclass(frozen=True)
class RanksRow:
    """One line of a report. direction: forward, or forward+backward. median_ms, spread_ms: of the slowest rank; tflops: of a
    rank, on the average. relative_error: the largest of any rank, None where it was not asked for."""

    name: str
    direction: str
    median_ms: float
    spread_ms: float
    tflops: float
    relative_error: float | None


@dataclass(frozen=True)
class RanksReport:
    """rows; left_out: what was not measured, and why; environment: what it was measured on; wrong: what was found of others
    whose results were further off than they may be, who are left out."""

    rows: list[RanksRow]
    left_out: dict[str, str]
    environment: dict[str, Any]
    wrong: list[str]


def bench_layer_over_ranks(
    shape: LayerShape,
    *,
    tokens: int,
    nproc: int,
    ep: int,
    routing: str,
    backend: str,
    calls: int,
    check: bool,
    device: str,
    dtype: torch.dtype,
    say: Callable[[str], None],
) -> RanksReport:
    """Time a layer of `shape` whose experts `ep` of `nproc` ranks of this machine share, as nproc / ep groups beside each
    other, `tokens` on each rank. backend: one of ours, or auto for all that can. Raises UsageError where the ranks cannot share
    the experts, CheckFailed if a result was wrong or a rank was lost."""
    if nproc % ep:
        raise UsageError(f"--ep {ep}: must divide the {nproc} ranks of --nproc")
    if ep < 2 or shape.num_experts % ep:
        raise UsageError(f"--ep {ep}: must be 2 or more and divide the {shape.num_experts} experts of the layer")
    names = [name for able in BACKENDS.values() for name in able]
    if backend not in ("auto", *names):
        raise UsageError(f"--backend {backend}: over ranks it must be auto or one of {', '.join(names)}")
    spec = {
        "shape": asdict(shape),
        "tokens": tokens,
        "ep": ep,
        "routing": routing,
        "backend": backend,
        "calls": calls,
        "check": check,
        "device": choose_device(device).type,
        "dtype": str(dtype).removeprefix("torch."),
    }
    found = run_ranks("mok.bench.layer_ranks", spec, nproc, say)
    return RanksReport([RanksRow(**row) for row in found["rows"]], found["left_out"], found["environment"], found["wrong"])


class Bench(BenchRank):
    """One rank: its experts and tokens, and what it has timed."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.shape = LayerShape(**self.spec["shape"])
        self.local = replace(self.shape, num_experts=self.shape.num_experts // self.ranks, top_k=1)
        self.dtype = getattr(torch, self.spec["dtype"])
        self.grid = CallGrid(self.ranks, self.ranks, (0,), self.ranks, self.member)
        experts = self.experts_of(self.member)
        weights = experts.gate_EIH, experts.up_EIH, experts.down_EHI
        self.problem = Problem("the layer", self.shape, self.spec["tokens"], self.inputs_of(self.rank), *weights)
        self.rows: list[RanksRow] = []
        self.left_out: dict[str, str] = {}
        self.wrong: list[str] = []

    def experts_of(self, member: int) -> Problem:
        return make_problem("experts", self.local, 0, "balanced", self.device, self.dtype, seed=member)

    def inputs_of(self, rank: int) -> list[Inputs]:
        thin = replace(self.shape, intermediate_size=16)  # for its tokens and routes alone
        tokens, routing = self.spec["tokens"], self.spec["routing"]
        return make_problem("tokens", thin, tokens, routing, self.device, self.dtype, seed=1000 + rank).sets

    def truth(self) -> Truth:
        """What this rank must get: its tokens through the experts of all ranks, and its experts with the tokens of all."""
        every = [self.experts_of(member) for member in range(self.ranks)]
        weights = (torch.cat([getattr(part, name) for part in every]) for name in ("gate_EIH", "up_EIH", "down_EHI"))
        of_tokens = replace(self.problem, gate_EIH=next(weights), up_EIH=next(weights), down_EHI=next(weights))
        first = self.rank - self.member
        sets = [self.inputs_of(rank)[0] for rank in range(first, first + self.ranks)]
        columns = {name: torch.cat([getattr(part, name) for part in sets]) for name in vars(sets[0])}
        columns["ids_TK"] = columns["ids_TK"] - self.member * self.local.num_experts
        of_experts = replace(self.problem, shape=self.local, sets=[Inputs(**columns)])
        return make_rank_truth(of_tokens, of_experts)

    def contestants(self) -> Iterator[tuple[str, Callable[[], peers.Contestant]]]:
        """Who is timed: (name, what makes it). Who cannot be is left out, with the reason."""
        wanted, on_cpu = self.spec["backend"], self.device.type == "cpu"
        for transport, backends in BACKENDS.items():
            for backend in backends:
                name = f"mok {backend}, {transport}"
                if wanted not in ("auto", backend):
                    continue
                try:
                    if transport == "peer" and on_cpu:
                        raise UsageError("ranks on CPUs have no memory to open to one another")
                    if transport == "collective" and not (on_cpu or self.nccl):
                        raise UsageError("NCCL wants a GPU for each rank")
                    shape = replace(self.shape, ranks=self.ranks)
                    choose(backend, shape, self.dtype, self.device, transport=transport)
                except UsageError as error:  # the same on every rank
                    self.left_out[name] = str(error)
                    continue
                yield name, partial(self.ours, backend, transport)
        if on_cpu or self.nccl:
            yield "all-to-all, grouped_mm", partial(GroupedOverRanks, self.problem, self.group)
        else:
            self.left_out["all-to-all, grouped_mm"] = "NCCL wants a GPU for each rank"

    def ours(self, backend: str, transport: str) -> peers.Contestant:
        if transport == "collective":
            return peers.Mok(self.problem, backend, transport=CollectiveTransport(self.group), grid=self.grid)
        shape = self.shape
        room = WorkspaceShape(max(self.problem.tokens, 1), shape.top_k, shape.hidden_size, shape.intermediate_size, self.ranks)
        opened = PeerTransport.allocate(room, self.group, self.device, self.agree, row_room=0.0, timeout_s=TIMEOUT_S)
        return peers.Mok(self.problem, backend, transport=opened, grid=self.grid)

    def run(self) -> None:
        truth = self.truth() if self.spec["check"] else None
        for name, make in self.contestants():
            contestant = make()
            error = None if truth is None else self.error_of(contestant, truth, name.startswith("mok"))
            if name in self.left_out:
                continue
            for direction in ("forward", "forward+backward"):
                call = call_of(contestant, self.problem, direction)
                median, spread = self.times(call, self.spec["calls"])
                rate = self.problem.flops(direction) / median / 1e9
                self.rows.append(RanksRow(name, direction, median, spread, rate, error))
            del contestant

    def error_of(self, contestant: peers.Contestant, truth: Truth, ours: bool) -> float:
        """The largest error of any rank. Where it is too large, RankError on every rank if it is ours; who else is left out."""
        error, problem = 0.0, ""
        try:
            error = worst_error(self.problem, contestant, truth, ours)
        except CheckFailed as failed:
            problem = first_line(failed)
        if ours:
            self.agree(problem)
        found: list[tuple[float, str]] = [(0.0, "")] * self.world_size
        dist.all_gather_object(found, (error, problem))
        if problems := [f"rank {rank}: {said}" for rank, (_, said) in enumerate(found) if said]:
            self.left_out[contestant.name] = problems[0]
            self.wrong.append(problems[0])
        return max(worst for worst, _ in found)


def main(path: str) -> None:
    """One rank."""
    bench = Bench(path)
    bench.run()
    told = {name: bench.spec[name] for name in ("shape", "tokens", "ep", "routing", "dtype")}
    environment = bench.environment() | told
    rows = [asdict(row) for row in bench.rows]
    bench.report({"rows": rows, "left_out": bench.left_out, "environment": environment, "wrong": bench.wrong})


if __name__ == "__main__":
    main(sys.argv[1])
