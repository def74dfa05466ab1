"""RMSNorm with an explicit backward: fp32 inside, rounded to the input's dtype, then times the weight.

Owns the formula and its derivative as plain functions (attention normalises heads with them too) and the module of the
residual stream. On a GPU one kernel each way does the same (`mok/launch/dense.py`). See `mok/model/attention.py` for the other
user.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

__all__ = ["RMSNorm", "has_kernels", "rms_norm", "rms_norm_backward", "rms_normed", "weight_gradient"]


def rms_normed(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x / rms(x) over the last dim, in the dtype of x; 1 / rms, in fp32 or fp64, with the last dim 1)."""
    wide = x if x.dtype == torch.float64 else x.float()
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * rstd).to(x.dtype), rstd


def rms_norm_backward(dy: Tensor, normed: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(dx in the dtype of `rstd`, dy * normed: the weight's gradient before any sum over tokens).

    With n = x rstd: dx = rstd (w dy - n mean(n w dy)).
    """
    dy, normed = dy.to(rstd.dtype), normed.to(rstd.dtype)
    per_row = dy * normed
    dx = dy * weight
    mean = (dx * normed).mean(-1, keepdim=True)
    return dx.sub_(normed * mean).mul_(rstd), per_row


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, w_H: Tensor, eps: float) -> Tensor:
        normed_TH, rstd_T1 = rms_normed(x_TH, eps)
        if not any(ctx.needs_input_grad):
            return normed_TH.mul_(w_H)
        ctx.save_for_backward(normed_TH, rstd_T1, w_H)
        ctx.parameter = w_H
        return w_H * normed_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TH: Tensor) -> tuple[Tensor, Tensor | None, None]:
        normed_TH, rstd_T1, w_H = ctx.saved_tensors
        dx_TH, per_row_TH = rms_norm_backward(dy_TH, normed_TH, rstd_T1, w_H)
        dw_H = None
        if ctx.needs_input_grad[1]:
            sink = getattr(ctx.parameter, "grad_sink", None)
            if sink is None:
                dw_H = per_row_TH.sum(0).to(w_H.dtype)
            else:
                sink.column_sums(per_row_TH)
        return dx_TH.to(dy_TH.dtype), dw_H, None


class _OnGpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, w_H: Tensor, eps: float) -> Tensor:
        from mok.launch import dense

        y_TH, rstd_T = dense.rms_norm(x_TH, w_H, eps)
        ctx.save_for_backward(x_TH, rstd_T, w_H)
        ctx.parameter = w_H
        return y_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TH: Tensor) -> tuple[Tensor, Tensor | None, None]:
        from mok.launch import dense

        x_TH, rstd_T, w_H = ctx.saved_tensors
        sink = getattr(ctx.parameter, "grad_sink", None)
        dx_TH, dw_CH = dense.rms_norm_backward(dy_TH, x_TH, rstd_T, w_H, sink.num_slices if sink else 1)
        return dx_TH, weight_gradient(ctx.parameter, dw_CH), None


def has_kernels(x: Tensor) -> bool:
    """Whether the kernels of `mok/launch/dense.py` compute on x; the plain functions also know fp64 and CPUs."""
    return x.is_cuda and x.dtype != torch.float64


def weight_gradient(weight: Tensor, per_slice: Tensor) -> Tensor | None:
    """Hand fp32 gradients [slices, *shape] to the weight's sink; without one, what autograd is to put into `.grad`."""
    sink = getattr(weight, "grad_sink", None)
    if not weight.requires_grad:
        return None
    if sink is None:
        return per_slice.sum(0).to(weight.dtype)
    sink.add(per_slice)
    return None


def rms_norm(x_TH: Tensor, w_H: Tensor, eps: float) -> Tensor:
    """w * (x / sqrt(mean(x^2) + eps)) for each row of [T, H]."""
    return (_OnGpu if has_kernels(x_TH) else _RMSNorm).apply(x_TH, w_H, eps)


class RMSNorm(nn.Module):
    """RMSNorm over a last dim of `size`, initially with weight 1."""

    def __init__(self, size: int, eps: float, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype))
        self.eps = eps

    def forward(self, x_TH: Tensor) -> Tensor:
        return rms_norm(x_TH, self.weight, self.eps)
