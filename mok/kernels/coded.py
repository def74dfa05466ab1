"""What 8-bit operands change in the roles of the megakernel on Hopper: loads, products, epilogues and stores of codes.

Operands are E4M3 codes with a power of two as the scale of each block: 128 values of a row share one, in a weight 128 x 128.
A stage of the ring then holds 128 contraction elements, one block, in the bytes of 64 elements of bf16, and the scales of its
rows beside them. Products of a stage start from zero; their sum, scaled, is added to the tile's fp32 sum: the accumulator of an
8-bit product has fewer bits than fp32, and is left after 128 elements. Owns nothing of who waits for what: tasks, rings, and
the products of weight gradients are those of bf16. Read next: `mok/kernels/consumer.py`, which calls this.
"""

# Annotations are evaluated here: device-side records check their fields against them.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from mok.kernels.gluon_compat import record, tma_load, tma_store
from mok.kernels.ring import HALF_M
from mok.kernels.tasks import DH, DX, EXPERT, GATE_UP, TILE_C, TILE_M, TILE_N, N

BLOCK = gl.constexpr(128)  # values that share a scale: contraction elements of a stage
STAGE_BYTES = gl.constexpr((TILE_M.value + TILE_N.value) * BLOCK.value + TILE_M.value)

CODES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2))
EXPERT_CODES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=3))
SCALES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8, rank=2))
SCALES_OF_ROWS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))

# A consumer's 64 rows of half of a tile's columns: one block of a weight's scale.
HALF_ACCUMULATOR = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_N.value // 2, 32]))
OF_ROWS = gl.constexpr(gl.SliceLayout(1, HALF_ACCUMULATOR))

FRACTION_OF_448 = gl.constexpr(0x600000)  # 448 = 1.75 * 2^8
INFINITY = gl.constexpr(0x7F800000)
NAN = gl.constexpr(0x7FC00000)


@record
class CodedRing:
    """A ring whose stages may hold codes: `Ring`, and the scales of a stage's rows [1, TILE_M]."""

    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    size: gl.constexpr


@record
class CodedPieces:
    """Pieces that may be codes [HALF_M, BLOCK]: `Pieces`, and the scales of a piece's rows [1, HALF_M]."""

    data: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    size: gl.constexpr


@record
class WeightScales:
    """Codes of the scales of gate, up [L, blocks_i, blocks_h] and down [L, blocks_h, blocks_i]: of their 128 x 128 blocks."""

    gate: gl.tensor
    up: gl.tensor
    down: gl.tensor
    blocks_h: gl.constexpr
    blocks_i: gl.constexpr


@gluon.jit
def make_scales(SIZE: gl.constexpr):
    """Room for the scales of up to 128 rows in each of SIZE stages or pieces; bulk copies need all of its 128 bytes."""
    return gl.allocate_shared_memory(gl.uint8, [SIZE, 1, BLOCK], SCALES)


@gluon.jit
def halves(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Left and right half of the columns; registers only."""
    return x.reshape([ROWS, 2, COLUMNS // 2]).permute([0, 2, 1]).split()


@gluon.jit
def beside(left, right, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """The inverse of `halves`: [ROWS, COLUMNS] from two [ROWS, COLUMNS / 2]."""
    return gl.join(left, right).permute([0, 2, 1]).reshape([ROWS, COLUMNS])


@gluon.jit
def scale_of(code):
    """2^(code - 127) in fp32. A block with NaN has code 255, of which this makes infinity, and NaN in all of its values."""
    code = code.to(gl.int32)
    return gl.where(code == 0, 0x400000, code << 23).to(gl.float32, bitcast=True)


@gluon.jit
def load_coded(rows, scales, weights, ring, at, expert, row, column, steps):
    """Stages of rows[row, :] and weights[i][expert, column:, :], both along the contraction: gate beside up, or one weight."""
    WEIGHTS: gl.constexpr = len(weights)
    for k in range(steps):
        mbarrier.wait(ring.empty.index(at.slot), at.phase)
        full = ring.full.index(at.slot)
        mbarrier.expect(full, STAGE_BYTES)
        a = ring.a.index(at.slot)._reinterpret(gl.float8e4nv, [TILE_M, BLOCK], CODES)
        b = ring.b.index(at.slot)._reinterpret(gl.float8e4nv, [WEIGHTS, 1, TILE_N // WEIGHTS, BLOCK], EXPERT_CODES)
        tma_load(rows, [row, k * BLOCK], full, a)
        tma_load(scales, [k, row], full, ring.scales.index(at.slot))
        for i in gl.static_range(WEIGHTS):
            tma_load(weights[i], [expert, column, k * BLOCK], full, b.index(i))
        at = at.next()
    return at


@gluon.jit
def load_coded_forward(loads, ring, at, kind, expert, row, column, steps):
    """steps: of the task, TILE_C elements each."""
    blocks = steps * TILE_C // BLOCK
    if kind == GATE_UP:
        at = load_coded(loads.x_codes, loads.x_scales, (loads.gate, loads.up), ring, at, expert, row, column, blocks)
    else:
        at = load_coded(loads.h_codes, loads.h_scales, (loads.down,), ring, at, expert, row, column, blocks)
    return at


@gluon.jit
def load_coded_backward(loads, ring, at, kind, expert, row, column, steps, AGAIN: gl.constexpr):
    """The kinds of the backward whose result is rows; what the epilogue of DH reads is not among it."""
    blocks = steps * TILE_C // BLOCK
    if kind == DH:
        at = load_coded(loads.dy_codes, loads.dy_scales, (loads.down,), ring, at, expert, row, column, blocks)
    elif kind == DX:
        at = load_coded(loads.gate_codes, loads.gate_scales, (loads.gate,), ring, at, expert, row, column, blocks // 2)
        at = load_coded(loads.up_codes, loads.up_scales, (loads.up,), ring, at, expert, row, column, blocks // 2)
    elif AGAIN:
        weights = (loads.again[2], loads.again[3])
        at = load_coded(loads.again[0], loads.again[1], weights, ring, at, expert, row, column, blocks)
    return at


@gluon.jit
def add_block(total, product, row_scale, scale):
    """total + product * the scales of its rows and of its weight, rounded once: scales are powers of two."""
    factor, product = gl.broadcast((row_scale * scale)[:, None], product)
    return gl.fma(product, factor, total)


@gluon.jit
def multiply_coded(ring, at, left, right, steps, left_scale, right_scale, stride, WG: gl.constexpr):
    """Add `steps` blocks to both halves [HALF_M, TILE_N / 2] fp32 of a consumer's rows, in order.

    left_scale, right_scale: pointers to the codes of the scales of the weights' first block, the next ones `stride` apart.
    """
    for k in range(steps):
        left_code = gl.load(left_scale + k * stride)
        right_code = gl.load(right_scale + k * stride)
        mbarrier.wait(ring.full.index(at.slot), at.phase)
        a = ring.a.index(at.slot)._reinterpret(gl.float8e4nv, [TILE_M, BLOCK], CODES).slice(WG * HALF_M, HALF_M, dim=0)
        b = ring.b.index(at.slot)._reinterpret(gl.float8e4nv, [TILE_N, BLOCK], CODES)
        zeros = gl.zeros([HALF_M, TILE_N // 2], gl.float32, HALF_ACCUMULATOR)
        product = warpgroup_mma(a, b.slice(0, TILE_N // 2, dim=0).permute((1, 0)), zeros, use_acc=False, is_async=True)
        rows = ring.scales.index(at.slot)._reinterpret(gl.uint8, [TILE_M], SCALES_OF_ROWS)
        row_scale = scale_of(rows.slice(WG * HALF_M, HALF_M, dim=0).load(OF_ROWS))
        product = warpgroup_mma_wait(0, (product,))
        left = add_block(left, product, row_scale, scale_of(left_code))
        product = warpgroup_mma(
            a, b.slice(TILE_N // 2, TILE_N // 2, dim=0).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        product = warpgroup_mma_wait(0, (product,))
        mbarrier.arrive(ring.empty.index(at.slot), count=1)
        right = add_block(right, product, row_scale, scale_of(right_code))
        at = at.next()
    return left, right, at


@gluon.jit
def multiply_forward(ring, at, task, kind, steps, weights, WG: gl.constexpr):
    """Both halves of a GATE_UP tile (gate, up) or of a DOWN tile (columns), fp32. steps: of the task, TILE_C elements each."""
    expert = gl.load(task + EXPERT)
    block = gl.load(task + N) // BLOCK
    if kind == GATE_UP:
        place = (expert * weights.blocks_i + block) * weights.blocks_h
        left_scale = weights.gate + place
        right_scale = weights.up + place
    else:
        left_scale = weights.down + (expert * weights.blocks_h + block) * weights.blocks_i
        right_scale = left_scale + gl.where(block + 1 < weights.blocks_h, weights.blocks_i, 0)
    left = gl.zeros([HALF_M, TILE_N // 2], gl.float32, HALF_ACCUMULATOR)
    return multiply_coded(ring, at, left, left, steps * TILE_C // BLOCK, left_scale, right_scale, 1, WG)


@gluon.jit
def multiply_backward(ring, at, task, kind, steps, weights, WG: gl.constexpr):
    """Both halves of the columns of a DH tile, or of a DX tile: all of gate, then all of up, one sum."""
    expert = gl.load(task + EXPERT)
    block = gl.load(task + N) // BLOCK
    if kind == DH:
        stride = weights.blocks_i
        first = weights.down + expert * weights.blocks_h * weights.blocks_i + block
        second = first
        blocks = steps * TILE_C // BLOCK
        more = 0
    else:
        stride = weights.blocks_h
        place = expert * weights.blocks_i * weights.blocks_h + block
        first = weights.gate + place
        second = weights.up + place
        blocks = steps * TILE_C // BLOCK // 2
        more = blocks
    beside = gl.where(block + 1 < stride, 1, 0)
    left = gl.zeros([HALF_M, TILE_N // 2], gl.float32, HALF_ACCUMULATOR)
    left, right, at = multiply_coded(ring, at, left, left, blocks, first, first + beside, stride, WG)
    return multiply_coded(ring, at, left, right, more, second, second + beside, stride, WG)


@gluon.jit
def scale_code(largest):
    """As `mok.kernels.quantize.scale_code`: E8M0 code of the least power of two that brings `largest`, the bits of a magnitude,
    to 448 or less; 255 for NaN and infinity."""
    code = gl.maximum((largest >> 23) - 8 + ((largest & 0x7FFFFF) > FRACTION_OF_448).to(gl.int32), 0)
    return gl.where(largest >= INFINITY, 255, code)


@gluon.jit
def scale_of_rows(magnitude):
    """From the bits of magnitudes [HALF_M, n]: the code of each row's scale, and 1 / scale in fp32; NaN for 255."""
    code = scale_code(gl.max(magnitude, axis=1))
    return code, gl.where(code == 255, NAN, (254 - code) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def magnitude_of(values):
    return values.to(gl.int32, bitcast=True) & 0x7FFFFFFF


@gluon.jit
def place_codes(codes, scales, pieces, at):
    """Write a piece of codes [HALF_M, BLOCK] and the scales of its rows into the next slot, which is free."""
    pieces.data.index(at.slot)._reinterpret(gl.float8e4nv, [HALF_M, BLOCK], CODES).store(codes)
    room = pieces.scales.index(at.slot)._reinterpret(gl.uint8, [BLOCK], SCALES_OF_ROWS)
    room.slice(0, HALF_M, dim=0).store(scales.to(gl.uint8))
    return at.next()


@gluon.jit
def quantize_piece(values, pieces, at):
    """Quantise a piece [HALF_M, BLOCK] of fp32 values that bf16 holds into the next slot."""
    scales, inverse = scale_of_rows(magnitude_of(values))
    return place_codes((values * inverse[:, None]).to(gl.float8e4nv), scales, pieces, at)


@gluon.jit
def packed(low, high):
    """Two tensors of bf16 as one of int32, half the registers; not pure, or the compiler would do it only where it is read."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, {$1, $2};",
        "=r,h,h",
        [low.to(gl.int16, bitcast=True), high.to(gl.int16, bitcast=True)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def unpacked(both):
    """What `packed` packed, as fp32."""
    return (both << 16).to(gl.float32, bitcast=True), (both & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def quantize_packed(left, right, pieces, at):
    """`quantize_piece` of four tensors [HALF_M, BLOCK / 4] beside one another, the first two packed in `left`."""
    v0, v1 = unpacked(left)
    v2, v3 = unpacked(right)
    largest = gl.maximum(gl.maximum(magnitude_of(v0), magnitude_of(v1)), gl.maximum(magnitude_of(v2), magnitude_of(v3)))
    scales, inverse = scale_of_rows(largest)
    inverse = inverse[:, None]
    first = beside((v0 * inverse).to(gl.float8e4nv), (v1 * inverse).to(gl.float8e4nv), HALF_M, BLOCK // 2)
    second = beside((v2 * inverse).to(gl.float8e4nv), (v3 * inverse).to(gl.float8e4nv), HALF_M, BLOCK // 2)
    return place_codes(beside(first, second, HALF_M, BLOCK), scales, pieces, at)


@gluon.jit
def send_codes(codes, scales, row, column, pieces, at):
    """Start the stores of the next piece's codes and scales; column: of the codes, a multiple of BLOCK."""
    mbarrier.wait(pieces.full.index(at.slot), at.phase)
    tma_store(codes, [row, column], pieces.data.index(at.slot)._reinterpret(gl.float8e4nv, [HALF_M, BLOCK], CODES))
    scales_of_rows = pieces.scales.index(at.slot)._reinterpret(gl.uint8, [BLOCK // HALF_M, 1, HALF_M], SCALES)
    tma_store(scales, [column // BLOCK, row], scales_of_rows.index(0))
    return at.next()
