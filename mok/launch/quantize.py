"""Launches of `mok/kernels/quantize.py`: 8-bit codes and scales of a matrix, in one orientation or in both in one pass.

Owns their memory and the way back to bf16 or fp32. Must not know of experts or of which operand a matrix is. Read next:
`mok/backends/quantization.py`, which calls it on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mok.kernels.quantize import quantize_tiles, quantize_weights

__all__ = [
    "Both",
    "CodedRows",
    "CodedWeight",
    "Quantized",
    "quantize",
    "quantize_squares",
    "quantize_weight",
    "quantize_weight_along",
]

TILE_COLUMNS = 128


class Quantized(NamedTuple):
    """codes: float8_e4m3fn [M, C]. scales: float8_e8m0fnu, one for every block of `block_rows` x `block_columns` values."""

    codes: Tensor
    scales: Tensor
    block_rows: int
    block_columns: int

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """code * scale [M, C]; in bf16 exact from 2^-133 on."""
        rows, columns = self.codes.shape
        values, scales = self.codes.to(dtype), self.scales.to(dtype)
        if rows % self.block_rows:  # the last group is short
            return values.mul_(scales.repeat_interleave(self.block_rows, 0)[:rows])
        blocks = values.view(-1, self.block_rows, columns // self.block_columns, self.block_columns)
        blocks.mul_(scales.view(scales.shape[0], 1, scales.shape[1], 1))
        return values


class Both(NamedTuple):
    """rows: blocks along a row, the contraction axis being the columns. columns: blocks down a column."""

    rows: Quantized
    columns: Quantized


class CodedWeight(NamedTuple):
    """A stack of weights [L, A, B] for products of codes, whose operands run along the contraction. codes: float8_e4m3fn
    [L, A, B]; scales: E8M0 as bytes [L, A / block, B / block], of block x block values. transposed, scales_transposed: the same
    with the last two axes exchanged."""

    codes: Tensor
    transposed: Tensor
    scales: Tensor
    scales_transposed: Tensor

    @property
    def square(self) -> bool:
        """Whether block x block values share a scale; else `block` values along the contraction do, in each orientation by
        itself, and scales are [L, A, B / block], scales_transposed [L, B, A / block]."""
        return self.scales.shape[1] < self.codes.shape[1]


class CodedRows(NamedTuple):
    """Rows for products of codes: codes float8_e4m3fn [rows, C]; scales E8M0 as bytes [C / block, rows in expert order], so
    that those of neighbouring rows lie together."""

    codes: Tensor
    scales: Tensor


def quantize(x_MC: Tensor, block: int, *, along_rows: bool = True, along_columns: bool = True) -> Both:
    """Codes and scales of x [M, C], bf16 or fp32, C a multiple of `block`; what was not asked for is empty."""
    rows, columns = x_MC.shape
    in_rows = _empty(x_MC, columns if along_rows else 0, (rows, columns // block), (1, block))
    in_columns = _empty(x_MC, columns if along_columns else 0, (-(-rows // block), columns), (block, 1))
    _launch(x_MC, block, in_rows, in_columns, ROWS=along_rows, COLUMNS=along_columns, SQUARES=False)
    return Both(in_rows, in_columns)


def quantize_squares(x_MC: Tensor, block: int) -> Quantized:
    """The same with one scale for block x block values; M and C are multiples of `block`."""
    rows, columns = x_MC.shape
    found = _empty(x_MC, columns, (rows // block, columns // block), (block, block))
    _launch(x_MC, block, found, found, ROWS=False, COLUMNS=False, SQUARES=True)
    return found


def quantize_weight_along(w_LAB: Tensor, block: int) -> CodedWeight:
    """Codes of a stack of weights quantised along the contraction of each orientation; A and B are multiples of `block`."""
    count, rows, columns = w_LAB.shape
    found = quantize(w_LAB.reshape(-1, columns), block)  # no block straddles two weights of the stack
    codes, scales = (part.view(torch.uint8) for part in found.rows[:2])
    back_codes, back_scales = (part.view(torch.uint8).view(count, -1, columns) for part in found.columns[:2])
    as_floats = torch.float8_e4m3fn
    return CodedWeight(
        codes.view(as_floats).view(w_LAB.shape),
        back_codes.transpose(1, 2).contiguous().view(as_floats),
        scales.view(count, rows, -1),
        back_scales.transpose(1, 2).contiguous(),
    )


def quantize_weight(w_LAB: Tensor, block: int) -> CodedWeight:
    """Codes of a stack of weights in both orientations from one pass; A and B are multiples of `block`, B is contiguous."""
    count, rows, columns = w_LAB.shape
    codes = torch.empty(count, rows, columns, dtype=torch.float8_e4m3fn, device=w_LAB.device)
    transposed = torch.empty(count, columns, rows, dtype=torch.float8_e4m3fn, device=w_LAB.device)
    scales = torch.empty(count, rows // block, columns // block, dtype=torch.uint8, device=w_LAB.device)
    scales_transposed = torch.empty(count, columns // block, rows // block, dtype=torch.uint8, device=w_LAB.device)
    grid = columns // block, rows // block, count
    if w_LAB.numel():
        quantize_weights[grid](
            w_LAB, codes.view(torch.uint8), transposed.view(torch.uint8), scales, scales_transposed, rows, columns,
            w_LAB.stride(0), w_LAB.stride(1), BLOCK=block, num_warps=block // 16, enable_fp_fusion=False,
        )  # fmt: skip
    return CodedWeight(codes, transposed, scales, scales_transposed)


def _empty(x_MC: Tensor, columns: int, scales: tuple[int, int], block: tuple[int, int]) -> Quantized:
    codes = torch.empty(x_MC.shape[0], columns, dtype=torch.float8_e4m3fn, device=x_MC.device)
    return Quantized(codes, torch.empty(scales, dtype=torch.float8_e8m0fnu, device=x_MC.device), *block)


def _launch(x_MC: Tensor, block: int, in_rows: Quantized, in_columns: Quantized, **orientations: bool) -> None:
    rows, columns = x_MC.shape
    if x_MC.stride(1) != 1:
        x_MC = x_MC.contiguous()
    outputs = [part.view(torch.uint8) for found in (in_rows, in_columns) for part in (found.codes, found.scales)]
    # 32 values for each thread: more would not stay in registers.
    grid = -(-rows // block), -(-columns // TILE_COLUMNS)
    if rows and columns:
        quantize_tiles[grid](
            x_MC, *outputs, rows, columns, x_MC.stride(0), BLOCK=block, TILE=TILE_COLUMNS, **orientations,
            num_warps=block // 8, enable_fp_fusion=False,
        )  # fmt: skip
