"""The reference loops as a backend: any dtype, float64 included, any device, very slow.

Owns only the way from a schedule and buffers to the plain arguments of `mok.reference.moe`, where the formulas are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mok.backends.interface import ExpertWeights, InputGrads, LayerShape, Options, SharedGrads
from mok.gradients import GradBuffers
from mok.quantization import Quantization
from mok.reference.moe import ExpertGrads, moe_backward, moe_forward
from mok.schedule import Schedule

__all__ = ["TRANSPORTS", "Saved", "backward", "forward", "why_not"]

TRANSPORTS = ()
"""See `mok.backends.interface`: the loops compute on one rank only."""


@dataclass(frozen=True)
class Saved:
    """Everything the forward was given; the backward computes all of it again."""

    schedule: Schedule
    options: Options
    x_TH: Tensor
    weights_TK: Tensor
    gate_LIH: Tensor
    up_LIH: Tensor
    down_LHI: Tensor
    shared_gate_up_JH: Tensor | None
    shared_down_HS: Tensor | None
    shared_scale_T: Tensor | None


def why_not(shape: LayerShape, dtype: torch.dtype, device: torch.device, quantization: Quantization | None = None) -> list[str]:
    """Why this backend cannot run, or an empty list."""
    return []


def forward(
    x_TH: Tensor,
    weights_TK: Tensor,
    schedule: Schedule,
    experts: ExpertWeights,
    options: Options,
    shared_scale_T: Tensor | None = None,
) -> tuple[Tensor, Saved]:
    """See `mok.backends.torch.forward`."""
    shared = experts.shared
    saved = Saved(
        schedule=schedule,
        options=options,
        x_TH=x_TH,
        weights_TK=weights_TK,
        gate_LIH=experts.gate_LIH,
        up_LIH=experts.up_LIH,
        down_LHI=experts.down_LHI,
        shared_gate_up_JH=shared.gate_up_JH if shared else None,
        shared_down_HS=shared.down_HS if shared else None,
        shared_scale_T=shared_scale_T,
    )
    y_TH = moe_forward(
        x_TH,
        schedule.expert_ids_TK,
        weights_TK,
        experts.gate_LIH,
        experts.up_LIH,
        experts.down_LHI,
        clamp=options.clamp,
        shared=_shared(saved),
        shared_scale_T=shared_scale_T,
        quantization=options.quantization,
    )
    return y_TH, saved


def backward(dy_TH: Tensor, saved: Saved, grads: GradBuffers | None) -> InputGrads:
    """See `mok.backends.torch.backward`. Lane by lane, so that each lane's chain is its own."""
    schedule, grid = saved.schedule, saved.schedule.grid
    shared = _shared(saved)
    tokens = saved.x_TH.shape[0]
    segments = [t * grid.num_slices // tokens // grid.segment for t in range(tokens)]  # one rank: all slices in order
    parts = []
    for lane in sorted(set(grid.lane_of_segment)):
        mine = [t for t, segment in enumerate(segments) if grid.lane_of_segment[segment] == lane]
        buffers = None if grads is None else ExpertGrads(grads.gate[lane], grads.up[lane], grads.down[lane])
        part = moe_backward(
            dy_TH[mine],
            saved.x_TH[mine],
            schedule.expert_ids_TK[mine],
            saved.weights_TK[mine],
            saved.gate_LIH,
            saved.up_LIH,
            saved.down_LHI,
            clamp=saved.options.clamp,
            shared=shared,
            shared_scale_T=None if saved.shared_scale_T is None else saved.shared_scale_T[mine],
            segment_of_token_T=[segments[t] for t in mine],
            quantization=saved.options.quantization,
            start=buffers if grads is not None and grads.started[lane] else None,
        )
        for buffer, total in zip(buffers or (), part.experts, strict=buffers is not None):
            buffer.copy_(total)
        parts.append((mine, part))
    dx_TH, dweights_TK = torch.empty_like(saved.x_TH), torch.empty_like(saved.weights_TK)
    for mine, part in parts:
        dx_TH[mine], dweights_TK[mine] = part.dx_TH, part.dweights_TK
    if shared is None:
        return InputGrads(dx_TH, dweights_TK)
    row_of_token = {t: row for mine, part in parts for t, row in zip(mine, part.shared_T, strict=True)}
    rows = [row_of_token[t] for t in range(tokens)]
    d_gate_up_TJ = dx_TH.new_empty(tokens, 2 * shared[0].shape[0])
    hidden_TS = dx_TH.new_empty(tokens, shared[0].shape[0])
    dscale_T = torch.empty_like(saved.weights_TK[:, 0])
    for t, row in enumerate(rows):
        d_gate_up_TJ[t], hidden_TS[t], dscale_T[t] = torch.cat((row.dgate_I, row.dup_I)), row.hidden_I, row.dweight
    operands = SharedGrads(d_gate_up_TJ, hidden_TS)
    return InputGrads(dx_TH, dweights_TK, None if saved.shared_scale_T is None else dscale_T, operands)


def _shared(saved: Saved) -> tuple[Tensor, Tensor, Tensor] | None:
    if saved.shared_gate_up_JH is None or saved.shared_down_HS is None:
        return None
    gate_SH, up_SH = saved.shared_gate_up_JH.chunk(2)
    return gate_SH, up_SH, saved.shared_down_HS
