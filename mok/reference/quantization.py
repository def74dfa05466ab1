"""Values rounded to E4M3 with a power of two as the scale of each block, one block at a time.

Written for reading: the definition that `mok/backends/quantization.py` and `mok/kernels/quantize.py` equal in every bit. Owns
the choice of a scale and the rounding; `mok/reference/moe.py` says which operands are quantised. Imports nothing from the
package.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["E4M3", "dequantized", "quantize_block", "round_row_groups", "round_rows", "round_weight", "scale_code"]

SCALE_BIAS = 127
"""A scale's code c means 2^(c - 127) (E8M0); 255 means NaN."""

NAN_CODE, NAN_SCALE = 0x7F, 255


def _magnitude(code: int) -> float:
    """The value of a code without its sign bit: 4 bits of exponent, 3 of fraction; exponent 0 is subnormal."""
    exponent, fraction = code >> 3, code & 7
    return math.ldexp(fraction, -9) if exponent == 0 else math.ldexp(8 + fraction, exponent - 10)


E4M3 = torch.tensor([_magnitude(code) for code in range(NAN_CODE)], dtype=torch.float64)
"""Every finite magnitude, 0 to 448, in the order of its code; the code of -x is that of x plus 128."""


def scale_code(largest: float) -> int:
    """The code of a block's scale: the least power of two, from 2^-127 on, that brings `largest` to at most 448; so nothing
    saturates. A block of zeros gets 2^-127, one that holds NaN or infinity 255."""
    if not math.isfinite(largest):
        return NAN_SCALE
    fraction, exponent = math.frexp(largest)  # largest = fraction * 2^exponent, 0.5 <= fraction < 1; 448 = 0.875 * 2^9
    return max(exponent - 9 + (fraction > 0.875) + SCALE_BIAS, 0) if largest else 0


def quantize_block(block: Tensor) -> tuple[Tensor, int]:
    """(codes, the scale's code) of values that share a scale: each value over the scale, to the nearest code, ties to the even
    one; -0.0 and negative values that round to zero keep their sign. With NaN or infinity in the block, all of it is NaN."""
    scale = scale_code(block.double().abs().max().item())
    if scale == NAN_SCALE:
        return torch.full(block.shape, NAN_CODE, dtype=torch.uint8), scale
    scaled = block.double().abs() * 2.0 ** (SCALE_BIAS - scale)
    above = torch.searchsorted(E4M3, scaled).clamp(max=len(E4M3) - 1)
    below = (above - 1).clamp(min=0)
    to_above, to_below = E4M3[above] - scaled, scaled - E4M3[below]
    takes_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    codes = torch.where(takes_above, above, below) + 128 * torch.signbit(block)
    return codes.to(torch.uint8), scale


def dequantized(codes: Tensor, scale: int) -> Tensor:
    """code * scale in float64."""
    if scale == NAN_SCALE:
        return torch.full(codes.shape, math.nan, dtype=torch.float64)
    sign = 1.0 - 2.0 * (codes >= 128).double()
    return sign * E4M3[(codes % 128).long()] * 2.0 ** (scale - SCALE_BIAS)


def round_rows(x_MC: Tensor, block: int) -> Tensor:
    """`x_MC` with every `block` values of a row quantised and back, in its dtype."""
    return _rounded(x_MC, ((slice(m, m + 1), columns) for m in range(x_MC.shape[0]) for columns in _cuts(x_MC.shape[1], block)))


def round_row_groups(x_MC: Tensor, block: int) -> Tensor:
    """The same down the columns: `block` rows from the first on share a scale in each column; the last group may be short."""
    return _rounded(x_MC, ((rows, slice(c, c + 1)) for rows in _cuts(x_MC.shape[0], block) for c in range(x_MC.shape[1])))


def round_weight(w_AB: Tensor, block: int, square: bool) -> tuple[Tensor, Tensor]:
    """A weight as the operand of products that contract over B, and as that of products that contract over A."""
    if not square:
        return round_rows(w_AB, block), round_row_groups(w_AB, block)
    both = _rounded(w_AB, ((rows, columns) for rows in _cuts(w_AB.shape[0], block) for columns in _cuts(w_AB.shape[1], block)))
    return both, both


def _cuts(size: int, block: int) -> list[slice]:
    return [slice(start, min(start + block, size)) for start in range(0, size, block)]


def _rounded(values: Tensor, blocks: Iterator[tuple[slice, slice]]) -> Tensor:
    out = torch.empty_like(values)
    for place in blocks:
        out[place] = dequantized(*quantize_block(values[place])).to(values.dtype)
    return out
