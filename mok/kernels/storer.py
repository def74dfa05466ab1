"""The store warps, one for each consumer: send finished pieces to memory, then signal the task's counters.

Owns where each piece of each kind of tile goes. Consumers never wait for a store, only for a free slot.
Read next: `mok/kernels/mover.py`.
"""

# Annotations are evaluated here: device-side records check their fields against them.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mok.kernels.coded import send_codes
from mok.kernels.gluon_compat import barrier, tma_store, tma_store_wait
from mok.kernels.ring import (
    GRADIENT_TILE,
    HALF_M,
    PIECE_N,
    TRACE_FINISH,
    TRACE_STORED,
    Cursor,
    is_skipped,
    note_time,
    signal,
    stores_complete,
)
from mok.kernels.tasks import DH, DW_GATE_UP, DX, EXPERT, FIELDS, GATE_UP, HALF, KIND, PART, ROW, SIGNAL0, SIGNAL1, STEPS, M, N


@gluon.jit
def send(destination, row, column, pieces, at):
    """Start the store of the next bf16 piece."""
    mbarrier.wait(pieces.full.index(at.slot), at.phase)
    tma_store(destination, [row, column], pieces.data.index(at.slot))
    return at.next()


@gluon.jit
def release(pieces, at, COUNT: gl.constexpr):
    """Free the slots of the COUNT pieces sent last, once they have left shared memory."""
    tma_store_wait(0)
    for k in gl.static_range(COUNT):
        mbarrier.arrive(pieces.empty.index(at.slot_before(COUNT - k)), count=1)


@gluon.jit
def send_pair(destination, row, column, pieces, at):
    for k in gl.static_range(2):
        at = send(destination, row, column + k * PIECE_N, pieces, at)
    release(pieces, at, 2)
    return at


@gluon.jit
def send_rows(destination, row, column, pieces, at):
    for q in range(2):
        at = send_pair(destination, row, column + q * (2 * PIECE_N), pieces, at)
    return at


@gluon.jit
def send_gradient(gradient, expert, m, column, pieces, at):
    for q in range(4):
        for k in gl.static_range(2):
            mbarrier.wait(pieces.full.index(at.slot), at.phase)
            piece = pieces.data.index(at.slot)._reinterpret(gl.float32, [1, HALF_M, PIECE_N // 2], GRADIENT_TILE)
            tma_store(gradient, [expert, m, column + q * PIECE_N + k * (PIECE_N // 2)], piece)
            at = at.next()
        release(pieces, at, 2)
    return at


@gluon.jit
def send_forward(stores, kind, row, column, pieces, at, CODED: gl.constexpr):
    if kind == GATE_UP:
        if CODED:
            at = send_codes(stores.h_codes, stores.h_scales, row, column, pieces, at)
            release(pieces, at, 1)
        else:
            at = send_pair(stores.h_rows, row, column, pieces, at)
        if stores.keep:
            at = send_pair(stores.gate_rows, row, column, pieces, at)
            at = send_pair(stores.up_rows, row, column, pieces, at)
    else:
        at = send_rows(stores.y_rows, row, column, pieces, at)
    return at


@gluon.jit
def send_backward(stores, kind, row, column, pieces, at, AGAIN: gl.constexpr, CODED: gl.constexpr):
    """The kinds of the backward whose result is rows."""
    if kind == DH:
        for q in range(4):
            at = send(stores.wh_rows, row, column + q * PIECE_N, pieces, at)
            at = send(stores.gate_rows, row, column + q * PIECE_N, pieces, at)
            at = send(stores.up_rows, row, column + q * PIECE_N, pieces, at)
            release(pieces, at, 3)
            if CODED:  # noqa: SIM102 (the compiler decides this one, the program the next)
                if q % 2 == 1:
                    first = column + (q - 1) * PIECE_N
                    at = send_codes(stores.gate_codes, stores.gate_scales, row, first, pieces, at)
                    at = send_codes(stores.up_codes, stores.up_scales, row, first, pieces, at)
                    release(pieces, at, 2)
    elif kind == DX:
        at = send_rows(stores.dx_rows, row, column, pieces, at)
    elif AGAIN:
        at = send_pair(stores.gate_rows, row, column, pieces, at)
        at = send_pair(stores.up_rows, row, column, pieces, at)
    return at


@gluon.jit
def store(job, stores, shared_stores, pieces, started, BACKWARD: gl.constexpr, LAST: gl.constexpr, WG: gl.constexpr):
    at = Cursor(gl.to_tensor(0), gl.to_tensor(0), pieces.size)
    for i in range(gl.program_id(0), job.num_tasks, gl.num_programs(0)):
        task = job.tasks + i * FIELDS
        kind = gl.load(task + KIND)
        row = gl.load(task + ROW) + WG * HALF_M
        column = gl.load(task + N)
        steps = gl.load(task + STEPS)
        none = (WG == 1) & (gl.load(task + HALF) != 0)
        if not (none | is_skipped(kind, steps, started, LAST)):
            if job.traced and WG == 0:
                mbarrier.wait(pieces.full.index(at.slot), at.phase)
                note_time(job, i, TRACE_FINISH)
            shared = False
            if job.shared:
                shared = gl.load(task + PART) != 0
            if not BACKWARD:
                if job.shared and shared:
                    at = send_forward(shared_stores, kind, row, column, pieces, at, False)
                else:
                    at = send_forward(stores, kind, row, column, pieces, at, job.coded)
            elif kind <= DX:
                if job.shared and shared:
                    at = send_backward(shared_stores, kind, row, column, pieces, at, job.again, False)
                else:
                    at = send_backward(stores, kind, row, column, pieces, at, job.again, job.coded)
            else:
                expert = gl.load(task + EXPERT)
                m = gl.load(task + M) + WG * HALF_M
                if kind == DW_GATE_UP:
                    if gl.load(task + PART) == 0:
                        at = send_gradient(stores.gradients[0], expert, m, column, pieces, at)
                    else:
                        at = send_gradient(stores.gradients[1], expert, m, column, pieces, at)
                else:
                    at = send_gradient(stores.gradients[2], expert, m, column, pieces, at)
            signal0 = gl.load(task + SIGNAL0)
            signal1 = gl.load(task + SIGNAL1)
            stores_complete(i)
            barrier()
            if WG == 0:
                note_time(job, i, TRACE_STORED)
            if signal0 >= 0:
                signal(job.counters + signal0)
            if signal1 >= 0:
                signal(job.counters + signal1)
