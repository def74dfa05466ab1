"""The megakernel in Gluon: one persistent launch runs every tile of an expert layer's forward, or of its backward.

A program (one per SM) is twelve warps in six roles that meet only in shared memory:

| role | warps | does |
|---|---|---|
| consume x 2 | 4 + 4 | one 64-row half of every tile each: wgmma over the ring, epilogue; at the end, part of the combine |
| produce | 1 | waits for a task's counters, then fills the ring of operand stages by bulk tensor copies |
| store x 2 | 1 + 1 | one per consumer: sends finished pieces to memory, then signals the task's counters |
| move | 1 | dispatch: copies token rows into expert order; then combine: sums the rows of a token in slot order |

That is Hopper; with TENSOR_MEMORY, for Blackwell, the roles of `mok/kernels/tensor_memory.py` take the place of consume and
store. Every role walks the same task list (`mok.kernels.tasks`) with its own position in the rings, so a role may be several
tiles ahead of another. Forward and backward share the roles and the loops; a task's kind picks the tile body. Nothing here
knows of torch or of how a table is made; `mok.launch.mega` launches it. Waiting is bounded: a counter that does not come sets
the status word and the walk goes on, so that a fault ends in an error and not in a hang.
"""

# Annotations are evaluated here: device-side records check their fields against them.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from mok.kernels.consumer import consume
from mok.kernels.gluon_compat import record
from mok.kernels.mover import Groups, Moves, move_backward, move_forward
from mok.kernels.producer import produce
from mok.kernels.ring import HALF_M, MOVER_SLOT_ELEMENTS, MOVER_SLOTS, PIECE_N, PLAIN_ROWS, TILE, Job, Pieces, Ring
from mok.kernels.storer import store
from mok.kernels.tasks import (
    ROW_BLOCK,
    SIZE_BACKWARD_TASKS,
    SIZE_FORWARD_TASKS,
    SIZE_ROWS,
    TILE_C,
    TILE_M,
    TILE_N,
)
from mok.kernels.tensor_memory import finish, make_accumulators, multiply, send


@record
class ForwardLoads:
    x_rows: tma.tensor_descriptor
    gate: tma.tensor_descriptor
    up: tma.tensor_descriptor
    h_rows: tma.tensor_descriptor
    down: tma.tensor_descriptor


@record
class ForwardStores:
    h_rows: tma.tensor_descriptor
    gate_rows: tma.tensor_descriptor
    up_rows: tma.tensor_descriptor
    y_rows: tma.tensor_descriptor
    keep: gl.constexpr


@record
class BackwardLoads:
    dy_rows: tma.tensor_descriptor
    dy_columns: tma.tensor_descriptor
    down: tma.tensor_descriptor
    gate_rows: tma.tensor_descriptor
    up_rows: tma.tensor_descriptor
    gate_columns: tma.tensor_descriptor
    up_columns: tma.tensor_descriptor
    gate: tma.tensor_descriptor
    up: tma.tensor_descriptor
    x_rows: tma.tensor_descriptor
    wh_rows: tma.tensor_descriptor
    gradients: gl.tuple


@record
class BackwardStores:
    wh_rows: tma.tensor_descriptor
    dgate_rows: tma.tensor_descriptor
    dup_rows: tma.tensor_descriptor
    dx_rows: tma.tensor_descriptor
    gradients: gl.tuple


@gluon.jit
def make_ring(SIZE: gl.constexpr, B_BY_ROWS: gl.constexpr):
    b_shape: gl.constexpr = [SIZE, TILE_C, TILE_N] if B_BY_ROWS else [SIZE, TILE_N, TILE_C]
    a = gl.allocate_shared_memory(gl.bfloat16, [SIZE, TILE_M, TILE_C], TILE)
    b = gl.allocate_shared_memory(gl.bfloat16, b_shape, TILE)
    full = gl.allocate_shared_memory(gl.int64, [SIZE, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SIZE, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SIZE):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)  # both consumers
    return Ring(a, b, full, empty, SIZE)


@gluon.jit
def make_pieces(SIZE: gl.constexpr, ROWS: gl.constexpr):
    data = gl.allocate_shared_memory(gl.bfloat16, [SIZE, ROWS, PIECE_N], TILE)
    full = gl.allocate_shared_memory(gl.int64, [SIZE, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SIZE, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SIZE):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    return Pieces(data, full, empty, SIZE)


@gluon.jit
def make_slots(PART: gl.constexpr):
    slots = gl.allocate_shared_memory(gl.bfloat16, [MOVER_SLOTS, 1, MOVER_SLOT_ELEMENTS // PART, PART], PLAIN_ROWS)
    full = gl.allocate_shared_memory(gl.int64, [MOVER_SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(MOVER_SLOTS):
        mbarrier.init(full.index(i), count=1)
    return slots, full


RUNTIME_SIZES = ["num_tokens", "mover_tokens", "group_counter", "x_counter", "free_counter", "free_target", "started"]


@gluon.jit(do_not_specialize=RUNTIME_SIZES)
def mega_forward(
    x,
    x_rows_boxes,
    y_rows_boxes,
    x_rows,
    gate,
    up,
    h_rows,
    down,
    h_pieces,
    gate_pieces,
    up_pieces,
    y_pieces,
    tables,
    y_rows,
    out,
    num_tokens,
    mover_tokens,
    group_counter,
    TOP_K: gl.constexpr,
    PARTS: gl.constexpr,
    PART: gl.constexpr,
    BOX_PARTS: gl.constexpr,
    KEEP: gl.constexpr,
    HAS_SHARED: gl.constexpr,
    HAS_SCALE: gl.constexpr,
    CLAMP: gl.constexpr,
    LAST: gl.constexpr,
    TRACED: gl.constexpr,
    STAGES: gl.constexpr,
    PIECES: gl.constexpr,
    TENSOR_MEMORY: gl.constexpr,
):
    """out[t] = sum over k of w[t, k] * (silu(x[t] gate_e^T) * (x[t] up_e^T)) down_e^T, e the expert of route (t, k).

    Computes: dispatch x -> x_rows; GATE_UP tiles -> h_rows (and gate_rows, up_rows if KEEP); DOWN tiles -> y_rows;
    combine -> out. y_rows may be the memory of x_rows: a DOWN tile waits for all tiles that read its rows.
    LAST = GATE_UP stops before DOWN (what a backward needs that kept nothing); launch that with 0 tokens to combine.
    Program: one of any number of co-resident programs (cooperative launch); 12 warps; about 226 KB of shared memory.
    Reads: x [T, H] bf16 as rows of [PARTS, PART]; gate, up [L, I, H] and down [L, H, I] bf16; `mok.launch.mega.Tables`.
    Writes: x_rows, y_rows [P, H], h_rows, gate_rows, up_rows [P, I] bf16; out [T, H] bf16.
    Waits and signals: counters of `mok.kernels.tasks`, each an acquire poll of a release add, device scope.
    Example: T = 2, K = 1, both tokens to expert 1 of 2: x_rows[0:2] are the tokens, x_rows[2:64] are zeros, one half tile each.
    """
    ring = make_ring(STAGES, False)
    if TENSOR_MEMORY:
        pieces = make_pieces(PIECES, TILE_M)
        accumulators = make_accumulators()
    else:
        pieces_0 = make_pieces(PIECES, HALF_M)
        pieces_1 = make_pieces(PIECES, HALF_M)
    slots, slots_full = make_slots(PART)
    fence_async_shared()
    num_rows = gl.load(tables.sizes + SIZE_ROWS)
    job = Job(
        tables.tasks, gl.load(tables.sizes + SIZE_FORWARD_TASKS), num_rows, tables.counters, tables.status, tables.trace, TRACED
    )
    total_target = num_rows // ROW_BLOCK * ((PARTS * PART + TILE_N - 1) // TILE_N)
    moves = Moves(
        slots, slots_full, tables.route_of_row, tables.row_of_route, tables.weights, tables.shared, tables.shared_scale, out,
        num_tokens, mover_tokens, TOP_K, PARTS, PART, BOX_PARTS, HAS_SHARED, HAS_SCALE,
    )  # fmt: skip
    groups = Groups(tables.combine_token, tables.combine_group, tables.group_target, group_counter)
    loads = ForwardLoads(x_rows, gate, up, h_rows, down)
    stores = ForwardStores(h_pieces, gate_pieces, up_pieces, y_pieces, KEEP)
    order = tables.combine_token
    if TENSOR_MEMORY:
        gl.warp_specialize(
            [
                (
                    finish,
                    (
                        job, ring, accumulators, pieces, moves, y_rows, order, total_target, y_rows, 0, 1, KEEP, CLAMP, False,
                        LAST,
                    ),
                ),
                (multiply, (job, ring, accumulators, 0, False, LAST)),
                (produce, (job, loads, ring, 0, False, LAST)),
                (move_forward, (job, x, x_rows_boxes, y_rows_boxes, moves, groups)),
                (send, (job, stores, pieces, 0, False, LAST)),
            ],
            [1, 1, 1, 1],
            [40, 40, 40, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (job, ring, pieces_0, moves, y_rows, order, total_target, y_rows, 0, 1, KEEP, CLAMP, False, LAST, 0)),
                (consume, (job, ring, pieces_1, moves, y_rows, order, total_target, y_rows, 0, 1, KEEP, CLAMP, False, LAST, 1)),
                (produce, (job, loads, ring, 0, False, LAST)),
                (move_forward, (job, x, x_rows_boxes, y_rows_boxes, moves, groups)),
                (store, (job, stores, pieces_0, 0, False, LAST, 0)),
                (store, (job, stores, pieces_1, 0, False, LAST, 1)),
            ],
            [4, 1, 1, 1, 1],
            [232, 40, 40, 40, 40],
        )


@gluon.jit(do_not_specialize=RUNTIME_SIZES)
def mega_backward(
    dy,
    dy_rows_boxes,
    x,
    x_rows_boxes,
    dx_rows_boxes,
    dy_rows,
    dy_columns,
    x_rows,
    wh_rows,
    down,
    gate,
    up,
    gate_rows,
    up_rows,
    gate_columns,
    up_columns,
    wh_pieces,
    dgate_pieces,
    dup_pieces,
    dx_pieces,
    gate_gradient,
    up_gradient,
    down_gradient,
    tables,
    partial,
    dx_rows,
    out,
    num_tokens,
    mover_tokens,
    group_counter,
    x_counter,
    free_counter,
    free_target,
    started,
    TOP_K: gl.constexpr,
    BLOCKS: gl.constexpr,
    PARTS: gl.constexpr,
    PART: gl.constexpr,
    BOX_PARTS: gl.constexpr,
    HAS_SHARED: gl.constexpr,
    CLAMP: gl.constexpr,
    LAST: gl.constexpr,
    TRACED: gl.constexpr,
    STAGES: gl.constexpr,
    PIECES: gl.constexpr,
    TENSOR_MEMORY: gl.constexpr,
):
    """dx, the fp32 main gradients of gate, up and down, and the partial sums of the router weights' gradient.

    Computes: dispatch dy -> dy_rows; DH tiles -> wh_rows, partial, and d(gate), d(up) over gate_rows, up_rows; DW tiles -> main
    gradients, continued if `started` is not 0, else begun; dispatch x -> x_rows; DX tiles -> dx_rows; combine -> out = dx.
    dy_rows, x_rows and dx_rows may be the same memory: each is written when the tiles that read the one before are done.
    LAST = DX leaves the weight gradients out. Program, waits and signals: as `mega_forward`.
    Reads: dy, x [T, H] bf16; gate_rows, up_rows [P, I] bf16 as the forward left them; weights; `tables`.
    Writes: dy_rows, x_rows, dx_rows [P, H], wh_rows, gate_rows, up_rows [P, I] bf16; partial [P, BLOCKS] fp32;
    gradients [L, I, H], [L, I, H], [L, H, I] fp32; out [T, H] bf16.
    Example: an expert without rows has DW tasks of 0 steps: zeros are stored if `started` is 0, else nothing is touched.
    """
    ring = make_ring(STAGES, True)
    if TENSOR_MEMORY:
        pieces = make_pieces(PIECES, TILE_M)
        accumulators = make_accumulators()
    else:
        pieces_0 = make_pieces(PIECES, HALF_M)
        pieces_1 = make_pieces(PIECES, HALF_M)
    slots, slots_full = make_slots(PART)
    fence_async_shared()
    num_rows = gl.load(tables.sizes + SIZE_ROWS)
    job = Job(
        tables.tasks,
        gl.load(tables.sizes + SIZE_BACKWARD_TASKS),
        num_rows,
        tables.counters,
        tables.status,
        tables.trace,
        TRACED,
    )
    total_target = num_rows // ROW_BLOCK * ((PARTS * PART + TILE_N - 1) // TILE_N)
    moves = Moves(
        slots, slots_full, tables.route_of_row, tables.row_of_route, tables.weights, tables.shared, tables.shared_scale, out,
        num_tokens, mover_tokens, TOP_K, PARTS, PART, BOX_PARTS, HAS_SHARED, False,
    )  # fmt: skip
    groups = Groups(tables.combine_token, tables.combine_group, tables.group_target, group_counter)
    gradients = (gate_gradient, up_gradient, down_gradient)
    loads = BackwardLoads(
        dy_rows, dy_columns, down, gate_rows, up_rows, gate_columns, up_columns, gate, up, x_rows, wh_rows, gradients
    )
    stores = BackwardStores(wh_pieces, dgate_pieces, dup_pieces, dx_pieces, gradients)
    order = tables.combine_token
    if TENSOR_MEMORY:
        gl.warp_specialize(
            [
                (
                    finish,
                    (
                        job, ring, accumulators, pieces, moves, dx_rows, order, total_target, partial, started, BLOCKS, True,
                        CLAMP, True, LAST,
                    ),
                ),
                (multiply, (job, ring, accumulators, started, True, LAST)),
                (produce, (job, loads, ring, started, True, LAST)),
                (
                    move_backward,
                    (
                        job, dy, dy_rows_boxes, x, x_rows_boxes, dx_rows_boxes, moves, groups, tables.expert_of_block,
                        x_counter, free_counter, free_target, LAST,
                    ),
                ),
                (send, (job, stores, pieces, started, True, LAST)),
            ],
            [1, 1, 1, 1],
            [40, 40, 40, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    consume,
                    (
                        job, ring, pieces_0, moves, dx_rows, order, total_target, partial, started, BLOCKS, True, CLAMP, True,
                        LAST, 0,
                    ),
                ),
                (
                    consume,
                    (
                        job, ring, pieces_1, moves, dx_rows, order, total_target, partial, started, BLOCKS, True, CLAMP, True,
                        LAST, 1,
                    ),
                ),
                (produce, (job, loads, ring, started, True, LAST)),
                (
                    move_backward,
                    (
                        job, dy, dy_rows_boxes, x, x_rows_boxes, dx_rows_boxes, moves, groups, tables.expert_of_block,
                        x_counter, free_counter, free_target, LAST,
                    ),
                ),
                (store, (job, stores, pieces_0, started, True, LAST, 0)),
                (store, (job, stores, pieces_1, started, True, LAST, 1)),
            ],
            [4, 1, 1, 1, 1],
            [232, 40, 40, 40, 40],
        )  # fmt: skip
