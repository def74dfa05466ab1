"""Message passing between two ranks, once for each pair of release and acquire that rows through peer memory rely on.

A round: the writer fills a row with the number of the round and raises its flag; the reader sees the flag, reads the row,
counts values of another round, and answers. Data and flags are reached as on other ranks, through addresses. Kernels only;
tests/kernels/test_gpu_peer.py runs them on two streams.
"""

# Annotations are evaluated here: Gluon checks layouts against them.
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mok.kernels import peer
from mok.kernels.gluon_compat import barrier, tma_load, tma_store
from mok.kernels.peer_mover import fence_system, load_acquire_system
from mok.kernels.ring import PLAIN_ROWS, fence_async_global, from_lane_0, stores_complete

WIDTH = 2048
GAVE_UP = 1 << 20
GLUON_WIDTH = gl.constexpr(WIDTH)
GLUON_GAVE_UP = gl.constexpr(GAVE_UP)


@triton.jit(do_not_specialize=["rank", "rounds"])
def plain(bases, flags_at, answers_at, faults, rank, rounds, given_up, limit_ns, WIDTH: tl.constexpr):
    """As `mok.kernels.peer`: stores, a barrier, exchange with release; add 0 with acquire, loads. Rank 0 writes, 1 reads."""
    columns = tl.arange(0, WIDTH)
    one = tl.arange(0, 1)
    bad = 0
    for i in range(1, rounds + 1):
        if rank == 0:
            tl.store(peer.values(bases, 1, 0) + columns, (tl.zeros((WIDTH,), tl.float32) + i % 256).to(tl.bfloat16))
            tl.debug_barrier()
            tl.atomic_xchg(peer.ints(bases, 1, flags_at), i, sem="release", scope="sys")
            late = peer.wait_until(
                peer.ints(bases, 0, answers_at) + tl.arange(0, 1), tl.arange(0, 1) == 0, i, given_up, limit_ns
            )
        else:
            late = peer.wait_until(peer.ints(bases, 1, flags_at) + one, one == 0, i, given_up, limit_ns)
            seen = tl.load(peer.values(bases, 1, 0) + columns).to(tl.float32)
            bad += tl.sum((seen != i % 256).to(tl.int32), axis=0)
            tl.debug_barrier()
            tl.atomic_xchg(peer.ints(bases, 0, answers_at), i, sem="release", scope="sys")
        bad += tl.max(late.to(tl.int32), axis=0)
    tl.atomic_add(faults, bad)


@gluon.jit
def await_flag(flag, goal):
    seen = from_lane_0(load_acquire_system(flag))
    polls = gl.to_tensor(0)
    while (seen < goal) & (polls < GLUON_GAVE_UP):
        seen = from_lane_0(load_acquire_system(flag))
        polls += 1
    return (seen < goal).to(gl.int32)


@gluon.jit(do_not_specialize=["rank", "rounds"])
def mover(row, boxes, flag, answer, faults, rounds, rank, BULK_STORE: gl.constexpr):
    """As the movers: stores by lanes, or by bulk copies, then a fence and a relaxed exchange; an acquire load, a proxy fence
    and a bulk copy. row: bf16 [WIDTH] in the reader's memory, boxes: a descriptor of it, [1, 8, 256]. One warp."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 1, 32], [1, 1, 1], [2, 1, 0])
    part = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    lane = gl.arange(0, 256, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    slot = gl.allocate_shared_memory(gl.bfloat16, [1, 8, 256], PLAIN_ROWS)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    fence_async_shared()
    bad = gl.to_tensor(0)
    for i in range(rounds):
        number = i + 1
        if rank == 0:
            values = (gl.zeros([1, 8, 256], gl.float32, layout) + (number % 256).to(gl.float32)).to(gl.bfloat16)
            if BULK_STORE:
                slot.store(values)
                fence_async_shared()
                barrier()
                tma_store(boxes, [0, 0, 0], slot)
                stores_complete(number)
            else:
                gl.store(row + part * 256 + lane, values)
            barrier()
            fence_system(number)
            gl.atomic_xchg(flag, number, sem="relaxed", scope="sys")
            bad += await_flag(answer, number)
        else:
            bad += await_flag(flag, number)
            fence_async_global(number)
            mbarrier.expect(full, GLUON_WIDTH * 2)
            tma_load(boxes, [0, 0, 0], full, slot)
            mbarrier.wait(full, i & 1)
            seen = slot.load(layout).to(gl.float32)
            wrong = (seen != (number % 256).to(gl.float32)).to(gl.int32)
            bad += gl.sum(gl.sum(gl.sum(wrong, axis=2), axis=1), axis=0)
            barrier()
            fence_system(number)
            gl.atomic_xchg(answer, number, sem="relaxed", scope="sys")
    gl.atomic_add(faults, bad)
