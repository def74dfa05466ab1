"""Experts shared by gloo ranks: output and every gradient have the bytes of the same call on one rank."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

import mok
from mok.grid import CallGrid
from mok.schedule import build_schedule, count_routes
from mok.transport.collective import CollectiveTransport, all_to_all_rows
from tests.distributed.processes import run_distributed

H, INTERMEDIATE, E, K = 32, 48, 8, 2


@dataclasses.dataclass(frozen=True)
class Case:
    """tokens: of each slice, slice i on rank i % ranks. routing: "mixed", or "rank 0": all routes go to the first E/4 experts,
    or "masked": one route in three goes nowhere."""

    ranks: int
    tokens: tuple[int, ...]
    routing: str = "mixed"
    segment: int = 0
    dtype: torch.dtype = torch.float32


def slice_inputs(case: Case, i: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, expert ids, router weights and output gradient of slice i, whoever computes it."""
    generator = torch.Generator().manual_seed(i)
    tokens = case.tokens[i]
    x, dy = (torch.randn(tokens, H, generator=generator).to(case.dtype) for _ in range(2))
    choices = 2 if case.routing == "rank 0" else E
    ids = torch.stack(
        [torch.randperm(choices, generator=generator)[:K].sort().values for _ in range(tokens)] or [torch.zeros(K)]
    )
    ids = ids[:tokens].to(torch.int32)
    if case.routing == "masked":
        ids[torch.rand(tokens, K, generator=generator) < 0.33] = -1
    return x, ids, torch.rand(tokens, K, generator=generator), dy


def layer(case: Case, slices: list[int], grid: CallGrid, group: dist.ProcessGroup | None) -> dict[str, torch.Tensor]:
    """Forward and backward of these slices with this rank's experts: every result by name."""
    generator = torch.Generator().manual_seed(99)
    local = slice(grid.rank * E // grid.ranks, (grid.rank + 1) * E // grid.ranks)
    shapes = {"gate": (E, INTERMEDIATE, H), "up": (E, INTERMEDIATE, H), "down": (E, H, INTERMEDIATE)}
    weights = {}
    for name, shape in shapes.items():
        whole = torch.randn(shape, generator=generator).to(case.dtype) / 6
        weights[name] = whole[local].clone().requires_grad_()
        weights[name].main_grad = torch.zeros(weights[name].shape)
    parts = [slice_inputs(case, i) for i in slices]
    x, ids, router, dy = (torch.cat([part[k] for part in parts]) for k in range(4))
    x.requires_grad_()
    router.requires_grad_()
    y = mok.moe(x, ids, router, *weights.values(), grid=grid, group=group)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, "drouter": router.grad, **{name: w.main_grad for name, w in weights.items()}}


def on_rank(rank: int, world_size: int, cases: list[Case]) -> list[dict[str, torch.Tensor]]:
    found = []
    for case in cases:
        num_slices = len(case.tokens)
        segment = case.segment or num_slices
        grid = CallGrid(num_slices, segment, (0,) * (num_slices // segment), world_size, rank)
        found.append(layer(case, list(grid.local_slices), grid, dist.group.WORLD))
    return found


def check(case: Case, found: list[dict[str, torch.Tensor]]) -> None:
    """`found`: the results of every rank."""
    num_slices = len(case.tokens)
    segment = case.segment or num_slices
    if len(set(case.tokens)) == 1:
        grid = CallGrid(num_slices, segment, (0,) * (num_slices // segment))
    else:
        grid = CallGrid()  # the rows of one segment lie in the order of their tokens, in one slice or in several
    expected = layer(case, list(range(num_slices)), grid, None)
    for name in ("gate", "up", "down"):
        assert torch.equal(torch.cat([part[name] for part in found]), expected[name]), f"gradient of {name}"
    for name in ("y", "dx", "drouter"):
        by_slice = {}
        for rank, part in enumerate(found):
            own = range(rank, num_slices, case.ranks)
            by_slice |= dict(zip(own, part[name].split([case.tokens[i] for i in own]), strict=True))
        assert torch.equal(torch.cat([by_slice[i] for i in range(num_slices)]), expected[name]), name


@pytest.mark.parametrize(
    "cases",
    [
        [
            Case(2, (24, 24)),
            Case(2, (24,) * 4, routing="masked", dtype=torch.bfloat16),
            # A rank with few or no tokens.
            *(Case(2, (64, tokens)) for tokens in range(4)),
        ],
        [Case(4, (24,) * 8, segment=4), Case(4, (24,) * 4, routing="rank 0")],
    ],
    ids=["2 ranks", "4 ranks"],
)
def test_every_gradient_is_that_of_one_rank(cases: list[Case]) -> None:
    found = run_distributed(on_rank, cases[0].ranks, cases)
    for i, case in enumerate(cases):
        check(case, [results[i] for results in found])
        if case.routing == "rank 0":
            for results in found[1:]:
                for name in ("gate", "up", "down"):
                    assert not results[i][name].any(), "experts without a row keep exactly zero"


def rows_that_tell_where_they_are_from(rank: int, world_size: int, dtype: torch.dtype) -> bool:
    """Row j that rank s sends to rank r holds (s, r, j): a misrouted row cannot look right."""
    sent = [(rank + r) % 3 for r in range(world_size)]
    rows = torch.tensor([[rank, r, j] for r, n in enumerate(sent) for j in range(n)], dtype=dtype).view(-1, 3)
    received = [(s + rank) % 3 for s in range(world_size)]
    expected = torch.tensor([[s, rank, j] for s, n in enumerate(received) for j in range(n)], dtype=dtype).view(-1, 3)
    return torch.equal(all_to_all_rows(rows, sent, received, dist.group.WORLD), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_unequal_and_empty_parts_arrive_where_they_belong(dtype: torch.dtype) -> None:
    assert all(run_distributed(rows_that_tell_where_they_are_from, 3, dtype))


def rows_in_order(rank: int, world_size: int, case: Case) -> torch.Tensor:
    num_slices = len(case.tokens)
    grid = CallGrid(num_slices, num_slices, (0,), world_size, rank)
    x, ids = (torch.cat([slice_inputs(case, i)[k] for i in grid.local_slices]) for k in range(2))
    transport = CollectiveTransport(dist.group.WORLD)
    schedule = build_schedule(ids, E, grid, transport.all_counts(count_routes(ids, E, grid)))
    return transport.rows_of_tokens(x, schedule)


def test_padding_rows_are_zero_and_rows_lie_as_on_one_rank() -> None:
    case = Case(2, (24,) * 4)
    x, ids = (torch.cat([slice_inputs(case, i)[k] for i in range(4)]) for k in range(2))
    whole = build_schedule(ids, E, CallGrid(4, 4, (0,)))
    expected = x[whole.token_of_row_P].masked_fill((whole.route_of_row_P < 0).unsqueeze(1), 0)
    assert (whole.route_of_row_P < 0).any(), "no padding row to check"
    assert torch.equal(torch.cat(run_distributed(rows_in_order, 2, case)), expected)
