"""The experts of a MoE layer, one route at a time, forward and backward.

Written for reading: this is the definition that the backends are compared with. Owns every formula and the places where a value
is rounded to the activations' dtype; everything between is in `wide`, fp32 (float64 for float64). Imports nothing from the
package. Read next: `mok/reference/exchange.py`, the same with the experts on several ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "BLOCK_COLUMNS",
    "ExpertGrads",
    "Gradients",
    "Hidden",
    "RowGrads",
    "combine",
    "expert_hidden",
    "expert_output",
    "moe_backward",
    "moe_forward",
]

BLOCK_COLUMNS = 128
"""Columns that a router weight's gradient adds up before it goes on to the next block."""


class Hidden(NamedTuple):
    """One row inside an expert: gate_I and up_I as limited by the clamp, hidden_I = silu(gate) * up, all in `wide`, and which
    columns of gate and up the clamp left alone."""

    gate_I: Tensor
    up_I: Tensor
    hidden_I: Tensor
    gate_open_I: Tensor
    up_open_I: Tensor


class ExpertGrads(NamedTuple):
    """Gradients of one stack of experts, in `wide`."""

    gate_EIH: Tensor
    up_EIH: Tensor
    down_EHI: Tensor


class RowGrads(NamedTuple):
    """Gradients around one row inside an expert. dx_H: of its input. dweight: of its weight. dgate_I, dup_I: of gate and up.
    hidden_I: the row that goes into the gradient of down. The last three carry the weight; all are in `wide`."""

    dx_H: Tensor
    dweight: Tensor
    dgate_I: Tensor
    dup_I: Tensor
    hidden_I: Tensor


class Gradients(NamedTuple):
    """Gradients of what `moe_forward` was given. shared_T: those of each token in the shared expert, empty without one; the
    weights of that are dense, and their gradients a matter of the caller."""

    dx_TH: Tensor
    dweights_TK: Tensor
    experts: ExpertGrads
    shared_T: list[RowGrads]


def wide(value: Tensor) -> Tensor:
    """fp32 for fp32 and bf16, float64 for float64."""
    return value if value.dtype == torch.float64 else value.to(torch.float32)


def rounded(value: Tensor, like: Tensor) -> Tensor:
    """Rounded to the dtype of `like`, and back in `wide`."""
    return wide(value.to(like.dtype))


def expert_hidden(x_H: Tensor, w_gate_IH: Tensor, w_up_IH: Tensor, clamp: float = 0.0) -> Hidden:
    """Gate and up are rounded to the dtype of x, as they are kept for the backward."""
    gate_I = rounded(wide(w_gate_IH) @ wide(x_H), x_H)
    up_I = rounded(wide(w_up_IH) @ wide(x_H), x_H)
    gate_open_I, up_open_I = torch.ones_like(gate_I, dtype=torch.bool), torch.ones_like(up_I, dtype=torch.bool)
    if clamp:
        gate_open_I, up_open_I = gate_I <= clamp, up_I.abs() <= clamp
        gate_I, up_I = gate_I.clamp(max=clamp), up_I.clamp(-clamp, clamp)
    return Hidden(gate_I, up_I, gate_I / (1 + torch.exp(-gate_I)) * up_I, gate_open_I, up_open_I)


def expert_output(hidden: Hidden, w_down_HI: Tensor, like: Tensor) -> Tensor:
    """The expert's row [H]: the hidden row is rounded once, and so is the result, which no weight has touched."""
    return rounded(wide(w_down_HI) @ rounded(hidden.hidden_I, like), like)


def combine(rows_KH: list[Tensor], weights_K: list[Tensor], like: Tensor) -> Tensor:
    """acc = +0; acc = acc + weight * row, slot by slot; rounded once to the dtype of `like`. No rows: zeros of its shape."""
    total_H = torch.zeros_like(wide(like))
    for row_H, weight in zip(rows_KH, weights_K, strict=True):
        total_H = total_H + weight * row_H
    return total_H.to(like.dtype)


def moe_forward(
    x_TH: Tensor,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    w_gate_EIH: Tensor,
    w_up_EIH: Tensor,
    w_down_EHI: Tensor,
    *,
    clamp: float = 0.0,
    shared: tuple[Tensor, Tensor, Tensor] | None = None,
    shared_scale_T: Tensor | None = None,
) -> Tensor:
    """y_TH: each token's slots in order (id -1 left out), then the shared expert (gate_SH, up_SH, down_HS) times its scale."""
    y_TH = torch.empty_like(x_TH)
    for t, x_H in enumerate(x_TH):
        rows, weights = [], []
        for k, e in enumerate(expert_ids_TK[t].tolist()):
            if e >= 0:
                hidden = expert_hidden(x_H, w_gate_EIH[e], w_up_EIH[e], clamp)
                rows.append(expert_output(hidden, w_down_EHI[e], x_H))
                weights.append(weights_TK[t, k])
        if shared is not None:
            hidden = expert_hidden(x_H, shared[0], shared[1], clamp)
            rows.append(expert_output(hidden, shared[2], x_H))
            weights.append(torch.ones_like(weights_TK[t, 0]) if shared_scale_T is None else shared_scale_T[t])
        y_TH[t] = combine(rows, weights, x_H)
    return y_TH


def moe_backward(
    dy_TH: Tensor,
    x_TH: Tensor,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    w_gate_EIH: Tensor,
    w_up_EIH: Tensor,
    w_down_EHI: Tensor,
    *,
    clamp: float = 0.0,
    shared: tuple[Tensor, Tensor, Tensor] | None = None,
    shared_scale_T: Tensor | None = None,
    segment_of_token_T: list[int] | None = None,
    start: ExpertGrads | None = None,
) -> Gradients:
    """The gradients of sum(dy * y).

    Expert weights get one term per (expert, segment): the rows of the segment added up in (token, slot) order. Terms are added
    in order of segment to `start`, or to zeros. segment_of_token_T: rising; None puts all tokens into one.
    """
    segments = segment_of_token_T or [0] * x_TH.shape[0]
    experts = _zeros(w_gate_EIH, w_up_EIH, w_down_EHI) if start is None else ExpertGrads(*(part.clone() for part in start))
    dweights_TK = torch.zeros_like(wide(weights_TK))
    rows_T: list[list[Tensor]] = [[] for _ in x_TH]
    for segment in sorted(set(segments)):
        term = _zeros(w_gate_EIH, w_up_EIH, w_down_EHI)
        for t in (t for t, s in enumerate(segments) if s == segment):
            for k, e in enumerate(expert_ids_TK[t].tolist()):
                if e >= 0:
                    weights = (w_gate_EIH[e], w_up_EIH[e], w_down_EHI[e])
                    row = _row_backward(dy_TH[t], x_TH[t], weights, weights_TK[t, k], clamp)
                    term.gate_EIH[e] += torch.outer(row.dgate_I, wide(x_TH[t]))
                    term.up_EIH[e] += torch.outer(row.dup_I, wide(x_TH[t]))
                    term.down_EHI[e] += torch.outer(wide(dy_TH[t]), row.hidden_I)
                    dweights_TK[t, k] = row.dweight
                    rows_T[t].append(row.dx_H)
        for total, part in zip(experts, term, strict=True):
            total += part
    one = torch.ones((), dtype=dweights_TK.dtype)
    shared_T = []
    if shared is not None:
        for t, x_H in enumerate(x_TH):
            shared_T.append(_row_backward(dy_TH[t], x_H, shared, one if shared_scale_T is None else shared_scale_T[t], clamp))
            rows_T[t].append(shared_T[t].dx_H)
    dx_TH = torch.empty_like(x_TH)
    for t, rows in enumerate(rows_T):
        dx_TH[t] = combine(rows, [one] * len(rows), x_TH[t])
    return Gradients(dx_TH, dweights_TK, experts, shared_T)


def _row_backward(dy_H: Tensor, x_H: Tensor, weights: tuple[Tensor, ...], weight: Tensor, clamp: float) -> RowGrads:
    """One row of the expert with `weights`.

    With g, u the gate and up columns, s = 1 / (1 + exp(-g)), h = g s u rounded, and dh = w_down^T dy:
        dweight = sum_i dh_i h_i                in blocks of 128 columns, a chain over the blocks
        du      = weight dh g s                 rounded once
        dg      = weight dh u s (1 + g (1 - s)) rounded once
        hidden  = weight g s u                  rounded once
        dx      = w_gate^T dg + w_up^T du       rounded once
    """
    w_gate_IH, w_up_IH, w_down_HI = weights
    row = expert_hidden(x_H, w_gate_IH, w_up_IH, clamp)
    dh_I = wide(w_down_HI).t() @ wide(dy_H)
    dweight = torch.zeros_like(wide(weight))
    for block in (dh_I * rounded(row.hidden_I, x_H)).split(BLOCK_COLUMNS):
        dweight = dweight + block.sum()
    sigmoid_I = 1 / (1 + torch.exp(-row.gate_I))
    weighted_I = weight * dh_I
    dup_I = rounded(weighted_I * row.gate_I * sigmoid_I * row.up_open_I, x_H)
    dgate_I = rounded(weighted_I * row.up_I * sigmoid_I * (1 + row.gate_I * (1 - sigmoid_I)) * row.gate_open_I, x_H)
    dx_H = rounded(wide(w_gate_IH).t() @ dgate_I + wide(w_up_IH).t() @ dup_I, x_H)
    return RowGrads(dx_H, dweight, dgate_I, dup_I, rounded(weight * row.hidden_I, x_H))


def _zeros(*weights: Tensor) -> ExpertGrads:
    return ExpertGrads(*(torch.zeros_like(wide(weight)) for weight in weights))
