"""The experts of a MoE layer, one route at a time, forward and backward.

Written for reading: this is the definition that the backends are compared with. Owns every formula and the places where a value
is rounded to the activations' dtype, or to 8 bits (`mok/reference/quantization.py`); everything between is in `wide`, fp32
(float64 for float64). Read next: `mok/reference/exchange.py`, the same with the experts on several ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mok.quantization import Format, Quantization
from mok.reference.quantization import round_row_groups, round_rows, round_weight

__all__ = [
    "BLOCK_COLUMNS",
    "ExpertGrads",
    "Gradients",
    "Hidden",
    "Operands",
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


class Operands(NamedTuple):
    """One expert's weights as its products take them: forward, and (`_back`) towards the input."""

    gate_IH: Tensor
    up_IH: Tensor
    down_HI: Tensor
    gate_back_IH: Tensor
    up_back_IH: Tensor
    down_back_HI: Tensor


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


def operands(w_gate_IH: Tensor, w_up_IH: Tensor, w_down_HI: Tensor, form: Format | None) -> Operands:
    """An expert's weights, rounded to `form`: along the contraction axis of each product, or in squares."""
    if form is None:
        return Operands(w_gate_IH, w_up_IH, w_down_HI, w_gate_IH, w_up_IH, w_down_HI)
    both = [round_weight(weight, form.block, form.square_weights) for weight in (w_gate_IH, w_up_IH, w_down_HI)]
    return Operands(*(forward for forward, _ in both), *(back for _, back in both))


def dispatched(values_TH: Tensor, quantization: Quantization | None) -> Tensor:
    """Rows as they arrive at the routed experts."""
    if quantization is None or not quantization.dispatch:
        return values_TH
    return round_rows(values_TH, quantization.of_blocks.block)


def as_operand(row_C: Tensor, form: Format | None) -> Tensor:
    """A row as products take it: its blocks rounded to `form`."""
    return row_C if form is None else round_rows(row_C.unsqueeze(0), form.block)[0]


def expert_hidden(x_H: Tensor, w_gate_IH: Tensor, w_up_IH: Tensor, clamp: float = 0.0, form: Format | None = None) -> Hidden:
    """Gate and up are rounded to the dtype of x, as they are kept for the backward. form: what the row is rounded to."""
    row_H = wide(as_operand(x_H, form))
    gate_I = rounded(wide(w_gate_IH) @ row_H, x_H)
    up_I = rounded(wide(w_up_IH) @ row_H, x_H)
    gate_open_I, up_open_I = torch.ones_like(gate_I, dtype=torch.bool), torch.ones_like(up_I, dtype=torch.bool)
    if clamp:
        gate_open_I, up_open_I = gate_I <= clamp, up_I.abs() <= clamp
        gate_I, up_I = gate_I.clamp(max=clamp), up_I.clamp(-clamp, clamp)
    return Hidden(gate_I, up_I, gate_I / (1 + torch.exp(-gate_I)) * up_I, gate_open_I, up_open_I)


def expert_output(hidden: Hidden, w_down_HI: Tensor, like: Tensor, form: Format | None = None) -> Tensor:
    """The expert's row [H]: the hidden row is rounded once (and then to `form`), and so is the result, which no weight has
    touched."""
    return rounded(wide(w_down_HI) @ as_operand(rounded(hidden.hidden_I, like), form), like)


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
    quantization: Quantization | None = None,
) -> Tensor:
    """y_TH: each token's slots in order (id -1 left out), then the shared expert (gate_SH, up_SH, down_HS) times its scale."""
    form, shared_form = _formats(quantization)
    experts = [operands(*weights, form) for weights in zip(w_gate_EIH, w_up_EIH, w_down_EHI, strict=True)]
    sent_TH = dispatched(x_TH, quantization)
    shared_expert = None if shared is None else operands(*shared, shared_form)
    y_TH = torch.empty_like(x_TH)
    for t, x_H in enumerate(x_TH):
        rows, weights = [], []
        for k, e in enumerate(expert_ids_TK[t].tolist()):
            if e >= 0:
                hidden = expert_hidden(sent_TH[t], experts[e].gate_IH, experts[e].up_IH, clamp, form)
                rows.append(expert_output(hidden, experts[e].down_HI, x_H, form))
                weights.append(weights_TK[t, k])
        if shared_expert is not None:
            hidden = expert_hidden(x_H, shared_expert.gate_IH, shared_expert.up_IH, clamp, shared_form)
            rows.append(expert_output(hidden, shared_expert.down_HI, x_H, shared_form))
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
    quantization: Quantization | None = None,
) -> Gradients:
    """The gradients of sum(dy * y).

    Expert weights get one term per (expert, segment): the rows of the segment added up in (token, slot) order. Terms are added
    in order of segment to `start`, or to zeros. segment_of_token_T: rising; None puts all tokens into one. With 8-bit weight
    gradients the rows of a term, in that order, are rounded down their columns, in groups from the first on.
    """
    form, shared_form = _formats(quantization)
    stack = [operands(*weights, form) for weights in zip(w_gate_EIH, w_up_EIH, w_down_EHI, strict=True)]
    sent_TH, sent_dy_TH = dispatched(x_TH, quantization), dispatched(dy_TH, quantization)
    rows_form = form if quantization is not None and quantization.weight_gradients else None
    segments = segment_of_token_T or [0] * x_TH.shape[0]
    experts = _zeros(w_gate_EIH, w_up_EIH, w_down_EHI) if start is None else ExpertGrads(*(part.clone() for part in start))
    dweights_TK = torch.zeros_like(wide(weights_TK))
    rows_T: list[list[Tensor]] = [[] for _ in x_TH]
    for segment in sorted(set(segments)):
        term = _zeros(w_gate_EIH, w_up_EIH, w_down_EHI)
        rows_E: list[list[tuple[Tensor, ...]]] = [[] for _ in stack]
        for t in (t for t, s in enumerate(segments) if s == segment):
            for k, e in enumerate(expert_ids_TK[t].tolist()):
                if e >= 0:
                    row = _row_backward(sent_dy_TH[t], sent_TH[t], stack[e], weights_TK[t, k], clamp, form)
                    rows_E[e].append((row.dgate_I, row.dup_I, wide(sent_TH[t]), wide(sent_dy_TH[t]), row.hidden_I))
                    dweights_TK[t, k] = row.dweight
                    rows_T[t].append(row.dx_H)
        for e, rows in enumerate(rows_E):
            for dgate_I, dup_I, x_H, dy_H, hidden_I in _rounded_in_groups(rows, rows_form):
                term.gate_EIH[e] += torch.outer(dgate_I, x_H)
                term.up_EIH[e] += torch.outer(dup_I, x_H)
                term.down_EHI[e] += torch.outer(dy_H, hidden_I)
        for total, part in zip(experts, term, strict=True):
            total += part
    one = torch.ones((), dtype=dweights_TK.dtype)
    shared_T = []
    if shared is not None:
        expert = operands(*shared, shared_form)
        for t, x_H in enumerate(x_TH):
            scale = one if shared_scale_T is None else shared_scale_T[t]
            shared_T.append(_row_backward(dy_TH[t], x_H, expert, scale, clamp, shared_form))
            rows_T[t].append(shared_T[t].dx_H)
    dx_TH = torch.empty_like(x_TH)
    for t, dx_rows in enumerate(rows_T):
        dx_TH[t] = combine(dx_rows, [one] * len(dx_rows), x_TH[t])
    return Gradients(dx_TH, dweights_TK, experts, shared_T)


def _row_backward(dy_H: Tensor, x_H: Tensor, expert: Operands, weight: Tensor, clamp: float, form: Format | None) -> RowGrads:
    """One row of `expert`, whose products take rows rounded to `form`.

    With g, u the gate and up columns, s = 1 / (1 + exp(-g)), h = g s u rounded, and dh = w_down^T dy:
        dweight = sum_i dh_i h_i                in blocks of 128 columns, a chain over the blocks
        du      = weight dh g s                 rounded once
        dg      = weight dh u s (1 + g (1 - s)) rounded once
        hidden  = weight g s u                  rounded once
        dx      = w_gate^T dg + w_up^T du       rounded once
    """
    row = expert_hidden(x_H, expert.gate_IH, expert.up_IH, clamp, form)
    dh_I = wide(expert.down_back_HI).t() @ wide(as_operand(dy_H, form))
    dweight = torch.zeros_like(wide(weight))
    for block in (dh_I * rounded(row.hidden_I, x_H)).split(BLOCK_COLUMNS):
        dweight = dweight + block.sum()
    sigmoid_I = 1 / (1 + torch.exp(-row.gate_I))
    weighted_I = weight * dh_I
    dup_I = rounded(weighted_I * row.gate_I * sigmoid_I * row.up_open_I, x_H)
    dgate_I = rounded(weighted_I * row.up_I * sigmoid_I * (1 + row.gate_I * (1 - sigmoid_I)) * row.gate_open_I, x_H)
    dx_gate_H = wide(expert.gate_back_IH).t() @ as_operand(dgate_I, form)
    dx_H = rounded(dx_gate_H + wide(expert.up_back_IH).t() @ as_operand(dup_I, form), x_H)
    return RowGrads(dx_H, dweight, dgate_I, dup_I, rounded(weight * row.hidden_I, x_H))


def _formats(quantization: Quantization | None) -> tuple[Format | None, Format | None]:
    """What the operands of the routed, and of the shared, experts are rounded to."""
    if quantization is None:
        return None, None
    return quantization.of_blocks, quantization.of_blocks if quantization.shared_experts else None


def _rounded_in_groups(rows: list[tuple[Tensor, ...]], form: Format | None) -> list[tuple[Tensor, ...]]:
    """The rows of one expert and segment, every operand rounded down its columns."""
    if form is None or not rows:
        return rows
    columns = (round_row_groups(torch.stack(part), form.block) for part in zip(*rows, strict=True))
    return list(zip(*columns, strict=True))


def _zeros(*weights: Tensor) -> ExpertGrads:
    return ExpertGrads(*(torch.zeros_like(wide(weight)) for weight in weights))
