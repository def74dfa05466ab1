"""Grouped-query attention: one projection for queries, keys and values, their norms and rotation, SDPA, one projection back.

Owns everything between the residual stream and the heads. Attention is causal within a sequence and does not stop at document
borders inside it: packed documents see what was packed before them, only the loss respects the border (docs/numerics.md).
Norms of heads and the rotary embedding are one autograd function with SDPA, so that their backward passes share buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from mok.config import ModelConfig
from mok.model.linear import linear
from mok.model.norm import rms_norm_backward, rms_normed, weight_gradient

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

    def rotate(self, x_BSXD: Tensor, direction: int) -> Tensor:
        """Every head of x rotated forward (direction 1) or back (-1), in new contiguous memory."""
        rotated = self.cos_SXr.shape[-1]
        half = rotated // 2
        part = x_BSXD[..., :rotated]
        y_BSXr, crossed = part * self.cos_SXr, part * self.sin_SXr
        first, second = y_BSXr[..., :half], y_BSXr[..., half:]
        if direction == 1:
            first.sub_(crossed[..., half:])
            second.add_(crossed[..., :half])
        else:
            first.add_(crossed[..., half:])
            second.sub_(crossed[..., :half])
        return y_BSXr if rotated == x_BSXD.shape[-1] else torch.cat([y_BSXr, x_BSXD[..., rotated:]], -1)


def _sdpa(q_BSAD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor) -> Tensor:
    """Causal attention, [B, S, A, D] in and out.

    On a GPU only the composed kernel is allowed, whose backward repeats bit for bit; what fused attention can do does not come
    here.
    """
    q, k, v = q_BSAD.transpose(1, 2), k_BSGD.transpose(1, 2), v_BSGD.transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)


class _Heads(torch.autograd.Function):
    """From projected queries, keys and values [B, S, A + 2G, D] to attended values [B, S, A, D]."""

    @staticmethod
    def forward(
        ctx: Any, heads_BSXD: Tensor, w_q: Tensor | None, w_k: Tensor | None, kind: str, num_q: int, eps: float, rotary: Rotary
    ) -> Tensor:
        num_kv = (heads_BSXD.shape[2] - num_q) // 2
        num_rotated = num_q + num_kv
        ctx.kind, ctx.num_q, ctx.num_kv, ctx.rotary = kind, num_q, num_kv, rotary
        qk_BSXD = heads_BSXD[:, :, :num_rotated]
        saved = []
        if w_q is not None and w_k is not None:
            parts = []
            for x, w in zip(_groups(qk_BSXD, kind, num_q), _group_weights(w_q, w_k, kind, num_q, num_kv), strict=True):
                normed, rstd = rms_normed(x, eps)
                parts.append((normed * w).view(*qk_BSXD.shape[:2], -1, qk_BSXD.shape[-1]))
                saved += [normed, rstd]
            qk_BSXD = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        qk_BSXD = rotary.rotate(qk_BSXD, 1)
        inputs = (qk_BSXD[:, :, :num_q], qk_BSXD[:, :, num_q:], heads_BSXD[:, :, num_rotated:])
        if not any(ctx.needs_input_grad):
            return _sdpa(*inputs)
        # The attention kernel's own backward is kept by a small graph of its own, whatever kernel SDPA chose.
        leaves = [x.detach().requires_grad_() for x in inputs]
        with torch.enable_grad():
            out_BSAD = _sdpa(*leaves)
        ctx.inputs, ctx.out = leaves, out_BSAD
        ctx.save_for_backward(w_q, w_k, *saved)
        ctx.parameters = w_q, w_k
        return out_BSAD.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_BSAD: Tensor) -> tuple[Tensor | None, ...]:
        w_q, w_k, *saved = ctx.saved_tensors
        num_q, num_kv = ctx.num_q, ctx.num_kv
        dq, dk, dv = torch.autograd.grad(ctx.out, ctx.inputs, dout_BSAD)
        dqk_BSXD = ctx.rotary.rotate(torch.cat([dq, dk], 2), -1)
        dheads_BSXD = dqk_BSXD.new_empty(*dq.shape[:2], num_q + 2 * num_kv, dq.shape[-1])
        dheads_BSXD[:, :, num_q + num_kv :] = dv
        target_BSXD = dheads_BSXD[:, :, : num_q + num_kv]
        dw_q = dw_k = None
        if not saved:
            target_BSXD.copy_(dqk_BSXD)
        else:
            per_rows = []
            for dy, normed, rstd, w, out in zip(
                _groups(dqk_BSXD, ctx.kind, num_q),
                saved[::2],
                saved[1::2],
                _group_weights(w_q, w_k, ctx.kind, num_q, num_kv),
                _groups(target_BSXD, ctx.kind, num_q),
                strict=True,
            ):
                dx, per_row = rms_norm_backward(dy, normed, rstd, w)
                out.copy_(dx)
                per_rows.append(per_row)
            if ctx.kind == "head":
                per_rows = [per_rows[0][:, :, :num_q], per_rows[0][:, :, num_q:]]
            dw_q, dw_k = (_norm_weight_gradient(*pair) for pair in zip(ctx.parameters, per_rows, strict=True))
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
            slices = parameter.grad_sink.num_slices if hasattr(parameter, "grad_sink") else 1
            dy = dqk_BSXD[:, :, part.first : part.first + part.count]
            dw_CX = dense.norm_and_rotate_backward(dy, heads_BSXD, part, weight, cos, sin, rstd, dheads_BSXD, slices)
            found.append(None if dw_CX is None else weight_gradient(parameter, dw_CX))
        return dheads_BSXD, found[0], found[1], None, None, None, None


def _attention_operands(qk_BSXD: Tensor, heads_BSXD: Tensor, num_q: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as fused attention wants them, [B, heads, S, D], without a copy."""
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


def _norm_weight_gradient(weight: Tensor, per_row: Tensor) -> Tensor | None:
    """Sum `per_row` [B, S, (heads,) size] over all but the last dim, slice by slice where the weight has a sink."""
    if not weight.requires_grad:
        return None
    sink = getattr(weight, "grad_sink", None)
    if sink is None:
        return per_row.flatten(0, -2).sum(0).to(weight.dtype)
    per_slice = per_row.reshape(sink.num_slices, -1, *per_row.shape[2:]).sum(1, dtype=torch.float32)
    sink.add(per_slice if per_slice.dim() == 2 else per_slice.sum(1))
    return None


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

    def forward(self, x_TH: Tensor, batch: int, rotary: Rotary) -> Tensor:
        """[T, H] to [T, H]; the T tokens are `batch` sequences one after the other."""
        config = self.config
        heads_BSXD = linear(x_TH, self.w_qkv, self.b_qkv).view(batch, x_TH.shape[0] // batch, -1, config.head_dim)
        attend = _HeadsOnGpu if _has_fused_attention(heads_BSXD) else _Heads
        out_BSAD = attend.apply(
            heads_BSXD, self.w_q_norm, self.w_k_norm, config.qk_norm, config.num_heads, config.norm_eps, rotary
        )
        return linear(out_BSAD.reshape(x_TH.shape[0], -1), self.w_o)
