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

from mok.kernels.consumer import Sums, consume
from mok.kernels.gluon_compat import record
from mok.kernels.mover import Free, Groups, Moves, Rest, move_backward, move_forward
from mok.kernels.peer_mover import Peers
from mok.kernels.producer import produce
from mok.kernels.ring import HALF_M, MOVER_SLOT_ELEMENTS, MOVER_SLOTS, PIECE_N, PLAIN_ROWS, TILE, Job, Pieces, Ring
from mok.kernels.storer import store
from mok.kernels.tasks import (
    DX,
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
    again: gl.tuple
    gradients: gl.tuple


@record
class BackwardStores:
    wh_rows: tma.tensor_descriptor
    gate_rows: tma.tensor_descriptor
    up_rows: tma.tensor_descriptor
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


@gluon.jit
def peers_of(tables, HAS_PEERS: gl.constexpr):
    """What the movers know of other ranks; nothing where all experts are here."""
    if HAS_PEERS:
        peers = (
            Peers(
                tables.bases, tables.facts, tables.epoch, tables.given_up, tables.rank_of_row, tables.place_of_row,
                tables.route_of_pulled_row, tables.pulled_row_of_route, tables.group_of_block, tables.rank_of_route,
            ),
        )  # fmt: skip
    else:
        peers = ()
    return peers


RUNTIME_SIZES = ["num_tokens", "mover_tokens", "num_blocks", "num_experts", "free_target", "gate_up_tiles", "started"]


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
    tokens,
    shared_gate,
    shared_up,
    shared_h_rows,
    shared_down,
    shared_h_pieces,
    shared_gate_pieces,
    shared_up_pieces,
    shared_y_pieces,
    tables,
    y_rows,
    out,
    num_tokens,
    mover_tokens,
    num_blocks,
    TOP_K: gl.constexpr,
    PARTS: gl.constexpr,
    PART: gl.constexpr,
    BOX_PARTS: gl.constexpr,
    KEEP: gl.constexpr,
    HAS_SHARED: gl.constexpr,
    HAS_SCALE: gl.constexpr,
    CLAMP: gl.constexpr,
    TRACED: gl.constexpr,
    STAGES: gl.constexpr,
    PIECES: gl.constexpr,
    TENSOR_MEMORY: gl.constexpr,
    HAS_PEERS: gl.constexpr,
):
    """out[t] = sum over k of w[t, k] * (silu(x[t] gate_e^T) * (x[t] up_e^T)) down_e^T, e the expert of route (t, k).

    Computes: dispatch x -> x_rows; GATE_UP tiles -> h_rows (and gate_rows, up_rows if KEEP); DOWN tiles -> y_rows;
    combine -> out. y_rows may be the memory of x_rows: a DOWN tile waits for all tiles that read its rows. HAS_PEERS: x is
    pulled from the ranks of the tokens, y_rows go back to them, and combine reads what came back. HAS_SHARED: the same
    GATE_UP and DOWN tiles of the shared experts, whose rows are the tokens, and a last term of each token's sum; without, their
    descriptors are None.
    Program: one of any number of co-resident programs (cooperative launch); 12 warps; about 226 KB of shared memory.
    Reads: x [T, H] bf16 as rows of [PARTS, PART], tokens the same as tiles; gate, up [L, I, H] and down [L, H, I] bf16;
    `mok.launch.mega.Tables`. Writes: x_rows, y_rows [P, H], h_rows, gate_rows, up_rows [P, I] bf16; out [T, H] bf16.
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
        tables.tasks,
        gl.load(tables.sizes + SIZE_FORWARD_TASKS),
        num_rows,
        tables.counters,
        tables.status,
        tables.trace,
        TRACED,
        HAS_SHARED,
        False,
        False,
    )
    total_target = num_rows // ROW_BLOCK * ((PARTS * PART + TILE_N - 1) // TILE_N)
    moves = Moves(
        slots, slots_full, tables.route_of_row, tables.expert_of_block, tables.row_of_route, tables.weights, tables.shared,
        tables.shared_scale, out, 1 + 3 * num_blocks, num_tokens, mover_tokens, TOP_K, PARTS, PART, BOX_PARTS, HAS_SHARED,
        HAS_SCALE, peers_of(tables, HAS_PEERS), HAS_PEERS,
    )  # fmt: skip
    groups = Groups(tables.combine_token, tables.combine_group, tables.group_target, 1 + 2 * num_blocks)
    loads = ForwardLoads(x_rows, gate, up, h_rows, down)
    stores = ForwardStores(h_pieces, gate_pieces, up_pieces, y_pieces, KEEP)
    shared_loads = loads
    shared_stores = stores
    if HAS_SHARED:
        shared_loads = ForwardLoads(tokens, shared_gate, shared_up, shared_h_rows, shared_down)
        shared_stores = ForwardStores(shared_h_pieces, shared_gate_pieces, shared_up_pieces, shared_y_pieces, KEEP)
    sums = Sums(y_rows, 1, y_rows, 1)  # of the backward only
    rest = Rest(y_rows, tables.combine_token, total_target)
    if TENSOR_MEMORY:
        gl.warp_specialize(
            [
                (finish, (job, ring, accumulators, pieces, moves, rest, sums, 0, KEEP, CLAMP, False, DX)),
                (multiply, (job, ring, accumulators, 0, False, DX)),
                (produce, (job, loads, shared_loads, ring, 0, False, DX)),
                (move_forward, (job, x, x_rows_boxes, y_rows_boxes, moves, moves, groups)),
                (send, (job, stores, shared_stores, pieces, 0, False, DX)),
            ],
            [1, 1, 1, 1],
            [40, 40, 40, 40],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (job, ring, pieces_0, moves, rest, sums, 0, 0, KEEP, CLAMP, False, DX, 0)),
                (consume, (job, ring, pieces_1, moves, rest, sums, 0, 0, KEEP, CLAMP, False, DX, 1)),
                (produce, (job, loads, shared_loads, ring, 0, False, DX)),
                (move_forward, (job, x, x_rows_boxes, y_rows_boxes, moves, moves, groups)),
                (store, (job, stores, shared_stores, pieces_0, 0, False, DX, 0)),
                (store, (job, stores, shared_stores, pieces_1, 0, False, DX, 1)),
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
    gate_pieces,
    up_pieces,
    dx_pieces,
    x_tiles,
    gate_tiles,
    up_tiles,
    gate_gradient,
    up_gradient,
    down_gradient,
    dy_tokens,
    shared_down,
    shared_gate_rows,
    shared_up_rows,
    shared_gate,
    shared_up,
    shared_wh_pieces,
    shared_gate_pieces,
    shared_up_pieces,
    shared_dx_pieces,
    x_tokens,
    shared_gate_tiles,
    shared_up_tiles,
    tables,
    partial,
    shared_partial,
    dx_rows,
    out,
    num_tokens,
    mover_tokens,
    num_blocks,
    num_experts,
    free_target,
    gate_up_tiles,
    started,
    TOP_K: gl.constexpr,
    BLOCKS: gl.constexpr,
    SHARED_BLOCKS: gl.constexpr,
    PARTS: gl.constexpr,
    PART: gl.constexpr,
    BOX_PARTS: gl.constexpr,
    HAS_SHARED: gl.constexpr,
    HAS_SCALE: gl.constexpr,
    AGAIN: gl.constexpr,
    CLAMP: gl.constexpr,
    LAST: gl.constexpr,
    TRACED: gl.constexpr,
    STAGES: gl.constexpr,
    PIECES: gl.constexpr,
    TENSOR_MEMORY: gl.constexpr,
    HAS_PEERS: gl.constexpr,
):
    """dx, the fp32 main gradients of gate, up and down, and the partial sums of the router weights' gradient.

    Computes: if AGAIN, dispatch x -> x_rows and GATE_UP tiles -> gate_rows, up_rows; dispatch dy -> dy_rows; DH tiles ->
    wh_rows, partial, and d(gate), d(up) over gate_rows, up_rows; DW tiles -> main gradients, continued if `started` is not 0,
    else begun; dispatch x -> x_rows; DX tiles -> dx_rows; combine -> out = dx. HAS_SHARED: GATE_UP, DH and DX of the shared
    experts too, whose rows are the tokens. dy_rows, x_rows and dx_rows may be the same memory: each is written when the tiles
    that read the one before are done. LAST = DX leaves the weight gradients out. Descriptors for what is not computed are None.
    Program, waits and signals: as `mega_forward`.
    Reads: dy, x [T, H] bf16; gate_rows, up_rows [P, I] bf16 as the forward left them, unless AGAIN; weights; `tables`.
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
        HAS_SHARED,
        AGAIN,
        False,
    )
    total_target = num_rows // ROW_BLOCK * ((PARTS * PART + TILE_N - 1) // TILE_N)
    moves = Moves(
        slots, slots_full, tables.route_of_row, tables.expert_of_block, tables.row_of_route, tables.weights, tables.shared,
        tables.shared_scale, out, 1 + 4 * num_blocks + 5 * num_experts, num_tokens, mover_tokens, TOP_K, PARTS, PART, BOX_PARTS,
        HAS_SHARED, HAS_SCALE, peers_of(tables, HAS_PEERS), HAS_PEERS,
    )  # fmt: skip
    groups = Groups(tables.combine_token, tables.combine_group, tables.group_target, 1 + 2 * num_blocks)
    of_experts = 1 + 3 * num_blocks
    x_free = Free(of_experts + 2 * num_experts, free_target, tables.expert_start, False)
    dy_free = Free(of_experts + 4 * num_experts, gate_up_tiles, tables.expert_start, True)
    gradients = (gate_gradient, up_gradient, down_gradient)
    again = (x_tiles, gate_tiles, up_tiles) if AGAIN else ()
    loads = BackwardLoads(
        dy_rows, dy_columns, down, gate_rows, up_rows, gate_columns, up_columns, gate, up, x_rows, wh_rows, again, gradients
    )
    stores = BackwardStores(wh_pieces, gate_pieces, up_pieces, dx_pieces, gradients)
    shared_loads = loads
    shared_stores = stores
    if HAS_SHARED:
        shared_again = (x_tokens, shared_gate_tiles, shared_up_tiles) if AGAIN else ()
        # The weight gradients of shared experts are dense: no task of theirs reads columns, rows of x or gradients.
        shared_loads = BackwardLoads(
            dy_tokens, dy_columns, shared_down, shared_gate_rows, shared_up_rows, gate_columns, up_columns, shared_gate,
            shared_up, x_rows, wh_rows, shared_again, gradients,
        )  # fmt: skip
        shared_stores = BackwardStores(shared_wh_pieces, shared_gate_pieces, shared_up_pieces, shared_dx_pieces, gradients)
    sums = Sums(partial, BLOCKS, shared_partial, SHARED_BLOCKS)
    rest = Rest(dx_rows, tables.combine_token, total_target)
    x_counter = of_experts + num_experts
    again_counter = of_experts + 5 * num_experts
    if TENSOR_MEMORY:
        gl.warp_specialize(
            [
                (finish, (job, ring, accumulators, pieces, moves, rest, sums, started, True, CLAMP, True, LAST)),
                (multiply, (job, ring, accumulators, started, True, LAST)),
                (produce, (job, loads, shared_loads, ring, started, True, LAST)),
                (
                    move_backward,
                    (
                        job, dy, dy_rows_boxes, x, x_rows_boxes, dx_rows_boxes, moves, groups, x_counter, x_free, again_counter,
                        dy_free, sums, LAST,
                    ),
                ),
                (send, (job, stores, shared_stores, pieces, started, True, LAST)),
            ],
            [1, 1, 1, 1],
            [40, 40, 40, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (job, ring, pieces_0, moves, rest, sums, 0, started, True, CLAMP, True, LAST, 0)),
                (consume, (job, ring, pieces_1, moves, rest, sums, 0, started, True, CLAMP, True, LAST, 1)),
                (produce, (job, loads, shared_loads, ring, started, True, LAST)),
                (
                    move_backward,
                    (
                        job, dy, dy_rows_boxes, x, x_rows_boxes, dx_rows_boxes, moves, groups, x_counter, x_free, again_counter,
                        dy_free, sums, LAST,
                    ),
                ),
                (store, (job, stores, shared_stores, pieces_0, started, True, LAST, 0)),
                (store, (job, stores, shared_stores, pieces_1, started, True, LAST, 1)),
            ],
            [4, 1, 1, 1, 1],
            [232, 40, 40, 40, 40],
        )  # fmt: skip
