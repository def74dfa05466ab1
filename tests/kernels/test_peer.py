"""Rows through peer memory, on ranks that share one process: the plan against loops, layers against one rank, bit for bit."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mok.autograd import Plan, experts
from mok.backends import staged
from mok.backends.interface import LayerShape, Options
from mok.errors import RunError
from mok.grid import CallGrid
from mok.launch import peer
from mok.launch import staged as staged_launch
from mok.launch.plan import TaskOrder
from mok.launch.status import check_status, forget_status, status_word
from mok.reference.exchange import rows_in_order, rows_with_padding
from mok.shapes import WorkspaceShape
from tests.kernels.virtual_ranks import Lockstep, transports
from tests.tolerances import assert_same_bits

K = 2


@pytest.fixture(autouse=True)
def gpu(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_status(torch.device("cuda", 0) if device.type == "cuda" else device)
    if device.type == "cpu":
        monkeypatch.setattr(staged_launch, "gpu_of", lambda device: staged_launch.Gpu(90, 3, 232448))


@dataclasses.dataclass(frozen=True)
class Case:
    """tokens: of each slice, slice i on rank i % ranks. routing: mixed, masked, or "first": all to the first two experts."""

    ranks: int
    tokens: tuple[int, ...]
    experts: int = 6
    routing: str = "mixed"
    segment: int = 0
    shared: int = 0
    hidden: int = 32
    width: int = 48
    top_k: int = K

    def grid(self, rank: int, ranks: int) -> CallGrid:
        slices = len(self.tokens)
        segment = self.segment or slices
        return CallGrid(slices, segment, (0,) * (slices // segment), ranks, rank)


def slice_inputs(case: Case, i: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, expert ids, router weights and output gradient of slice i, whoever computes it."""
    generator = torch.Generator().manual_seed(i)
    tokens = case.tokens[i]
    x, dy = (torch.randn(tokens, case.hidden, generator=generator).bfloat16() for _ in range(2))
    choices = 2 if case.routing == "first" else case.experts
    picks = [torch.randperm(choices, generator=generator)[: case.top_k].sort().values for _ in range(tokens)]
    ids = torch.stack(picks or [torch.zeros(case.top_k)])[:tokens].to(torch.int32)
    if case.routing == "masked":
        ids[torch.rand(tokens, case.top_k, generator=generator) < 0.33] = -1
    return x, ids, torch.randn(tokens, case.top_k, generator=generator), dy


def layer(
    case: Case, slices: list[int], grid: CallGrid, options: Options, device: torch.device, backend: ModuleType = staged
) -> dict[str, Tensor]:
    """Forward and backward of these slices with this rank's experts: every result by name."""
    generator = torch.Generator().manual_seed(99)
    local = slice(grid.rank * case.experts // grid.ranks, (grid.rank + 1) * case.experts // grid.ranks)
    weights = {}
    for name, shape in (
        ("gate", (case.width, case.hidden)),
        ("up", (case.width, case.hidden)),
        ("down", (case.hidden, case.width)),
    ):
        whole = torch.randn(case.experts, *shape, generator=generator).bfloat16() / 6
        weights[name] = whole[local].to(device).requires_grad_()
        weights[name].main_grad = torch.zeros(weights[name].shape, device=device)
    shared = None
    if case.shared:
        sizes = (2 * case.shared, case.hidden), (case.hidden, case.shared)
        shared = tuple((torch.randn(size, generator=generator).bfloat16() / 6).to(device) for size in sizes)
    parts = [slice_inputs(case, i) for i in slices]
    x, ids, router, dy = (torch.cat([part[k] for part in parts]).to(device) for k in range(4))
    x.requires_grad_()
    router.requires_grad_()
    sizes = LayerShape(case.hidden, case.width, case.experts, case.top_k, grid.ranks, case.shared)
    schedule = backend.build_schedule(ids, sizes, grid, options)
    y = experts(x, router, tuple(weights.values()), Plan(backend, schedule, options), shared)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, "drouter": router.grad, **{name: w.main_grad for name, w in weights.items()}}


def over_ranks(
    case: Case,
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    calls: int = 1,
    recompute: str = "none",
    backend: ModuleType = staged,
    kernel: Any = None,
    **room: float,
) -> list[list[dict[str, Tensor]]]:
    """For each call, the results of every rank."""
    ranks = case.ranks
    tokens = max(sum(case.tokens[i] for i in range(rank, len(case.tokens), ranks)) for rank in range(ranks))
    group = transports(WorkspaceShape(max(tokens, 1), case.top_k, case.hidden, case.width, ranks), device, **room)
    lockstep = Lockstep(monkeypatch, ranks, device=device)

    def rank(r: int) -> list[dict[str, Tensor]]:
        grid = case.grid(r, ranks)
        options = Options(recompute=recompute, transport=group[r], kernel=kernel)
        return [layer(case, list(grid.local_slices), grid, options, device, backend) for _ in range(calls)]

    found = lockstep.run(rank)
    return [[of_rank[call] for of_rank in found] for call in range(calls)]


def check(case: Case, found: list[dict[str, Tensor]], device: torch.device) -> None:
    """`found`: the results of every rank; against the staged backend on one rank, whose tokens are all of theirs."""
    slices = len(case.tokens)
    whole = case.grid(0, 1) if len(set(case.tokens)) == 1 else CallGrid()  # tokens in slice order are one slice
    expected = layer(case, list(range(slices)), whole, Options(), device)
    for name in ("gate", "up", "down"):
        assert_same_bits(f"gradient of {name}", torch.cat([part[name] for part in found]), expected[name])
    for name in ("y", "dx", "drouter"):
        by_slice = {}
        for rank, part in enumerate(found):
            own = range(rank, slices, case.ranks)
            by_slice |= dict(zip(own, part[name].split([case.tokens[i] for i in own]), strict=True))
        assert_same_bits(name, torch.cat([by_slice[i] for i in range(slices)]), expected[name])


@pytest.mark.parametrize(
    "case",
    [
        Case(2, (5, 5), experts=2, shared=16),
        Case(3, (7, 0, 3), experts=3),
        Case(2, (3, 3, 3, 3), experts=2, routing="masked", segment=2),
        Case(2, (0, 4), experts=4, routing="first"),
    ],
    ids=["two", "unequal", "slices", "an empty rank, and one without rows"],
)
def test_a_layer_has_the_bits_of_one_rank(case: Case, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    again = {"calls": 2, "recompute": "all"} if case.segment else {}
    for found in over_ranks(case, monkeypatch, device, **again):
        check(case, found, device)
    check_status(device)


def test_too_many_rows_are_found_by_all_ranks(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(3, (80, 80, 80), routing="first")
    (found,) = over_ranks(case, monkeypatch, device, row_room=1.0)
    for results in found:
        assert not results["y"].any() and not results["gate"].any(), "the call is empty on every rank"
    with pytest.raises(RunError, match=r"layer 0: the experts of rank 0 .* 512 rows.*moe\.peer_rows"):
        check_status(device)


@given(st.sampled_from([2, 3, 4, 6, 8, 12, 24, 36, 72]), st.integers(1, 2), st.randoms(use_true_random=False))
@settings(max_examples=6)
def test_the_plan_is_that_of_the_loops(ranks: int, local: int, random) -> None:
    """Rows of one rank of many, whose tokens are few: against `mok.reference.exchange`, up to 72 ranks, some without tokens."""
    num_experts, room, hidden, width = ranks * local, 3, 32, 48
    top_k = min(2, num_experts)
    ids = [
        torch.tensor(
            [sorted(random.sample(range(num_experts), top_k)) for _ in range(random.randrange(room + 1))], dtype=torch.int32
        ).view(-1, top_k)
        for _ in range(ranks)
    ]
    for part in ids:
        part[torch.tensor([[random.random() < 0.2 for _ in range(top_k)] for _ in part]).view(-1, top_k).bool()] = -1
    group = transports(WorkspaceShape(room, top_k, hidden, width, ranks))
    me = random.randrange(ranks)
    status = status_word(torch.device("cpu"))
    for rank, part in enumerate(ids):
        at = group[rank].start["ids"], group[rank].ids_stride
        peer.kernels.publish_ids[(1,)](
            part, group[rank].bases, group[rank].epoch, status, rank, *at, len(part), part.numel(), num_experts, WIDTH=64
        )

    def meet(transport, status) -> None:
        transport.epoch += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer, "meet", meet)
        grid = CallGrid(ranks, ranks, (0,), ranks, me)
        plan = peer.plan_over_ranks(ids[me], num_experts, hidden, width, TaskOrder(), TaskOrder(), group[me], grid=grid)
    mine = rows_in_order(ids, num_experts, ranks, ranks)[me]
    expected = rows_with_padding(mine, range(me * local, (me + 1) * local), 1, 64)
    assert int(plan.rows.sizes[0]) == len(expected)
    for p, row in enumerate(expected):
        place = (-1, -1) if row is None else (row.rank, row.token * top_k + row.slot)
        assert (int(plan.rank_of_row_P[p]), int(plan.place_of_row_P[p])) == place
    for n, expert in enumerate(ids[me].view(-1).tolist()):
        assert int(plan.own.row_of_route_N[n]) == (n if expert >= 0 else -1)
        assert expert < 0 or int(plan.rank_of_route_N[n]) == expert // local
    counts = torch.stack([torch.bincount(part[part >= 0], minlength=num_experts) for part in ids])
    assert torch.equal(plan.counts_CE, counts.int())
