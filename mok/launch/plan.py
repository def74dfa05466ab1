"""Launches the planner: rows, task table and combine order of one call, made on the device without waiting for it.

Owns the allocation of every planning array, with upper bounds that the host knows, and the order of the launches. The device
knows the real sizes (`DevicePlan.sizes`); nothing here reads them. Must not know what the tasks compute. Read next:
`mok/kernels/plan.py`, the kernels; `mok/reference/task_table.py`, the same lists in loops.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mok.errors import UsageError
from mok.grid import CallGrid
from mok.kernels import plan as kernels
from mok.kernels import tasks
from mok.kernels.plan_shared import write_shared_tasks
from mok.launch.status import status_word

__all__ = ["DevicePlan", "TaskOrder", "ceil_div", "empty", "max_rows", "place_experts", "plan_on_device", "plan_tables"]

RUN = 128
"""Items of one run of the counting sort: comparing all pairs of a run stays in registers."""

SCAN_RUNS = 1024
"""Runs that the scan over runs takes at a time."""

MAX_BINS = 512
"""Bins of the combine order; with more groups than bins, neighbouring groups share one."""

WIDTH = 128
"""Records or blocks of one program."""

FIELDS = tasks.FIELDS.value
ROW_BLOCK = tasks.ROW_BLOCK.value
TILE_M, TILE_N = tasks.TILE_M.value, tasks.TILE_N.value


@dataclass(frozen=True)
class TaskOrder:
    """In which order the tiles of one pass are listed; changes time and cache traffic, never a bit.

    group_size: m-tiles of an expert that are walked together.
    groups_per_phase: groups whose first products are all listed before their second; 0 for all, as always in the backward.
    """

    group_size: int = 16
    groups_per_phase: int = 0


@dataclass(frozen=True)
class DevicePlan:
    """What the kernels of one call walk. T tokens, K slots, N = T*K routes, E experts here, P rows and B 64-row blocks at most;
    int32 tensors on the device of the ids. Entries beyond the real sizes are as stated.

    counts_CE: routes of each slice to each expert.
    row_of_route_N: -1 for a masked route. route_of_row_P: -1 for padding and beyond the last row.
    expert_start: [E + 1] first row of each expert, the last entry the rows in all; multiples of 64.
    expert_of_block_B, group_of_block_B: 0 beyond the last block; groups are those of the forward.
    sizes: rows, forward tasks, backward tasks, groups, m-tiles, and three zeros.
    forward_tasks, backward_tasks: records [capacity, 16]; backward None where it was not asked for.
    again: whether the backward computes gate and up again, and its tasks begin with that.
    shared_size: the width S of the shared experts whose tasks open both lists; 0 for none.
    group_target_G: [B] signals that complete each group of the forward; 0 beyond the last.
    combine_token_T: tokens in the order in which the forward completes them. combine_group_T: the group that each of those
        waits for, never falling.
    status: int32 [1], where the kernels of this call leave what goes wrong (mok/launch/status.py).
    """

    num_tokens: int
    top_k: int
    num_experts: int
    max_rows: int
    counts_CE: Tensor
    row_of_route_N: Tensor
    route_of_row_P: Tensor
    expert_start: Tensor
    expert_of_block_B: Tensor
    group_of_block_B: Tensor
    sizes: Tensor
    forward_tasks: Tensor
    backward_tasks: Tensor | None
    again: bool
    shared_size: int
    coded: bool
    group_target_G: Tensor
    combine_token_T: Tensor
    combine_group_T: Tensor
    status: Tensor

    @property
    def max_blocks(self) -> int:
        return self.max_rows // ROW_BLOCK

    @property
    def token_blocks(self) -> int:
        """64-row blocks that hold every token: the rows of shared experts."""
        return ceil_div(self.num_tokens, ROW_BLOCK)

    @property
    def counters(self) -> tuple[int, int]:
        """Counters of a forward and of a backward launch, those of shared experts included."""
        forward, _ = shared_counters(self.max_blocks, self.num_experts)
        return forward + 1 + self.token_blocks, self.dy_counter + (self.num_experts if self.coded else 0)

    @property
    def dy_counter(self) -> int:
        """Where the backward counts rows of dy that come apart from their codes."""
        _, backward = shared_counters(self.max_blocks, self.num_experts)
        return backward + 1 + 2 * self.token_blocks


def shared_counters(blocks: int, num_experts: int) -> tuple[int, int]:
    """Where the counters of shared experts begin, forward and backward; see `mok.kernels.tasks`."""
    return 1 + 3 * blocks, 1 + 4 * blocks + 5 * num_experts


def max_rows(num_routes: int, num_experts: int, num_segments: int = 1) -> int:
    """Rows that hold any distribution of `num_routes`, every segment padded to 16 rows and every expert to 64; at least 64.

    Example: 100 routes to 8 experts of one segment: 100 + 8 * 63 = 604, so at most 576 rows.
    """
    padding = (ROW_BLOCK - 1) * min(num_experts, num_routes)
    if num_segments > 1:
        padding = 15 * min(num_experts * num_segments, num_routes) + 48 * min(num_experts, num_routes)
    return max((num_routes + padding) // ROW_BLOCK * ROW_BLOCK, ROW_BLOCK)


def plan_on_device(
    expert_ids_TK: Tensor,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    forward_order: TaskOrder,
    backward_order: TaskOrder | None,
    *,
    grid: CallGrid | None = None,
    units: int = 1,
    row_units: int | None = None,
    again: bool = False,
    shared_size: int = 0,
    layer: int = 0,
    capacity: int = 0,
    own_tokens: int | None = None,
) -> DevicePlan:
    """The plan of the routes `expert_ids_TK` (int32 or int64 [T, K]; -1 masks a route, and so does an id out of range, which
    is an error in the status word of `layer`).

    backward_order: None leaves the backward's table out. grid: the call, one rank; None is one slice.
    units: signals that the mover will give for each 64-row block of rows. row_units: of those that weight gradients read, where
    they come apart from those that tiles multiply, which are codes; None where they are the same. again, shared_size: see
    `DevicePlan`. capacity: rows to make room for, where the caller knows that there will not be more; 0 for all that may come.
    own_tokens: see `plan_tables`.
    Raises UsageError for tokens that do not fill whole slices, or more than one rank.
    """
    grid = grid or CallGrid()
    tokens, top_k = expert_ids_TK.shape
    if grid.ranks > 1:
        raise UsageError(f"the device planner places routes of one rank, not of {grid.ranks}; use mok.schedule.build_schedule")
    if tokens % grid.num_slices:
        raise UsageError(
            f"{tokens} tokens do not fill {grid.num_slices} slices evenly; give every slice the same number of tokens"
        )
    ids = expert_ids_TK.contiguous()
    device = ids.device
    rows = capacity or max_rows(ids.numel(), num_experts, grid.num_segments)
    routes_per_slice = ids.numel() // grid.num_slices
    runs_per_slice, bins = ceil_div(routes_per_slice, RUN), bin_count(num_experts)
    runs = grid.num_slices * runs_per_slice
    expert_start, counts_CE, row_in_expert_XE, before = place_experts(ids, num_experts, grid, layer)
    row_of_route_N = empty(device, ids.numel())
    route_of_row_P = torch.full((rows,), -1, dtype=torch.int32, device=device)
    if runs:
        kernels.place_routes[(runs,)](
            ids, before, row_in_expert_XE, expert_start, row_of_route_N, route_of_row_P,
            routes_per_slice, runs_per_slice, grid.segment, num_experts, RUN=RUN, BINS=bins, num_warps=8,
        )  # fmt: skip
    return plan_tables(
        row_of_route_N.view(tokens, top_k),
        route_of_row_P,
        expert_start,
        counts_CE,
        hidden_size,
        intermediate_size,
        forward_order,
        backward_order,
        units=units,
        row_units=row_units,
        again=again,
        shared_size=shared_size,
        layer=layer,
        own_tokens=own_tokens,
    )


def place_experts(ids_N: Tensor, num_experts: int, grid: CallGrid, layer: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where the rows of each expert start if all experts' lie in one buffer, and what that is made of: int32 expert_start
    [E + 1], counts_CE, and for `mok.kernels.plan.place_routes` row_in_expert_XE and before_run. ids_N: routes of the call."""
    device, bins = ids_N.device, bin_count(num_experts)
    routes_per_slice = ids_N.numel() // grid.num_slices
    runs_per_slice = ceil_div(routes_per_slice, RUN)
    runs = grid.num_slices * runs_per_slice
    counts = empty(device, runs, bins)
    if runs:
        status = status_word(device, layer)
        kernels.count_runs[(runs,)](ids_N, counts, status, routes_per_slice, runs_per_slice, num_experts, RUN=RUN, BINS=bins)
    before = sum_before(counts)
    counts_CE = empty(device, grid.num_slices, num_experts)
    row_in_expert_XE = empty(device, grid.num_segments, bins)
    expert_start = empty(device, num_experts + 1)
    kernels.place_experts[(1,)](
        before, counts_CE, row_in_expert_XE, expert_start, num_experts, grid.num_segments, grid.segment, runs_per_slice,
        BINS=bins,
    )  # fmt: skip
    return expert_start, counts_CE, row_in_expert_XE, before


def plan_tables(
    row_of_route_TK: Tensor,
    route_of_row_P: Tensor,
    expert_start: Tensor,
    counts_CE: Tensor,
    hidden_size: int,
    intermediate_size: int,
    forward_order: TaskOrder,
    backward_order: TaskOrder | None,
    *,
    units: int = 1,
    row_units: int | None = None,
    again: bool = False,
    shared_size: int = 0,
    layer: int = 0,
    own_tokens: int | None = None,
) -> DevicePlan:
    """The rest of a plan, for rows that are already placed: `plan_on_device`'s own, or those of a schedule over several ranks.

    row_of_route_TK: int32 [T, K]. route_of_row_P: int32 [P], P a multiple of 64. expert_start: int32 [E + 1], multiples of 64.
    own_tokens: of this rank, where the routes are those of several: shared experts see them alone, and they are summed in
    token order, as they come back.
    """
    device = expert_start.device
    tokens, top_k = row_of_route_TK.shape
    if own_tokens is not None:
        tokens = own_tokens
    num_experts = expert_start.shape[0] - 1
    rows = route_of_row_P.shape[0]
    blocks = rows // ROW_BLOCK
    mtiles = min(blocks, ceil_div(blocks, 2) + num_experts)
    bins = bin_count(num_experts)
    rows_h, rows_i = ceil_div(hidden_size, TILE_M), ceil_div(intermediate_size, TILE_M)
    columns_h, columns_i = ceil_div(hidden_size, TILE_N), ceil_div(intermediate_size, TILE_N)
    forward_tiles, backward_tiles, again_tiles, weight_tasks = rows_i + columns_h, 0, 0, 0
    if backward_order is not None:
        backward_tiles, again_tiles = columns_i + columns_h, rows_i if again else 0
        weight_tasks = num_experts * (rows_h * columns_i + 2 * rows_i * columns_h)
    backward = backward_order or forward_order
    orders = (forward_order,) if backward_order is None else (forward_order, backward_order)
    shared_tasks = [shared_task_count(tokens, hidden_size, shared_size, forward=not i, again=again) for i in range(2)]
    sizes, mtile_start = empty(device, 8), empty(device, num_experts + 1)
    forward_group_start, backward_group_start = empty(device, num_experts + 1), empty(device, num_experts + 1)
    kernels.count_groups[(1,)](
        expert_start, mtile_start, forward_group_start, backward_group_start, sizes, num_experts, forward_order.group_size,
        backward.group_size, forward_tiles, backward_tiles + again_tiles, shared_tasks[0], shared_tasks[1] + weight_tasks,
        BINS=bins,
    )  # fmt: skip
    expert_of_block_B, group_of_block_B, group_target_G = (empty(device, blocks) for _ in range(3))
    kernels.describe_blocks[(ceil_div(blocks, WIDTH),)](
        expert_start, forward_group_start, expert_of_block_B, group_of_block_B, group_target_G, num_experts,
        forward_order.group_size, columns_h, blocks, WIDTH=WIDTH, BINS=bins,
    )  # fmt: skip
    tile_tasks = [mtiles * tiles for tiles in (forward_tiles, backward_tiles, again_tiles)]
    forward_tasks = empty(device, shared_tasks[0] + tile_tasks[0], FIELDS)
    backward_tasks = None
    if backward_order is not None:
        backward_tasks = empty(device, shared_tasks[1] + sum(tile_tasks[1:]) + weight_tasks, FIELDS)
    lists = [forward_tasks, forward_tasks if backward_tasks is None else backward_tasks]
    for i, order in enumerate(orders):
        if shared_tasks[i]:
            write_shared_tasks[(ceil_div(shared_tasks[i], WIDTH),)](
                lists[i], tokens, order.group_size, hidden_size, shared_size, shared_counters(blocks, num_experts)[i],
                FORWARD=not i, AGAIN=again, WIDTH=WIDTH,
            )  # fmt: skip
    dy_counter = 0 if row_units is None else shared_counters(blocks, num_experts)[1] + 1 + 2 * ceil_div(tokens, ROW_BLOCK)
    programs = [ceil_div(count, WIDTH) for count in (*tile_tasks, weight_tasks)]
    kernels.write_tasks[(sum(programs),)](
        *(listed[count:] for listed, count in zip(lists, shared_tasks, strict=True)), expert_start, mtile_start,
        forward_group_start, backward_group_start, num_experts, forward_order.group_size, backward.group_size,
        forward_order.groups_per_phase or mtiles, mtiles, weight_tasks, hidden_size, intermediate_size, units,
        units if row_units is None else row_units, dy_counter, blocks,
        *programs[:3], WIDTH=WIDTH, BINS=bins,
    )  # fmt: skip
    if own_tokens is None:
        combine_token_T, combine_group_T = order_tokens(row_of_route_TK, group_of_block_B, forward_group_start, mtiles)
    else:
        combine_token_T = torch.arange(tokens, dtype=torch.int32, device=device)
        combine_group_T = torch.zeros_like(combine_token_T)
    return DevicePlan(
        num_tokens=tokens,
        top_k=top_k,
        num_experts=num_experts,
        max_rows=rows,
        counts_CE=counts_CE,
        row_of_route_N=row_of_route_TK.view(-1),
        route_of_row_P=route_of_row_P,
        expert_start=expert_start,
        expert_of_block_B=expert_of_block_B,
        group_of_block_B=group_of_block_B,
        sizes=sizes,
        forward_tasks=forward_tasks,
        backward_tasks=backward_tasks,
        again=again,
        shared_size=shared_size,
        coded=row_units is not None,
        group_target_G=group_target_G,
        combine_token_T=combine_token_T,
        combine_group_T=combine_group_T,
        status=status_word(device, layer),
    )


def shared_task_count(tokens: int, hidden_size: int, shared_size: int, *, forward: bool, again: bool) -> int:
    """Tasks of shared experts of a forward, or of a backward that computes gate and up `again`."""
    if not shared_size:
        return 0
    gate_up = ceil_div(shared_size, TILE_M) if forward or again else 0
    dh = 0 if forward else ceil_div(shared_size, TILE_N)
    return ceil_div(tokens, TILE_M) * (gate_up + dh + ceil_div(hidden_size, TILE_N))


def order_tokens(
    row_of_route_TK: Tensor, group_of_block_B: Tensor, group_start: Tensor, max_groups: int
) -> tuple[Tensor, Tensor]:
    """(tokens in the order of completion, the group each waits for), both int32 [T]."""
    tokens, top_k = row_of_route_TK.shape
    device = row_of_route_TK.device
    num_experts = group_start.shape[0] - 1
    num_bins = min(MAX_BINS, bin_count(max_groups))
    bin_of_token_T, combine_token_T, combine_group_T = (empty(device, tokens) for _ in range(3))
    if tokens:
        runs = ceil_div(tokens, RUN)
        counts = empty(device, runs, num_bins)
        kernels.count_tokens[(runs,)](
            row_of_route_TK, group_of_block_B, group_start, bin_of_token_T, counts, tokens, num_experts, num_bins,
            K=top_k, RUN=RUN, BINS=num_bins,
        )  # fmt: skip
        kernels.order_tokens[(runs,)](
            bin_of_token_T, sum_before(counts), group_start, combine_token_T, combine_group_T, tokens, num_experts, num_bins,
            runs, RUN=RUN, BINS=num_bins, num_warps=8,
        )  # fmt: skip
    return combine_token_T, combine_group_T


def sum_before(counts: Tensor) -> Tensor:
    """Sums of the rows of `counts` [runs, bins] before each, and of all of them: int32 [runs + 1, bins]."""
    runs, bins = counts.shape
    before = empty(counts.device, runs + 1, bins)
    width = min(bins, 4)
    kernels.scan_runs[(bins // width,)](counts, before, runs, BINS=bins, RUNS=SCAN_RUNS, WIDTH=width, num_warps=8)
    return before


def bin_count(num_bins: int) -> int:
    """The power of two that holds `num_bins`, at least a warp's 32."""
    return max(32, 1 << (num_bins - 1).bit_length())


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def empty(device: torch.device, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=device)
