"""The task table: what a planner writes and what every tile kernel reads, as named columns of int32 records.

A task is one output tile of one grouped GEMM. Task i of a launch runs on program i mod num_programs, in list order; a tile
waits until two counters have reached their targets and, when its rows are stored, adds to up to two counters. Owns the numbers
of kinds, columns, counters and tile sides, and nothing else: the planner (`mok.launch.plan`) fills the table, the kernels
(`mok.kernels.mega`, `mok.kernels.staged`) walk it.

| kind | rows of A | B | result | waits for | signals |
|---|---|---|---|---|---|
| GATE_UP | x_rows | gate, up | h_rows, gate_rows, up_rows | X_IN of its blocks | HIDDEN |
| GATE_UP again | x_rows | gate, up | gate_rows, up_rows | GATE_UP_IN of its blocks | GATE_UP_OF_EXPERT |
| DOWN | h_rows | down | y_rows | HIDDEN | GROUP, TOTAL |
| DH | dy_rows | down^T | wh_rows, dgate_rows, dup_rows, partial sums | DY_IN of its blocks | DHIDDEN, DHIDDEN_OF_EXPERT |
| DW_DOWN | dy_rows^T | wh_rows | gradient of down | DHIDDEN_OF_EXPERT | DOWN_DONE_OF_EXPERT |
| DW_GATE_UP | dgate_rows^T, dup_rows^T | x_rows | gradient of gate, up | DHIDDEN_OF_EXPERT, X_IN_OF_EXPERT | X_DONE_OF_EXPERT |
| DX | dgate_rows, dup_rows | gate^T, up^T | dx_rows | DHIDDEN, X_DONE_OF_EXPERT | GROUP, TOTAL |

The kinds of the backward are listed in that order, GATE_UP where the forward did not keep gate_rows and up_rows. So one buffer
of rows holds x_rows, if GATE_UP is listed, then dy_rows, which the mover brings when GATE_UP_OF_EXPERT is reached, then x_rows
at DOWN_DONE_OF_EXPERT, then dx_rows; in the forward one holds x_rows, then y_rows.

Shared experts are one expert more whose rows are the tokens in order, so nobody brings them: its tasks (PART = 1) open each
list, GATE_UP and DOWN, or GATE_UP where it is computed again, DH and DX. A waits for nothing; HIDDEN and GATE_UP are counted by
SHARED_HIDDEN and SHARED_GATE_UP, and SHARED counts the last of them, which the combine waits for.

Counters of one launch, with B = blocks that fit in the row buffers, L = local experts, S = blocks that hold the tokens:
forward TOTAL | X_IN[B] | HIDDEN[B] | GROUP[B] | SHARED | SHARED_HIDDEN[S];
backward TOTAL | DY_IN[B] | DHIDDEN[B] | GROUP[B] | DHIDDEN_OF_EXPERT[L] | X_IN_OF_EXPERT[L] | DOWN_DONE_OF_EXPERT[L] |
X_DONE_OF_EXPERT[L] | GATE_UP_OF_EXPERT[L] | GATE_UP_IN[B] | SHARED | SHARED_HIDDEN[S] | SHARED_GATE_UP[S] |
DY_ROWS_OF_EXPERT[L].

Where tiles multiply 8-bit codes, x_rows, h_rows, dy_rows, dgate_rows and dup_rows of DW tasks are rows of bf16 beside the codes
that the others read; the mover brings those of dy after the codes, and DW_DOWN waits for DY_ROWS_OF_EXPERT too.
"""

from __future__ import annotations

import triton.language as tl

ROW_BLOCK = tl.constexpr(64)  # rows; every expert starts on a multiple
TILE_M = tl.constexpr(128)  # rows of an output tile: two blocks
TILE_N = tl.constexpr(256)  # columns of an output tile (GATE_UP: 128 of gate beside 128 of up)
TILE_C = tl.constexpr(64)  # contraction elements per step
DW_RUN = tl.constexpr(16)  # output-row tiles of a weight gradient that are walked together

GATE_UP = tl.constexpr(0)
DOWN = tl.constexpr(1)
DH = tl.constexpr(2)
DX = tl.constexpr(3)
DW_GATE_UP = tl.constexpr(4)
DW_DOWN = tl.constexpr(5)

KIND = tl.constexpr(0)
EXPERT = tl.constexpr(1)
ROW = tl.constexpr(2)
M = tl.constexpr(3)
N = tl.constexpr(4)
STEPS = tl.constexpr(5)
HALF = tl.constexpr(6)
WAIT0 = tl.constexpr(7)
WAIT0_TARGET = tl.constexpr(8)
WAIT1 = tl.constexpr(9)
WAIT1_TARGET = tl.constexpr(10)
SIGNAL0 = tl.constexpr(11)
SIGNAL1 = tl.constexpr(12)
PART = tl.constexpr(13)
DTYPE = tl.constexpr(14)
SCALE = tl.constexpr(15)
FIELDS = tl.constexpr(16)

SIZE_ROWS = tl.constexpr(0)
SIZE_FORWARD_TASKS = tl.constexpr(1)
SIZE_BACKWARD_TASKS = tl.constexpr(2)
SIZE_GROUPS = tl.constexpr(3)
SIZE_MTILES = tl.constexpr(4)
