"""The planner's kernels against the readable schedule and task table: equal in every entry."""

from __future__ import annotations

import pytest
import torch

from mok.errors import RunError, UsageError
from mok.grid import CallGrid
from mok.launch.plan import DevicePlan, TaskOrder, max_rows, plan_on_device, shared_counters
from mok.launch.status import check_status
from mok.reference import task_table
from mok.schedule import build_schedule

HIDDEN, INNER = 320, 144  # neither a multiple of a tile


def ids_of(case: str, seed: int = 0) -> tuple[torch.Tensor, int, CallGrid]:
    """(expert ids [T, K], experts, grid) of a named case."""
    random = torch.Generator().manual_seed(seed)
    one = CallGrid()

    def draw(tokens: int, top_k: int, experts: int) -> torch.Tensor:
        return torch.rand(tokens, experts, generator=random).argsort(1)[:, :top_k].sort(1).values

    match case:
        case "even":
            return draw(300, 2, 5), 5, one
        case "no tokens":
            return draw(0, 2, 5), 5, one
        case "one token":
            return draw(1, 3, 7), 7, one
        case "all experts":
            return draw(17, 6, 6), 6, one
        case "one expert":
            return torch.full((333, 1), 2), 4, one
        case "masked":
            ids = draw(150, 2, 4)
            ids[torch.rand(ids.shape, generator=random) < 0.4] = -1
            return ids, 4, one
        case "all masked":
            return torch.full((40, 2), -1), 3, one
        case "many experts":
            return draw(64, 10, 512), 512, one
        case "segments":
            return draw(12 * 25, 2, 5), 5, CallGrid(12, 3, (0, 1, 0, 1))
        case "more routes than a run":
            return draw(700, 3, 4), 4, CallGrid(2, 1, (0, 0))
    raise AssertionError(case)


CASES = (
    "even", "no tokens", "one token", "all experts", "one expert", "masked", "all masked", "many experts", "segments",
    "more routes than a run",
)  # fmt: skip


ORDERS = [(case, TaskOrder(2, 0)) for case in CASES] + [
    ("even", TaskOrder(1, 1)), ("masked", TaskOrder(1, 2)), ("one expert", TaskOrder(1, 2)), ("no tokens", TaskOrder(1, 3)),
    ("segments", TaskOrder(16, 3)), ("more routes than a run", TaskOrder(3, 2)),
]  # fmt: skip


def planned(
    ids_TK: torch.Tensor, num_experts: int, grid: CallGrid, order: TaskOrder, device: torch.device, layer: int = 0
) -> DevicePlan:
    return plan_on_device(ids_TK.to(device), num_experts, HIDDEN, INNER, order, TaskOrder(3), grid=grid, units=3, layer=layer)


@pytest.mark.parametrize(("case", "order"), ORDERS, ids=str)
def test_equals_the_schedule_and_the_task_table(case: str, order: TaskOrder, device: torch.device) -> None:
    ids_TK, num_experts, grid = ids_of(case)
    schedule = build_schedule(ids_TK, num_experts, grid, tile_rows=64)
    plan = planned(ids_TK, num_experts, grid, order, device)
    rows, starts = schedule.num_rows, [*schedule.expert_start_E.tolist(), schedule.num_rows]
    assert plan.expert_start.tolist() == starts
    assert plan.sizes[0] == rows <= plan.max_rows
    assert plan.counts_CE.tolist() == schedule.counts_CE.tolist()
    assert plan.row_of_route_N.tolist() == schedule.row_of_route_N.tolist()
    assert plan.route_of_row_P[:rows].tolist() == schedule.route_of_row_P.tolist()
    assert (plan.route_of_row_P[rows:] == -1).all()

    sizes = {"units": 3, "num_blocks_max": plan.max_blocks}
    forward = task_table.table(
        task_table.forward_tasks(
            starts, HIDDEN, INNER, group_size=order.group_size, groups_per_phase=order.groups_per_phase, **sizes
        )
    )
    backward = task_table.table(
        task_table.backward_tasks(starts, HIDDEN, INNER, group_size=3, combine_group_size=order.group_size, **sizes)
    )
    targets = task_table.group_targets(starts, order.group_size, HIDDEN)
    _, num_forward, num_backward, num_groups, num_mtiles, *rest = plan.sizes.tolist()
    assert (num_forward, num_backward, num_groups, rest) == (len(forward), len(backward), len(targets), [0] * 3)
    assert num_mtiles == len(task_table.mtiles(starts, 1))
    assert plan.forward_tasks[:num_forward].tolist() == forward.tolist()
    assert plan.backward_tasks is not None
    assert plan.backward_tasks[:num_backward].tolist() == backward.tolist()
    assert plan.group_target_G.tolist() == targets + [0] * (plan.max_blocks - num_groups)
    tokens, groups = task_table.combine_order(plan.row_of_route_N.view(ids_TK.shape).tolist(), starts, order.group_size)
    assert plan.combine_token_T.tolist() == tokens
    assert plan.combine_group_T.tolist() == groups
    experts = [tile.expert for tile in task_table.mtiles(starts, 1) for _ in range(2 - tile.half)]
    assert plan.expert_of_block_B.tolist() == experts + [0] * (plan.max_blocks - len(experts))


@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize("case", ["even", "one token", "all masked", "more routes than a run", "no tokens"])
@pytest.mark.parametrize("shared", [0, 144, 400])
def test_shared_experts_and_what_is_computed_again_open_the_lists(
    shared: int, case: str, again: bool, device: torch.device
) -> None:
    ids_TK, num_experts, grid = ids_of(case)
    orders = TaskOrder(2, 1), TaskOrder(3)
    plan = plan_on_device(
        ids_TK.to(device), num_experts, HIDDEN, INNER, *orders, grid=grid, units=3, again=again, shared_size=shared
    )
    starts, sizes = plan.expert_start.tolist(), {"units": 3, "num_blocks_max": plan.max_blocks}
    routed = (
        task_table.forward_tasks(starts, HIDDEN, INNER, group_size=2, groups_per_phase=1, **sizes),
        task_table.backward_tasks(starts, HIDDEN, INNER, group_size=3, combine_group_size=2, again=again, **sizes),
    )
    counters = shared_counters(plan.max_blocks, num_experts)
    assert plan.backward_tasks is not None
    for i, listed in enumerate((plan.forward_tasks, plan.backward_tasks)):
        opening = task_table.shared_tasks(
            len(ids_TK), HIDDEN, shared, forward=not i, again=again, group_size=orders[i].group_size, counter=counters[i]
        )
        expected = task_table.table((opening if shared else []) + routed[i])
        assert plan.sizes[1 + i] == len(expected)
        assert listed[: len(expected)].tolist() == expected.tolist()
        largest = expected[:, [7, 9, 11, 12]].max(initial=0)
        assert largest < plan.counters[i], "a counter lies outside of its array"


@pytest.mark.parametrize("case", ["even", "no tokens", "more routes than a run"])
def test_rows_beside_their_codes_are_waited_for(case: str, device: torch.device) -> None:
    ids_TK, num_experts, grid = ids_of(case)
    plan = plan_on_device(
        ids_TK.to(device), num_experts, HIDDEN, INNER, TaskOrder(2), TaskOrder(3), grid=grid, units=3, row_units=5
    )
    expected = task_table.table(
        task_table.backward_tasks(
            plan.expert_start.tolist(), HIDDEN, INNER, group_size=3, combine_group_size=2, units=3, row_units=5,
            dy_counter=plan.dy_counter, num_blocks_max=plan.max_blocks,
        )
    )  # fmt: skip
    assert plan.backward_tasks is not None
    assert plan.backward_tasks[: len(expected)].tolist() == expected.tolist()
    assert expected[:, [7, 9, 11, 12]].max(initial=0) == plan.counters[1] - 1


def test_64_bit_ids_are_taken(device: torch.device) -> None:
    ids_TK, num_experts, grid = ids_of("even")
    first = planned(ids_TK.to(torch.int32), num_experts, grid, TaskOrder(), device)
    second = planned(ids_TK.to(torch.int64), num_experts, grid, TaskOrder(), device)
    assert first.row_of_route_N.tolist() == second.row_of_route_N.tolist()


def test_more_groups_than_bins_share_the_later_group(device: torch.device) -> None:
    """With 600 groups and 512 bins a token may wait for the group after its own, never for an earlier one."""
    tokens = torch.arange(600).repeat_interleave(2).view(-1, 1)
    plan = plan_on_device(tokens.to(device), 600, 64, 64, TaskOrder(1, 0), None)
    order = plan.combine_token_T.long()
    own = plan.row_of_route_N[order] // 64
    assert plan.sizes[3] == 600
    assert (plan.combine_group_T >= own).all()
    assert (plan.combine_group_T - own).max() == 1
    assert (plan.combine_group_T.diff() >= 0).all()
    assert order.tolist() == list(range(1200))


@pytest.mark.parametrize("bad", [2, 5, -2, 2**31 - 1, 2**32, 2**32 + 1, -(2**32)])
def test_ids_out_of_range_are_masked_and_an_error(bad: int, device: torch.device) -> None:
    """Also those that would be in range, or masked, if they were cut to 32 bits."""
    ids = torch.tensor([[bad, 0], [1, -1], [1, 0]])
    plan = planned(ids, 2, CallGrid(), TaskOrder(), device, layer=7)
    assert plan.row_of_route_N.tolist() == [-1, 0, 64, -1, 65, 1]
    with pytest.raises(RunError, match="layer 7: expert ids out of range"):
        check_status(plan.status.device)
    planned(ids.clamp(-1, 1), 2, CallGrid(), TaskOrder(), device, layer=7)
    check_status(plan.status.device)


def test_max_rows_is_reached() -> None:
    """The bound is what the worst distribution needs, to the block."""
    for counts, segments in (([1] * 8, 1), ([65, 1], 1), ([64] * 4, 1), ([0, 0, 200], 1)):
        ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).view(-1, 1)
        needed = build_schedule(ids, len(counts), tile_rows=64).num_rows
        assert needed <= max_rows(sum(counts), len(counts), segments)
    assert max_rows(8, 8) == 8 * 64


def test_refuses_what_it_cannot_place(device: torch.device) -> None:
    with pytest.raises(UsageError, match="fill 2 slices"):
        planned(torch.zeros(3, 1, dtype=torch.int64), 2, CallGrid(2, 2, (0,)), TaskOrder(), device)
    with pytest.raises(UsageError, match="one rank"):
        planned(torch.zeros(4, 1, dtype=torch.int64), 2, CallGrid(2, 2, (0,), ranks=2), TaskOrder(), device)
