"""How fast rows travel between the ranks that share experts: out to the experts and back, alone and as part of a layer.

Runs as every rank of a launch: `python -m mok.bench.exchange SPEC.json`. Each way is checked before it is timed: rows that
come back untouched must be the bytes that went out, at their own (token, slot). Read next: `mok/launch/peer.py` and
`mok/transport/collective.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mok.backends import choose
from mok.bench.layer import Inputs, make_problem
from mok.bench.ranks import TIMEOUT_S, BenchRank, run_ranks
from mok.errors import MokError, UsageError
from mok.grid import CallGrid
from mok.layer import moe_layer
from mok.schedule import build_schedule, count_routes
from mok.shapes import LayerShape, WorkspaceShape
from mok.train.device import choose_device
from mok.transport.collective import CollectiveTransport
from mok.transport.interface import Transport
from mok.transport.peer import PeerTransport

__all__ = ["ExchangeReport", "ExchangeRow", "bench_exchange"]


@dataclass(frozen=True)
class ExchangeRow:
    """One thing timed on the slowest rank. name: transport and backend. what: plan, dispatch, combine, forward, backward.
    link_bytes: that the busiest rank receives from others in it; gb_per_s: those over the median."""

    name: str
    what: str
    median_ms: float
    spread_ms: float
    link_bytes: int
    gb_per_s: float


@dataclass(frozen=True)
class ExchangeReport:
    """rows; left_out: what was not measured, and why; environment: what it was measured on; trace: a timeline of mega's tasks
    and movers on all ranks, where it was asked for and mega ran."""

    rows: list[ExchangeRow]
    left_out: dict[str, str]
    environment: dict[str, Any]
    trace: dict[str, Any] | None = None


def bench_exchange(
    shape: LayerShape,
    *,
    tokens: int,
    nproc: int,
    routing: str,
    calls: int,
    device: str,
    trace: bool,
    say: Callable[[str], None],
) -> ExchangeReport:
    """Time the exchange of a layer of `shape` among `nproc` ranks of this machine, `tokens` on each. Raises UsageError where
    the ranks cannot share the experts, CheckFailed if a row came back wrong or a rank was lost."""
    if nproc < 2 or shape.num_experts % nproc:
        raise UsageError(f"--nproc {nproc}: must be 2 or more and divide the {shape.num_experts} experts of the layer")
    kind = choose_device(device).type
    if trace and kind != "cuda":
        raise UsageError("--trace: the megakernel needs a CUDA device of compute capability 9.0")
    spec = {"shape": asdict(shape), "tokens": tokens, "routing": routing, "calls": calls, "device": kind, "trace": trace}
    found = run_ranks("mok.bench.exchange", spec, nproc, say)
    return ExchangeReport(
        [ExchangeRow(**row) for row in found["rows"]], found["left_out"], found["environment"], found["trace"]
    )


class Bench(BenchRank):
    """One rank: its layer, its tokens, and what it has timed."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        spec, rank, ranks, device = self.spec, self.rank, self.ranks, self.device
        self.shape = replace(LayerShape(**spec["shape"]), ranks=ranks)
        self.calls = spec["calls"]
        self.grid = CallGrid(ranks, ranks, (0,), ranks, rank)
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        local = replace(self.shape, num_experts=self.shape.num_experts // ranks, top_k=min(self.shape.top_k, 1), ranks=1)
        layer = make_problem("exchange", local, 0, "balanced", device, self.dtype, seed=rank)
        self.weights = (layer.gate_EIH, layer.up_EIH, layer.down_EHI)
        for weight in self.weights:
            weight.requires_grad_()
            weight.main_grad = torch.zeros(weight.shape, device=device)  # type: ignore[attr-defined]
        thin = replace(self.shape, intermediate_size=16, ranks=1)  # for its tokens and routes alone
        inputs = make_problem("exchange", thin, spec["tokens"], spec["routing"], device, self.dtype, seed=1000 + rank).sets[0]
        self.x_TH, self.ids_TK, self.router_TK, self.dy_TH = inputs.x_TH, inputs.ids_TK, inputs.weights_TK, inputs.dy_TH
        self.rows: list[ExchangeRow] = []
        self.left_out: dict[str, str] = {}
        self.timeline: dict[str, Any] | None = None

    def link_bytes(self, once: bool) -> int:
        """Bytes of rows that the busiest rank gets from others; a token `once` for each rank that wants it."""
        owner_TK = self.ids_TK // (self.shape.num_experts // self.ranks)
        sent = []
        for other in range(self.ranks):
            wanted_TK = (owner_TK == other) & (self.ids_TK >= 0)
            sent.append(int(wanted_TK.any(1).sum() if once else wanted_TK.sum()) if other != self.rank else 0)
        all_sent: list[list[int]] = [[]] * self.ranks
        dist.all_gather_object(all_sent, sent)
        row_bytes = self.shape.hidden_size * self.x_TH.element_size()
        return max(sum(column) for column in zip(*all_sent, strict=True)) * row_bytes

    def time(
        self, name: str, what: str, work: Callable[[], Any], link_bytes: int, before: Callable[[], Any] | None = None
    ) -> None:
        """Add the slowest rank's time for `work`, after `before`, which is not timed."""
        median, spread = self.times(lambda _: work(), self.calls, before)
        self.rows.append(ExchangeRow(name, what, median, spread, link_bytes, link_bytes / median / 1e6))

    def check(self, name: str, slots_KTH: Tensor) -> None:
        """Rows that came back untouched: each slot of a token holds the token."""
        sent = self.x_TH.view(torch.uint8)
        wrong = [k for k, slot_TH in enumerate(slots_KTH) if not torch.equal(slot_TH.contiguous().view(torch.uint8), sent)]
        self.agree(f"{name}: rows of slots {wrong} came back with other bytes than they left with" if wrong else "")

    def collective(self) -> None:
        """All-to-all, and the torch backend around it."""
        transport = CollectiveTransport(self.group)
        name = f"collective ({'nccl' if self.nccl else 'gloo'}), torch"

        def plan() -> Any:
            counts_CE = transport.all_counts(count_routes(self.ids_TK, self.shape.num_experts, self.grid))
            schedule = build_schedule(self.ids_TK, self.shape.num_experts, self.grid, counts_CE)
            schedule.exchange  # noqa: B018 (made once, here)
            return schedule

        schedule = plan()
        rows = transport.rows_of_tokens(self.x_TH, schedule)
        self.check(name, torch.stack(list(transport.slots_of_rows(rows, schedule))))
        sent = self.link_bytes(once=False)
        self.time(name, "plan", plan, 0)
        self.time(name, "dispatch", lambda: transport.rows_of_tokens(self.x_TH, schedule), sent)
        self.time(name, "combine", lambda: list(transport.slots_of_rows(rows, schedule)), sent)
        self.layer(name, "torch", transport, sent, sent)

    def peer(self) -> None:
        """Peer memory by kernels of its own, and as part of the backends that can."""
        from mok.launch import peer
        from mok.launch.plan import TaskOrder

        name = "peer, staged"
        shape, tokens = self.shape, self.x_TH.shape[0]
        room = WorkspaceShape(tokens, shape.top_k, shape.hidden_size, shape.intermediate_size, self.ranks)
        transport = PeerTransport.allocate(room, self.group, self.device, self.agree, row_room=0.0, timeout_s=TIMEOUT_S)
        sizes = shape.num_experts, shape.hidden_size, shape.intermediate_size, TaskOrder(), TaskOrder()

        def plan() -> peer.PeerPlan:
            return peer.plan_over_ranks(self.ids_TK, *sizes, transport, grid=self.grid)

        def dispatch() -> None:
            peer.send_tokens(made, x=self.x_TH)
            peer.pull_rows(made, "x", rows)

        def combine() -> None:
            peer.return_rows(made, rows)
            peer.await_rows(made)

        made = plan()
        rows = self.x_TH.new_empty(made.rows.max_rows, shape.hidden_size)
        dispatch()
        combine()
        self.check(name, peer.returned_rows(made).view(tokens, shape.top_k, -1).transpose(0, 1))
        once, each = self.link_bytes(once=True), self.link_bytes(once=False)
        self.time(name, "plan", plan, 0)
        self.time(name, "dispatch", dispatch, once)
        self.time(name, "combine", combine, each, before=dispatch)
        self.layer(name, "staged", transport, once, each)
        self.layer("peer, mega", "mega", transport, once, each)
        if self.spec["trace"] and "peer, mega" not in self.left_out:
            self.trace(transport)

    def trace(self, transport: PeerTransport) -> None:
        """One forward and one backward of all ranks, with the times that the kernels note."""
        from mok.bench.trace import chrome_trace, trace_rank
        from mok.launch.mega import Weights

        inputs = Inputs(self.x_TH, self.ids_TK, self.router_TK, self.dy_TH)
        weights = Weights(*(weight.detach() for weight in self.weights))
        every: list[Any] = [None] * self.world_size
        dist.all_gather_object(every, trace_rank(inputs, weights, self.shape, transport, self.grid))
        self.timeline = chrome_trace({f"rank {rank}": found for rank, found in enumerate(every)}, one_clock=self.shared)

    def layer(self, name: str, backend: str, transport: Transport, out_bytes: int, back_bytes: int) -> None:
        """Whole passes: rows go out once and come back once in each; in the backward x may go out again."""
        from mok.backends.interface import Options

        try:
            choose(backend, self.shape, self.dtype, self.device, transport=transport.name)
        except UsageError as error:  # the same on every rank
            self.left_out[name] = str(error)
            return
        options = Options(transport=transport)
        x_TH = self.x_TH.detach().requires_grad_()
        outputs: list[Tensor] = []

        def forward() -> None:
            y_TH, _ = moe_layer(
                x_TH, self.ids_TK, self.router_TK, self.weights, options=options, backend=backend, grid=self.grid
            )
            outputs.append(y_TH)

        def backward() -> None:
            outputs.pop().backward(self.dy_TH)

        self.time(name, "forward", forward, out_bytes + back_bytes)
        outputs.clear()
        self.time(name, "backward", backward, out_bytes + back_bytes, before=forward)


def main(path: str) -> None:
    """One rank."""
    bench = Bench(path)
    if bench.device.type == "cpu" or bench.nccl:
        bench.collective()
    else:
        bench.left_out["collective, torch"] = "NCCL wants a GPU for each rank"
    if bench.device.type == "cpu":
        bench.left_out["peer, staged"] = "ranks on CPUs have no memory to open to one another"
    else:
        try:
            bench.peer()
        except MokError as error:
            bench.left_out["peer, staged"] = str(error)
    spec = bench.spec
    environment = bench.environment() | {
        "tokens_per_rank": spec["tokens"],
        "routing": spec["routing"],
        "shape": spec["shape"],
    }
    rows = [asdict(row) for row in bench.rows]
    bench.report({"rows": rows, "left_out": bench.left_out, "environment": environment, "trace": bench.timeline})


if __name__ == "__main__":
    main(sys.argv[1])
