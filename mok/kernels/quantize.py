"""Rounding of bf16 and fp32 values to E4M3 with a power of two as the scale of each block, in plain Triton.

Owns the bits of docs/numerics.md, "8-bit formats": integer operations, exact products and one addition that rounds, so that
no GPU's own conversion shows, but in weights for products of 8-bit floats, which the same GPUs convert as defined. No atomics,
and every output has one writer. Knows nothing of torch. Read next:
`mok/launch/quantize.py`, which launches it, and `mok/reference/quantization.py`, which defines it.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["quantize_tiles", "quantize_weights"]

FRACTION_OF_448 = tl.constexpr(0x600000)  # 448 = 1.75 * 2^8
INFINITY = tl.constexpr(0x7F800000)
SMALLEST_NORMAL = tl.constexpr(0x3C800000)  # 2^-6
FIXED_POINT = tl.constexpr(0x46800000)  # 2^14: a float that is at least this large ends on a multiple of 2^-9


@triton.jit
def scale_code(largest):
    """E8M0 code of the least power of two, from 2^-127 on, that brings `largest` (the bits of a magnitude) to 448 or less; 255
    for NaN and infinity."""
    code = tl.maximum((largest >> 23) - 8 + ((largest & 0x7FFFFF) > FRACTION_OF_448).to(tl.int32), 0)
    return tl.where(largest >= INFINITY, 255, code)


@triton.jit
def encode(values, scale):
    """E4M3 codes of values / 2^(scale - 127), nearest, ties to even; 0x7F everywhere under a scale of 255. Broadcasts."""
    inverse = tl.where(scale == 255, 0, (254 - scale) << 23).to(tl.float32, bitcast=True)
    bits = (values * inverse).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    fixed = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - FIXED_POINT
    code = tl.where(magnitude < SMALLEST_NORMAL, fixed, normal) | ((bits >> 24) & 0x80)
    return tl.where(scale == 255, 0x7F, code).to(tl.uint8)


@triton.jit
def quantize_tiles(
    x, row_codes, row_scales, column_codes, column_scales, num_rows, num_columns, x_stride,
    BLOCK: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    """Codes and scales of x in one orientation, or in both at once.

    Computes: ROWS: BLOCK values of a row share a scale; COLUMNS: BLOCK values of a column do, from row 0 on, the last group
        perhaps short; SQUARES: BLOCK x BLOCK values do, and go where those of ROWS would.
    Program: BLOCK rows (first grid axis), TILE columns (second), TILE a multiple of BLOCK; each value is read once.
    Reads: x bf16 or fp32 [num_rows, num_columns], rows x_stride apart; num_columns a multiple of BLOCK.
    Writes: row_codes, column_codes uint8 [num_rows, num_columns]; row_scales uint8 [num_rows, num_columns / BLOCK], for
        SQUARES [num_rows / BLOCK, ..]; column_scales uint8 [num_rows / BLOCK rounded up, num_columns].
    Waits and signals: nothing
    Example, BLOCK = 2, x = [[448, -0.0], [1, 0]]: rows [[0x7E, 0x80], [0x78, 0x00]] with scales 2^0, 2^-8 (codes 127, 119);
        columns [[0x7E, 0x80], [0x38, 0x00]] with scales 2^0, 2^-127 (codes 127, 0).
    """
    group = tl.program_id(0)
    rows = group * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    values = tl.load(x + rows.to(tl.int64)[:, None] * x_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    places = rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    magnitude = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    blocks = tl.program_id(1) * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
    blocks_in_row = num_columns // BLOCK
    if ROWS or SQUARES:
        largest = tl.max(tl.reshape(magnitude, (BLOCK, TILE // BLOCK, BLOCK)), axis=2)
        if SQUARES:
            scale = scale_code(tl.max(largest, axis=0))
            tl.store(row_scales + group * blocks_in_row + blocks, scale.to(tl.uint8), mask=blocks < blocks_in_row)
            scale = tl.broadcast_to(scale[None, :], (BLOCK, TILE // BLOCK))
        else:
            scale = scale_code(largest)
            exists = (rows < num_rows)[:, None] & (blocks < blocks_in_row)[None, :]
            tl.store(row_scales + rows.to(tl.int64)[:, None] * blocks_in_row + blocks[None, :], scale.to(tl.uint8), mask=exists)
        codes = encode(tl.reshape(values, (BLOCK, TILE // BLOCK, BLOCK)), scale[:, :, None])
        tl.store(row_codes + places, tl.reshape(codes, (BLOCK, TILE)), mask=inside)
    if COLUMNS:
        scale = scale_code(tl.max(magnitude, axis=0))
        tl.store(column_scales + group.to(tl.int64) * num_columns + columns, scale.to(tl.uint8), mask=columns < num_columns)
        tl.store(column_codes + places, encode(values, scale[None, :]), mask=inside)


@triton.jit
def load_row(w, rows, columns, row_stride):
    """Those rows in fp32, and their magnitudes as bits, of which NaN and infinity are the largest."""
    values = tl.load(w + rows[:, None] * row_stride + columns[None, :]).to(tl.float32)
    return values, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def encode_fours(v0, v1, v2, v3):
    """E4M3 codes of magnitudes up to 448 as the bytes of a word, the first the lowest, rounded as by `encode`; 0x7F for NaN.

    The conversion of GPUs from compute capability 8.9 on. Spelt out for four at once: ptxas 12.8 crashes on bytes that are
    both stored and packed one by one (`tests/kernels/test_coded_compiled.py` compiles this).
    """
    return tl.inline_asm_elementwise(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; "
        "mov.b32 $0, {low, high}; }",
        "=r,f,f,f,f",
        [v0, v1, v2, v3],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def quantize_weights(
    w, codes, transposed, scales, scales_transposed, num_rows, num_columns, expert_stride, row_stride, BLOCK: tl.constexpr
):  # fmt: skip
    """Codes of a stack of weights, row by row and transposed, with one scale for BLOCK x BLOCK values.

    Four rows at a time lie in one word for the transposition, and the GPU's own conversion rounds as `encode` does: both spare
    two thirds of the instructions.
    Program: one block: (block of columns, block of rows, expert).
    Reads: w bf16 or fp32 [L, num_rows, num_columns], both sizes multiples of BLOCK, BLOCK of 4.
    Writes: codes uint8 [L, num_rows, num_columns], transposed uint8 [L, num_columns, num_rows] as words of 4, scales uint8
        [L, num_rows / BLOCK, num_columns / BLOCK], and the same transposed.
    Waits and signals: nothing
    Example, BLOCK = 4, of rows [448, -0.0, 0, 0], [1, 0, 0, 0] and two of zeros: codes begin [0x7E, 0x80, ..],
        [0x38, 0x00, ..], transposed [0x7E, 0x38, ..], [0x80, 0x00, ..]; the scale is 2^0 (code 127).
    """
    expert = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(1) * BLOCK + 4 * tl.arange(0, BLOCK // 4)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    w += expert * expert_stride
    v0, m0 = load_row(w, rows, columns, row_stride)
    v1, m1 = load_row(w, rows + 1, columns, row_stride)
    v2, m2 = load_row(w, rows + 2, columns, row_stride)
    v3, m3 = load_row(w, rows + 3, columns, row_stride)
    largest = tl.maximum(tl.maximum(m0, m1), tl.maximum(m2, m3))
    scale = scale_code(tl.max(tl.max(largest, axis=1), axis=0))
    place = (expert * (num_rows // BLOCK) + tl.program_id(1)) * (num_columns // BLOCK) + tl.program_id(0)
    tl.store(scales + place, scale.to(tl.uint8))
    place = (expert * (num_columns // BLOCK) + tl.program_id(0)) * (num_rows // BLOCK) + tl.program_id(1)
    tl.store(scales_transposed + place, scale.to(tl.uint8))
    # NaN times anything is NaN, whose code is 0x7F.
    inverse = tl.where(scale == 255, 0x7FC00000, (254 - scale) << 23).to(tl.float32, bitcast=True)
    first = expert * num_rows * num_columns
    words = encode_fours(v0 * inverse, v1 * inverse, v2 * inverse, v3 * inverse)
    for j in tl.static_range(4):
        tl.store(codes + first + (rows + j)[:, None] * num_columns + columns[None, :], (words >> (8 * j)).to(tl.uint8))
    fours = tl.program_id(1) * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    places = first // 4 + columns[:, None] * (num_rows // 4) + fours[None, :]
    tl.store(transposed.to(tl.pointer_type(tl.int32)) + places, tl.trans(words))
