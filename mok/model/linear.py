"""Linear layers and the embedding, with explicit backward passes.

Owns the two guarantees of rules 3 and 7 of docs/numerics.md for dense weights: a row of a product depends on that row and the
weights alone, and weight gradients are computed slice by slice (`mok/gradients.py`). Where they go is looked up on the
parameter itself, since what checkpointing gives back for a saved parameter is another tensor. Knows nothing of what the layers
are for.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mok.gradients import GEMM_MULTIPLE, add_gradient, add_product, slices_of

__all__ = ["embedding", "linear", "matmul_rows"]


def matmul_rows(x_TC: Tensor, w_CN: Tensor, slices: int = 1) -> Tensor:
    """x @ w whose rows do not depend on how many slices there are; N must be a multiple of 16.

    On a CPU a row depends on itself alone. On a GPU the library chooses its kernel by the number of rows, so each slice is a
    product of its own, of a shape that no layout changes.
    """
    tokens = x_TC.shape[0]
    if x_TC.is_cuda and slices > 1:
        y_TN = x_TC.new_empty(tokens, w_CN.shape[1])
        for rows, out in zip(x_TC.chunk(slices), y_TN.chunk(slices), strict=True):
            torch.mm(rows, w_CN, out=out)
        return y_TN
    padding = -tokens % GEMM_MULTIPLE
    if padding == 0:
        return x_TC @ w_CN
    return (F.pad(x_TC, (0, 0, 0, padding)) @ w_CN)[:tokens]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, w_NK: Tensor, b_N: Tensor | None, slices: int) -> Tensor:
        ctx.save_for_backward(x_TK, w_NK)
        ctx.parameters, ctx.slices = (w_NK, b_N), slices
        y_TN = matmul_rows(x_TK, w_NK.t(), slices)
        return y_TN if b_N is None else y_TN.add_(b_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x_TK, w_NK = ctx.saved_tensors
        weight, bias = ctx.parameters
        dx_TK = matmul_rows(dy_TN, w_NK, ctx.slices) if ctx.needs_input_grad[0] else None
        dw_NK = add_product(weight, dy_TN, x_TK) if ctx.needs_input_grad[1] else None
        db_N = None
        if ctx.needs_input_grad[2]:
            dy_CsN = dy_TN.view(slices_of(bias), -1, dy_TN.shape[1])
            db_N = add_gradient(bias, dy_CsN.sum(1, dtype=torch.promote_types(dy_TN.dtype, torch.float32)))
        return dx_TK, dw_NK, db_N, None


def linear(x_TK: Tensor, w_NK: Tensor, b_N: Tensor | None = None, slices: int = 1) -> Tensor:
    """x w^T + b for each row of x: [T, K] to [T, N]. N and K are multiples of 16, T is that of `slices` slices."""
    return _Linear.apply(x_TK, w_NK, b_N, slices)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids_T: Tensor, w_VH: Tensor) -> Tensor:
        ctx.save_for_backward(ids_T)
        ctx.parameter = w_VH
        return w_VH.index_select(0, ids_T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TH: Tensor) -> tuple[None, Tensor | None]:
        (ids_T,) = ctx.saved_tensors
        w_VH = ctx.parameter
        sink = getattr(w_VH, "embedding_sink", None) or getattr(w_VH, "grad_sink", None)
        if sink is None:
            return None, _scatter_rows(dy_TH, ids_T, w_VH.shape[0])
        # Each slice adds up in rows of its own.
        slices, (rows, width) = sink.num_slices, w_VH.shape
        first_row_C1 = torch.arange(0, slices * rows, rows, device=ids_T.device).unsqueeze(1)
        terms = _scatter_rows(dy_TH.float(), (ids_T.view(slices, -1) + first_row_C1).view(-1), slices * rows)
        sink.add(terms.view(slices, rows, width))
        return None, None


def _scatter_rows(dy_TH: Tensor, ids_T: Tensor, vocab_size: int) -> Tensor:
    """[V, H]: the sum of the rows of each id, in order of T. ATen's kernel gives each row of the result one owner."""
    return torch.ops.aten.embedding_dense_backward(dy_TH, ids_T, vocab_size, -1, False)


def embedding(ids_T: Tensor, w_VH: Tensor) -> Tensor:
    """Rows `ids` (int64, [T]) of w: [T, H]."""
    return _Embedding.apply(ids_T, w_VH)
