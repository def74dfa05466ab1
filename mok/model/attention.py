"""Grouped-query attention: one projection for queries, keys and values, their norms and rotation, SDPA, one projection back.

Owns everything between the residual stream and the heads. Attention is causal within a sequence and does not stop at document
borders inside it: packed documents see what was packed before them, only the loss respects the border (docs/numerics.md).
Norms of heads and the rotary embedding are one autograd function with SDPA, so that their backward passes share buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from mok.config import ModelConfig
from mok.gradients import add_gradient, slices_of
from mok.model.linear import linear
from mok.model.norm import rms_norm_backward, rms_normed

__all__ = ["Attention", "Rotary"]


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines of the rotary embedding for each position and head, [S, X, r] each, in the activations' dtype.

    Half-split form: of the r leading channels of a head, channel i is rotated with channel i + r/2 by the angle
    position / theta^(2i/r); both halves of the last dim hold the same values. They are written out for all X heads that are
    rotated, so that a product with them is one long vector operation.
    """

    cos_SXr: Tensor
    sin_SXr: Tensor

    @classmethod
    def of(cls, positions: int, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Rotary:
        rotated = int(config.head_dim * config.rotary_fraction)
        exponent = torch.arange(0, rotated, 2, dtype=torch.float32, device=device) / rotated
        frequency = 1.0 / (config.rope_theta**exponent)
        angle = torch.arange(positions, dtype=torch.float32, device=device)[:, None, None] * frequency
        heads = config.num_heads + config.num_kv_heads
        cos, sin = (torch.cat([f, f], -1).to(dtype).expand(-1, heads, -1).contiguous() for f in (angle.cos(), angle.sin()))
        return cls(cos, sin)

    def rotate_(self, x_BSXD: Tensor) -> Tensor:
        """Rotate every head of x in place."""
        rotated = self.cos_SXr.shape[-1]
        part = x_BSXD[..., :rotated]
        crossed = part * self.sin_SXr
        part.mul_(self.cos_SXr)
        first, second = part.chunk(2, -1)
        crossed_first, crossed_second = crossed.chunk(2, -1)
        first.sub_(crossed_second)
        second.add_(crossed_first)
        return x_BSXD

    def rotated_back(self, parts: Sequence[Tensor]) -> Tensor:
        """The heads of all parts, [B, S, *, D] each, side by side and rotated back: [B, S, X, D]."""
        rotated = self.cos_SXr.shape[-1]
        batch, length, _, dim = parts[0].shape
        heads = [part.shape[2] for part in parts]
        out_BSXD = parts[0].new_empty(batch, length, sum(heads), dim)
        crossed_BSXr = parts[0].new_empty(batch, length, sum(heads), rotated)
        places = (
            out_BSXD.split(heads, 2),
            crossed_BSXr.split(heads, 2),
            self.cos_SXr.split(heads, 1),
            self.sin_SXr.split(heads, 1),
        )
        for part, out, crossed, cos, sin in zip(parts, *places, strict=True):
            torch.mul(part[..., :rotated], cos, out=out[..., :rotated])
            torch.mul(part[..., :rotated], sin, out=crossed)
            if rotated < dim:
                out[..., rotated:] = part[..., rotated:]
        first, second = out_BSXD[..., :rotated].chunk(2, -1)
        crossed_first, crossed_second = crossed_BSXr.chunk(2, -1)
        first.add_(crossed_second)
        second.sub_(crossed_first)
        return out_BSXD


def _sdpa(q_BASD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor) -> Tensor:
    """Causal attention, [B, A, S, D] in and out.

    On a GPU only the composed kernel is allowed, whose backward repeats bit for bit; what fused attention can do does not come
    here.
    """
    grouped = q_BASD.shape[1] != k_BGSD.shape[1]
    with sdpa_kernel(SDPBackend.MATH) if q_BASD.is_cuda else nullcontext():
        return F.scaled_dot_product_attention(q_BASD, k_BGSD, v_BGSD, is_causal=True, enable_gqa=grouped)


class _Heads(torch.autograd.Function):
    """From projected queries, keys and values [B, S, A + 2G, D] to attended values [B, S, A, D].

    On a CPU the two operations that SDPA stands for are called by themselves; a graph inside this function, as a GPU has it
    here, would stay in memory where blocks are computed again.
    """

    @staticmethod
    def forward(
        ctx: Any, heads_BSXD: Tensor, w_q: Tensor | None, w_k: Tensor | None, kind: str, num_q: int, eps: float, rotary: Rotary
    ) -> Tensor:
        num_kv = (heads_BSXD.shape[2] - num_q) // 2
        qk_BSXD = heads_BSXD[:, :, : num_q + num_kv]
        kept = []
        if w_q is None or w_k is None:
            qk_BSXD = qk_BSXD.clone()
        else:
            parts = []
            for x, w in zip(_groups(qk_BSXD, kind, num_q), _group_weights(w_q, w_k, kind, num_q, num_kv), strict=True):
                normed, rstd = rms_normed(x, eps)
                parts.append((normed * w).view(*qk_BSXD.shape[:2], -1, qk_BSXD.shape[-1]))
                kept += [normed, rstd]
            qk_BSXD = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        operands = _attention_operands(rotary.rotate_(qk_BSXD), heads_BSXD, num_q)
        if not any(ctx.needs_input_grad):
            return _sdpa(*operands).transpose(1, 2)
        ctx.kind, ctx.num_q, ctx.num_kv, ctx.rotary, ctx.parameters = kind, num_q, num_kv, rotary, (w_q, w_k)
        if heads_BSXD.is_cuda:
            leaves = [x.detach().requires_grad_() for x in operands]
            with torch.enable_grad():
                out_BASD = _sdpa(*leaves)
            ctx.graph = leaves, out_BASD
            ctx.save_for_backward(w_q, w_k, *kept)
            return out_BASD.detach().transpose(1, 2)
        out_BASD, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*operands, 0.0, True)
        ctx.graph = None
        ctx.save_for_backward(w_q, w_k, *kept, qk_BSXD, heads_BSXD, out_BASD, lse)
        return out_BASD.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_BSAD: Tensor) -> tuple[Tensor | None, ...]:
        w_q, w_k, *kept = ctx.saved_tensors
        num_q, num_kv = ctx.num_q, ctx.num_kv
        dout_BASD = dout_BSAD.transpose(1, 2)
        if ctx.graph is not None:
            leaves, out_BASD = ctx.graph
            gradients = torch.autograd.grad(out_BASD, leaves, dout_BASD)
        else:
            *kept, qk_BSXD, heads_BSXD, out_BASD, lse = kept
            gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dout_BASD, *_attention_operands(qk_BSXD, heads_BSXD, num_q), out_BASD, lse, 0.0, True
            )
        dq_BSAD, dk_BSGD, dv_BSGD = (d.transpose(1, 2) for d in gradients)
        dqk_BSXD = ctx.rotary.rotated_back([dq_BSAD, dk_BSGD])
        dheads_BSXD = dqk_BSXD.new_empty(*dqk_BSXD.shape[:2], num_q + 2 * num_kv, dqk_BSXD.shape[3])
        dheads_BSXD[:, :, num_q + num_kv :] = dv_BSGD
        if not kept:
            dheads_BSXD[:, :, : num_q + num_kv] = dqk_BSXD
            return dheads_BSXD, None, None, None, None, None, None
        slices = max(map(slices_of, ctx.parameters))
        weights = _group_weights(w_q, w_k, ctx.kind, num_q, num_kv)
        places = _groups(dheads_BSXD[:, :, : num_q + num_kv], ctx.kind, num_q)
        dws = []
        for place, d, normed, rstd, w in zip(
            places, _groups(dqk_BSXD, ctx.kind, num_q), kept[::2], kept[1::2], weights, strict=True
        ):
            d, normed, rstd = d.flatten(0, 1), normed.flatten(0, 1), rstd.flatten(0, 1)
            dx, dw = rms_norm_backward(d, normed, rstd, w, slices)
            place.copy_(dx.view(place.shape))
            dws.append(dw)
        if ctx.kind == "head":
            dws = [dw.sum(1) for dw in dws[0].split([num_q, num_kv], 1)]
        dw_q, dw_k = (add_gradient(weight, dw) for weight, dw in zip(ctx.parameters, dws, strict=True))
        return dheads_BSXD, dw_q, dw_k, None, None, None, None


class _HeadsOnGpu(torch.autograd.Function):
    """`_Heads` with one kernel each way for the norms and the rotation, and fused attention by explicit calls: a graph inside
    this function, as `_Heads` has one, would stay in memory where blocks are computed again.

    Keeps what was projected, the reciprocal roots, rotated queries and keys, and the result.
    """

    @staticmethod
    def forward(
        ctx: Any, heads_BSXD: Tensor, w_q: Tensor | None, w_k: Tensor | None, kind: str, num_q: int, eps: float, rotary: Rotary
    ) -> Tensor:
        from mok.launch import dense

        num_kv = (heads_BSXD.shape[2] - num_q) // 2
        parts = dense.Heads(0, num_q, kind), dense.Heads(num_q, num_kv, kind)
        qk_BSXD = heads_BSXD.new_empty(*heads_BSXD.shape[:2], num_q + num_kv, heads_BSXD.shape[3])
        rstds = [
            dense.norm_and_rotate(heads_BSXD, part, weight, rotary.cos_SXr, rotary.sin_SXr, eps, qk_BSXD)
            for part, weight in zip(parts, (w_q, w_k), strict=True)
        ]
        operands = _attention_operands(qk_BSXD, heads_BSXD, num_q)
        if not any(ctx.needs_input_grad):
            return torch.ops.aten._scaled_dot_product_flash_attention(*operands, is_causal=True)[0].transpose(1, 2)
        ctx.on_hopper = _on_hopper(heads_BSXD)
        if ctx.on_hopper:
            found = torch.ops.aten._scaled_dot_product_cudnn_attention(*operands, None, True, is_causal=True)
            out_BSAD, lse_BAS, rest, ctx.lengths = found[0].transpose(1, 2), found[1].squeeze(-1), (), ()
        else:
            out, lse_BAS, *rest = torch.ops.aten._scaled_dot_product_flash_attention(*operands, is_causal=True)
            out_BSAD, ctx.lengths, rest = out.transpose(1, 2), rest[2:4], (*rest[:2], *rest[4:6])
        ctx.save_for_backward(heads_BSXD, w_q, w_k, qk_BSXD, out_BSAD, lse_BAS, *rstds, *rest)
        ctx.parameters, ctx.parts, ctx.rotary = (w_q, w_k), parts, rotary
        return out_BSAD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_BSAD: Tensor) -> tuple[Tensor | None, ...]:
        from mok.launch import dense

        heads_BSXD, w_q, w_k, qk_BSXD, out_BSAD, lse_BAS, *rest = ctx.saved_tensors
        rstds, rest = rest[:2], rest[2:]
        num_q, dqk_BSXD, dheads_BSXD = ctx.parts[0].count, torch.empty_like(qk_BSXD), torch.empty_like(heads_BSXD)
        if ctx.on_hopper:
            from mok.launch.attention import attention_backward

            attention_backward(
                dout_BSAD.contiguous(), qk_BSXD, heads_BSXD, out_BSAD.contiguous(), lse_BAS.contiguous(), dqk_BSXD, dheads_BSXD
            )
        else:
            starts_q, starts_k, seed, offset = rest
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                dout_BSAD.transpose(1, 2), *_attention_operands(qk_BSXD, heads_BSXD, num_q), out_BSAD.transpose(1, 2), lse_BAS,
                starts_q, starts_k, *ctx.lengths, 0.0, True, seed, offset,
            )  # fmt: skip
            dqk_BSXD[:, :, :num_q], dqk_BSXD[:, :, num_q:] = dq.transpose(1, 2), dk.transpose(1, 2)
            dheads_BSXD[:, :, qk_BSXD.shape[2] :] = dv.transpose(1, 2)
        found = []
        cos, sin = ctx.rotary.cos_SXr, ctx.rotary.sin_SXr
        for part, weight, parameter, rstd in zip(ctx.parts, (w_q, w_k), ctx.parameters, rstds, strict=True):
            slices = 1 if parameter is None else slices_of(parameter)
            dy = dqk_BSXD[:, :, part.first : part.first + part.count]
            dw_CX = dense.norm_and_rotate_backward(dy, heads_BSXD, part, weight, cos, sin, rstd, dheads_BSXD, slices)
            found.append(None if dw_CX is None else add_gradient(parameter, dw_CX))
        return dheads_BSXD, found[0], found[1], None, None, None, None


def _attention_operands(qk_BSXD: Tensor, heads_BSXD: Tensor, num_q: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as attention wants them, [B, heads, S, D], without a copy."""
    parts = qk_BSXD[:, :, :num_q], qk_BSXD[:, :, num_q:], heads_BSXD[:, :, qk_BSXD.shape[2] :]
    q, k, v = (part.transpose(1, 2) for part in parts)
    return q, k, v


def _has_fused_attention(heads_BSXD: Tensor) -> bool:
    """Whether FlashAttention 2 can be used, whose backward repeats bit for bit under torch.use_deterministic_algorithms."""
    dim = heads_BSXD.shape[-1]
    return heads_BSXD.is_cuda and heads_BSXD.dtype in (torch.bfloat16, torch.float16) and dim % 8 == 0 and dim <= 256


def _on_hopper(heads_BSXD: Tensor) -> bool:
    """Whether training takes cuDNN's forward and the backward of `mok/kernels/attention.py`: twice as fast there as
    FlashAttention 2, whose kernels are of the generation before. cuDNN's own backward does not repeat bit for bit."""
    return (
        heads_BSXD.dtype == torch.bfloat16
        and heads_BSXD.shape[-1] in (64, 128)
        and torch.cuda.get_device_capability(heads_BSXD.device) == (9, 0)
        and torch.backends.cudnn.is_available()
    )


def _groups(qk_BSXD: Tensor, kind: str, num_q: int) -> list[Tensor]:
    """What is normalised together, as last dim: each head, or the queries and the keys as wholes."""
    return [qk_BSXD] if kind == "head" else [qk_BSXD[:, :, :num_q].flatten(2), qk_BSXD[:, :, num_q:].flatten(2)]


def _group_weights(w_q: Tensor, w_k: Tensor, kind: str, num_q: int, num_kv: int) -> list[Tensor]:
    """The weights of `_groups`."""
    return [torch.cat([w_q.expand(num_q, -1), w_k.expand(num_kv, -1)])] if kind == "head" else [w_q, w_k]


class Attention(nn.Module):
    """Causal grouped-query attention of `config`, with optional norms of queries and keys.

    w_qkv [(A + 2G) D, H] stacks the query, key and value projections, w_o [H, A D] goes back. The key and value projections
    have a bias where `attention_bias` says so, the way back has none.
    """

    def __init__(self, config: ModelConfig, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.config = config
        width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        empty: dict[str, Any] = {"device": device, "dtype": dtype}
        self.w_qkv = nn.Parameter(torch.empty(width, config.hidden_size, **empty))
        self.w_o = nn.Parameter(torch.empty(config.hidden_size, config.num_heads * config.head_dim, **empty))
        self.b_qkv = nn.Parameter(torch.zeros(width, **empty)) if config.attention_bias else None
        self.w_q_norm: nn.Parameter | None = None
        self.w_k_norm: nn.Parameter | None = None
        if config.qk_norm != "none":
            full = config.qk_norm == "full"
            q_size = config.head_dim * (config.num_heads if full else 1)
            k_size = config.head_dim * (config.num_kv_heads if full else 1)
            self.w_q_norm = nn.Parameter(torch.ones(q_size, **empty))
            self.w_k_norm = nn.Parameter(torch.ones(k_size, **empty))

    def forward(self, x_TH: Tensor, batch: int, rotary: Rotary, slices: int = 1) -> Tensor:
        """[T, H] to [T, H]; the T tokens are `batch` sequences one after the other, of `slices` slices."""
        config = self.config
        heads_BSXD = linear(x_TH, self.w_qkv, self.b_qkv, slices).view(batch, x_TH.shape[0] // batch, -1, config.head_dim)
        attend = _HeadsOnGpu if _has_fused_attention(heads_BSXD) else _Heads
        out_BSAD = attend.apply(
            heads_BSXD, self.w_q_norm, self.w_k_norm, config.qk_norm, config.num_heads, config.norm_eps, rotary
        )
        return linear(out_BSAD.reshape(x_TH.shape[0], -1), self.w_o, slices=slices)
