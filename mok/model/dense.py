"""The feed-forward layer of blocks without experts: SwiGLU of two projections, then one back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mok.backends.activation import silu
from mok.model.linear import linear

__all__ = ["DenseMLP"]


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_TJ: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_TJ)
        gate_TI, up_TI = gate_up_TJ.chunk(2, dim=1)
        return silu(gate_TI).mul_(up_TI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TI: Tensor) -> Tensor:
        (gate_up_TJ,) = ctx.saved_tensors
        gate_TI, up_TI = gate_up_TJ.chunk(2, dim=1)
        wide = torch.promote_types(gate_TI.dtype, torch.float32)
        gate, up, dy = gate_TI.to(wide), up_TI.to(wide), dy_TI.to(wide)
        sigmoid = 1.0 / (1.0 + torch.exp(-gate))
        d_gate = dy * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid)))
        return torch.cat([d_gate, dy * (gate * sigmoid)], dim=1).to(dy_TI.dtype)


class DenseMLP(nn.Module):
    """down(silu(gate x) * up x). w_gate_up [2I, H] holds the gate rows, then the up rows; w_down [H, I]."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.w_gate_up = nn.Parameter(torch.empty(2 * intermediate_size, hidden_size, device=device, dtype=dtype))
        self.w_down = nn.Parameter(torch.empty(hidden_size, intermediate_size, device=device, dtype=dtype))

    def forward(self, x_TH: Tensor, slices: int = 1) -> Tensor:
        """[T, H] to [T, H], of the tokens of `slices` slices."""
        return linear(_SwiGLU.apply(linear(x_TH, self.w_gate_up, slices=slices)), self.w_down, slices=slices)
