from __future__ import annotations

import dataclasses

import pytest

from mok.config import DistributedConfig, Recipe, TrainConfig
from mok.errors import UsageError
from mok.grid import CallGrid, Grid, Layout

GRID = Grid(lanes=4, slices=4, segment=2, slice_sequences=1, num_slices=32)
LAYOUTS = [(replicas, ep) for replicas in (1, 2, 4) for ep in (1, 2, 4)]


@pytest.mark.parametrize(("replicas", "ep"), LAYOUTS)
@pytest.mark.parametrize("slices_per_call", [0, 2, 8])
def test_every_slice_is_computed_once_by_the_owner_of_its_lane_and_position(
    replicas: int, ep: int, slices_per_call: int
) -> None:
    if slices_per_call and (slices_per_call * ep % GRID.segment or GRID.slices_per_lane % (slices_per_call * ep)):
        pytest.skip("refused, see below")
    seen: list[int] = []
    for rank in range(replicas * ep):
        layout = Layout(GRID, replicas, ep, rank)
        for call in layout.calls(slices_per_call):
            for slice_of_step, cell in zip(call.slices, call.cells, strict=True):
                lane, place = divmod(slice_of_step, GRID.slices_per_lane)
                owned_lane, owned_position = divmod(cell, len(layout.positions))
                assert layout.lanes[owned_lane] == lane
                assert lane % replicas == layout.replica
                assert layout.positions[owned_position] == place % GRID.slices
                assert place % GRID.slices % ep == layout.member
                seen.append(slice_of_step)
            for local, slice_of_call in enumerate(call.grid.local_slices):
                owned_lane = call.grid.lane_of_segment[slice_of_call // call.grid.segment]
                assert owned_lane == call.cells[local] // len(layout.positions)
    assert sorted(seen) == list(range(32))


def test_slices_of_a_cell_come_in_order_of_time() -> None:
    for replicas, ep in LAYOUTS:
        for slices_per_call in (0, 8):
            if slices_per_call * ep > GRID.slices_per_lane:
                continue
            calls = Layout(GRID, replicas, ep).calls(slices_per_call)
            order: dict[int, list[int]] = {}
            for call in calls:
                for slice_of_step, cell in zip(call.slices, call.cells, strict=True):
                    order.setdefault(cell, []).append(slice_of_step)
            assert all(slices == sorted(slices) for slices in order.values())


@pytest.mark.parametrize(
    ("replicas", "ep", "text"), [(3, 1, "distributed.lanes = 4 does not fit 3 replicas"), (1, 3, "1, 2, 4")]
)
def test_a_layout_that_does_not_fit_is_refused_with_those_that_do(replicas: int, ep: int, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Layout(GRID, replicas, ep)
    assert Layout(dataclasses.replace(GRID, lanes=12, num_slices=96), 3, 1).lanes == range(0, 12, 3)


def test_a_call_that_cuts_a_segment_is_refused() -> None:
    with pytest.raises(UsageError, match="whole segments of 2"):
        Layout(GRID).calls(1)
    with pytest.raises(UsageError, match="segment"):
        CallGrid(num_slices=3, segment=2, lane_of_segment=(0,))
    with pytest.raises(UsageError, match="names 1 lanes for 2 segments"):
        CallGrid(num_slices=4, segment=2, lane_of_segment=(0,))


def test_the_recipe_or_else_the_first_launch_fixes_the_grid() -> None:
    recipe = Recipe(train=TrainConfig(batch_size=16))
    assert Grid.of(recipe) == Grid(1, 1, 1, 16, 1)
    assert Grid.of(recipe, replicas=2, ep=4) == Grid(2, 4, 4, 2, 8)
    fixed = dataclasses.replace(recipe, distributed=DistributedConfig(lanes=2, slices=2, slice_sequences=1))
    assert Grid.of(fixed, replicas=1, ep=1) == Grid(2, 2, 2, 1, 16)
    with pytest.raises(UsageError, match=r"batch_size = 16 does not fill a grid of 3 lanes.*use a multiple of 3,"):
        Grid.of(recipe, replicas=3)
