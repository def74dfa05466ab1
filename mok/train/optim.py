"""AdamW on fp32 master weights, and the global gradient norm, with bits that do not depend on how tensors are cut.

Owns moments and master weights as flat tensors (one `ParameterGroup` per kind of parameter) and the arithmetic of rules 9
and 12 of docs/numerics.md: element by element with separately rounded products and sums, reductions over fixed blocks of one
logical tensor. Knows nothing of models, layouts or files.

Update of one element, g already scaled by the clipping factor:

    m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2        c = sqrt(1 - b2^t)
    w = w (1 - lr wd) - lr c / (1 - b1^t) * m / (sqrt(v) + eps c)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mok.config import OptimConfig
from mok.gradients import ALIGNMENT, Bank

__all__ = ["MOMENT_DTYPES", "AdamW", "ParameterGroup", "gradient_norm", "tensor_square_sums"]

MOMENT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

CHUNK = {"cpu": 1 << 16, "cuda": 1 << 26}
"""Elements worked on at once: on the CPU the six operands of a chunk stay in a core's cache, on a GPU few launches count."""


@dataclass
class ParameterGroup:
    """Parameters with one weight decay, as flat tensors laid out by `bank`.

    weights: what the forward reads, in the model's dtype; the parameters are views of it. master: fp32, the same memory as
    `weights` where the model is fp32. exp_avg, exp_avg_sq: moments. grads: fp32, the main gradients.
    """

    bank: Bank
    weights: Tensor
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grads: Tensor
    weight_decay: float

    @classmethod
    def of(cls, bank: Bank, grads: Tensor, weight_decay: float, moment_dtype: torch.dtype) -> ParameterGroup:
        """Move the parameters of `bank` into one flat tensor; the moments start at zero."""
        weights = bank.flat(bank.parameters[0].dtype)
        for parameter, view in zip(bank.parameters, bank.views(weights), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        master = weights if weights.dtype == torch.float32 else weights.float()
        return cls(bank, weights, master, bank.flat(moment_dtype), bank.flat(moment_dtype), grads, weight_decay)


class AdamW:
    """One optimizer over several groups. `step` is the only method that changes anything."""

    def __init__(self, groups: Sequence[ParameterGroup], config: OptimConfig) -> None:
        self.groups = list(groups)
        self.config = config

    @torch.no_grad()
    def step(self, step: int, lr: float, scale: float) -> None:
        """Update number `step` (from 1, for the bias corrections) with gradients multiplied by `scale`."""
        for group in self.groups:
            chunk = CHUNK[group.master.device.type]
            size = min(chunk, group.bank.numel)
            buffers = torch.empty(3, size, device=group.master.device)
            for start in range(0, group.bank.numel, chunk):
                self._update(group, slice(start, min(start + chunk, group.bank.numel)), buffers, step, lr, scale)

    def _update(self, group: ParameterGroup, part: slice, buffers: Tensor, step: int, lr: float, scale: float) -> None:
        """Rows of `buffers` are scratch. Products and sums are separate operations on purpose: `addcmul` and `lerp` round
        once where the vector unit is used and twice at the end of a tensor, so the place of a cut would show."""
        config = self.config
        correction = math.sqrt(1.0 - config.beta2**step)
        other, wide_m, wide_v = buffers[:, : part.stop - part.start]
        grad, m, v, master = group.grads[part], group.exp_avg[part], group.exp_avg_sq[part], group.master[part]
        exact = m.dtype == torch.float32
        first, second = (m, v) if exact else (wide_m.copy_(m), wide_v.copy_(v))
        first.mul_(config.beta1).add_(torch.mul(grad, (1.0 - config.beta1) * scale, out=other))
        torch.mul(grad, math.sqrt(1.0 - config.beta2) * scale, out=other)
        second.mul_(config.beta2).add_(other.mul_(other))
        if not exact:
            m.copy_(first)
            v.copy_(second)
        torch.sqrt(second, out=other).add_(config.eps * correction)
        torch.div(first, other, out=other).mul_(lr * correction / (1.0 - config.beta1**step))
        if group.weight_decay:
            master.mul_(1.0 - lr * group.weight_decay)
        master.sub_(other)
        if group.weights is not group.master:
            group.weights[part].copy_(master)


def block_sums(values: Tensor) -> Tensor:
    """Sums of consecutive `ALIGNMENT` elements: [n] to [n / ALIGNMENT]."""
    return values.view(-1, ALIGNMENT).sum(-1)


def tensor_square_sums(flat: Tensor, bank: Bank, matrices: Sequence[int]) -> list[float]:
    """Sum of squares of every logical tensor of a bank, in its order.

    matrices: for each parameter, how many logical tensors of equal size it stacks on its leading dims (experts).
    Each sum is made of fixed blocks of that tensor alone, so it is the same wherever the tensor lives.
    """
    chunk = CHUNK[flat.device.type]
    squares = [block_sums(flat[start : start + chunk].square()) for start in range(0, bank.numel, chunk)]
    blocks = torch.cat(squares) if squares else flat.new_zeros(0)
    sums = []
    for start, parameter, count in zip(bank.starts, bank.parameters, matrices, strict=True):
        first = start // ALIGNMENT
        length = -(-parameter.numel() // ALIGNMENT)
        part = blocks[first : first + length].view(count, -1)
        while part.shape[1] > ALIGNMENT:
            part = torch.nn.functional.pad(part, (0, -part.shape[1] % ALIGNMENT)).view(count, -1, ALIGNMENT).sum(-1)
        sums.append(part.sum(-1))
    return torch.cat(sums).tolist() if sums else []


def gradient_norm(square_sums: Sequence[float]) -> float:
    """Global norm from the sums of squares of all logical tensors of all ranks. `fsum` is exact, so no order shows.

    NaN or infinity in any of them comes out as NaN or infinity.
    """
    if not all(map(math.isfinite, square_sums)):
        return math.nan
    return math.sqrt(math.fsum(square_sums))
