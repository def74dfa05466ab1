"""The two consumer warpgroups: each multiplies one 64-row half of every tile and finishes it.

Owns the products and the epilogues, one function for each kind of tile. Finished pieces go to the store warp
(`mok/kernels/storer.py`); nothing here writes memory but the partial sums of the router weights' gradient.
"""

# Annotations are evaluated here: device-side records check their fields against them.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from mok.kernels.coded import (
    BLOCK,
    beside,
    halves,
    multiply_backward,
    multiply_forward,
    packed,
    quantize_packed,
    quantize_piece,
)
from mok.kernels.gluon_compat import barrier, record
from mok.kernels.mover import combine_rest
from mok.kernels.ring import ACCUMULATOR, GRADIENT_PIECE, HALF_M, PIECE_N, TILE, Cursor, is_skipped, sigmoid, to_bf16_and_back
from mok.kernels.tasks import DH, DX, FIELDS, GATE_UP, HALF, KIND, PART, ROW, STEPS, TILE_C, TILE_M, TILE_N, N


@record
class Sums:
    """Partial sums of the gradients of router weights, and of shared experts' scales: fp32 [rows, count] each."""

    routed: gl.tensor
    count: gl.constexpr
    shared: gl.tensor
    shared_count: gl.constexpr


@gluon.jit
def quarters(accumulator):
    left, right = halves(accumulator, HALF_M, TILE_N)
    q0, q1 = halves(left, HALF_M, TILE_N // 2)
    q2, q3 = halves(right, HALF_M, TILE_N // 2)
    return q0, q1, q2, q3


@gluon.jit
def quarters_of_halves(left, right):
    """As `quarters`, of an accumulator that is held as two halves of its columns."""
    q0, q1 = halves(left, HALF_M, TILE_N // 2)
    q2, q3 = halves(right, HALF_M, TILE_N // 2)
    return q0, q1, q2, q3


@gluon.jit
def multiply_stage(ring, at, accumulator, A_BY_COLUMNS: gl.constexpr, B_BY_ROWS: gl.constexpr, WG: gl.constexpr):
    """Start one stage's products, 16 contraction elements at a time in order, on top of `accumulator` [HALF_M, TILE_N] fp32."""
    mbarrier.wait(ring.full.index(at.slot), at.phase)
    a = ring.a.index(at.slot)
    b = ring.b.index(at.slot)
    if A_BY_COLUMNS:
        a = a._reinterpret(gl.bfloat16, [TILE_C, TILE_M], TILE).slice(WG * HALF_M, HALF_M, dim=1).permute((1, 0))
    else:
        a = a.slice(WG * HALF_M, HALF_M, dim=0)
    if not B_BY_ROWS:
        b = b._reinterpret(gl.bfloat16, [TILE_N, TILE_C], TILE).permute((1, 0))
    return warpgroup_mma(a, b, accumulator, is_async=True)


@gluon.jit
def multiply(ring, at, accumulator, steps, A_BY_COLUMNS: gl.constexpr, B_BY_ROWS: gl.constexpr, WG: gl.constexpr):
    """Continue the chain `accumulator` by `steps` stages, one of them in flight while the next is awaited."""
    for k in range(steps):
        accumulator = multiply_stage(ring, at, accumulator, A_BY_COLUMNS, B_BY_ROWS, WG)
        accumulator = warpgroup_mma_wait(1, (accumulator,))
        # All but the newest product are done: the stage before this one may be filled again.
        mbarrier.arrive(ring.empty.index(at.slot_before(1)), count=1, pred=k > 0)
        at = at.next()
    accumulator = warpgroup_mma_wait(0, (accumulator,))
    mbarrier.arrive(ring.empty.index(at.slot_before(1)), count=1, pred=steps > 0)
    return accumulator, at


@gluon.jit
def pass_over(ring, at, stages):
    """Release stages unread: a half tile has no rows for the second consumer."""
    for _ in range(stages):
        mbarrier.wait(ring.full.index(at.slot), at.phase)
        mbarrier.arrive(ring.empty.index(at.slot), count=1)
        at = at.next()
    return at


@gluon.jit
def wait_for_slots(pieces, at, COUNT: gl.constexpr):
    """Until the next COUNT slots are free."""
    for _ in gl.static_range(COUNT):
        mbarrier.wait(pieces.empty.index(at.slot), at.phase ^ 1)
        at = at.next()


@gluon.jit
def place(piece, pieces, at):
    """Write a piece [HALF_M, PIECE_N] as bf16 into the next slot, which is free; `hand_over` follows."""
    pieces.data.index(at.slot).store(piece.to(gl.bfloat16))
    return at.next()


@gluon.jit
def place_gradient(piece, pieces, at):
    """Write a piece [HALF_M, PIECE_N / 2] as fp32 into the next slot, which is free; `hand_over` follows."""
    pieces.data.index(at.slot)._reinterpret(gl.float32, [HALF_M, PIECE_N // 2], GRADIENT_PIECE).store(piece)
    return at.next()


@gluon.jit
def hand_over(pieces, at, COUNT: gl.constexpr):
    """Give the store warp the COUNT pieces placed last: one fence and one barrier for all of them."""
    fence_async_shared()
    barrier()
    for k in gl.static_range(COUNT):
        mbarrier.arrive(pieces.full.index(at.slot_before(COUNT - k)), count=1)


@gluon.jit
def limited(gate, up, CLAMP: gl.constexpr):
    """gate at most CLAMP, up within +-CLAMP; NaN stays NaN."""
    if CLAMP > 0:
        gate = gl.where(gate > CLAMP, CLAMP, gate)
        up = gl.where(up > CLAMP, CLAMP, gl.where(up < -CLAMP, -CLAMP, up))
    return gate, up


@gluon.jit
def place_quarters(q, pieces, at):
    """Four pieces from left to right, two at a time."""
    for j in gl.static_range(4):
        if j % 2 == 0:
            wait_for_slots(pieces, at, 2)
        at = place(q[j], pieces, at)
        if j % 2 == 1:
            hand_over(pieces, at, 2)
    return at


@gluon.jit
def finish_gate_up(accumulator, pieces, at, KEEP: gl.constexpr, CLAMP: gl.constexpr):
    """h = silu(gate) * up from pre-activations rounded to bf16, so that the backward recomputes exactly this h.

    Pieces in order: h (2), then, if they are kept for the backward, gate (2) and up (2).
    """
    q = quarters(accumulator)
    wait_for_slots(pieces, at, 2)
    for j in gl.static_range(2):
        gate, up = limited(to_bf16_and_back(q[j]), to_bf16_and_back(q[j + 2]), CLAMP)
        at = place((gate * sigmoid(gate)) * up, pieces, at)
    hand_over(pieces, at, 2)
    if KEEP:
        at = place_quarters(q, pieces, at)
    return at


@gluon.jit
def finish_gate_up_coded(gate, up, pieces, at, KEEP: gl.constexpr, CLAMP: gl.constexpr):
    """As `finish_gate_up`, from gate and up [HALF_M, 2 PIECE_N] each, but h, rounded to bf16, is quantised: one piece."""
    gate = to_bf16_and_back(gate)
    up = to_bf16_and_back(up)
    limited_gate, limited_up = limited(gate, up, CLAMP)
    h = to_bf16_and_back((limited_gate * sigmoid(limited_gate)) * limited_up)
    wait_for_slots(pieces, at, 1)
    at = quantize_piece(h, pieces, at)
    hand_over(pieces, at, 1)
    if KEEP:
        at = place_quarters(quarters_of_halves(gate, up), pieces, at)
    return at


@gluon.jit
def finish_rows(accumulator, pieces, at):
    """Round once; four pieces from left to right."""
    return place_quarters(quarters(accumulator), pieces, at)


@gluon.jit
def column_sum(x):
    """Sum of PIECE_N columns as a tree over the bits of the column: 5, 4, 3 here, then 0 in registers and 2, 1 across lanes.

    `finish_64_columns` of `mok.kernels.staged` writes the same tree out; a plain sum would follow the layout instead.
    """
    left, right = halves(x, HALF_M, PIECE_N // 2)
    left, right = halves(left + right, HALF_M, PIECE_N // 4)
    return gl.sum(left + right, axis=1)


@gluon.jit
def weight_of_rows(moves, task, rows, inside):
    """Factors of a DH tile's `rows`, fp32: the router weight of a routed row, the scale of a shared expert's; 0 for padding and
    where not `inside`."""
    if moves.has_shared:
        shared = gl.load(task + PART) != 0
        route = gl.load(moves.route_of_row + rows, mask=inside & (shared == 0), other=-1)
        exists = inside & shared & (rows < moves.num_tokens)
        scale = exists.to(gl.float32)
        if moves.has_scale:
            scale = gl.load(moves.shared_scale + rows, mask=exists, other=0.0)
        weight = gl.where(shared, scale, gl.load(moves.weights + route, mask=route >= 0, other=0.0))
    else:
        route = gl.load(moves.route_of_row + rows, mask=inside, other=-1)
        weight = gl.load(moves.weights + route, mask=route >= 0, other=0.0)
    return weight


@gluon.jit
def place_of_sums(sums, task, rows, HAS_SHARED: gl.constexpr):
    """Where the partial sums of a DH tile's `rows` go, the first of the tile's two; and whether there is a second."""
    block = gl.load(task + N) // 128
    if HAS_SHARED:
        shared = gl.load(task + PART) != 0
        target = gl.where(shared, sums.shared, sums.routed)
        count = gl.where(shared, sums.shared_count, sums.count)
    else:
        target = sums.routed
        count = sums.count
    return target + rows.to(gl.int64) * count + block, block + 1 < count


@gluon.jit
def swiglu_backward(dh, raw_gate, raw_up, weight, CLAMP: gl.constexpr):
    """(dH * h, then as bf16 h * w, d(gate), d(up)) of one piece's columns."""
    weight = gl.convert_layout(weight, gl.SliceLayout(1, dh.type.layout), assert_trivial=True)[:, None]
    raw_gate = raw_gate.to(gl.float32)
    raw_up = raw_up.to(gl.float32)
    gate, up = limited(raw_gate, raw_up, CLAMP)
    s = sigmoid(gate)
    silu = gate * s
    h = to_bf16_and_back(silu * up)
    slope = up * (s + silu * (1.0 - s))  # dh / dgate; dh / dup is silu
    if CLAMP > 0:
        slope = gl.where(raw_gate > CLAMP, 0.0, slope)
        silu = gl.where((raw_up > CLAMP) | (raw_up < -CLAMP), 0.0, silu)
    d = dh * weight
    return dh * h, (h * weight).to(gl.bfloat16), (d * slope).to(gl.bfloat16), (d * silu).to(gl.bfloat16)


@gluon.jit
def in_parts(dh, raw_gate, raw_up, weight, CLAMP: gl.constexpr, COLUMNS: gl.constexpr):
    """`swiglu_backward` of COLUMNS. Limits make more values of each element, so that fewer elements are taken at once."""
    if CLAMP > 0 and COLUMNS > 8:
        d = halves(dh, HALF_M, COLUMNS)
        gate = halves(raw_gate, HALF_M, COLUMNS)
        up = halves(raw_up, HALF_M, COLUMNS)
        left = in_parts(d[0], gate[0], up[0], weight, CLAMP, COLUMNS // 2)
        right = in_parts(d[1], gate[1], up[1], weight, CLAMP, COLUMNS // 2)
        product = beside(left[0], right[0], HALF_M, COLUMNS)
        h = beside(left[1], right[1], HALF_M, COLUMNS)
        dgate = beside(left[2], right[2], HALF_M, COLUMNS)
        dup = beside(left[3], right[3], HALF_M, COLUMNS)
    else:
        product, h, dgate, dup = swiglu_backward(dh, raw_gate, raw_up, weight, CLAMP)
    return product, h, dgate, dup


@gluon.jit
def finish_dh(
    q,
    ring,
    ring_at,
    pieces,
    at,
    weight,
    sums,
    task,
    HAS_SHARED: gl.constexpr,
    HAS_PEERS: gl.constexpr,
    CLAMP: gl.constexpr,
    CODED: gl.constexpr,
    WG: gl.constexpr,
):
    """SwiGLU backward of a dH tile, given in quarters; the router weight w of each row enters here, once, in fp32.

    Per 64 columns three pieces: h * w, d(gate), d(up). If CODED, per 128 columns two more: d(gate) and d(up), quantised. Per
    128 columns one partial sum of dH * h (dH without w, h as stored), from which the router weight's gradient is chained.
    """
    layout: gl.constexpr = q[0].type.layout
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    HALF_PIECE: gl.constexpr = PIECE_N // 2
    total = gl.zeros([HALF_M], gl.float32, of_rows)
    first_total = total
    for j in gl.static_range(4):
        mbarrier.wait(ring.full.index(ring_at.slot), ring_at.phase)
        b = ring.b.index(ring_at.slot)._reinterpret(gl.bfloat16, [2, TILE_M, PIECE_N], TILE)
        raw_gate = halves(b.index(0).slice(WG * HALF_M, HALF_M, dim=0).load(layout), HALF_M, PIECE_N)
        raw_up = halves(b.index(1).slice(WG * HALF_M, HALF_M, dim=0).load(layout), HALF_M, PIECE_N)
        fence_async_shared()
        mbarrier.arrive(ring.empty.index(ring_at.slot), count=1)
        ring_at = ring_at.next()
        dh = halves(q[j], HALF_M, PIECE_N)
        product_0, h_0, dgate_0, dup_0 = in_parts(dh[0], raw_gate[0], raw_up[0], weight, CLAMP, HALF_PIECE)
        wait_for_slots(pieces, at, 3)  # here, so that the other half's values take no registers before
        product_1, h_1, dgate_1, dup_1 = in_parts(dh[1], raw_gate[1], raw_up[1], weight, CLAMP, HALF_PIECE)
        if CODED:
            dgate = packed(dgate_0, dgate_1)
            dup = packed(dup_0, dup_1)
        total += gl.convert_layout(column_sum(product_0 + product_1), of_rows)
        if j == 1:
            first_total = total
            total = gl.zeros([HALF_M], gl.float32, of_rows)
        at = place(beside(h_0, h_1, HALF_M, PIECE_N), pieces, at)
        at = place(beside(dgate_0, dgate_1, HALF_M, PIECE_N), pieces, at)
        at = place(beside(dup_0, dup_1, HALF_M, PIECE_N), pieces, at)
        if HAS_PEERS and j == 3:
            # Movers send them home in this launch: what the store warp signals after these pieces must cover them too.
            store_sums(sums, task, first_total, total, HAS_SHARED, WG)
        hand_over(pieces, at, 3)
        if CODED:
            if j % 2 == 0:
                left_dgate = dgate
                left_dup = dup
            else:
                wait_for_slots(pieces, at, 2)
                at = quantize_packed(left_dgate, dgate, pieces, at)
                at = quantize_packed(left_dup, dup, pieces, at)
                hand_over(pieces, at, 2)
    if not HAS_PEERS:
        # Last: a fence in front of the pieces would wait for these stores.
        store_sums(sums, task, first_total, total, HAS_SHARED, WG)
    return ring_at, at


@gluon.jit
def store_sums(sums, task, first_total, total, HAS_SHARED: gl.constexpr, WG: gl.constexpr):
    """The two partial sums of each row of a DH tile. The rows are read again, so that they hold no registers until here."""
    rows = gl.load(task + ROW) + WG * HALF_M + gl.arange(0, HALF_M, total.type.layout)
    target, second = place_of_sums(sums, task, rows, HAS_SHARED)
    gl.store(target, first_total)
    gl.store(target + 1, total, mask=second)


@gluon.jit
def take_gradient(accumulator, ring, at, WG: gl.constexpr):
    """The accumulator as the last call left it in the main gradient; the argument gives its layout only."""
    eighth, _ = halves(quarters(accumulator)[0], HALF_M, PIECE_N)
    layout: gl.constexpr = eighth.type.layout
    e = ()
    for _ in gl.static_range(4):
        mbarrier.wait(ring.full.index(at.slot), at.phase)
        b = ring.b.index(at.slot)._reinterpret(gl.float32, [4, HALF_M, PIECE_N // 2], GRADIENT_PIECE)
        e = e + (beside(b.index(WG).load(layout), b.index(2 + WG).load(layout), HALF_M, PIECE_N),)  # noqa: RUF005
        fence_async_shared()
        mbarrier.arrive(ring.empty.index(at.slot), count=1)
        at = at.next()
    left = beside(e[0], e[1], HALF_M, TILE_N // 2)
    right = beside(e[2], e[3], HALF_M, TILE_N // 2)
    return gl.convert_layout(beside(left, right, HALF_M, TILE_N), ACCUMULATOR, assert_trivial=True), at


@gluon.jit
def finish_gradient(accumulator, pieces, at):
    q = quarters(accumulator)
    for j in gl.static_range(4):
        left, right = halves(q[j], HALF_M, PIECE_N)
        wait_for_slots(pieces, at, 2)
        at = place_gradient(left, pieces, at)
        at = place_gradient(right, pieces, at)
        hand_over(pieces, at, 2)
    return at


@gluon.jit
def consume(
    job,
    ring,
    pieces,
    moves,
    rest,
    sums,
    weight_scales,
    started,
    KEEP: gl.constexpr,
    CLAMP: gl.constexpr,
    BACKWARD: gl.constexpr,
    LAST: gl.constexpr,
    WG: gl.constexpr,
):
    ring_at = Cursor(gl.to_tensor(0), gl.to_tensor(0), ring.size)
    at = Cursor(gl.to_tensor(0), gl.to_tensor(0), pieces.size)
    for i in range(gl.program_id(0), job.num_tasks, gl.num_programs(0)):
        task = job.tasks + i * FIELDS
        kind = gl.load(task + KIND)
        steps = gl.load(task + STEPS)
        if is_skipped(kind, steps, started, LAST):
            pass
        elif (WG == 1) & (gl.load(task + HALF) != 0):
            stages = steps
            if job.coded:
                stages = steps * TILE_C // BLOCK  # no task of a weight gradient is half a tile
            ring_at = pass_over(ring, ring_at, stages + gl.where(kind == DH, 4, 0))
        else:
            accumulator = gl.zeros([HALF_M, TILE_N], gl.float32, ACCUMULATOR)
            if not BACKWARD and job.coded:
                left, right, ring_at = multiply_forward(ring, ring_at, task, kind, steps, weight_scales, WG)
                if kind == GATE_UP:
                    at = finish_gate_up_coded(left, right, pieces, at, KEEP, CLAMP)
                else:
                    at = place_quarters(quarters_of_halves(left, right), pieces, at)
            elif not BACKWARD:
                accumulator, ring_at = multiply(ring, ring_at, accumulator, steps, False, False, WG)
                if kind == GATE_UP:
                    at = finish_gate_up(accumulator, pieces, at, KEEP, CLAMP)
                else:
                    at = finish_rows(accumulator, pieces, at)
            elif job.again and kind == GATE_UP:
                # gate and up side by side, rounded as the forward rounded them
                if job.coded:
                    left, right, ring_at = multiply_forward(ring, ring_at, task, kind, steps, weight_scales, WG)
                    at = place_quarters(quarters_of_halves(left, right), pieces, at)
                else:
                    accumulator, ring_at = multiply(ring, ring_at, accumulator, steps, False, False, WG)
                    at = finish_rows(accumulator, pieces, at)
            elif kind <= DX:
                if job.coded:
                    left, right, ring_at = multiply_backward(ring, ring_at, task, kind, steps, weight_scales, WG)
                    q = quarters_of_halves(left, right)
                else:
                    accumulator, ring_at = multiply(ring, ring_at, accumulator, steps, False, True, WG)
                    q = quarters(accumulator)
                if kind == DH:
                    layout: gl.constexpr = gl.SliceLayout(1, q[0].type.layout)
                    rows_here = gl.load(task + ROW) + WG * HALF_M + gl.arange(0, HALF_M, layout)
                    weight = weight_of_rows(moves, task, rows_here, rows_here >= 0)
                    ring_at, at = finish_dh(
                        q, ring, ring_at, pieces, at, weight, sums, task, job.shared, moves.has_peers, CLAMP, job.coded, WG
                    )  # fmt: skip
                else:
                    at = place_quarters(q, pieces, at)
            else:
                if (started != 0) & (steps > 0):
                    accumulator, ring_at = take_gradient(accumulator, ring, ring_at, WG)
                    # The first stage apart: ptxas serializes a loop of wgmma whose accumulator comes from loads (C7515).
                    accumulator = multiply_stage(ring, ring_at, accumulator, True, True, WG)
                    accumulator = warpgroup_mma_wait(0, (accumulator,))
                    mbarrier.arrive(ring.empty.index(ring_at.slot), count=1)
                    ring_at = ring_at.next()
                    steps -= 1
                accumulator, ring_at = multiply(ring, ring_at, accumulator, steps, True, True, WG)
                at = finish_gradient(accumulator, pieces, at)
    combine_rest(job, moves, rest, not BACKWARD, WG, 2, 4)
