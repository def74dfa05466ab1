"""The schedule against loops over routes, for one rank and for several in one process."""

from __future__ import annotations

import pytest
import torch

from mok.errors import UsageError
from mok.grid import CallGrid
from mok.reference.exchange import exchanged_forward, rows_in_order, rows_with_padding
from mok.reference.moe import moe_forward
from mok.schedule import Schedule, build_schedule, count_routes, exchange_maps
from tests.cases import random_ids


def schedules(ids_of_rank: list[torch.Tensor], experts: int, slices: int, segment: int, tile_rows: int = 16) -> list[Schedule]:
    """The schedule of each rank, its counts gathered from all."""
    ranks = len(ids_of_rank)
    grids = [CallGrid(slices, segment, (0,) * (slices // segment), ranks, rank) for rank in range(ranks)]
    counts = torch.empty(slices, experts, dtype=torch.int64)
    for rank, ids in enumerate(ids_of_rank):
        counts[rank::ranks] = count_routes(ids, experts, grids[rank])
    return [build_schedule(ids, experts, grid, counts, tile_rows) for ids, grid in zip(ids_of_rank, grids, strict=True)]


def check(ids_of_rank: list[torch.Tensor], experts: int, slices: int, segment: int, tile_rows: int = 16) -> None:
    ranks, top_k = len(ids_of_rank), ids_of_rank[0].shape[1]
    plans = schedules(ids_of_rank, experts, slices, segment, tile_rows)
    buffers = rows_in_order(ids_of_rank, experts, slices, segment)
    placed: list[dict[tuple[int, int], int]] = [{} for _ in range(ranks)]
    for rank, (plan, rows) in enumerate(zip(plans, buffers, strict=True)):
        mine = range(rank * experts // ranks, (rank + 1) * experts // ranks)
        buffer = rows_with_padding(rows, mine, slices // segment, tile_rows)
        assert plan.num_rows == len(buffer)
        own = [-1 if row is None or row.rank != rank else row.token * top_k + row.slot for row in buffer]
        assert plan.route_of_row_P.tolist() == own
        for place, row in enumerate(buffer):
            if row is not None:
                placed[row.rank][row.token, row.slot] = place
    for ids, plan, places in zip(ids_of_rank, plans, placed, strict=True):
        expected = [places.get((t, k), -1) for t in range(ids.shape[0]) for k in range(top_k)]
        assert plan.row_of_route_N.tolist() == expected

    maps = [exchange_maps(plan) for plan in plans]
    for receiver in range(ranks):
        arrived = []
        for sender in range(ranks):
            start = sum(maps[sender].sent_R[:receiver])
            routes = maps[sender].route_of_sent_M[start : start + maps[sender].sent_R[receiver]].tolist()
            assert len(routes) == maps[receiver].received_R[sender]
            arrived += [placed[sender][route // top_k, route % top_k] for route in routes]
        assert maps[receiver].row_of_received_M.tolist() == arrived


def test_example_of_the_docstring() -> None:
    plan = build_schedule(torch.tensor([[0, 1], [1, -1], [0, 1]]), 2)
    assert plan.counts_CE.tolist() == [[2, 3]]
    assert plan.expert_start_E.tolist() == [0, 16] and plan.num_rows == 32
    assert plan.row_of_route_N.tolist() == [0, 16, 17, -1, 1, 18]
    assert plan.route_of_row_P[[0, 1, 16, 17, 18]].tolist() == [0, 4, 1, 2, 5]
    assert plan.num_masked == 1 and plan.expert_sizes == plan.segment_sizes == (16, 16)


def test_example_of_the_exchange() -> None:
    one, two = (exchange_maps(p) for p in schedules([torch.tensor([[1], [0], [1]]), torch.tensor([[0], [1]])], 2, 2, 2))
    assert one.route_of_sent_M.tolist() == [1, 0, 2] and one.sent_R == (1, 2)
    assert one.received_R == (1, 1) and one.row_of_received_M.tolist() == [0, 1]
    assert two.received_R == (2, 1) and two.row_of_received_M.tolist() == [0, 1, 2]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_of_every_rank(ranks: int) -> None:
    generator = torch.Generator().manual_seed(ranks)
    ids = [random_ids(12, 8, 3, generator) for _ in range(ranks)]
    check(ids, 8, ranks * 2, ranks, tile_rows=32)
    check([rank_ids.masked_fill(rank_ids == 5, -1) for rank_ids in ids], 8, ranks * 2, 2 * ranks)


def test_a_rank_whose_experts_nobody_wants_and_one_without_tokens() -> None:
    none = torch.empty(0, 2, dtype=torch.int32)
    check([torch.tensor([[0, 1]] * 5), none], 4, 2, 2)
    check([none, none], 4, 2, 2)


def test_ranks_do_not_change_the_order_of_rows() -> None:
    """Four slices on one rank, and the same on two: an expert's rows are the same tokens in the same order."""
    generator = torch.Generator().manual_seed(0)
    slices = [random_ids(5, 4, 2, generator) for _ in range(4)]
    (one,) = rows_in_order([torch.cat(slices)], 4, 4, 2)
    two = rows_in_order([torch.cat(slices[0::2]), torch.cat(slices[1::2])], 4, 4, 2)
    as_slices = [[(r.expert, r.slice, r.token % 5, r.slot) for r in rows] for rows in ([*two[0], *two[1]], one)]
    assert as_slices[0] == as_slices[1]


def test_exchange_gives_the_output_of_one_rank() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 4, generator=generator)
    ids, weights = random_ids(8, 4, 2, generator), torch.rand(8, 2, generator=generator)
    experts = [torch.randn(4, *shape, generator=generator) for shape in ((6, 4), (6, 4), (4, 6))]
    whole = moe_forward(x, ids, weights, *experts)
    halves = exchanged_forward(
        [x[0::2], x[1::2]], [ids[0::2], ids[1::2]], [weights[0::2], weights[1::2]], *experts, num_slices=8, segment=4
    )
    assert torch.equal(halves[0], whole[0::2]) and torch.equal(halves[1], whole[1::2])


def test_maps_are_64_bit() -> None:
    plan = build_schedule(torch.zeros(3, 1, dtype=torch.int32), 2)
    assert {plan.row_of_route_N.dtype, plan.route_of_row_P.dtype, plan.expert_start_E.dtype} == {torch.int64}


@pytest.mark.parametrize(
    ("ids", "experts", "grid", "message"),
    [
        ([[0], [4]], 4, CallGrid(), "expert ids run from 0 to 4: must be -1 .* or 0 to 3"),
        ([[-2]], 4, CallGrid(), "expert ids run from -2"),
        ([[0], [1], [2]], 4, CallGrid(2, 1, (0, 0)), "3 tokens do not fill 2 slices"),
        ([[0]], 3, CallGrid(2, 2, (0,), 2, 0), "3 experts cannot be shared by 2 ranks"),
        ([[0]], 4, CallGrid(2, 2, (0,), 2, 0), "needs counts_CE"),
    ],
)
def test_refusals(ids: list[list[int]], experts: int, grid: CallGrid, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_schedule(torch.tensor(ids), experts, grid)
