"""Launches of `mok/kernels/product.py`.

Owns block sizes, which are a function of the weights' shape and the dtype, never of the number of rows.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from mok.kernels import product as kernels

__all__ = ["product_of_rows"]


def product_of_rows(x_TC: Tensor, w_CN: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """x @ w [T, N] on a GPU, summed in fp32 without TF32; the bits of a row do not depend on the other rows.

    x_TC, w_CN: both bf16 or both fp32, w of any strides. dtype: of the result, bf16 or fp32. out: where to write it, if not to
    new memory.
    """
    if x_TC.dtype != w_CN.dtype or x_TC.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"operands are {x_TC.dtype} and {w_CN.dtype}; both must be torch.bfloat16, or both torch.float32")
    if x_TC.stride(1) != 1:
        x_TC = x_TC.contiguous()
    (tokens, inner), width = x_TC.shape, w_CN.shape[1]
    if out is None:
        out = x_TC.new_empty(tokens, width, dtype=dtype)
    if tokens and width:
        rows, columns, at_once = 128 if width > 128 else 64, 128, 64
        if x_TC.dtype == torch.float32:
            rows, columns, at_once = 64, 64, 32
        columns = min(max(triton.next_power_of_2(width), 16), columns)
        kernels.product_of_rows[(triton.cdiv(tokens, rows), triton.cdiv(width, columns))](
            x_TC,
            w_CN,
            out,
            tokens,
            inner,
            width,
            x_TC.stride(0),
            w_CN.stride(0),
            w_CN.stride(1),
            out.stride(0),
            ROWS=rows,
            COLUMNS=columns,
            INNER=at_once,
            num_warps=8,
            num_stages=3,
        )
    return out
