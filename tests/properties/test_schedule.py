"""Properties of the schedule for any routing, slices and ranks."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mok.grid import CallGrid
from mok.schedule import Schedule, build_schedule, count_routes, exchange_maps


@st.composite
def plans(draw: st.DrawFn) -> list[Schedule]:
    """Schedules of all ranks of one call, up to 72 of them."""
    ranks = draw(st.sampled_from([1, 1, 2, 3, 3, 8, 8, 72]))
    experts = ranks * draw(st.integers(1, 4))
    top_k = draw(st.integers(1, min(experts, 4)))
    segments, per_segment = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    slices = ranks * per_segment * segments
    tile_rows = draw(st.sampled_from([16, 128]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    hot = draw(st.booleans())
    ids, grids = [], []
    for rank in range(ranks):
        tokens = draw(st.integers(0, 4)) * slices // ranks
        rank_ids = torch.randint(-1, 1 if hot else experts, (tokens, top_k), generator=generator, dtype=torch.int32)
        ids.append(rank_ids)
        grids.append(CallGrid(slices, slices // segments, (0,) * segments, ranks, rank))
    counts = torch.empty(slices, experts, dtype=torch.int64)
    for rank in range(ranks):
        counts[rank::ranks] = count_routes(ids[rank], experts, grids[rank])
    return [build_schedule(i, experts, grid, counts, tile_rows) for i, grid in zip(ids, grids, strict=True)]


def runs(plan: Schedule) -> list[tuple[int, int, int]]:
    """(expert, first row, real rows) of each segment of each expert of the plan's rank, expert by expert."""
    own = slice(plan.first_expert, plan.first_expert + plan.num_local_experts)
    starts, rows = plan.segment_start_XE[:, own].T.tolist(), plan.segment_rows_XE[:, own].T.tolist()
    return [
        (expert, start, count)
        for expert in range(plan.num_local_experts)
        for start, count in zip(starts[expert], rows[expert], strict=True)
        if count
    ]


@settings(max_examples=30, deadline=None)
@given(plans())
def test_every_route_has_one_row_and_every_row_one_route(call: list[Schedule]) -> None:
    ranks, local = len(call), call[0].num_local_experts
    taken: list[list[int]] = [[] for _ in range(ranks)]
    for plan in call:
        rows = plan.row_of_route_N.tolist()
        for row, expert in zip(rows, plan.expert_ids_TK.view(-1).tolist(), strict=True):
            assert (row < 0) == (expert < 0)
            if expert >= 0:
                start, count = plan.expert_start_E[expert].item(), plan.expert_rows_E[expert].item()
                assert start <= row < start + count
                taken[expert // local].append(row)
        own = torch.nonzero(plan.route_of_row_P >= 0).view(-1)
        assert torch.equal(plan.row_of_route_N[plan.route_of_row_P[own]], own)
    for plan, rows in zip(call, taken, strict=True):
        assert len(rows) == len(set(rows)) == sum(count for _, _, count in runs(plan))
        assert all(0 <= row < plan.num_rows for row in rows)
        assert sorted(rows) == sorted(row for _, start, count in runs(plan) for row in range(start, start + count))


@settings(max_examples=30, deadline=None)
@given(plans())
def test_segments_are_aligned_and_disjoint(call: list[Schedule]) -> None:
    for plan in call:
        end = 0
        for expert, rows in enumerate(plan.expert_sizes):
            start = plan.expert_start_E[plan.first_expert + expert].item()
            assert start == end and start % plan.tile_rows == rows % plan.tile_rows == 0
            inside, end = start, start + rows
            for _, first, count in (run for run in runs(plan) if run[0] == expert):
                assert first % 16 == 0 and inside <= first and first + count <= end
                inside = first + count
            assert sum(plan.segment_sizes[expert * plan.grid.num_segments :][: plan.grid.num_segments]) <= rows
        assert end == plan.num_rows


@settings(max_examples=30, deadline=None)
@given(plans())
def test_rows_keep_the_order_of_slices_and_tokens(call: list[Schedule]) -> None:
    for plan in call:
        ids, rows = plan.expert_ids_TK.view(-1), plan.row_of_route_N
        for expert in set(ids[ids >= 0].tolist()):
            mine = rows[ids == expert]
            assert bool((mine.diff() > 0).all())


@settings(max_examples=25, deadline=None)
@given(plans())
def test_what_is_sent_is_received(call: list[Schedule]) -> None:
    maps = [exchange_maps(plan) for plan in call]
    for rank, own in enumerate(maps):
        assert own.received_R == tuple(other.sent_R[rank] for other in maps)
        assert len(own.route_of_sent_M) == sum(own.sent_R) == call[rank].row_of_route_N.numel() - call[rank].num_masked
        assert sorted(own.row_of_received_M.tolist()) == sorted(
            row for _, start, count in runs(call[rank]) for row in range(start, start + count)
        )
