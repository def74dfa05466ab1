"""Launches of the router's kernels.

Owns block sizes, which fix the order of sums over tokens. The layer is `mok/model/router.py`.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from mok.kernels import router as kernels

__all__ = ["route", "route_backward"]


def route(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    valid_T: Tensor | None,
    num_slices: int,
    *,
    top_k: int,
    softmax: bool,
    normalize: bool,
    epsilon: float,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(ids_TK int32, weights_TK, what they were divided by [T], logsumexp [T], sums [slices, 2 E + 2]), see the kernel."""
    tokens, experts = logits_TE.shape
    block, rows = _blocks(experts)
    per_slice = tokens // num_slices
    programs = triton.cdiv(per_slice, rows)
    ids_TK = torch.empty(tokens, top_k, dtype=torch.int32, device=logits_TE.device)
    weights_TK, totals_T, lse_T = (logits_TE.new_empty(shape) for shape in ((tokens, top_k), (tokens,), (tokens,)))
    partial = logits_TE.new_empty(num_slices, programs, 2 * experts + 2)
    if tokens:
        kernels.route[(programs, num_slices)](
            logits_TE,
            logits_TE if bias_E is None else bias_E,
            logits_TE if valid_T is None else valid_T,
            ids_TK,
            weights_TK,
            totals_T,
            lse_T,
            partial,
            per_slice,
            experts,
            epsilon,
            scaling,
            K=top_k,
            SOFTMAX=softmax,
            NORMALIZE=normalize,
            BIASED=bias_E is not None,
            MASKED=valid_T is not None,
            ROWS=rows,
            EXPERTS=block,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return ids_TK, weights_TK, totals_T, lse_T, partial.sum(1)


def route_backward(
    logits_TE: Tensor,
    ids_TK: Tensor,
    totals_T: Tensor,
    lse_T: Tensor,
    dweights_TK: Tensor | None,
    balance_CE: Tensor | None,
    dz_C: Tensor | None,
    num_slices: int,
    *,
    softmax: bool,
    normalize: bool,
    scaling: float,
) -> Tensor:
    """dlogits_TE, see the kernel; gradients that are None count as zeros."""
    tokens, experts = logits_TE.shape
    block, rows = _blocks(experts)
    per_slice = tokens // num_slices
    dlogits_TE = torch.empty_like(logits_TE)
    if tokens:
        kernels.route_backward[(triton.cdiv(per_slice, rows), num_slices)](
            logits_TE,
            ids_TK,
            totals_T,
            lse_T,
            lse_T if dweights_TK is None else dweights_TK.contiguous(),
            lse_T if balance_CE is None else balance_CE,
            lse_T if dz_C is None else dz_C,
            dlogits_TE,
            per_slice,
            experts,
            scaling,
            K=ids_TK.shape[1],
            SOFTMAX=softmax,
            NORMALIZE=normalize,
            WEIGHTS=dweights_TK is not None,
            BALANCE=balance_CE is not None,
            Z=dz_C is not None,
            ROWS=rows,
            EXPERTS=block,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return dlogits_TE


def _blocks(experts: int) -> tuple[int, int]:
    """Columns and rows of a tile: 2048 numbers, 16 a thread."""
    block = triton.next_power_of_2(experts)
    return block, max(2048 // block, 1)
