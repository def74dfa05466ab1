"""Launches of the optimizer's kernels: one pass where separate operations would make twenty.

Owns block sizes. What the numbers mean is `mok/train/optim.py`'s, the arithmetic `mok/kernels/optimizer.py`'s.
"""

from __future__ import annotations

import triton
from torch import Tensor

from mok.kernels import optimizer as kernels

__all__ = ["adamw", "square_sums"]

BLOCK = 2048
"""Elements of a program: with 8 warps each thread moves 16 bytes of a bf16 moment at a time."""


def adamw(
    weights: Tensor | None,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grads: Tensor,
    numbers: Tensor,
    *,
    beta1: float,
    beta2: float,
    decay: bool,
) -> None:
    """Update flat tensors of equal length in place, see the kernel. weights: None where they are the master weights."""
    kernels.adamw[(triton.cdiv(master.numel(), BLOCK),)](
        master if weights is None else weights,
        master,
        exp_avg,
        exp_avg_sq,
        grads,
        numbers,
        master.numel(),
        beta1,
        beta2,
        DECAY=decay,
        APART=weights is not None,
        BLOCK=BLOCK,
        num_warps=8,
        enable_fp_fusion=False,
    )


def square_sums(flat: Tensor, width: int) -> Tensor:
    """Sums of squares of consecutive `width` elements of a flat fp32 tensor: [n] to [n / width]."""
    sums = flat.new_empty(flat.numel() // width)
    blocks = 16
    kernels.square_sums[(triton.cdiv(sums.numel(), blocks),)](
        flat, sums, sums.numel(), WIDTH=width, BLOCKS=blocks, num_warps=4, enable_fp_fusion=False
    )
    return sums
