"""Rounding of bf16 and fp32 values to E4M3 with a power of two as the scale of each block, in plain Triton.

Owns the bits of docs/numerics.md, "8-bit formats": integer operations, exact products and one addition that rounds, so that
no GPU's own conversion shows. No atomics, and every output has one writer. Knows nothing of torch. Read next:
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
def quantize_weights(
    w, codes, transposed, scales, scales_transposed, num_rows, num_columns, expert_stride, row_stride, BLOCK: tl.constexpr
):  # fmt: skip
    """Codes of a stack of weights, row by row and transposed, with one scale for BLOCK x BLOCK values.

    Program: one block: (block of columns, block of rows, expert).
    Reads: w bf16 or fp32 [L, num_rows, num_columns], both sizes multiples of BLOCK.
    Writes: codes uint8 [L, num_rows, num_columns], transposed uint8 [L, num_columns, num_rows], scales uint8
        [L, num_rows / BLOCK, num_columns / BLOCK], and the same transposed.
    Waits and signals: nothing
    Example, BLOCK = 2: [[448, -0.0], [1, 0]] make codes [[0x7E, 0x80], [0x38, 0x00]], transposed [[0x7E, 0x38],
        [0x80, 0x00]] and the scale 2^0 (code 127).
    """
    expert = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(w + expert * expert_stride + rows[:, None] * row_stride + columns[None, :]).to(tl.float32)
    magnitude = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    scale = scale_code(tl.max(tl.max(magnitude, axis=1), axis=0))
    place = (expert * (num_rows // BLOCK) + tl.program_id(1)) * (num_columns // BLOCK) + tl.program_id(0)
    tl.store(scales + place, scale.to(tl.uint8))
    place = (expert * (num_columns // BLOCK) + tl.program_id(0)) * (num_rows // BLOCK) + tl.program_id(1)
    tl.store(scales_transposed + place, scale.to(tl.uint8))
    found = encode(values, scale)
    first = expert * num_rows * num_columns
    tl.store(codes + first + rows[:, None] * num_columns + columns[None, :], found)
    tl.store(transposed + first + columns[:, None] * num_rows + rows[None, :], tl.trans(found))
