"""SiLU of half a matrix, with the same bits for any number of threads; see `silu`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["silu"]

_GRAIN = 32768
"""Elements up to which ATen's element-wise CPU kernels use one thread (at::internal::GRAIN_SIZE)."""


def silu(gate_TI: Tensor) -> Tensor:
    """x / (1 + exp(-x)), as ATen computes it and therefore with the bits of other people's models, in new memory.

    gate_TI: rows that are contiguous, or half of the columns of a wider matrix; widths are multiples of 16. What ATen's vectors
    of 32 elements leave over at the end of a row (or of a contiguous tensor) goes through another exponential whose last bit
    may differ. Threads share the elements evenly, which would move that border with their number wherever they cannot share
    pairs of rows; there it is done in pieces that stay on one thread.
    """
    rows, width = gate_TI.shape
    threads = min(torch.get_num_threads(), -(-rows * width // _GRAIN))
    if not gate_TI.is_cpu or threads <= 1 or rows % (2 * threads) == 0:
        return F.silu(gate_TI)
    out_TI = torch.empty_like(gate_TI, memory_format=torch.contiguous_format)
    step = max(2, _GRAIN // width // 2 * 2)
    for start in range(0, rows, step):
        out_TI[start : start + step] = F.silu(gate_TI[start : start + step])
    return out_TI
