"""Launches of the kernels between the dense products: norms, attention heads, cross-entropy.

Owns block sizes and how many rows a program sums, which fix the order of sums over tokens. The layers that call this are
`mok/model/norm.py`, `mok/model/attention.py` and `mok/model/loss.py`; the arithmetic is `mok/kernels/dense.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from mok.kernels import dense as kernels

__all__ = ["Heads", "cross_entropy", "norm_and_rotate", "norm_and_rotate_backward", "rms_norm", "rms_norm_backward"]

ROWS = 16
"""Rows of a slice whose share of a weight's gradient one program sums: enough programs for a GPU at 4096 rows, and few sums."""

AT_ONCE = 2
"""Of these, how many the backward of a norm loads before it needs the first."""


def rms_norm(x_TH: Tensor, branch_TH: Tensor | None, w_H: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(s = x + branch, in the memory of `branch`, or x where there is none; w times s over its root mean square, in the dtype
    of x; the reciprocal roots, fp32 [T])."""
    x_TH = x_TH.contiguous()
    tokens, width = x_TH.shape
    y_TH, rstd_T = torch.empty_like(x_TH), x_TH.new_empty(tokens, dtype=torch.float32)
    total_TH = x_TH if branch_TH is None else branch_TH
    if tokens:
        block = triton.next_power_of_2(width)
        kernels.rms_norm[(tokens,)](
            x_TH,
            total_TH,
            w_H,
            y_TH,
            rstd_T,
            width,
            eps,
            ADD=branch_TH is not None,
            BLOCK=block,
            num_warps=_warps(block),
            enable_fp_fusion=False,
        )
    return total_TH, y_TH, rstd_T


def rms_norm_backward(
    dy_TH: Tensor, dtotal_TH: Tensor | None, x_TH: Tensor, rstd_T: Tensor, w_H: Tensor, num_slices: int
) -> tuple[Tensor, Tensor]:
    """(dx in the dtype of dy, dtotal added where there is one; fp32 [slices, H], the weight's gradient of each slice)."""
    dy_TH, x_TH = dy_TH.contiguous(), x_TH.contiguous()
    tokens, width = x_TH.shape
    dx_TH, rows = torch.empty_like(dy_TH), tokens // num_slices
    programs, block = triton.cdiv(rows, ROWS), triton.next_power_of_2(width)
    partial = x_TH.new_empty(num_slices, programs, width, dtype=torch.float32)
    if tokens:
        kernels.rms_norm_backward[(programs, num_slices)](
            dy_TH,
            dy_TH if dtotal_TH is None else dtotal_TH.contiguous(),
            x_TH,
            rstd_T,
            w_H,
            dx_TH,
            partial,
            width,
            rows,
            ADD=dtotal_TH is not None,
            ROWS=ROWS,
            AT_ONCE=AT_ONCE,
            BLOCK=block,
            num_warps=_warps(block),
            enable_fp_fusion=False,
        )
    return dx_TH, partial.sum(1)


@dataclass(frozen=True)
class Heads:
    """Some heads of each token. first, count: which. kind: how they are normalised, see `mok.kernels.dense.norm_and_rotate`."""

    first: int
    count: int
    kind: str


def norm_and_rotate(
    x_BSXD: Tensor, heads: Heads, weight: Tensor | None, cos_SXr: Tensor, sin_SXr: Tensor, eps: float, y_BSYD: Tensor
) -> Tensor:
    """Normalise and rotate `heads` of x into the heads of the same number in y; returns the reciprocal roots, fp32.

    x_BSXD, y_BSYD: contiguous. cos_SXr, sin_SXr: equal for all heads.
    """
    batch, length, _, dim = x_BSXD.shape
    tokens = batch * length
    rstd = x_BSXD.new_empty((tokens, heads.count) if heads.kind == "head" else (tokens,), dtype=torch.float32)
    if tokens:
        x = x_BSXD[:, :, heads.first :]
        kernels.norm_and_rotate[(tokens,)](
            x,
            x if weight is None else weight,
            cos_SXr,
            sin_SXr,
            y_BSYD[:, :, heads.first :],
            rstd,
            length,
            x_BSXD.stride(1),
            y_BSYD.stride(1),
            cos_SXr.stride(0),
            eps,
            heads.count,
            KIND="none" if weight is None else heads.kind,
            **_blocks(heads, dim, cos_SXr.shape[-1]),
        )
    return rstd


def norm_and_rotate_backward(
    dy_BSYD: Tensor,
    x_BSXD: Tensor,
    heads: Heads,
    weight: Tensor | None,
    cos_SXr: Tensor,
    sin_SXr: Tensor,
    rstd: Tensor,
    dx_BSXD: Tensor,
    num_slices: int,
) -> Tensor | None:
    """Write the gradient of `heads` into dx, of the shape of x; returns the weight's, fp32 [slices, *shape], if there is one.

    dy_BSYD: the gradient of these heads alone, the channels of a token's heads side by side.
    """
    batch, length, _, dim = x_BSXD.shape
    rows = batch * length // num_slices
    programs = triton.cdiv(rows, ROWS)
    kept = 0 if weight is None else programs
    partial = x_BSXD.new_empty(num_slices, kept, heads.count, dim, dtype=torch.float32)
    if rows:
        x, dx = x_BSXD[:, :, heads.first :], dx_BSXD[:, :, heads.first :]
        kernels.norm_and_rotate_backward[(programs, num_slices)](
            dy_BSYD,
            x,
            x if weight is None else weight,
            cos_SXr,
            sin_SXr,
            rstd,
            dx,
            partial,
            length,
            dy_BSYD.stride(1),
            x_BSXD.stride(1),
            cos_SXr.stride(0),
            heads.count,
            rows,
            KIND="none" if weight is None else heads.kind,
            ROWS=ROWS,
            **_blocks(heads, dim, cos_SXr.shape[-1]),
        )
    if weight is None:
        return None
    per_slice = partial.sum(1)
    return per_slice.sum(1) if heads.kind == "head" else per_slice.flatten(1)


def cross_entropy(logits_TV: Tensor, vocab_size: int, targets_T: Tensor, ignored: int, scale: Tensor | None) -> Tensor:
    """The loss of each token, fp32 [T]; with `scale`, the logits become the gradient of scale times their sum.

    logits_TV: contiguous. targets_T: int64. scale: one number on the device.
    """
    losses_T = logits_TV.new_empty(logits_TV.shape[0], dtype=torch.float32)
    if losses_T.numel():
        kernels.cross_entropy[(losses_T.numel(),)](
            logits_TV,
            targets_T,
            losses_T,
            logits_TV.shape[1],
            vocab_size,
            targets_T if scale is None else scale,
            ignored,
            GRADIENT=scale is not None,
            BLOCK=min(4096, triton.next_power_of_2(logits_TV.shape[1])),
            num_warps=8,
            enable_fp_fusion=False,
        )
    return losses_T


def _blocks(heads: Heads, dim: int, rotated: int) -> dict[str, int | bool]:
    count, half = triton.next_power_of_2(heads.count), rotated // 2
    return {
        "DIM": dim,
        "HALF": half,
        "HEADS": count,
        "BLOCK_HALF": triton.next_power_of_2(half),
        "BLOCK_REST": triton.next_power_of_2(max(dim - rotated, 1)),
        "num_warps": _warps(count * dim),
        "enable_fp_fusion": False,
    }


def _warps(elements: int) -> int:
    """Warps for a row: 16 elements a thread, at least one warp and at most 16."""
    return min(max(triton.next_power_of_2(elements) // 512, 1), 16)
