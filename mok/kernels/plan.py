"""The planner on the device: from expert ids to rows, groups and task records, in plain Triton, reading nothing back.

Owns the integer arithmetic of rule 2 (`docs/numerics.md`) as kernels: a counting sort of routes by expert, then the task
table of `mok/kernels/tasks.py`. Every result is a function of the ids alone: there are no atomics in which an order could show.
Knows nothing of torch, launches or configuration. The readable counterparts are `mok/schedule.py` and
`mok/reference/task_table.py`; read next `mok/launch/plan.py`, which allocates and launches.

Words: the items of a slice (routes, or tokens) are cut into *runs* of RUN items that never cross a slice. An *m-tile* is two
64-row blocks of one expert, the last one of an expert perhaps a single block. A *group* is up to `group_size` m-tiles of one
expert, a *phase* `groups_per_phase` groups. BINS is the number of experts (or bins) rounded up to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mok.kernels.tasks import (
    DH,
    DOWN,
    DW_DOWN,
    DW_GATE_UP,
    DW_RUN,
    DX,
    EXPERT,
    FIELDS,
    GATE_UP,
    HALF,
    KIND,
    PART,
    ROW,
    ROW_BLOCK,
    SIGNAL0,
    SIGNAL1,
    SIZE_BACKWARD_TASKS,
    SIZE_FORWARD_TASKS,
    SIZE_GROUPS,
    SIZE_MTILES,
    SIZE_ROWS,
    STEPS,
    TILE_C,
    TILE_M,
    TILE_N,
    WAIT0,
    WAIT0_TARGET,
    WAIT1,
    WAIT1_TARGET,
    M,
    N,
)

SEGMENT_ROWS = tl.constexpr(16)  # every (expert, segment) starts on a multiple: the k16 step of a weight gradient
STATUS_BAD_IDS = tl.constexpr(2)  # bit of the status word, see mok/launch/status.py

# Whose tasks `write_tile_tasks` writes: of the forward, of the backward, or those that the backward computes again.
FORWARD = tl.constexpr(0)
BACKWARD = tl.constexpr(1)
AGAIN = tl.constexpr(2)


@triton.jit
def load_bins(bin_of_item, item, exists, num_bins):
    """(bins as int32, -1 for those out of range; whether one of them is neither in range nor -1). Compared before it is
    narrowed: an int64 id of 2^32 is out of range, not 0."""
    given = tl.load(bin_of_item + item, mask=exists, other=-1)
    valid = (given >= 0) & (given < num_bins)
    return tl.where(valid, given, -1).to(tl.int32), tl.max(((given != -1) & (valid == 0)).to(tl.int32), axis=0)


@triton.jit
def load_run(bin_of_item, items_per_slice, runs_per_slice, num_bins, run, RUN: tl.constexpr):
    """The bins of one run: (item indices, which of them exist, bins or -1), each [RUN], and whether one is out of range."""
    within = run % runs_per_slice * RUN + tl.arange(0, RUN)
    exists = within < items_per_slice
    item = run // runs_per_slice * items_per_slice + within
    chosen, bad = load_bins(bin_of_item, item, exists, num_bins)
    return item, exists, chosen, bad


@triton.jit
def count_runs(
    bin_of_item, count_of_run, status, items_per_slice, runs_per_slice, num_bins, RUN: tl.constexpr, BINS: tl.constexpr
):
    """Computes count_of_run[r, b] = items of run r in bin b.

    Program: one run. Reads bin_of_item (any integer type; anything outside 0..num_bins-1 counts nowhere).
    Writes count_of_run int32 [runs, BINS], and STATUS_BAD_IDS into the status word if an id is out of range and not -1.
    """
    run = tl.program_id(0)
    _, _, chosen, bad = load_run(bin_of_item, items_per_slice, runs_per_slice, num_bins, run, RUN)
    counts = tl.histogram(tl.where(chosen >= 0, chosen, 0), BINS, mask=chosen >= 0)
    tl.store(count_of_run + run * BINS + tl.arange(0, BINS), counts)
    if bad != 0:
        tl.atomic_or(status, STATUS_BAD_IDS, sem="relaxed")


@triton.jit
def scan_runs(count_of_run, before_run, num_runs, BINS: tl.constexpr, RUNS: tl.constexpr, WIDTH: tl.constexpr):
    """Computes before_run[r, b] = sum of count_of_run[r', b] over r' < r, for r = 0..num_runs.

    Program: WIDTH bins, walking the runs RUNS at a time. Writes before_run int32 [num_runs + 1, BINS], the
    totals in its last row.
    """
    bins = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.int32)
    for start in range(0, num_runs, RUNS):
        runs = start + tl.arange(0, RUNS)
        place = runs[:, None] * BINS + bins[None, :]
        counts = tl.load(count_of_run + place, mask=runs[:, None] < num_runs, other=0)
        up_to = tl.cumsum(counts, axis=0)
        tl.store(before_run + place, total[None, :] + up_to - counts, mask=runs[:, None] < num_runs)
        total += tl.sum(counts, axis=0)
    tl.store(before_run + num_runs * BINS + bins, total)


@triton.jit
def rank_in_run(bin_of_item, item, exists, chosen, num_bins):
    """How many earlier items of the run share an item's bin, int32 [RUN].

    The items stand along the lanes, those before them along the registers: so a lane adds up its own.
    """
    other, _ = load_bins(bin_of_item, item, exists, num_bins)
    earlier = (other[:, None] == chosen[None, :]) & (item[:, None] < item[None, :])
    return tl.sum(earlier.to(tl.int32), axis=0)


@triton.jit
def place_experts(
    before_run,
    counts_CE,
    row_in_expert_XE,
    expert_start,
    num_experts,
    num_segments,
    slices_per_segment,
    runs_per_slice,
    BINS: tl.constexpr,
):
    """Computes where each expert and each of its segments starts in the row buffers.

    Program: one in all. Reads before_run [runs + 1, BINS].
    Writes counts_CE [slices, num_experts] routes per slice and expert; row_in_expert_XE [segments, BINS] first row of the
    segment relative to its expert, a multiple of 16; expert_start [num_experts + 1], multiples of 64, the rows in
    all last.
    Example: one segment, counts (3, 0, 70) give expert_start (0, 64, 64, 192).
    """
    expert = tl.arange(0, BINS)
    real = expert < num_experts
    rows = tl.zeros((BINS,), tl.int32)
    for segment in range(num_segments):
        tl.store(row_in_expert_XE + segment * BINS + expert, rows)
        for position in range(slices_per_segment):
            s = segment * slices_per_segment + position
            first = tl.load(before_run + s * runs_per_slice * BINS + expert)
            last = tl.load(before_run + (s + 1) * runs_per_slice * BINS + expert)
            tl.store(counts_CE + s * num_experts + expert, last - first, mask=real)
            rows += last - first
        rows = (rows + SEGMENT_ROWS - 1) // SEGMENT_ROWS * SEGMENT_ROWS
    rows = (rows + ROW_BLOCK - 1) // ROW_BLOCK * ROW_BLOCK
    end = tl.cumsum(rows, axis=0)
    tl.store(expert_start + expert, end - rows, mask=real)
    tl.store(expert_start + num_experts, tl.sum(rows, axis=0))


@triton.jit
def place_routes(
    expert_of_route_N,
    before_run,
    row_in_expert_XE,
    expert_start,
    row_of_route_N,
    route_of_row_P,
    routes_per_slice,
    runs_per_slice,
    slices_per_segment,
    num_experts,
    RUN: tl.constexpr,
    BINS: tl.constexpr,
):
    """Computes the row of every route: rows of an expert in (segment, slice, token, slot) order.

    Program: one run of routes. Writes row_of_route_N (-1 where the route is masked) and route_of_row_P, whose other entries the
    launch has set to -1.
    Example: experts (1, 0, 1, -1) with expert_start (0, 64) give rows (64, 0, 65, -1).
    """
    run = tl.program_id(0)
    route, exists, expert, _ = load_run(expert_of_route_N, routes_per_slice, runs_per_slice, num_experts, run, RUN)
    routed = expert >= 0
    segment = run // runs_per_slice // slices_per_segment
    first_run = segment * slices_per_segment * runs_per_slice
    expert = tl.where(routed, expert, 0)
    place = tl.load(expert_start + expert) + tl.load(row_in_expert_XE + segment * BINS + expert)
    place += tl.load(before_run + run * BINS + expert) - tl.load(before_run + first_run * BINS + expert)
    row = tl.where(routed, place + rank_in_run(expert_of_route_N, route, exists, expert, num_experts), -1)
    tl.store(row_of_route_N + route, row, mask=exists)
    tl.store(route_of_row_P + row, route, mask=routed)


@triton.jit
def count_groups(
    expert_start,
    mtile_start,
    forward_group_start,
    backward_group_start,
    sizes,
    num_experts,
    forward_group_size,
    backward_group_size,
    forward_tiles,
    backward_tiles,
    forward_others,
    backward_others,
    BINS: tl.constexpr,
):
    """Computes the m-tiles and groups before each expert, and how long the lists are.

    Program: one in all. forward_tiles, backward_tiles: tasks per m-tile; forward_others, backward_others: those that no m-tile
    has, of shared experts and of weight gradients. A backward that is not planned has 0 of both. Writes mtile_start and both
    group_start int32 [num_experts + 1], and sizes [8].
    """
    expert = tl.arange(0, BINS)
    real = expert < num_experts
    first = tl.load(expert_start + expert, mask=real, other=0)
    last = tl.load(expert_start + expert + 1, mask=real, other=0)
    mtiles = (last - first + TILE_M - 1) // TILE_M
    num_mtiles = store_starts(mtile_start, mtiles, expert, num_experts)
    forward_groups = (mtiles + forward_group_size - 1) // forward_group_size
    num_groups = store_starts(forward_group_start, forward_groups, expert, num_experts)
    backward_groups = (mtiles + backward_group_size - 1) // backward_group_size
    store_starts(backward_group_start, backward_groups, expert, num_experts)
    place = tl.arange(0, 8)
    values = tl.where(place == SIZE_ROWS, tl.load(expert_start + num_experts), 0)
    values = tl.where(place == SIZE_FORWARD_TASKS, num_mtiles * forward_tiles + forward_others, values)
    values = tl.where(place == SIZE_BACKWARD_TASKS, num_mtiles * backward_tiles + backward_others, values)
    values = tl.where(place == SIZE_GROUPS, num_groups, values)
    values = tl.where(place == SIZE_MTILES, num_mtiles, values)
    tl.store(sizes + place, values)


@triton.jit
def store_starts(start, counts, expert, num_experts):
    """start[e] = what comes before expert e, start[num_experts] = the sum, which is returned."""
    total = tl.sum(counts, axis=0)
    tl.store(start + expert, tl.cumsum(counts, axis=0) - counts, mask=expert < num_experts)
    tl.store(start + num_experts, total)
    return total


@triton.jit
def owner(index, start, num_experts, BINS: tl.constexpr):
    """Which expert's stretch [start[e], start[e + 1]) holds each index; num_experts beyond the last. int32 like `index`."""
    SPAN: tl.constexpr = BINS if BINS < 64 else 64  # compared at a time: all at once would not fit into registers
    found = tl.zeros_like(index)
    for first in range(0, BINS, SPAN):
        expert = first + tl.arange(0, SPAN)
        end = tl.load(start + expert + 1, mask=expert < num_experts, other=2147483647)
        found += tl.sum((end[None, :] <= index[:, None]).to(tl.int32), axis=1)
    return found


@triton.jit
def describe_blocks(
    expert_start,
    group_start,
    expert_of_block_B,
    group_of_block_B,
    group_target_G,
    num_experts,
    group_size,
    signals_per_block,
    num_blocks_max,
    WIDTH: tl.constexpr,
    BINS: tl.constexpr,
):
    """Computes what a block belongs to and what completes a group, for the forward's groups.

    Program: WIDTH blocks and groups. Beyond the end: expert 0, group 0, target 0.
    Writes expert_of_block_B, group_of_block_B, group_target_G [num_blocks_max].
    """
    index = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    expert = owner(index, group_start, num_experts, BINS)
    inside = expert < num_experts
    expert = tl.where(inside, expert, 0)
    group = index - tl.load(group_start + expert)
    blocks = (tl.load(expert_start + expert + 1) - tl.load(expert_start + expert)) // ROW_BLOCK
    blocks = tl.minimum(blocks - 2 * group * group_size, 2 * group_size)
    tl.store(group_target_G + index, tl.where(inside, blocks * signals_per_block, 0), mask=index < num_blocks_max)

    expert = owner(index * ROW_BLOCK, expert_start, num_experts, BINS)
    inside = expert < num_experts
    expert = tl.where(inside, expert, 0)
    mtile = (index - tl.load(expert_start + expert) // ROW_BLOCK) // 2
    group = tl.where(inside, tl.load(group_start + expert) + mtile // group_size, 0)
    tl.store(expert_of_block_B + index, expert, mask=index < num_blocks_max)
    tl.store(group_of_block_B + index, group, mask=index < num_blocks_max)


@triton.jit
def with_field(records, field: tl.constexpr, values):
    """`records` [n, 16] with column `field` set to `values` [n]."""
    return tl.where(tl.arange(0, FIELDS)[None, :] == field, values[:, None], records)


@triton.jit
def first_mtile(group, mtile_start, group_start, num_experts, group_size, BINS: tl.constexpr):
    """The first m-tile of each group; all m-tiles for a group beyond the last."""
    expert = owner(group, group_start, num_experts, BINS)
    inside = expert < num_experts
    expert = tl.where(inside, expert, num_experts)
    return tl.load(mtile_start + expert) + tl.where(inside, group - tl.load(group_start + expert), 0) * group_size


@triton.jit
def write_tile_tasks(
    tasks,
    program,
    expert_start,
    mtile_start,
    group_start,
    num_experts,
    group_size,
    groups_per_phase,
    combine_group_start,
    combine_group_size,
    tiles_before,
    first_tiles,
    second_tiles,
    tasks_between,
    hidden_size,
    intermediate_size,
    units,
    num_blocks_max,
    PASS: tl.constexpr,
    WIDTH: tl.constexpr,
    BINS: tl.constexpr,
):
    """Writes the records of GATE_UP and DOWN (forward), DH and DX (backward), or GATE_UP alone (computed again), each where the
    order of the list puts it, after `tiles_before` tasks of every m-tile.

    Program: WIDTH tasks, numbered by (m-tile, tile); `first_tiles` of an m-tile are of the first kind, then `second_tiles` of
    the second. Order (A first kind, B second, one stretch per phase): A0, A1, B0, A2, B1, ..., with groups in order inside a
    stretch, and inside a group columns outside, m-tiles inside. So a stretch starts at a*(m-tiles of its A stretches so far) +
    b*(those of its B stretches), which needs the first m-tile of two phases only. tasks_between: others that come before B,
    of a list with one phase.
    Example: a = b = 1, three groups of one m-tile, one group a phase: A0 A1 B0 A2 B1 B2.
    """
    tiles = first_tiles + second_tiles
    index = program * WIDTH + tl.arange(0, WIDTH)
    mtile = index // tiles
    expert = owner(mtile, mtile_start, num_experts, BINS)
    exists = expert < num_experts
    expert = tl.where(exists, expert, 0)
    tile = index % tiles
    is_first = tile < first_tiles
    column = tl.where(is_first, tile, tile - first_tiles)

    expert_mtile = tl.load(mtile_start + expert)
    expert_mtiles = tl.load(mtile_start + expert + 1) - expert_mtile
    expert_row = tl.load(expert_start + expert)
    expert_rows = tl.load(expert_start + expert + 1) - expert_row
    group_in_expert = (mtile - expert_mtile) // group_size
    group = tl.load(group_start + expert) + group_in_expert
    group_mtile = expert_mtile + group_in_expert * group_size
    length = tl.minimum(expert_mtiles - group_in_expert * group_size, group_size)
    phase_group = group // groups_per_phase * groups_per_phase
    previous = tl.maximum(phase_group - groups_per_phase, 0)
    before = first_mtile(previous, mtile_start, group_start, num_experts, group_size, BINS)
    after = first_mtile(phase_group + 2 * groups_per_phase, mtile_start, group_start, num_experts, group_size, BINS)
    inside = column * length + mtile - group_mtile + tl.load(mtile_start + num_experts) * tiles_before
    first_place = first_tiles * group_mtile + second_tiles * before + inside
    second_place = first_tiles * after + tasks_between + second_tiles * group_mtile + inside
    place = tl.where(is_first, first_place, second_place)

    row = expert_row + (mtile - expert_mtile) * TILE_M
    half = (expert_row + expert_rows - row == ROW_BLOCK).to(tl.int32)
    block = row // ROW_BLOCK
    arrived = 1 + block
    ready = 1 + num_blocks_max + block
    complete = 1 + 2 * num_blocks_max + tl.load(combine_group_start + expert)
    complete += (mtile - expert_mtile) // combine_group_size
    steps_h = (hidden_size + TILE_C - 1) // TILE_C
    steps_i = (intermediate_size + TILE_C - 1) // TILE_C
    records = tl.zeros((WIDTH, FIELDS), tl.int32)
    records = with_field(records, EXPERT, expert)
    records = with_field(records, ROW, row)
    records = with_field(records, HALF, half)
    records = with_field(records, WAIT0, tl.where(is_first, arrived, ready))
    records = with_field(records, WAIT0_TARGET, tl.where(is_first, units, (2 - half) * first_tiles))
    records = with_field(records, SIGNAL0, tl.where(is_first, ready, complete))
    if PASS == AGAIN:
        gate_up_in = 1 + 3 * num_blocks_max + 5 * num_experts + block
        records = with_field(records, N, column * (TILE_N // 2))
        records = with_field(records, STEPS, tl.zeros_like(column) + steps_h)
        records = with_field(records, WAIT0, gate_up_in)
        records = with_field(records, WAIT1, gate_up_in + 1 - half)
        records = with_field(records, WAIT1_TARGET, tl.zeros_like(column) + units)
        records = with_field(records, SIGNAL0, 1 + 3 * num_blocks_max + 4 * num_experts + expert)
        records = with_field(records, SIGNAL1, tl.full((WIDTH,), -1, tl.int32))
    elif PASS == FORWARD:
        records = with_field(records, KIND, tl.where(is_first, GATE_UP, DOWN))
        records = with_field(records, N, column * tl.where(is_first, TILE_N // 2, TILE_N))
        records = with_field(records, STEPS, tl.where(is_first, steps_h, steps_i))
        records = with_field(records, WAIT1, tl.where(is_first, arrived + 1 - half, 0))
        records = with_field(records, WAIT1_TARGET, tl.where(is_first, units, 0))
        records = with_field(records, SIGNAL1, tl.where(is_first, -1, 0))
    else:
        dhidden_of_expert = 1 + 3 * num_blocks_max + expert
        x_done_of_expert = dhidden_of_expert + 3 * num_experts
        x_tasks = 2 * ((intermediate_size + TILE_M - 1) // TILE_M) * second_tiles
        records = with_field(records, KIND, tl.where(is_first, DH, DX))
        records = with_field(records, N, column * TILE_N)
        records = with_field(records, STEPS, tl.where(is_first, steps_h, 2 * steps_i))
        records = with_field(records, WAIT1, tl.where(is_first, arrived + 1 - half, x_done_of_expert))
        records = with_field(records, WAIT1_TARGET, tl.where(is_first, units, 2 * x_tasks))
        records = with_field(records, SIGNAL1, tl.where(is_first, dhidden_of_expert, 0))
    fields = place.to(tl.int64)[:, None] * FIELDS + tl.arange(0, FIELDS)[None, :]
    tl.store(tasks + fields, records, mask=exists[:, None])


@triton.jit
def write_weight_tasks(
    tasks,
    program,
    expert_start,
    mtile_start,
    num_experts,
    tiles_before,
    hidden_size,
    intermediate_size,
    row_units,
    dy_counter,
    num_blocks_max,
    WIDTH: tl.constexpr,
):
    """Writes the records of the weight gradients, after the `tiles_before` tasks of every m-tile.

    Program: WIDTH tasks, numbered as they are listed: DW_DOWN of every expert, then DW_GATE_UP of every expert. Output tiles go
    in runs of 16 rows of tiles: columns outside, the rows of the run inside.
    """
    rows_h = (hidden_size + TILE_M - 1) // TILE_M
    rows_i = (intermediate_size + TILE_M - 1) // TILE_M
    columns_h = (hidden_size + TILE_N - 1) // TILE_N
    columns_i = (intermediate_size + TILE_N - 1) // TILE_N
    down_tasks = rows_h * columns_i
    gate_up_tasks = 2 * rows_i * columns_h
    index = program * WIDTH + tl.arange(0, WIDTH)
    is_down = index < num_experts * down_tasks
    task = tl.where(is_down, index, index - num_experts * down_tasks)
    tasks_per_expert = tl.where(is_down, down_tasks, gate_up_tasks)
    expert = task // tasks_per_expert
    exists = expert < num_experts
    task = task % tasks_per_expert
    tile_rows = tl.where(is_down, rows_h, 2 * rows_i)
    columns = tl.where(is_down, columns_i, columns_h)
    run = task // (DW_RUN * columns)
    height = tl.minimum(tile_rows - run * DW_RUN, DW_RUN)
    task -= run * DW_RUN * columns
    tile_row = run * DW_RUN + task % height
    part = tl.where(is_down, 0, tile_row // rows_i)

    first_row = tl.load(expert_start + expert, mask=exists, other=0)
    blocks = (tl.load(expert_start + expert + 1, mask=exists, other=0) - first_row) // ROW_BLOCK
    records = tl.zeros((WIDTH, FIELDS), tl.int32)
    records = with_field(records, KIND, tl.where(is_down, DW_DOWN, DW_GATE_UP))
    records = with_field(records, EXPERT, expert)
    records = with_field(records, ROW, first_row)
    records = with_field(records, M, (tile_row - part * rows_i) * TILE_M)
    records = with_field(records, N, task // height * TILE_N)
    records = with_field(records, STEPS, blocks)
    dhidden_of_expert = 1 + 3 * num_blocks_max + expert
    records = with_field(records, WAIT0, dhidden_of_expert)
    records = with_field(records, WAIT0_TARGET, blocks * columns_i)
    dy_rows = tl.where(dy_counter > 0, dy_counter + expert, 0)
    dy_target = tl.where(dy_counter > 0, blocks * row_units, 0)
    records = with_field(records, WAIT1, tl.where(is_down, dy_rows, dhidden_of_expert + num_experts))
    records = with_field(records, WAIT1_TARGET, tl.where(is_down, dy_target, blocks * row_units))
    records = with_field(records, SIGNAL0, dhidden_of_expert + tl.where(is_down, 2, 3) * num_experts)
    records = with_field(records, SIGNAL1, tl.full((WIDTH,), -1, tl.int32))
    records = with_field(records, PART, part)
    place = tl.load(mtile_start + num_experts) * tiles_before + index
    fields = place.to(tl.int64)[:, None] * FIELDS + tl.arange(0, FIELDS)[None, :]
    tl.store(tasks + fields, records, mask=exists[:, None])


@triton.jit
def write_tasks(
    forward_tasks,
    backward_tasks,
    expert_start,
    mtile_start,
    forward_group_start,
    backward_group_start,
    num_experts,
    forward_group_size,
    backward_group_size,
    forward_groups_per_phase,
    num_mtiles_max,
    weight_tasks,
    hidden_size,
    intermediate_size,
    units,
    row_units,
    dy_counter,
    num_blocks_max,
    forward_programs,
    backward_programs,
    again_programs,
    WIDTH: tl.constexpr,
    BINS: tl.constexpr,
):
    """Writes both tables. Program: WIDTH tasks; first `forward_programs` programs for the forward, then `backward_programs` for
    the tile tasks of the backward, `again_programs` for the GATE_UP tasks that open it where it has them, then those of the
    weight gradients."""
    rows_i = (intermediate_size + TILE_M - 1) // TILE_M
    columns_i = (intermediate_size + TILE_N - 1) // TILE_N
    columns_h = (hidden_size + TILE_N - 1) // TILE_N
    tiles_again = tl.where(again_programs > 0, rows_i, 0)
    program = tl.program_id(0)
    if program < forward_programs:
        write_tile_tasks(
            forward_tasks, program, expert_start, mtile_start, forward_group_start, num_experts, forward_group_size,
            forward_groups_per_phase, forward_group_start, forward_group_size, 0, rows_i, columns_h, 0, hidden_size,
            intermediate_size, units, num_blocks_max, FORWARD, WIDTH, BINS,
        )  # fmt: skip
    elif program < forward_programs + backward_programs:
        write_tile_tasks(
            backward_tasks, program - forward_programs, expert_start, mtile_start, backward_group_start, num_experts,
            backward_group_size, num_mtiles_max, forward_group_start, forward_group_size, tiles_again, columns_i, columns_h,
            weight_tasks, hidden_size, intermediate_size, units, num_blocks_max, BACKWARD, WIDTH, BINS,
        )  # fmt: skip
    elif program < forward_programs + backward_programs + again_programs:
        write_tile_tasks(
            backward_tasks, program - forward_programs - backward_programs, expert_start, mtile_start, backward_group_start,
            num_experts, backward_group_size, num_mtiles_max, forward_group_start, forward_group_size, 0, rows_i, 0, 0,
            hidden_size, intermediate_size, units, num_blocks_max, AGAIN, WIDTH, BINS,
        )  # fmt: skip
    else:
        write_weight_tasks(
            backward_tasks, program - forward_programs - backward_programs - again_programs, expert_start, mtile_start,
            num_experts, tiles_again + columns_i, hidden_size, intermediate_size, row_units, dy_counter, num_blocks_max, WIDTH,
        )  # fmt: skip


@triton.jit
def count_tokens(
    row_of_route_N,
    group_of_block_B,
    group_start,
    bin_of_token_T,
    count_of_run,
    num_tokens,
    num_experts,
    num_bins,
    K: tl.constexpr,
    RUN: tl.constexpr,
    BINS: tl.constexpr,
):
    """Computes the bin in which each token becomes complete, that of the last group among its rows (0 if it has none), and
    count_of_run[r, b] = tokens of run r in bin b.

    Program: one run of tokens. With no more groups than bins a bin is a group; else bins are equal stretches of groups.
    """
    token = tl.program_id(0) * RUN + tl.arange(0, RUN)
    exists = token < num_tokens
    num_groups = tl.load(group_start + num_experts)
    last = tl.zeros((RUN,), tl.int32)
    for slot in range(K):
        row = tl.load(row_of_route_N + token.to(tl.int64) * K + slot, mask=exists, other=-1)
        group = tl.load(group_of_block_B + row // ROW_BLOCK, mask=row >= 0, other=0)
        last = tl.maximum(last, group)
    groups_per_bin = tl.maximum((num_groups + num_bins - 1) // num_bins, 1)
    bins = last // groups_per_bin
    tl.store(bin_of_token_T + token, bins, mask=exists)
    counts = tl.histogram(bins, BINS, mask=exists)
    tl.store(count_of_run + tl.program_id(0) * BINS + tl.arange(0, BINS), counts)


@triton.jit
def order_tokens(
    bin_of_token_T,
    before_run,
    group_start,
    combine_token_T,
    combine_group_T,
    num_tokens,
    num_experts,
    num_bins,
    num_runs,
    RUN: tl.constexpr,
    BINS: tl.constexpr,
):
    """Computes the tokens in the order in which they become complete, ties in token order.

    Program: one run of tokens. Writes combine_token_T, and combine_group_T: the last group of the token's bin.
    Example: bins (2, 0, 2) give tokens (1, 0, 2), groups (0, 2, 2).
    """
    run = tl.program_id(0)
    token, exists, chosen, _ = load_run(bin_of_token_T, num_tokens, num_runs, num_bins, run, RUN)
    bins = tl.arange(0, BINS)
    total = tl.load(before_run + num_runs * BINS + bins)
    chosen = tl.where(exists, chosen, 0)
    start = tl.gather(tl.cumsum(total, axis=0) - total, chosen, axis=0)
    earlier = rank_in_run(bin_of_token_T, token, exists, chosen, num_bins)
    place = start + tl.load(before_run + run * BINS + chosen) + earlier
    num_groups = tl.load(group_start + num_experts)
    groups_per_bin = tl.maximum((num_groups + num_bins - 1) // num_bins, 1)
    group = tl.minimum((chosen + 1) * groups_per_bin, tl.maximum(num_groups, 1)) - 1
    tl.store(combine_token_T + place, token, mask=exists)
    tl.store(combine_group_T + place, group, mask=exists)
