"""The roles of the megakernel that Blackwell changes: products accumulate in tensor memory instead of in registers.

| role | warps | does |
|---|---|---|
| finish | 8 | takes finished tiles out of tensor memory, epilogue; at the end, part of the combine |
| multiply | 1 | starts the products (tcgen05) of whole tiles over the ring, into one of two accumulators in turn |
| send | 1 | sends finished pieces to memory, then signals the task's counters |

Tasks, ring, producer and mover are those of Hopper (`mok/kernels/mega.py`), and so is each epilogue, operation by operation.
Every stage of the ring is released by two arrivals: products release theirs with both; stages for the epilogue (gate and up of
DH, the gradient that a chain goes on from) get one from `multiply`, which passes them over, and one from `finish`, which reads
them. So `multiply` waits for every stage in order, and `finish` waits only for stages whose slot it knows to have been used
before: after the products of the tile in front of them are complete. Compiled for sm_100a and sm_103a and reviewed; it has not
run. Read next: `mok/kernels/consumer.py`, the same for Hopper.
"""

# Annotations are evaluated here: device-side records check their fields against them.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    tcgen05_commit,
    tcgen05_mma,
    tensor_memory_descriptor,
)
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mok.kernels.consumer import halves, hand_over, limited, place, place_of_sums, wait_for_slots, weight_of_rows
from mok.kernels.gluon_compat import barrier, record, tma_store, tma_store_wait
from mok.kernels.mover import combine_rest
from mok.kernels.ring import (
    GRADIENT_PIECE,
    GRADIENT_TILE,
    HALF_M,
    PIECE_N,
    TILE,
    TRACE_FINISH,
    TRACE_STORED,
    Cursor,
    is_skipped,
    note_time,
    sigmoid,
    signal,
    stores_complete,
)
from mok.kernels.tasks import (
    DH,
    DW_GATE_UP,
    DX,
    EXPERT,
    FIELDS,
    GATE_UP,
    HALF,
    KIND,
    PART,
    ROW,
    SIGNAL0,
    SIGNAL1,
    STEPS,
    TILE_C,
    TILE_M,
    TILE_N,
    M,
    N,
)

ACCUMULATORS = gl.constexpr(2)  # of 256 columns each: all of an SM's tensor memory
IN_TENSOR_MEMORY = gl.constexpr(TensorMemoryLayout([TILE_M.value, TILE_N.value], col_stride=1))
EPILOGUE_STAGES = gl.constexpr(4)  # what DH, and a gradient that is carried on, take of the ring

# How the eight warps of `finish` hold 64 or 32 columns of a tile: the fragments of tcgen05.ld.16x256b, which are those of
# wgmma, so that sums over columns are the same tree (`column_sum`).
LANES = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
WARPS = [[32, 0], [64, 0], [16, 0]]
FRAGMENT = gl.constexpr(gl.DistributedLinearLayout([[0, 1], [8, 0], [0, 8], [0, 16], [0, 32]], LANES, WARPS, [], [128, 64]))
HALF_FRAGMENT = gl.constexpr(gl.DistributedLinearLayout([[0, 1], [8, 0], [0, 8], [0, 16]], LANES, WARPS, [], [128, 32]))


@record
class Accumulators:
    """Tiles [TILE_M, TILE_N] fp32 on their way from `multiply` to `finish`; seeded: one that begins with a carried gradient."""

    data: tensor_memory_descriptor
    full: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    seeded: gl.shared_memory_descriptor


@gluon.jit
def make_accumulators():
    data = allocate_tensor_memory(gl.float32, [ACCUMULATORS, TILE_M, TILE_N], IN_TENSOR_MEMORY)
    full = gl.allocate_shared_memory(gl.int64, [ACCUMULATORS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [ACCUMULATORS, 1], mbarrier.MBarrierLayout())
    seeded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(ACCUMULATORS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    mbarrier.init(seeded, count=1)
    return Accumulators(data, full, free, seeded)


@gluon.jit
def cursor_after(at, stages):
    """`at`, `stages` places on."""
    place = at.slot + stages
    return Cursor(place % at.size, at.phase ^ ((place // at.size) & 1), at.size)


@gluon.jit
def multiply_tile(ring, at, accumulator, steps, continued, A_BY_COLUMNS: gl.constexpr, B_BY_ROWS: gl.constexpr):
    """Start `steps` stages of products in order, on top of what the accumulator holds if `continued`."""
    for k in range(steps):
        mbarrier.wait(ring.full.index(at.slot), at.phase)
        a = ring.a.index(at.slot)
        b = ring.b.index(at.slot)
        if A_BY_COLUMNS:
            a = a._reinterpret(gl.bfloat16, [TILE_C, TILE_M], TILE).permute((1, 0))
        if not B_BY_ROWS:
            b = b._reinterpret(gl.bfloat16, [TILE_N, TILE_C], TILE).permute((1, 0))
        tcgen05_mma(a, b, accumulator, use_acc=continued | (k > 0))
        tcgen05_commit(ring.empty.index(at.slot))
        tcgen05_commit(ring.empty.index(at.slot))
        at = at.next()
    return at


@gluon.jit
def pass_to_epilogue(ring, at):
    for _ in range(EPILOGUE_STAGES):
        mbarrier.wait(ring.full.index(at.slot), at.phase)
        mbarrier.arrive(ring.empty.index(at.slot), count=1)
        at = at.next()
    return at


@gluon.jit
def multiply(job, ring, accumulators, started, BACKWARD: gl.constexpr, LAST: gl.constexpr):
    at = Cursor(gl.to_tensor(0), gl.to_tensor(0), ring.size)
    turn = gl.to_tensor(0)
    seeds = gl.to_tensor(0)
    for i in range(gl.program_id(0), job.num_tasks, gl.num_programs(0)):
        task = job.tasks + i * FIELDS
        kind = gl.load(task + KIND)
        steps = gl.load(task + STEPS)
        if not is_skipped(kind, steps, started, LAST):
            which = turn % ACCUMULATORS
            accumulator = accumulators.data.index(which)
            full = accumulators.full.index(which)
            mbarrier.wait(accumulators.free.index(which), ((turn // ACCUMULATORS) & 1) ^ 1)
            if not BACKWARD or (job.again and kind == GATE_UP):
                at = multiply_tile(ring, at, accumulator, steps, False, False, False)
                tcgen05_commit(full)
            elif kind <= DX:
                at = multiply_tile(ring, at, accumulator, steps, False, False, True)
                tcgen05_commit(full)
                if kind == DH:
                    at = pass_to_epilogue(ring, at)
            else:
                continued = (started != 0) & (steps > 0)
                if continued:
                    at = pass_to_epilogue(ring, at)
                    mbarrier.wait(accumulators.seeded, seeds & 1)
                    seeds += 1
                at = multiply_tile(ring, at, accumulator, steps, continued, True, True)
                tcgen05_commit(full)
            turn += 1


@gluon.jit
def put(piece, pieces, at):
    """Hand a bf16 piece to the store warp, which frees slots one by one."""
    wait_for_slots(pieces, at, 1)
    at = place(piece, pieces, at)
    hand_over(pieces, at, 1)
    return at


@gluon.jit
def quarter(tile, J: gl.constexpr):
    return tile.slice(J * PIECE_N, PIECE_N).load(FRAGMENT)


@gluon.jit
def finish_gate_up(tile, pieces, at, KEEP: gl.constexpr, CLAMP: gl.constexpr):
    """As `mok.kernels.consumer.finish_gate_up`."""
    for j in gl.static_range(2):
        gate = quarter(tile, j).to(gl.bfloat16).to(gl.float32)
        up = quarter(tile, j + 2).to(gl.bfloat16).to(gl.float32)
        gate, up = limited(gate, up, CLAMP)
        at = put((gate * sigmoid(gate)) * up, pieces, at)
    if KEEP:
        for j in gl.static_range(4):
            at = put(quarter(tile, j), pieces, at)
    return at


@gluon.jit
def finish_rows(tile, pieces, at):
    for j in gl.static_range(4):
        at = put(quarter(tile, j), pieces, at)
    return at


@gluon.jit
def column_sum(x):
    """As `mok.kernels.consumer.column_sum`, of a whole tile's rows."""
    left, right = halves(x, TILE_M, PIECE_N)
    left, right = halves(left + right, TILE_M, PIECE_N // 2)
    left, right = halves(left + right, TILE_M, PIECE_N // 4)
    return gl.sum(left + right, axis=1)


@gluon.jit
def finish_dh(
    tile, ring, ring_at, pieces, at, moves, sums, task, num_rows, HAS_SHARED: gl.constexpr, CLAMP: gl.constexpr
):  # fmt: skip
    """As `mok.kernels.consumer.finish_dh`; rows from `num_rows` on belong to another task."""
    of_rows: gl.constexpr = gl.SliceLayout(1, FRAGMENT)
    inside = gl.arange(0, TILE_M, of_rows) < num_rows
    rows = gl.load(task + ROW) + gl.arange(0, TILE_M, of_rows)
    weight = weight_of_rows(moves, task, rows, inside)
    total = gl.zeros([TILE_M], gl.float32, of_rows)
    first_total = total
    for j in gl.static_range(4):
        mbarrier.wait(ring.full.index(ring_at.slot), ring_at.phase)
        b = ring.b.index(ring_at.slot)._reinterpret(gl.bfloat16, [2, TILE_M, PIECE_N], TILE)
        raw_gate = b.index(0).load(FRAGMENT).to(gl.float32)
        raw_up = b.index(1).load(FRAGMENT).to(gl.float32)
        fence_async_shared()
        barrier()
        mbarrier.arrive(ring.empty.index(ring_at.slot), count=1)
        ring_at = ring_at.next()
        gate, up = limited(raw_gate, raw_up, CLAMP)
        s = sigmoid(gate)
        silu = gate * s
        h = (silu * up).to(gl.bfloat16).to(gl.float32)
        slope = up * (s + silu * (1.0 - s))
        if CLAMP > 0:
            slope = gl.where(raw_gate > CLAMP, 0.0, slope)
            silu = gl.where((raw_up > CLAMP) | (raw_up < -CLAMP), 0.0, silu)
        dh = quarter(tile, j)
        total += gl.convert_layout(column_sum(dh * h), of_rows)
        if j == 1:
            first_total = total
            total = gl.zeros([TILE_M], gl.float32, of_rows)
        at = put(h * weight[:, None], pieces, at)
        d = dh * weight[:, None]
        at = put(d * slope, pieces, at)
        if j == 3:
            # Before the last piece, whose signal then covers them: movers over several ranks send them home in this launch.
            target, second = place_of_sums(sums, task, rows, HAS_SHARED)
            gl.store(target, first_total, mask=inside)
            gl.store(target + 1, total, mask=inside & second)
        at = put(d * silu, pieces, at)
    return ring_at, at


@gluon.jit
def seed(tile, ring, at):
    """Put the main gradient, as the last call left it, into the accumulator."""
    for j in gl.static_range(EPILOGUE_STAGES):
        mbarrier.wait(ring.full.index(at.slot), at.phase)
        b = ring.b.index(at.slot)._reinterpret(gl.float32, [2, TILE_M, PIECE_N // 2], GRADIENT_PIECE)
        for half in gl.static_range(2):
            tile.slice(j * PIECE_N + half * (PIECE_N // 2), PIECE_N // 2).store(b.index(half).load(HALF_FRAGMENT))
        fence_async_shared()
        barrier()
        mbarrier.arrive(ring.empty.index(at.slot), count=1)
        at = at.next()
    return at


@gluon.jit
def finish_gradient(tile, pieces, at, steps):
    """Eight fp32 pieces; an expert without rows had no product, and its gradient is zero."""
    for j in gl.static_range(8):
        piece = tile.slice(j * (PIECE_N // 2), PIECE_N // 2).load(HALF_FRAGMENT)
        mbarrier.wait(pieces.empty.index(at.slot), at.phase ^ 1)
        target = pieces.data.index(at.slot)._reinterpret(gl.float32, [TILE_M, PIECE_N // 2], GRADIENT_PIECE)
        target.store(gl.where(steps > 0, piece, 0.0))
        fence_async_shared()
        barrier()
        mbarrier.arrive(pieces.full.index(at.slot), count=1)
        at = at.next()
    return at


@gluon.jit
def finish(
    job,
    ring,
    accumulators,
    pieces,
    moves,
    rest,
    sums,
    started,
    KEEP: gl.constexpr,
    CLAMP: gl.constexpr,
    BACKWARD: gl.constexpr,
    LAST: gl.constexpr,
):
    ring_at = Cursor(gl.to_tensor(0), gl.to_tensor(0), ring.size)
    at = Cursor(gl.to_tensor(0), gl.to_tensor(0), pieces.size)
    turn = gl.to_tensor(0)
    for i in range(gl.program_id(0), job.num_tasks, gl.num_programs(0)):
        task = job.tasks + i * FIELDS
        kind = gl.load(task + KIND)
        steps = gl.load(task + STEPS)
        if not is_skipped(kind, steps, started, LAST):
            which = turn % ACCUMULATORS
            tile = accumulators.data.index(which)
            if BACKWARD:  # noqa: SIM102 (the compiler decides this one, the program the next)
                if (kind > DX) & (started != 0) & (steps > 0):
                    ring_at = seed(tile, ring, ring_at)
                    mbarrier.arrive(accumulators.seeded, count=1)
            mbarrier.wait(accumulators.full.index(which), (turn // ACCUMULATORS) & 1)
            ring_at = cursor_after(ring_at, steps)
            if not BACKWARD:
                if kind == GATE_UP:
                    at = finish_gate_up(tile, pieces, at, KEEP, CLAMP)
                else:
                    at = finish_rows(tile, pieces, at)
            elif kind == DH:
                num_rows = gl.where(gl.load(task + HALF) != 0, HALF_M, TILE_M)
                ring_at, at = finish_dh(tile, ring, ring_at, pieces, at, moves, sums, task, num_rows, job.shared, CLAMP)
            elif kind <= DX:  # GATE_UP, where it is computed again, leaves gate and up side by side
                at = finish_rows(tile, pieces, at)
            else:
                at = finish_gradient(tile, pieces, at, steps)
            barrier()  # all warps have read the tile
            mbarrier.arrive(accumulators.free.index(which), count=1)
            turn += 1
    combine_rest(job, moves, rest, not BACKWARD, 0, 1, 8)


@gluon.jit
def release_sent(pieces, at, half, index):
    """Hand back the slot before the newest once its stores have been read: a piece is one store in a half tile, else two."""
    if half != 0:
        tma_store_wait(1)
    else:
        tma_store_wait(2)
    mbarrier.arrive(pieces.empty.index(at.slot_before(1)), count=1, pred=index > 0)
    return at.next()


@gluon.jit
def send_piece(destination, row, column, half, pieces, at, index):
    mbarrier.wait(pieces.full.index(at.slot), at.phase)
    piece = pieces.data.index(at.slot)
    tma_store(destination, [row, column], piece.slice(0, HALF_M, dim=0))
    if half == 0:
        tma_store(destination, [row + HALF_M, column], piece.slice(HALF_M, HALF_M, dim=0))
    return release_sent(pieces, at, half, index)


@gluon.jit
def send_tile(destination, row, column, half, pieces, at):
    for q in range(4):
        at = send_piece(destination, row, column + q * PIECE_N, half, pieces, at, q)
    return at


@gluon.jit
def send_gradient(gradient, expert, m, column, half, pieces, at):
    for q in range(8):
        mbarrier.wait(pieces.full.index(at.slot), at.phase)
        piece = pieces.data.index(at.slot)._reinterpret(gl.float32, [2, 1, HALF_M, PIECE_N // 2], GRADIENT_TILE)
        tma_store(gradient, [expert, m, column + q * (PIECE_N // 2)], piece.index(0))
        if half == 0:
            tma_store(gradient, [expert, m + HALF_M, column + q * (PIECE_N // 2)], piece.index(1))
        at = release_sent(pieces, at, half, q)
    return at


@gluon.jit
def send_forward(stores, kind, row, column, half, pieces, at):
    if kind == GATE_UP:
        for q in gl.static_range(2):
            at = send_piece(stores.h_rows, row, column + q * PIECE_N, half, pieces, at, q)
        if stores.keep:
            for q in gl.static_range(2):
                at = send_piece(stores.gate_rows, row, column + q * PIECE_N, half, pieces, at, 2 + q)
            for q in gl.static_range(2):
                at = send_piece(stores.up_rows, row, column + q * PIECE_N, half, pieces, at, 4 + q)
    else:
        at = send_tile(stores.y_rows, row, column, half, pieces, at)
    return at


@gluon.jit
def send_backward(stores, kind, row, column, half, pieces, at, AGAIN: gl.constexpr):
    """The kinds of the backward whose result is rows."""
    if kind == DH:
        for q in range(4):
            at = send_piece(stores.wh_rows, row, column + q * PIECE_N, half, pieces, at, 3 * q)
            at = send_piece(stores.gate_rows, row, column + q * PIECE_N, half, pieces, at, 3 * q + 1)
            at = send_piece(stores.up_rows, row, column + q * PIECE_N, half, pieces, at, 3 * q + 2)
    elif kind == DX:
        at = send_tile(stores.dx_rows, row, column, half, pieces, at)
    elif AGAIN:
        for q in gl.static_range(2):
            at = send_piece(stores.gate_rows, row, column + q * PIECE_N, half, pieces, at, q)
        for q in gl.static_range(2):
            at = send_piece(stores.up_rows, row, column + q * PIECE_N, half, pieces, at, 2 + q)
    return at


@gluon.jit
def send(job, stores, shared_stores, pieces, started, BACKWARD: gl.constexpr, LAST: gl.constexpr):
    at = Cursor(gl.to_tensor(0), gl.to_tensor(0), pieces.size)
    for i in range(gl.program_id(0), job.num_tasks, gl.num_programs(0)):
        task = job.tasks + i * FIELDS
        kind = gl.load(task + KIND)
        row = gl.load(task + ROW)
        column = gl.load(task + N)
        half = gl.load(task + HALF)
        if not is_skipped(kind, gl.load(task + STEPS), started, LAST):
            if job.traced:
                mbarrier.wait(pieces.full.index(at.slot), at.phase)
                note_time(job, i, TRACE_FINISH)
            shared = False
            if job.shared:
                shared = gl.load(task + PART) != 0
            if not BACKWARD:
                if job.shared and shared:
                    at = send_forward(shared_stores, kind, row, column, half, pieces, at)
                else:
                    at = send_forward(stores, kind, row, column, half, pieces, at)
            elif kind <= DX:
                if job.shared and shared:
                    at = send_backward(shared_stores, kind, row, column, half, pieces, at, job.again)
                else:
                    at = send_backward(stores, kind, row, column, half, pieces, at, job.again)
            else:
                expert = gl.load(task + EXPERT)
                m = gl.load(task + M)
                if kind == DW_GATE_UP:
                    if gl.load(task + PART) == 0:
                        at = send_gradient(stores.gradients[0], expert, m, column, half, pieces, at)
                    else:
                        at = send_gradient(stores.gradients[1], expert, m, column, half, pieces, at)
                else:
                    at = send_gradient(stores.gradients[2], expert, m, column, half, pieces, at)
            tma_store_wait(0)
            mbarrier.arrive(pieces.empty.index(at.slot_before(1)), count=1)
            stores_complete(i)
            barrier()
            note_time(job, i, TRACE_STORED)
            for place in gl.static_range(2):
                counter = gl.load(task + SIGNAL0 + place * (SIGNAL1 - SIGNAL0))
                if counter >= 0:
                    # Two store warps signal a whole tile on Hopper, and targets count them.
                    signal(job.counters + counter)
                    if half == 0:
                        signal(job.counters + counter)
