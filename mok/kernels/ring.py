"""What the roles of the megakernel share: tile layouts, rings in shared memory, the list of tasks, waiting and signalling.

Owns the records that pass between roles, and PTX that Gluon has no name for. A ring is filled by one role and emptied by
another; each keeps its own `Cursor`. Waiting for other programs is bounded: a counter that does not come sets the status word
and the walk goes on, so that a fault ends in an error and not in a hang. Read next: `mok/kernels/mega.py`.
"""

# Annotations are evaluated here: device-side records check their fields against them.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mok.kernels.gluon_compat import record
from mok.kernels.tasks import DW_GATE_UP, TILE_C, TILE_M, TILE_N

# Tiles of bf16 and fp32 whose inner side is one 128-byte swizzle line, and plain rows.
TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
EXPERT_TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3))
GRADIENT_TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=3))
GRADIENT_PIECE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))
PLAIN_ROWS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=3))
ACCUMULATOR = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_N.value, 16]))

HALF_M = gl.constexpr(TILE_M.value // 2)  # rows of one consumer
PIECE_N = gl.constexpr(64)  # columns of a bf16 piece; an fp32 piece has half of them
STAGE_BYTES = gl.constexpr((TILE_M.value + TILE_N.value) * TILE_C.value * 2)
PIECE_STAGE_BYTES = gl.constexpr(TILE_N.value * TILE_C.value * 2)  # stages that carry gate and up, or gradients
MOVER_SLOTS = gl.constexpr(2)
MOVER_SLOT_ELEMENTS = gl.constexpr(4096)

# A poll of a counter in L2 takes about 0.7 us on an H200, so this is some seconds.
MAX_POLLS = gl.constexpr(1 << 22)
STATUS_TIMED_OUT = gl.constexpr(1)

# What a traced launch notes of each task: its waits begin, its loads begin, its first piece is there, all of it is stored.
TRACE_WAIT = gl.constexpr(0)
TRACE_LOAD = gl.constexpr(1)
TRACE_FINISH = gl.constexpr(2)
TRACE_STORED = gl.constexpr(3)
TRACE_EVENTS = gl.constexpr(4)
# And of each program's mover, behind the tasks: it begins, its rows are brought, its rows are returned, its tokens are summed.
TRACE_BEGUN = gl.constexpr(0)
TRACE_BROUGHT = gl.constexpr(1)
TRACE_RETURNED = gl.constexpr(2)
TRACE_COMBINED = gl.constexpr(3)


@record
class Cursor:
    """Where a role stands in a ring: slot, and the parity of the pass."""

    slot: gl.tensor
    phase: gl.tensor
    size: gl.constexpr

    @gluon.jit
    def next(self):
        slot = self.slot + 1
        wrap = slot == self.size
        return Cursor(gl.where(wrap, 0, slot), gl.where(wrap, self.phase ^ 1, self.phase), self.size)

    @gluon.jit
    def slot_before(self, count: gl.constexpr):
        """The slot `count` places back, at most `size`."""
        return gl.where(self.slot >= count, self.slot - count, self.slot - count + self.size)


@record
class Ring:
    """Operand stages from the producer to both consumers: a [TILE_M, TILE_C], b [TILE_N, TILE_C] or [TILE_C, TILE_N]."""

    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    size: gl.constexpr


@record
class Pieces:
    """Finished pieces [HALF_M, PIECE_N] bf16 (or [HALF_M, PIECE_N / 2] fp32) from one consumer to its store warp."""

    data: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    size: gl.constexpr


@record
class Job:
    """What all roles walk: tasks, counters, the row and task counts that the planner left on the device, the status word.

    shared: whether tasks of shared experts are among them; again: whether a backward computes gate and up again; coded: whether
    products but those of weight gradients take 8-bit operands (`mok/kernels/coded.py`).
    """

    tasks: gl.tensor
    num_tasks: gl.tensor
    num_rows: gl.tensor
    counters: gl.tensor
    status: gl.tensor
    trace: gl.tensor
    traced: gl.constexpr
    shared: gl.constexpr
    again: gl.constexpr
    coded: gl.constexpr


@gluon.jit
def load_acquire(pointer):
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [pointer.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def fence_async_global(value):
    """Order what a counter's acquire made visible before bulk copies of this thread."""
    return gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def stores_complete(value):
    """Wait until this thread's bulk stores have been written, not only read; then order them before a release."""
    return gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.b32 $0, $1;",
        "=r,r",
        [value],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def pause(value):
    return gl.inline_asm_elementwise(
        "nanosleep.u32 256; mov.b32 $0, $1;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def from_lane_0(value):
    """The same value in all lanes, so that a branch around a bulk copy is taken by the whole warp."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def to_bf16_and_back(x):
    """x rounded to bf16, as fp32; two elements at a time, since a conversion of one alone takes the slow unit."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000; }",
        "=f,=f,f,f",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) by one hardware tanh: off by at most 2^-12, a tenth of a bf16 step at 1."""
    half = 0.5 * x
    tanh = gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [half], dtype=gl.float32, is_pure=True, pack=1)
    return 0.5 * tanh + 0.5


@gluon.jit
def wait_for(counter, target, status, PAUSE: gl.constexpr):
    """Poll `counter` (acquire; the partner is `signal`'s release) until `target`, or until the launch is given up."""
    value = from_lane_0(load_acquire(counter))
    if value < target:
        given_up = from_lane_0(load_acquire(status)) & STATUS_TIMED_OUT  # other bits spoil a result, not the protocol
        polls = gl.where(given_up != 0, MAX_POLLS, 0)
        while (value < target) & (polls < MAX_POLLS):
            if PAUSE:
                value = pause(value)
            value = from_lane_0(load_acquire(counter))
            polls += 1
        if value < target:
            gl.atomic_or(status, STATUS_TIMED_OUT, sem="relaxed", scope="gpu")
    return value


@gluon.jit
def signal(counter):
    """Release what this warp has stored (`stores_complete` came before); the partner is `wait_for`'s acquire."""
    gl.atomic_add(counter, 1, sem="release", scope="gpu")


@gluon.jit
def note_time(job, i, EVENT: gl.constexpr):
    """For a traced launch: the time in ns at which task i came to `EVENT`."""
    if job.traced:
        now = gl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l,r", [i], dtype=gl.int64, is_pure=False, pack=1)
        gl.store(job.trace + i * TRACE_EVENTS + EVENT, now)


@gluon.jit
def is_skipped(kind, steps, started, LAST: gl.constexpr):
    """Kinds after LAST; and the gradient of an expert without rows, kept as it is once its chain has started."""
    return (kind > LAST) | ((kind >= DW_GATE_UP) & (steps == 0) & (started != 0))
