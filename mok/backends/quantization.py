"""Operands of expert products, rounded to an 8-bit format and back.

Owns the emulation of 8-bit products: the torch backend multiplies dequantised values. Those have 4 significant bits, so bf16
holds them (down to 2^-133) and a product of two is exact in fp32; what is left of an 8-bit product is its sum, in fp32 as ever.
Plain PyTorch on a CPU, `mok/launch/quantize.py` on a GPU, with the same bits. Knows nothing of experts. Read next:
`mok/reference/quantization.py`, the definition in loops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from mok.quantization import Format, Quantization

if TYPE_CHECKING:  # it needs Triton
    from mok.launch.quantize import CodedWeight

__all__ = [
    "Operand",
    "WeightCache",
    "coded_weight",
    "dispatched",
    "pack_rows",
    "round_row_groups",
    "round_rows",
    "round_weight",
    "unpack_rows",
    "why_not_coded",
]

Weight = TypeVar("Weight")


class Operand(NamedTuple):
    """A weight [.., A, B] as products take it that contract over B (forward), and that contract over A (towards the input)."""

    over_columns: Tensor
    over_rows: Tensor


class WeightCache:
    """The rounded weights of one layer, kept from call to call until their owner says that the weights have changed."""

    def __init__(self) -> None:
        self._kept: dict[str, object] = {}

    def get(self, name: str, make: Callable[[], Weight]) -> Weight:
        if name not in self._kept:
            self._kept[name] = make()
        return cast("Weight", self._kept[name])

    def clear(self) -> None:
        self._kept.clear()


def why_not_coded(quantization: Quantization, ranks: int, scaled_products: bool = False) -> list[str]:
    """Why kernels whose products take 8-bit codes cannot compute it, in words; empty if they can. scaled_products: whether the
    GPU's products take scales too."""
    reasons = []
    if not quantization.of_blocks.square_weights and not scaled_products:
        reasons.append(f"{quantization.format}: its products take 8-bit operands in blocks of 128 (fp8_block) only")
    if quantization.weight_gradients:
        reasons.append("quantize_weight_gradients: its weight gradients take operands in bf16 only")
    if quantization.dispatch and ranks > 1:
        reasons.append(f"quantize_dispatch over {ranks} ranks: its rows travel in bf16 only")
    return reasons


def coded_weight(name: str, w_LAB: Tensor, form: Format, cache: WeightCache | None) -> CodedWeight:
    """Codes of a stack of weights on a GPU, both orientations, from the layer's cache if it has one."""
    from mok.launch.quantize import quantize_weight, quantize_weight_along

    def make() -> CodedWeight:
        return (quantize_weight if form.square_weights else quantize_weight_along)(w_LAB, form.block)

    return make() if cache is None else cache.get(f"codes of {name}", make)


def round_rows(x_MC: Tensor, block: int) -> Tensor:
    """x [M, C], fp32 or bf16, with every `block` values of a row quantised and back; C is a multiple of `block`."""
    if x_MC.is_cuda:
        from mok.launch.quantize import quantize

        return quantize(x_MC, block, along_columns=False).rows.dequantized(x_MC.dtype)
    rows, columns = x_MC.shape
    return _round(x_MC.reshape(rows, columns // block, block), (2,)).view(rows, columns)


def dispatched(values_TH: Tensor, quantization: Quantization | None) -> Tensor:
    """What the routed experts see of each token's row, where it does not leave the rank: in 8 bits and back, if it is to travel
    so."""
    if quantization is None or not quantization.dispatch:
        return values_TH
    return round_rows(values_TH, quantization.of_blocks.block)


def pack_rows(x_MC: Tensor, block: int) -> Tensor:
    """The rows that `round_rows` gives as uint8 [M, C + C / block]: E4M3 codes, then the E8M0 codes of their scales."""
    if x_MC.is_cuda:
        from mok.launch.quantize import quantize

        found = quantize(x_MC, block, along_columns=False).rows
        return torch.cat((found.codes.view(torch.uint8), found.scales.view(torch.uint8)), dim=1)
    rows, columns = x_MC.shape
    values, scales, bad = _scaled(x_MC.reshape(rows, columns // block, block), (2,))
    codes = values.masked_fill_(bad, torch.nan).to(torch.float8_e4m3fn).view(rows, columns)
    return torch.cat((codes.view(torch.uint8), scales.masked_fill_(bad, 255).view(rows, -1).to(torch.uint8)), dim=1)


def unpack_rows(packed: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """What `pack_rows` packed, [M, columns]; a row of zero bytes is a row of zeros."""
    codes, scales = packed[:, :columns], packed[:, columns:]
    values = codes.contiguous().view(torch.float8_e4m3fn).to(dtype).view(packed.shape[0], scales.shape[1], -1)
    values.mul_(scales.contiguous().view(torch.float8_e8m0fnu).to(dtype).unsqueeze(2))
    return values.view(packed.shape[0], columns)


def round_row_groups(x_MC: Tensor, block: int) -> Tensor:
    """The same down the columns: in each, `block` rows from the first on share a scale; the last group may be short."""
    if x_MC.is_cuda:
        from mok.launch.quantize import quantize

        return quantize(x_MC, block, along_rows=False).columns.dequantized(x_MC.dtype)
    rows, columns = x_MC.shape
    grouped = pad(x_MC, (0, 0, 0, -rows % block)).view(-1, block, columns)
    return _round(grouped, (1,)).view(-1, columns)[:rows]


def round_weight(w_LAB: Tensor, form: Format) -> Operand:
    """A stack of weights, each [A, B] with both sizes multiples of the block, in both orientations."""
    w_MB = w_LAB.reshape(-1, w_LAB.shape[2])  # no block straddles two weights of the stack
    if w_MB.is_cuda:
        from mok.launch.quantize import quantize, quantize_squares

        if form.square_weights:
            both = quantize_squares(w_MB, form.block).dequantized(w_MB.dtype).view_as(w_LAB)
            return Operand(both, both)
        found = quantize(w_MB, form.block)
        return Operand(*(part.dequantized(w_MB.dtype).view_as(w_LAB) for part in (found.rows, found.columns)))
    if form.square_weights:
        rows, columns = w_MB.shape
        blocks = w_MB.reshape(rows // form.block, form.block, columns // form.block, form.block)
        both = _round(blocks, (1, 3)).view(w_LAB.shape)
        return Operand(both, both)
    return Operand(*(part(w_MB, form.block).view(w_LAB.shape) for part in (round_rows, round_row_groups)))


def _round(blocks: Tensor, dims: tuple[int, ...]) -> Tensor:
    """`blocks`, fp32 or bf16, quantised and back, in new memory."""
    rounded, scales, bad = _scaled(blocks, dims)
    rounded.mul_(torch.where(scales == 0, 0x400000, scales << 23).view(torch.float32))
    if bool(bad.any()):
        rounded.masked_fill_(bad, torch.nan)
    return rounded.to(blocks.dtype)


def _scaled(blocks: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """`blocks`, each over the least power of two that brings its largest value (over `dims`) to 448, rounded to E4M3, fp32; the
    codes of those powers, int32; and which blocks hold NaN or infinity, whose values mean nothing. Exact operations on bits and
    floats only, so neither threads nor vectors show."""
    values = blocks.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    bits = values.view(torch.int32)
    scratch = torch.bitwise_and(bits, 0x7FFFFFFF)
    largest = scratch.amax(dims, keepdim=True)
    # 448 = 1.75 * 2^8, and 0x600000 is the .75 among the 23 bits of a fraction. Codes of scales as in E8M0: 127 is 1.
    scales = ((largest >> 23) - 8 + ((largest & 0x7FFFFF) > 0x600000)).clamp_(min=0)
    values.mul_(((254 - scales) << 23).view(torch.float32))
    # Of a value in [2^e, 2^(e+1)) three bits of fraction stay, below 2^-6 multiples of 2^-9. Adding 1.5 * 2^(e + 20) puts
    # the last of them at the end of a float, which rounds there, ties to even, and taking it away again is exact.
    torch.bitwise_and(bits, 0x7F800000, out=scratch).clamp_(min=(127 - 6) << 23).add_((20 << 23) | 0x400000)
    magic = scratch.view(torch.float32)
    return torch.add(values, magic).sub_(magic).copysign_(values), scales, largest >= 0x7F800000
