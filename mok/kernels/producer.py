"""The producer warp: waits for a task's counters, then fills the ring of operand stages by bulk tensor copies.

Owns which boxes of which tensors make a stage, one function for each form of product. Knows nothing of what is made of them.
Read next: `mok/kernels/consumer.py`, the other end of the ring.
"""

# Annotations are evaluated here: device-side records check their fields against them.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mok.kernels.coded import load_coded_backward, load_coded_forward
from mok.kernels.gluon_compat import tma_load
from mok.kernels.ring import (
    EXPERT_TILE,
    GRADIENT_TILE,
    HALF_M,
    PIECE_N,
    PIECE_STAGE_BYTES,
    STAGE_BYTES,
    TILE,
    TRACE_LOAD,
    TRACE_WAIT,
    Cursor,
    fence_async_global,
    is_skipped,
    note_time,
    wait_for,
)
from mok.kernels.tasks import (
    DH,
    DW_GATE_UP,
    DX,
    EXPERT,
    FIELDS,
    GATE_UP,
    KIND,
    PART,
    ROW,
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


@gluon.jit
def load_gate_up(rows, gate, up, ring, at, expert, row, column, steps):
    for k in range(steps):
        mbarrier.wait(ring.empty.index(at.slot), at.phase)
        full = ring.full.index(at.slot)
        mbarrier.expect(full, STAGE_BYTES)
        b = ring.b.index(at.slot)._reinterpret(gl.bfloat16, [2, 1, TILE_N // 2, TILE_C], EXPERT_TILE)
        tma_load(rows, [row, k * TILE_C], full, ring.a.index(at.slot))
        tma_load(gate, [expert, column, k * TILE_C], full, b.index(0))
        tma_load(up, [expert, column, k * TILE_C], full, b.index(1))
        at = at.next()
    return at


@gluon.jit
def load_down(loads, ring, at, expert, row, column, steps):
    for k in range(steps):
        mbarrier.wait(ring.empty.index(at.slot), at.phase)
        full = ring.full.index(at.slot)
        mbarrier.expect(full, STAGE_BYTES)
        b = ring.b.index(at.slot)._reinterpret(gl.bfloat16, [1, TILE_N, TILE_C], EXPERT_TILE)
        tma_load(loads.h_rows, [row, k * TILE_C], full, ring.a.index(at.slot))
        tma_load(loads.down, [expert, column, k * TILE_C], full, b)
        at = at.next()
    return at


@gluon.jit
def load_rows_by_expert(rows, weight, ring, at, expert, row, column, steps):
    """Stages of rows[row, :] times weight[expert, :, column]: the weight is read along its own rows."""
    for k in range(steps):
        mbarrier.wait(ring.empty.index(at.slot), at.phase)
        full = ring.full.index(at.slot)
        mbarrier.expect(full, STAGE_BYTES)
        b = ring.b.index(at.slot)._reinterpret(gl.bfloat16, [1, TILE_C, TILE_N], EXPERT_TILE)
        tma_load(rows, [row, k * TILE_C], full, ring.a.index(at.slot))
        tma_load(weight, [expert, k * TILE_C, column], full, b)
        at = at.next()
    return at


@gluon.jit
def load_columns_by_rows(columns, rows, ring, at, row, m, column, steps):
    """Stages of columns[row:, m]^T times rows[row:, column]: the contraction runs over an expert's rows."""
    for k in range(steps):
        mbarrier.wait(ring.empty.index(at.slot), at.phase)
        full = ring.full.index(at.slot)
        mbarrier.expect(full, STAGE_BYTES)
        a = ring.a.index(at.slot)._reinterpret(gl.bfloat16, [TILE_C, TILE_M], TILE)
        tma_load(columns, [row + k * TILE_C, m], full, a)
        tma_load(rows, [row + k * TILE_C, column], full, ring.b.index(at.slot))
        at = at.next()
    return at


@gluon.jit
def load_gate_up_pieces(loads, ring, at, row, column):
    """Four stages with [TILE_M, PIECE_N] of gate and of up each, for the epilogue of DH."""
    for q in range(4):
        mbarrier.wait(ring.empty.index(at.slot), at.phase)
        full = ring.full.index(at.slot)
        mbarrier.expect(full, PIECE_STAGE_BYTES)
        b = ring.b.index(at.slot)._reinterpret(gl.bfloat16, [2, TILE_M, PIECE_N], TILE)
        tma_load(loads.gate_rows, [row, column + q * PIECE_N], full, b.index(0))
        tma_load(loads.up_rows, [row, column + q * PIECE_N], full, b.index(1))
        at = at.next()
    return at


@gluon.jit
def load_gradient_pieces(gradient, ring, at, expert, m, column):
    """Four stages with [TILE_M, PIECE_N] of the fp32 main gradient each, as boxes [column half, consumer]."""
    for q in range(4):
        mbarrier.wait(ring.empty.index(at.slot), at.phase)
        full = ring.full.index(at.slot)
        mbarrier.expect(full, PIECE_STAGE_BYTES)
        b = ring.b.index(at.slot)._reinterpret(gl.float32, [4, 1, HALF_M, PIECE_N // 2], GRADIENT_TILE)
        for j in gl.static_range(4):
            tma_load(
                gradient, [expert, m + (j % 2) * HALF_M, column + q * PIECE_N + (j // 2) * (PIECE_N // 2)], full, b.index(j)
            )
        at = at.next()
    return at


@gluon.jit
def load_forward(loads, ring, at, kind, expert, row, column, steps):
    if kind == GATE_UP:
        at = load_gate_up(loads.x_rows, loads.gate, loads.up, ring, at, expert, row, column, steps)
    else:
        at = load_down(loads, ring, at, expert, row, column, steps)
    return at


@gluon.jit
def load_backward(loads, ring, at, kind, expert, row, column, steps, AGAIN: gl.constexpr):
    """The kinds of the backward whose result is rows."""
    if kind == DH:
        at = load_rows_by_expert(loads.dy_rows, loads.down, ring, at, expert, row, column, steps)
        at = load_gate_up_pieces(loads, ring, at, row, column)
    elif kind == DX:
        at = load_rows_by_expert(loads.gate_rows, loads.gate, ring, at, expert, row, column, steps // 2)
        at = load_rows_by_expert(loads.up_rows, loads.up, ring, at, expert, row, column, steps // 2)
    elif AGAIN:
        at = load_gate_up(loads.again[0], loads.again[1], loads.again[2], ring, at, expert, row, column, steps)
    return at


@gluon.jit
def produce(job, loads, shared_loads, ring, started, BACKWARD: gl.constexpr, LAST: gl.constexpr):
    at = Cursor(gl.to_tensor(0), gl.to_tensor(1), ring.size)  # a fresh barrier lets the wait for phase 1 pass
    for i in range(gl.program_id(0), job.num_tasks, gl.num_programs(0)):
        task = job.tasks + i * FIELDS
        kind = gl.load(task + KIND)
        expert = gl.load(task + EXPERT)
        row = gl.load(task + ROW)
        column = gl.load(task + N)
        steps = gl.load(task + STEPS)
        skipped = is_skipped(kind, steps, started, LAST)
        if not skipped:
            note_time(job, i, TRACE_WAIT)
            wait_for(job.counters + gl.load(task + WAIT0), gl.load(task + WAIT0_TARGET), job.status, False)
            target = gl.load(task + WAIT1_TARGET)
            if LAST == DX:
                target = gl.where(kind == DX, 0, target)  # the weight gradients that it would wait for are left out
            value = wait_for(job.counters + gl.load(task + WAIT1), target, job.status, False)
            fence_async_global(value)
            note_time(job, i, TRACE_LOAD)
        shared = False
        if job.shared:
            shared = gl.load(task + PART) != 0
        if skipped:
            pass
        elif not BACKWARD:
            if job.coded:
                at = load_coded_forward(loads, ring, at, kind, expert, row, column, steps)
            elif job.shared and shared:
                at = load_forward(shared_loads, ring, at, kind, expert, row, column, steps)
            else:
                at = load_forward(loads, ring, at, kind, expert, row, column, steps)
        elif kind <= DX:
            if job.coded:
                at = load_coded_backward(loads, ring, at, kind, expert, row, column, steps, job.again)
                if kind == DH:
                    at = load_gate_up_pieces(loads, ring, at, row, column)
            elif job.shared and shared:
                at = load_backward(shared_loads, ring, at, kind, expert, row, column, steps, job.again)
            else:
                at = load_backward(loads, ring, at, kind, expert, row, column, steps, job.again)
        else:
            m = gl.load(task + M)
            carried = (started != 0) & (steps > 0)
            if kind == DW_GATE_UP:
                if gl.load(task + PART) == 0:
                    if carried:
                        at = load_gradient_pieces(loads.gradients[0], ring, at, expert, m, column)
                    at = load_columns_by_rows(loads.gate_columns, loads.x_rows, ring, at, row, m, column, steps)
                else:
                    if carried:
                        at = load_gradient_pieces(loads.gradients[1], ring, at, expert, m, column)
                    at = load_columns_by_rows(loads.up_columns, loads.x_rows, ring, at, row, m, column, steps)
            else:
                if carried:
                    at = load_gradient_pieces(loads.gradients[2], ring, at, expert, m, column)
                at = load_columns_by_rows(loads.dy_columns, loads.wh_rows, ring, at, row, m, column, steps)
