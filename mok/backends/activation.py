"""SiLU and its derivative on half a matrix, with the same bits for any number of threads; see `silu`."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["silu", "silu_backward"]

_GRAIN = 32768
"""Elements up to which ATen's element-wise CPU kernels use one thread (at::internal::GRAIN_SIZE)."""


def silu(gate_TI: Tensor) -> Tensor:
    """x / (1 + exp(-x)), as ATen computes it and therefore with the bits of other people's models.

    gate_TI: rows that are contiguous, or half of the columns of a wider matrix; widths are multiples of 16. What ATen's vectors
    of 32 elements leave over at the end of a row (or of a contiguous tensor) goes through another exponential whose last bit
    may differ. Threads share the elements evenly, which would move that border with their number wherever they cannot share
    pairs of rows; there it is done in pieces that stay on one thread.
    """
    out_TI = torch.empty_like(gate_TI, memory_format=torch.contiguous_format)
    step = _piece_rows(gate_TI) or max(gate_TI.shape[0], 1)
    for out, gate in zip(out_TI.split(step), gate_TI.split(step), strict=True):
        torch.ops.aten.silu.out(gate, out=out)
    return out_TI


def silu_backward(dy_TI: Tensor, gate_TI: Tensor, out_TI: Tensor) -> None:
    """out = dy * s * (1 + x * (1 - s)) with s = 1 / (1 + exp(-x)), all of it as in `silu`; fp32."""
    step = _piece_rows(gate_TI) or max(gate_TI.shape[0], 1)
    for out, dy, gate in zip(out_TI.split(step), dy_TI.split(step), gate_TI.split(step), strict=True):
        torch.ops.aten.silu_backward.grad_input(dy, gate, grad_input=out)


def _piece_rows(gate_TI: Tensor) -> int:
    """Rows of one piece; 0 where the whole can be done at once."""
    rows, width = gate_TI.shape
    threads = min(torch.get_num_threads(), -(-rows * width // _GRAIN))
    if not gate_TI.is_cpu or threads <= 1 or rows % (2 * threads) == 0:
        return 0
    return max(2, _GRAIN // width // 2 * 2)
