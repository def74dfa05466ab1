"""The task table written for reading: the same list that the planner's kernels write, from Python integers in loops.

Owns the order of tasks and what each waits for and signals; sizes, kinds, columns and counters are those of
`mok/kernels/tasks.py`. Must not import the planner that it checks (`mok/kernels/plan.py`, `mok/launch/plan.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import numpy as np

from mok.kernels import tasks

__all__ = ["Task", "backward_tasks", "combine_order", "forward_tasks", "group_targets", "mtiles", "shared_tasks", "table"]

GATE_UP, DOWN, DH, DX = tasks.GATE_UP.value, tasks.DOWN.value, tasks.DH.value, tasks.DX.value
DW_GATE_UP, DW_DOWN = tasks.DW_GATE_UP.value, tasks.DW_DOWN.value
ROW_BLOCK, TILE_M, TILE_N, TILE_C = tasks.ROW_BLOCK.value, tasks.TILE_M.value, tasks.TILE_N.value, tasks.TILE_C.value
DW_RUN = tasks.DW_RUN.value
NONE = -1
TOTAL = 0


@dataclass(frozen=True)
class Task:
    """One record, its fields in the order of its columns."""

    kind: int
    expert: int
    row: int
    m: int
    n: int
    steps: int
    half: int
    wait0: int = 0
    wait0_target: int = 0
    wait1: int = 0
    wait1_target: int = 0
    signal0: int = NONE
    signal1: int = NONE
    part: int = 0
    dtype: int = 0
    scale: int = 0


@dataclass(frozen=True)
class MTile:
    """Up to 128 rows of one expert. row: the first; half: 1 if there are only 64; group: among all groups."""

    expert: int
    row: int
    half: int
    group: int


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def mtiles(expert_start: list[int], group_size: int) -> list[MTile]:
    """The m-tiles in order, each in its group; every expert begins a new group.

    Example: starts [0, 192, 192, 256] and groups of one: rows 0 and 128 (half) of expert 0, row 192 (half) of expert 2.
    """
    found: list[MTile] = []
    for expert, (start, end) in enumerate(pairwise(expert_start)):
        first_group = found[-1].group + 1 if found else 0
        for place, row in enumerate(range(start, end, TILE_M)):
            found.append(MTile(expert, row, int(end - row == ROW_BLOCK), first_group + place // group_size))
    return found


def group_targets(expert_start: list[int], group_size: int, hidden_size: int) -> list[int]:
    """Signals that complete each group: one for each 64-row block and each tile of columns of its output rows."""
    columns = ceil_div(hidden_size, TILE_N)
    tiles = mtiles(expert_start, group_size)
    num_groups = tiles[-1].group + 1 if tiles else 0
    return [sum((2 - tile.half) * columns for tile in tiles if tile.group == group) for group in range(num_groups)]


def forward_tasks(
    expert_start: list[int],
    hidden_size: int,
    intermediate_size: int,
    *,
    group_size: int,
    groups_per_phase: int,
    units: int,
    num_blocks_max: int,
) -> list[Task]:
    """GATE_UP and DOWN of every m-tile. units: signals the mover gives for each 64-row block it has brought;
    num_blocks_max: blocks that the row buffers hold, which fixes where counters lie."""
    gate_up_columns = ceil_div(intermediate_size, TILE_N // 2)

    def gate_up(tile: MTile, column: int) -> Task:
        block = tile.row // ROW_BLOCK
        return Task(
            GATE_UP, tile.expert, tile.row, 0, column * TILE_N // 2, ceil_div(hidden_size, TILE_C), tile.half,
            wait0=1 + block, wait0_target=units, wait1=1 + block + 1 - tile.half, wait1_target=units,
            signal0=1 + num_blocks_max + block,
        )  # fmt: skip

    def down(tile: MTile, column: int) -> Task:
        block = tile.row // ROW_BLOCK
        return Task(
            DOWN, tile.expert, tile.row, 0, column * TILE_N, ceil_div(intermediate_size, TILE_C), tile.half,
            wait0=1 + num_blocks_max + block, wait0_target=(2 - tile.half) * gate_up_columns,
            signal0=1 + 2 * num_blocks_max + tile.group, signal1=TOTAL,
        )  # fmt: skip

    tiles = mtiles(expert_start, group_size)
    return list(in_phases(tiles, groups_per_phase, (gate_up, gate_up_columns), (down, ceil_div(hidden_size, TILE_N))))


def backward_tasks(
    expert_start: list[int],
    hidden_size: int,
    intermediate_size: int,
    *,
    group_size: int,
    combine_group_size: int,
    units: int,
    num_blocks_max: int,
    again: bool = False,
    row_units: int | None = None,
    dy_counter: int = 0,
) -> list[Task]:
    """DH of every m-tile, the gradients of down, then of gate and up, of every expert (also of those without rows), DX of
    every m-tile; before them GATE_UP of every m-tile, if it is computed again. combine_group_size: m-tiles of a group of the
    forward, for which a DX tile signals. row_units: signals for each block of the rows that weight gradients read, where they
    come apart from those that DH and DX do; those of dy are then counted for each expert from `dy_counter` on."""
    num_experts = len(expert_start) - 1
    dh_columns, dx_columns = ceil_div(intermediate_size, TILE_N), ceil_div(hidden_size, TILE_N)
    rows_h, rows_i = ceil_div(hidden_size, TILE_M), ceil_div(intermediate_size, TILE_M)
    dhidden_of_expert = 1 + 3 * num_blocks_max
    x_in_of_expert, down_done_of_expert, x_done_of_expert = (dhidden_of_expert + i * num_experts for i in (1, 2, 3))
    combine_group = {tile.row: tile.group for tile in mtiles(expert_start, combine_group_size)}

    gate_up_of_expert = x_done_of_expert + num_experts
    gate_up_in = gate_up_of_expert + num_experts

    def gate_up(tile: MTile, column: int) -> Task:
        block = gate_up_in + tile.row // ROW_BLOCK
        return Task(
            GATE_UP, tile.expert, tile.row, 0, column * TILE_N // 2, ceil_div(hidden_size, TILE_C), tile.half,
            wait0=block, wait0_target=units, wait1=block + 1 - tile.half, wait1_target=units,
            signal0=gate_up_of_expert + tile.expert,
        )  # fmt: skip

    def dh(tile: MTile, column: int) -> Task:
        block = tile.row // ROW_BLOCK
        return Task(
            DH, tile.expert, tile.row, 0, column * TILE_N, ceil_div(hidden_size, TILE_C), tile.half,
            wait0=1 + block, wait0_target=units, wait1=1 + block + 1 - tile.half, wait1_target=units,
            signal0=1 + num_blocks_max + block, signal1=dhidden_of_expert + tile.expert,
        )  # fmt: skip

    def dx(tile: MTile, column: int) -> Task:
        block = tile.row // ROW_BLOCK
        return Task(
            DX, tile.expert, tile.row, 0, column * TILE_N, 2 * ceil_div(intermediate_size, TILE_C), tile.half,
            wait0=1 + num_blocks_max + block, wait0_target=(2 - tile.half) * dh_columns,
            wait1=x_done_of_expert + tile.expert, wait1_target=2 * 2 * rows_i * dx_columns,
            signal0=1 + 2 * num_blocks_max + combine_group[tile.row], signal1=TOTAL,
        )  # fmt: skip

    def weight(expert: int) -> Task:
        start, end = expert_start[expert : expert + 2]
        blocks = (end - start) // ROW_BLOCK
        return Task(
            DW_DOWN, expert, start, 0, 0, blocks, 0,
            wait0=dhidden_of_expert + expert, wait0_target=blocks * dh_columns, signal0=down_done_of_expert + expert,
        )  # fmt: skip

    def weight_gate_up(expert: int) -> Task:
        task = weight(expert)
        return replace(
            task, kind=DW_GATE_UP, wait1=x_in_of_expert + expert,
            wait1_target=task.steps * (units if row_units is None else row_units), signal0=x_done_of_expert + expert,
        )  # fmt: skip

    tiles = mtiles(expert_start, group_size)
    found = list(stretch(tiles, gate_up, rows_i)) if again else []
    found += stretch(tiles, dh, dh_columns)
    for expert in range(num_experts):
        for row, column in in_runs(rows_h, dh_columns):
            task = replace(weight(expert), m=row * TILE_M, n=column * TILE_N)
            if row_units is not None:
                task = replace(task, wait1=dy_counter + expert, wait1_target=task.steps * row_units)
            found.append(task)
    for expert in range(num_experts):
        for row, column in in_runs(2 * rows_i, dx_columns):
            part, row_of_part = divmod(row, rows_i)
            found.append(replace(weight_gate_up(expert), m=row_of_part * TILE_M, n=column * TILE_N, part=part))
    return found + list(stretch(tiles, dx, dx_columns))


def shared_tasks(
    num_tokens: int, hidden_size: int, width: int, *, forward: bool, again: bool, group_size: int, counter: int
) -> list[Task]:
    """What opens the list where there are shared experts of `width` in all: GATE_UP and DOWN, or, after GATE_UP if it is
    computed again, DH and DX; their rows are the tokens. counter: where SHARED is."""
    blocks = ceil_div(num_tokens, ROW_BLOCK)
    tiles = mtiles([0, blocks * ROW_BLOCK], group_size)
    gate_up_tiles, dh_tiles, columns = ceil_div(width, TILE_M), ceil_div(width, TILE_N), ceil_div(hidden_size, TILE_N)
    steps_h, steps_i = ceil_div(hidden_size, TILE_C), ceil_div(width, TILE_C)

    def hidden(tile: MTile) -> int:
        return counter + 1 + tile.row // ROW_BLOCK

    def gate_up(tile: MTile, column: int) -> Task:
        signal = hidden(tile) + (0 if forward else blocks)
        return Task(GATE_UP, 0, tile.row, 0, column * TILE_N // 2, steps_h, tile.half, signal0=signal, part=1)

    def dh(tile: MTile, column: int) -> Task:
        target = (2 - tile.half) * gate_up_tiles if again else 0
        return Task(
            DH, 0, tile.row, 0, column * TILE_N, steps_h, tile.half,
            wait0=hidden(tile) + blocks, wait0_target=target, signal0=hidden(tile), part=1,
        )  # fmt: skip

    def last(tile: MTile, column: int) -> Task:
        kind, steps, ready = (DOWN, steps_i, gate_up_tiles) if forward else (DX, 2 * steps_i, dh_tiles)
        return Task(
            kind, 0, tile.row, 0, column * TILE_N, steps, tile.half,
            wait0=hidden(tile), wait0_target=(2 - tile.half) * ready, signal0=counter, part=1,
        )  # fmt: skip

    found = list(stretch(tiles, gate_up, gate_up_tiles)) if forward or again else []
    if not forward:
        found += stretch(tiles, dh, dh_tiles)
    return found + list(stretch(tiles, last, columns))


def stretch(tiles: list[MTile], make: Callable[[MTile, int], Task], columns: int) -> Iterator[Task]:
    """The tasks of one kind: groups in order, then columns, then m-tiles."""
    for _, group in groupby(tiles, key=lambda tile: tile.group):
        members = list(group)
        yield from (make(tile, column) for column in range(columns) for tile in members)


def in_phases(
    tiles: list[MTile],
    groups_per_phase: int,
    first: tuple[Callable[[MTile, int], Task], int],
    second: tuple[Callable[[MTile, int], Task], int],
) -> Iterator[Task]:
    """The tasks of two kinds, phase by phase: A0, A1, B0, A2, B1, ... Each kind is (make task, its columns).

    groups_per_phase 0 puts all groups into one phase. Inside a phase: groups in order, then columns, then m-tiles.
    """
    num_groups = tiles[-1].group + 1 if tiles else 0
    span = groups_per_phase or max(num_groups, 1)
    phases = [[tile for tile in tiles if tile.group // span == phase] for phase in range(ceil_div(num_groups, span))]
    for place, phase in enumerate(phases):
        yield from stretch(phase, *first)
        if place:
            yield from stretch(phases[place - 1], *second)
    if phases:
        yield from stretch(phases[-1], *second)


def in_runs(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """(row, column) of the tiles of a matrix, in runs of 16 rows: columns outside, the rows of the run inside."""
    for start in range(0, rows, DW_RUN):
        for column in range(columns):
            for row in range(start, min(start + DW_RUN, rows)):
                yield row, column


def combine_order(row_of_route_TK: list[list[int]], expert_start: list[int], group_size: int) -> tuple[list[int], list[int]]:
    """Tokens in the order in which the last group of their rows comes, and that group for each; 0 for a token without rows."""
    group_of_block = {
        block: tile.group
        for tile in mtiles(expert_start, group_size)
        for block in range(tile.row // ROW_BLOCK, tile.row // ROW_BLOCK + 2 - tile.half)
    }
    last = [max((group_of_block[row // ROW_BLOCK] for row in rows if row >= 0), default=0) for rows in row_of_route_TK]
    tokens = sorted(range(len(last)), key=last.__getitem__)
    return tokens, [last[token] for token in tokens]


def table(listed: list[Task]) -> np.ndarray:
    """The records as the kernels see them: int32 [tasks, 16]."""
    rows = [tuple(vars(task).values()) for task in listed]
    return np.array(rows, dtype=np.int32).reshape(len(rows), tasks.FIELDS.value)
