"""RMSNorm with an explicit backward: fp32 inside, rounded to the input's dtype, then times the weight.

Owns the formula and its derivative as plain functions (attention normalises heads with them too) and the module of the
residual stream, which also adds what comes back from a branch. On a GPU one kernel each way does the same
(`mok/launch/dense.py`). See `mok/model/attention.py` for the other user.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mok.gradients import add_gradient, slices_of

__all__ = ["RMSNorm", "add_and_norm", "has_kernels", "rms_norm_backward", "rms_normed"]


def rms_normed(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x / rms(x) over the last dim, in the dtype of x; 1 / rms, in fp32 or fp64, with the last dim 1)."""
    wide = x if x.dtype == torch.float64 else x.float()
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * rstd).to(x.dtype), rstd


def rms_norm_backward(dy: Tensor, normed: Tensor, rstd: Tensor, weight: Tensor, num_slices: int) -> tuple[Tensor, Tensor]:
    """(dx in the dtype of `rstd` and the shape of dy; the weight's gradient of each slice).

    dy: [T, ..., X] with the tokens of `num_slices` slices, T > 0. weight: what each token is multiplied with, [..., X]. With
    n = x rstd: dx = rstd (w dy - n mean(n w dy)), and the weight's gradient [slices, ..., X] sums n dy.

    dx is what weight normalisation g v / |v| gives v = n with |n| = sqrt(X) and g = rstd sqrt(X), so its kernel computes it, in
    one pass, each row by itself.
    """
    size = dy.shape[-1]
    dy, normed = dy.to(rstd.dtype), normed.to(rstd.dtype)
    scratch = dy * normed
    dw = scratch.view(num_slices, -1, *dy.shape[1:]).sum(1)
    dnormed = torch.mul(dy, weight, out=scratch).view(-1, size)
    length = rstd.new_full((dnormed.shape[0], 1), math.sqrt(size))
    dx, _ = torch.ops.aten._weight_norm_interface_backward(
        dnormed, normed.view(-1, size), rstd.view(-1, 1) * math.sqrt(size), length, 0
    )
    return dx.view(dy.shape), dw


class _RMSNorm(torch.autograd.Function):
    """Each of these functions returns the sum that it normalises too, so that its backward adds what reaches that."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, branch_TH: Tensor | None, w_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total_TH = x_TH if branch_TH is None else branch_TH.add_(x_TH)
        if branch_TH is not None:
            ctx.mark_dirty(branch_TH)
        ctx.set_materialize_grads(False)
        normed_TH, rstd_T1 = rms_normed(total_TH, eps)
        if not any(ctx.needs_input_grad):
            return total_TH, normed_TH.mul_(w_H)
        ctx.save_for_backward(normed_TH, rstd_T1, w_H)
        ctx.parameter = w_H
        return total_TH, w_H * normed_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal_TH: Tensor | None, dy_TH: Tensor) -> tuple[Tensor | None, ...]:
        normed_TH, rstd_T1, w_H = ctx.saved_tensors
        dx_TH, dw_CH = rms_norm_backward(dy_TH, normed_TH, rstd_T1, w_H, slices_of(ctx.parameter))
        dx_TH = dx_TH.to(dy_TH.dtype)
        if dtotal_TH is not None:
            dx_TH.add_(dtotal_TH)
        return dx_TH, dx_TH if ctx.needs_input_grad[1] else None, add_gradient(ctx.parameter, dw_CH), None


class _OnGpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, branch_TH: Tensor | None, w_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        from mok.launch import dense

        total_TH, y_TH, rstd_T = dense.rms_norm(x_TH, branch_TH, w_H, eps)
        if branch_TH is not None:
            ctx.mark_dirty(branch_TH)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(total_TH, rstd_T, w_H)
        ctx.parameter = w_H
        return total_TH, y_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal_TH: Tensor | None, dy_TH: Tensor) -> tuple[Tensor | None, ...]:
        from mok.launch import dense

        x_TH, rstd_T, w_H = ctx.saved_tensors
        dx_TH, dw_CH = dense.rms_norm_backward(dy_TH, dtotal_TH, x_TH, rstd_T, w_H, slices_of(ctx.parameter))
        return dx_TH, dx_TH if ctx.needs_input_grad[1] else None, add_gradient(ctx.parameter, dw_CH), None


def has_kernels(x: Tensor) -> bool:
    """Whether the kernels of `mok/launch/dense.py` compute on x; the plain functions also know fp64 and CPUs."""
    return x.is_cuda and x.dtype != torch.float64


def add_and_norm(x_TH: Tensor, branch_TH: Tensor | None, w_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(s = x + branch, in the memory of `branch`, or x where there is none; w s / sqrt(mean(s^2) + eps) by rows), [T, H]."""
    return (_OnGpu if has_kernels(x_TH) else _RMSNorm).apply(x_TH, branch_TH, w_H, eps)


class RMSNorm(nn.Module):
    """RMSNorm over a last dim of `size`, initially with weight 1."""

    def __init__(self, size: int, eps: float, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype))
        self.eps = eps

    def forward(self, x_TH: Tensor, branch_TH: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`add_and_norm` with this weight."""
        return add_and_norm(x_TH, branch_TH, self.weight, self.eps)
