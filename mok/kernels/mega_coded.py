"""The megakernel on 8-bit operands, for Hopper: the roles of `mok/kernels/mega.py` with codes and scales among their operands.

Products forward and towards the input take E4M3 codes, with one scale for 128 values of a row and for 128 x 128 of a weight;
those of weight gradients take bf16, as there. So do the tiles, the list of tasks and what waits for what, but that in a
backward rows of dy come twice: as codes for DH, and in bf16 for the gradient of down. What else codes change is in
`mok/kernels/coded.py`; `mok.launch.coded` launches this.
"""

# Annotations are evaluated here: device-side records check their fields against them.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from mok.kernels.coded import CodedPieces, CodedRing, WeightScales, make_scales
from mok.kernels.consumer import Sums, consume
from mok.kernels.gluon_compat import record
from mok.kernels.mega import RUNTIME_SIZES, make_pieces, make_ring, make_slots
from mok.kernels.mover import Free, Groups, Moves, Rest, move_backward_coded, move_forward
from mok.kernels.producer import produce
from mok.kernels.ring import HALF_M, Job
from mok.kernels.storer import store
from mok.kernels.tasks import DX, ROW_BLOCK, SIZE_BACKWARD_TASKS, SIZE_FORWARD_TASKS, SIZE_ROWS, TILE_N


@record
class CodedForwardLoads:
    x_codes: tma.tensor_descriptor
    x_scales: tma.tensor_descriptor
    gate: tma.tensor_descriptor
    up: tma.tensor_descriptor
    h_codes: tma.tensor_descriptor
    h_scales: tma.tensor_descriptor
    down: tma.tensor_descriptor


@record
class CodedForwardStores:
    h_codes: tma.tensor_descriptor
    h_scales: tma.tensor_descriptor
    gate_rows: tma.tensor_descriptor
    up_rows: tma.tensor_descriptor
    y_rows: tma.tensor_descriptor
    keep: gl.constexpr


@record
class CodedBackwardLoads:
    dy_codes: tma.tensor_descriptor
    dy_scales: tma.tensor_descriptor
    down: tma.tensor_descriptor
    gate_rows: tma.tensor_descriptor
    up_rows: tma.tensor_descriptor
    gate_codes: tma.tensor_descriptor
    gate_scales: tma.tensor_descriptor
    up_codes: tma.tensor_descriptor
    up_scales: tma.tensor_descriptor
    gate: tma.tensor_descriptor
    up: tma.tensor_descriptor
    dy_columns: tma.tensor_descriptor
    gate_columns: tma.tensor_descriptor
    up_columns: tma.tensor_descriptor
    x_rows: tma.tensor_descriptor
    wh_rows: tma.tensor_descriptor
    again: gl.tuple
    gradients: gl.tuple


@record
class CodedBackwardStores:
    wh_rows: tma.tensor_descriptor
    gate_rows: tma.tensor_descriptor
    up_rows: tma.tensor_descriptor
    gate_codes: tma.tensor_descriptor
    gate_scales: tma.tensor_descriptor
    up_codes: tma.tensor_descriptor
    up_scales: tma.tensor_descriptor
    dx_rows: tma.tensor_descriptor
    gradients: gl.tuple


@gluon.jit
def make_coded_ring(SIZE: gl.constexpr, B_BY_ROWS: gl.constexpr):
    ring = make_ring(SIZE, B_BY_ROWS)
    return CodedRing(ring.a, ring.b, make_scales(SIZE), ring.full, ring.empty, SIZE)


@gluon.jit
def make_coded_pieces(SIZE: gl.constexpr):
    pieces = make_pieces(SIZE, HALF_M)
    return CodedPieces(pieces.data, make_scales(SIZE), pieces.full, pieces.empty, SIZE)


@gluon.jit
def make_moves(
    tables, slots, slots_full, out, num_tokens, mover_tokens, num_blocks, TOP_K: gl.constexpr, PARTS: gl.constexpr,
    PART: gl.constexpr, BOX_PARTS: gl.constexpr,
):  # fmt: skip
    """How rows of that form travel on one rank, without shared experts."""
    return Moves(
        slots, slots_full, tables.route_of_row, tables.expert_of_block, tables.row_of_route, tables.weights, tables.shared,
        tables.shared_scale, out, num_blocks, num_tokens, mover_tokens, TOP_K, PARTS, PART, BOX_PARTS, False, False, (),
        False,
    )  # fmt: skip


@gluon.jit
def make_job(tables, NUM_TASKS: gl.constexpr, TRACED: gl.constexpr, AGAIN: gl.constexpr):
    """NUM_TASKS: where the planner left the number of tasks of the launch."""
    num_rows = gl.load(tables.sizes + SIZE_ROWS)
    num_tasks = gl.load(tables.sizes + NUM_TASKS)
    return Job(tables.tasks, num_tasks, num_rows, tables.counters, tables.status, tables.trace, TRACED, False, AGAIN, True)


@gluon.jit
def make_rest(job, tables, rows, WIDTH: gl.constexpr):
    """What is summed when all tiles of `rows`, WIDTH columns wide, are done."""
    return Rest(rows, tables.combine_token, job.num_rows // ROW_BLOCK * ((WIDTH + TILE_N - 1) // TILE_N))


@gluon.jit(do_not_specialize=RUNTIME_SIZES)
def mega_forward_coded(
    x_boxes,
    x_rows_boxes,
    y_rows_boxes,
    x_codes,
    x_scales,
    gate,
    up,
    h_codes,
    h_scales,
    down,
    h_code_pieces,
    h_scale_pieces,
    gate_pieces,
    up_pieces,
    y_pieces,
    gate_scales,
    up_scales,
    down_scales,
    tables,
    y_rows,
    out,
    num_tokens,
    mover_tokens,
    num_blocks,
    TOP_K: gl.constexpr,
    BLOCKS_H: gl.constexpr,
    BLOCKS_I: gl.constexpr,
    PARTS: gl.constexpr,
    PART: gl.constexpr,
    BOX_PARTS: gl.constexpr,
    CODE_PARTS: gl.constexpr,
    CODE_PART: gl.constexpr,
    CODE_BOX_PARTS: gl.constexpr,
    KEEP: gl.constexpr,
    CLAMP: gl.constexpr,
    TRACED: gl.constexpr,
    STAGES: gl.constexpr,
    PIECES: gl.constexpr,
):
    """As `mega_forward`, but x, h and the weights are quantised before their products.

    Reads: codes of x [T, H] E4M3, which travel as [CODE_PARTS, CODE_PART] elements of 16 bits; scales of its rows in expert
    order [BLOCKS_H, P]; codes of gate, up [L, I, H] and down [L, H, I]; scales of their blocks; all scales E8M0.
    Writes: codes of x and h in expert order, h's scales [BLOCKS_I, P], y_rows [P, H] bf16, gate_rows, up_rows [P, I] bf16 if
    KEEP; out [T, H] bf16. Example: h of a row of 256 columns has two scales, of columns 0 to 127 and of 128 to 255.
    """
    ring = make_coded_ring(STAGES, False)
    pieces_0 = make_coded_pieces(PIECES)
    pieces_1 = make_coded_pieces(PIECES)
    slots, slots_full = make_slots(PART)
    fence_async_shared()
    job = make_job(tables, SIZE_FORWARD_TASKS, TRACED, False)
    counts = (num_tokens, mover_tokens, num_blocks)
    moves = make_moves(tables, slots, slots_full, out, *counts, TOP_K, PARTS, PART, BOX_PARTS)
    code_moves = make_moves(tables, slots, slots_full, out, *counts, TOP_K, CODE_PARTS, CODE_PART, CODE_BOX_PARTS)
    groups = Groups(tables.combine_token, tables.combine_group, tables.group_target, 1 + 2 * num_blocks)
    loads = CodedForwardLoads(x_codes, x_scales, gate, up, h_codes, h_scales, down)
    stores = CodedForwardStores(h_code_pieces, h_scale_pieces, gate_pieces, up_pieces, y_pieces, KEEP)
    scales = WeightScales(gate_scales, up_scales, down_scales, BLOCKS_H, BLOCKS_I)
    sums = Sums(y_rows, 1, y_rows, 1)  # of the backward only
    rest = make_rest(job, tables, y_rows, PARTS * PART)
    gl.warp_specialize(
        [
            (consume, (job, ring, pieces_0, moves, rest, sums, scales, 0, KEEP, CLAMP, False, DX, 0)),
            (consume, (job, ring, pieces_1, moves, rest, sums, scales, 0, KEEP, CLAMP, False, DX, 1)),
            (produce, (job, loads, loads, ring, 0, False, DX)),
            (move_forward, (job, x_boxes, x_rows_boxes, y_rows_boxes, code_moves, moves, groups)),
            (store, (job, stores, stores, pieces_0, 0, False, DX, 0)),
            (store, (job, stores, stores, pieces_1, 0, False, DX, 1)),
        ],
        [4, 1, 1, 1, 1],
        [232, 40, 40, 40, 40],
    )


@gluon.jit(do_not_specialize=[*RUNTIME_SIZES, "dy_counter"])
def mega_backward_coded(
    x_code_boxes,
    x_code_rows_boxes,
    dy_code_boxes,
    dy_code_rows_boxes,
    dy_boxes,
    dy_rows_boxes,
    x_boxes,
    x_rows_boxes,
    dx_rows_boxes,
    dy_codes,
    dy_scales,
    down,
    gate_rows,
    up_rows,
    gate_codes,
    gate_code_scales,
    up_codes,
    up_code_scales,
    gate,
    up,
    dy_columns,
    gate_columns,
    up_columns,
    x_rows,
    wh_rows,
    x_codes,
    x_scales,
    gate_again,
    up_again,
    wh_pieces,
    gate_pieces,
    up_pieces,
    gate_code_pieces,
    gate_scale_pieces,
    up_code_pieces,
    up_scale_pieces,
    dx_pieces,
    gate_gradient,
    up_gradient,
    down_gradient,
    gate_scales,
    up_scales,
    down_scales,
    tables,
    partial,
    dx_rows,
    out,
    num_tokens,
    mover_tokens,
    num_blocks,
    num_experts,
    free_target,
    dy_counter,
    started,
    TOP_K: gl.constexpr,
    BLOCKS_H: gl.constexpr,
    BLOCKS_I: gl.constexpr,
    PARTS: gl.constexpr,
    PART: gl.constexpr,
    BOX_PARTS: gl.constexpr,
    CODE_PARTS: gl.constexpr,
    CODE_PART: gl.constexpr,
    CODE_BOX_PARTS: gl.constexpr,
    AGAIN: gl.constexpr,
    CLAMP: gl.constexpr,
    LAST: gl.constexpr,
    TRACED: gl.constexpr,
    STAGES: gl.constexpr,
    PIECES: gl.constexpr,
):
    """As `mega_backward`, but dy, d(gate), d(up), x of GATE_UP, and the weights are quantised before their products.

    Reads: codes of dy [T, H] and their scales in expert order [BLOCKS_H, P], if AGAIN also of x; codes of down^T [L, I, H] and
    of gate^T, up^T [L, H, I], since both operands of a product run along its contraction; scales of weight blocks as in the
    forward; dy, x [T, H] and gate_rows, up_rows [P, I] in bf16.
    Writes: what `mega_backward` does; codes of dy in expert order, codes of d(gate), d(up) [P, I], their scales [BLOCKS_I, P].
    Example: LAST = DX needs neither dy nor x in bf16, and does not move them.
    """
    ring = make_coded_ring(STAGES, True)
    pieces_0 = make_coded_pieces(PIECES)
    pieces_1 = make_coded_pieces(PIECES)
    slots, slots_full = make_slots(PART)
    fence_async_shared()
    job = make_job(tables, SIZE_BACKWARD_TASKS, TRACED, AGAIN)
    counts = (num_tokens, mover_tokens, num_blocks)
    moves = make_moves(tables, slots, slots_full, out, *counts, TOP_K, PARTS, PART, BOX_PARTS)
    code_moves = make_moves(tables, slots, slots_full, out, *counts, TOP_K, CODE_PARTS, CODE_PART, CODE_BOX_PARTS)
    groups = Groups(tables.combine_token, tables.combine_group, tables.group_target, 1 + 2 * num_blocks)
    of_experts = 1 + 3 * num_blocks
    x_free = Free(of_experts + 2 * num_experts, free_target, tables.expert_start, False)
    gradients = (gate_gradient, up_gradient, down_gradient)
    again = (x_codes, x_scales, gate_again, up_again) if AGAIN else ()
    loads = CodedBackwardLoads(
        dy_codes, dy_scales, down, gate_rows, up_rows, gate_codes, gate_code_scales, up_codes, up_code_scales, gate, up,
        dy_columns, gate_columns, up_columns, x_rows, wh_rows, again, gradients,
    )  # fmt: skip
    stores = CodedBackwardStores(
        wh_pieces, gate_pieces, up_pieces, gate_code_pieces, gate_scale_pieces, up_code_pieces, up_scale_pieces, dx_pieces,
        gradients,
    )  # fmt: skip
    scales = WeightScales(gate_scales, up_scales, down_scales, BLOCKS_H, BLOCKS_I)
    sums = Sums(partial, BLOCKS_I, partial, 1)
    rest = make_rest(job, tables, dx_rows, PARTS * PART)
    x_counter = of_experts + num_experts
    again_counter = of_experts + 5 * num_experts
    gl.warp_specialize(
        [
            (consume, (job, ring, pieces_0, moves, rest, sums, scales, started, True, CLAMP, True, LAST, 0)),
            (consume, (job, ring, pieces_1, moves, rest, sums, scales, started, True, CLAMP, True, LAST, 1)),
            (produce, (job, loads, loads, ring, started, True, LAST)),
            (
                move_backward_coded,
                (
                    job, x_code_boxes, x_code_rows_boxes, dy_code_boxes, dy_code_rows_boxes, dy_boxes, dy_rows_boxes, x_boxes,
                    x_rows_boxes, dx_rows_boxes, code_moves, moves, groups, dy_counter, x_counter, x_free, again_counter, LAST,
                ),
            ),
            (store, (job, stores, stores, pieces_0, started, True, LAST, 0)),
            (store, (job, stores, stores, pieces_1, started, True, LAST, 1)),
        ],
        [4, 1, 1, 1, 1],
        [232, 40, 40, 40, 40],
    )  # fmt: skip
