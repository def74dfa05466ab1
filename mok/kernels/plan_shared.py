"""The planner's part for shared experts: tasks that depend on sizes alone, as every token is a row.

Owns their order and what they wait for, as `mok/kernels/tasks.py` lays it down. Read next: `mok/kernels/plan.py`, which lists
the routed experts' tasks after them; `mok/reference/task_table.py`, the same in loops.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mok.kernels.plan import with_field
from mok.kernels.tasks import (
    DH,
    DOWN,
    DX,
    FIELDS,
    GATE_UP,
    HALF,
    KIND,
    PART,
    ROW,
    ROW_BLOCK,
    SIGNAL0,
    SIGNAL1,
    STEPS,
    TILE_C,
    TILE_M,
    TILE_N,
    WAIT0,
    WAIT0_TARGET,
    N,
)


@triton.jit(do_not_specialize=["num_tokens", "group_size", "counter"])
def write_shared_tasks(
    tasks, num_tokens, group_size, hidden_size, width, counter, FORWARD: tl.constexpr, AGAIN: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Writes the records of GATE_UP and DOWN, or of the backward's DH and DX, after GATE_UP if it is computed AGAIN.

    Program: WIDTH tasks. One stretch per kind: groups of `group_size` m-tiles in order, inside a group columns outside, m-tiles
    inside. `counter`: where SHARED is. Writes tasks int32 [in all, 16].
    Example, one m-tile, a forward with two tiles of each kind: GATE_UP 0, GATE_UP 1, DOWN 0, DOWN 1.
    """
    mtiles = (num_tokens + TILE_M - 1) // TILE_M
    blocks = (num_tokens + ROW_BLOCK - 1) // ROW_BLOCK
    steps_h = (hidden_size + TILE_C - 1) // TILE_C
    steps_i = (width + TILE_C - 1) // TILE_C
    columns_h = (hidden_size + TILE_N - 1) // TILE_N
    gate_up_tiles = (width + TILE_M - 1) // TILE_M
    dh_tiles = (width + TILE_N - 1) // TILE_N
    num_gate_up = mtiles * gate_up_tiles if FORWARD or AGAIN else 0
    num_dh = 0 if FORWARD else mtiles * dh_tiles
    index = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    exists = index < num_gate_up + num_dh + mtiles * columns_h
    is_gate_up = index < num_gate_up
    is_last = index >= num_gate_up + num_dh
    tiles = tl.where(is_gate_up, gate_up_tiles, tl.where(is_last, columns_h, dh_tiles))
    task = index - tl.where(is_gate_up, 0, tl.where(is_last, num_gate_up + num_dh, num_gate_up))
    group_mtile = task // (group_size * tiles) * group_size
    length = tl.maximum(tl.minimum(mtiles - group_mtile, group_size), 1)
    task -= group_mtile * tiles
    column = task // length
    row = (group_mtile + task % length) * TILE_M

    block = row // ROW_BLOCK
    half = (blocks - block == 1).to(tl.int32)
    hidden = counter + 1 + block
    gate_up = hidden if FORWARD else hidden + blocks
    ready_tiles = gate_up_tiles if FORWARD else dh_tiles
    again_tiles = gate_up_tiles if AGAIN else 0
    steps_last = steps_i if FORWARD else 2 * steps_i
    records = tl.zeros((WIDTH, FIELDS), tl.int32)
    records = with_field(records, KIND, tl.where(is_gate_up, GATE_UP, tl.where(is_last, DOWN if FORWARD else DX, DH)))
    records = with_field(records, ROW, row)
    records = with_field(records, N, column * tl.where(is_gate_up, TILE_N // 2, TILE_N))
    records = with_field(records, STEPS, tl.where(is_last, steps_last, steps_h))
    records = with_field(records, HALF, half)
    records = with_field(records, WAIT0, tl.where(is_gate_up, 0, tl.where(is_last, hidden, gate_up)))
    target = (2 - half) * tl.where(is_last, ready_tiles, again_tiles)
    records = with_field(records, WAIT0_TARGET, tl.where(is_gate_up, 0, target))
    records = with_field(records, SIGNAL0, tl.where(is_gate_up, gate_up, tl.where(is_last, counter, hidden)))
    records = with_field(records, SIGNAL1, tl.full((WIDTH,), -1, tl.int32))
    records = with_field(records, PART, tl.full((WIDTH,), 1, tl.int32))
    fields = index.to(tl.int64)[:, None] * FIELDS + tl.arange(0, FIELDS)[None, :]
    tl.store(tasks + fields, records, mask=exists[:, None])
