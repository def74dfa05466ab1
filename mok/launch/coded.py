"""Launches of the megakernel on 8-bit operands: what `mok/launch/mega.py` is for bf16.

Owns the quantisation of tokens and weights for them, the order in which scales lie, and the buffers of codes that live as long
as a launch. Knows nothing of routers, modules or owners of gradients. Read next: `mok/kernels/mega_coded.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mok.kernels import coded, mega_coded, tasks
from mok.kernels.rows import dispatch_scales
from mok.launch.config import KernelConfig
from mok.launch.mega import (
    Backward,
    Gradients,
    Kept,
    RowBox,
    combine_box_parts,
    gradient_tile,
    plain_rows,
    row_box,
    run,
    sum_partial_rows,
    tables_of,
    tile,
)
from mok.launch.plan import DevicePlan, ceil_div
from mok.launch.quantize import CodedRows, CodedWeight, quantize

__all__ = ["CodedWeights", "backward", "code_box", "forward"]

BLOCK = coded.BLOCK.value


class CodedWeights(NamedTuple):
    """gate, up [L, I, H] and down [L, H, I] with I and H multiples of 128, quantised."""

    gate: CodedWeight
    up: CodedWeight
    down: CodedWeight


def rows_of_tokens(x_TH: Tensor, plan: DevicePlan) -> CodedRows:
    """Every row of x, bf16, quantised by itself: codes in token order, scales in expert order: no mover carries them."""
    found = quantize(x_TH, BLOCK, along_columns=False).rows
    blocks = x_TH.shape[1] // BLOCK
    scales = torch.empty(blocks, plan.max_rows, dtype=torch.uint8, device=x_TH.device)
    dispatch_scales[(ceil_div(plan.max_rows, 128), ceil_div(blocks, 16))](
        found.scales.view(torch.uint8), scales, plan.route_of_row_P, plan.sizes, blocks, plan.max_rows, plan.top_k,
        ROWS=128, BLOCKS=16,
    )  # fmt: skip
    return CodedRows(found.codes, scales)


def code_box(hidden_size: int) -> RowBox:
    """How a row of codes travels: as `hidden_size` / 2 elements of 16 bits."""
    return row_box(hidden_size // 2)


def forward(
    x_TH: Tensor,
    weights_TK: Tensor,
    experts: CodedWeights,
    plan: DevicePlan,
    config: KernelConfig,
    *,
    clamp: float,
    keep: bool,
    trace: Tensor | None = None,
) -> tuple[Tensor, Kept | None]:
    """As `mok.launch.mega.forward`, without shared experts."""
    hidden_size, width = x_TH.shape[1], experts.gate.codes.shape[1]
    rows, box, boxed = plan.max_rows, row_box(hidden_size), code_box(hidden_size)
    counts, form = counts_of(x_TH, plan, config), form_of(plan, hidden_size, width)
    x = rows_of_tokens(x_TH, plan)
    y_TH = torch.empty_like(x_TH)
    x_rows = _codes(x_TH, rows, hidden_size)
    y_rows = x_TH.new_empty(rows, hidden_size)
    h_rows, h_scales = _codes(x_TH, rows, width), _scales(x_TH, width, rows)
    gate_rows, up_rows = (x_TH.new_empty(rows, width) if keep else None for _ in range(2))
    run(
        mega_coded.mega_forward_coded,
        config,
        _boxes(x.codes, boxed),
        _boxes(x_rows, boxed),
        plain_rows(y_rows, box, combine_box_parts(box, plan.top_k)),
        *coded_tiles(x_rows, x.scales, 128),
        expert_code_tile(experts.gate.codes, 128),
        expert_code_tile(experts.up.codes, 128),
        *coded_tiles(h_rows, h_scales, 128),
        expert_code_tile(experts.down.codes, 256),
        *coded_tiles(h_rows, h_scales, 64),
        tile(y_rows if gate_rows is None else gate_rows, 64, 64),
        tile(y_rows if up_rows is None else up_rows, 64, 64),
        tile(y_rows, 64, 64),
        experts.gate.scales,
        experts.up.scales,
        experts.down.scales,
        tables_of(plan, plan.forward_tasks, plan.counters[0], weights_TK, None, None, trace),
        y_rows,
        y_TH,
        *counts,
        *form,
        keep,
        clamp,
        trace is not None,
        config.stages,
        config.pieces,
    )
    if gate_rows is None or up_rows is None:
        return y_TH, None
    return y_TH, Kept(gate_rows, up_rows, None, None)


def backward(
    dy_TH: Tensor,
    x_TH: Tensor,
    weights_TK: Tensor,
    experts: CodedWeights,
    kept: Kept | None,
    plan: DevicePlan,
    gradients: Gradients | None,
    config: KernelConfig,
    *,
    clamp: float,
    trace: Tensor | None = None,
) -> Backward:
    """As `mok.launch.mega.backward`, without shared experts; weight gradients are of operands in bf16."""
    assert plan.backward_tasks is not None and plan.again == (kept is None) and plan.coded
    hidden_size, width = x_TH.shape[1], experts.gate.codes.shape[1]
    rows, box, boxed = plan.max_rows, row_box(hidden_size), code_box(hidden_size)
    counts, form = counts_of(x_TH, plan, config), form_of(plan, hidden_size, width)
    dy = rows_of_tokens(dy_TH, plan)
    dy_code_rows = _codes(x_TH, rows, hidden_size)
    # First dy, then x, then dx: the tasks that read the one before are waited for, see `mok.kernels.tasks`.
    dy_rows = x_rows = dx_rows = x_TH.new_empty(rows, hidden_size)
    wh_rows = x_TH.new_empty(rows, width)
    gate_rows, up_rows = (x_TH.new_empty(rows, width) for _ in range(2)) if kept is None else kept[:2]
    gate_codes, up_codes = (_codes(x_TH, rows, width) for _ in range(2))
    gate_scales, up_scales = (_scales(x_TH, width, rows) for _ in range(2))
    partial = weights_TK.new_empty(rows, width // BLOCK)
    dx_TH = torch.empty_like(x_TH)
    if gradients is None:
        nowhere = weights_TK.new_empty(1, 1, 16)
        gradients, last_kind = Gradients(nowhere, nowhere, nowhere, False), tasks.DX.value
    else:
        last_kind = tasks.DW_DOWN.value
    x_boxes = x_operands = None
    if plan.again:
        x, x_code_rows = rows_of_tokens(x_TH, plan), _codes(x_TH, rows, hidden_size)
        x_boxes = [_boxes(x.codes, boxed), _boxes(x_code_rows, boxed)]
        again = experts.gate.codes, experts.up.codes
        x_operands = [*coded_tiles(x_code_rows, x.scales, 128), *(expert_code_tile(w, 128) for w in again)]
    run(
        mega_coded.mega_backward_coded,
        config,
        *(x_boxes or [None] * 2),
        _boxes(dy.codes, boxed),
        _boxes(dy_code_rows, boxed),
        plain_rows(dy_TH, box, box.box_parts),
        plain_rows(dy_rows, box, box.box_parts),
        plain_rows(x_TH, box, box.box_parts),
        plain_rows(x_rows, box, box.box_parts),
        plain_rows(dx_rows, box, combine_box_parts(box, plan.top_k)),
        *coded_tiles(dy_code_rows, dy.scales, 128),
        expert_code_tile(experts.down.transposed, 256),
        tile(gate_rows, 128, 64),
        tile(up_rows, 128, 64),
        *coded_tiles(gate_codes, gate_scales, 128),
        *coded_tiles(up_codes, up_scales, 128),
        expert_code_tile(experts.gate.transposed, 256),
        expert_code_tile(experts.up.transposed, 256),
        tile(dy_rows, 64, 128),
        tile(gate_rows, 64, 128),
        tile(up_rows, 64, 128),
        tile(x_rows, 64, 256),
        tile(wh_rows, 64, 256),
        *(x_operands or [None] * 4),
        tile(wh_rows, 64, 64),
        tile(gate_rows, 64, 64),
        tile(up_rows, 64, 64),
        *coded_tiles(gate_codes, gate_scales, 64),
        *coded_tiles(up_codes, up_scales, 64),
        tile(dx_rows, 64, 64),
        gradient_tile(gradients.gate),
        gradient_tile(gradients.up),
        gradient_tile(gradients.down),
        experts.gate.scales,
        experts.up.scales,
        experts.down.scales,
        tables_of(plan, plan.backward_tasks, plan.counters[1], weights_TK, None, None, trace),
        partial,
        dx_rows,
        dx_TH,
        *counts,
        plan.num_experts,
        2 * ceil_div(hidden_size, tasks.TILE_M.value) * ceil_div(width, tasks.TILE_N.value),
        plan.dy_counter,
        int(gradients.started),
        *form,
        plan.again,
        clamp,
        last_kind,
        trace is not None,
        config.stages,
        config.pieces,
    )
    dweights_TK = torch.empty_like(weights_TK)
    sum_partial_rows(partial, plan.row_of_route_N, dweights_TK)
    return Backward(dx_TH, dweights_TK, None, None, None, None)


def counts_of(x_TH: Tensor, plan: DevicePlan, config: KernelConfig) -> tuple[int, int, int]:
    """Tokens, those that the movers combine, and blocks of rows at most."""
    return x_TH.shape[0], int(x_TH.shape[0] * config.mover_share), plan.max_blocks


def form_of(plan: DevicePlan, hidden_size: int, width: int) -> tuple[int, ...]:
    """What a launch is compiled for: TOP_K, BLOCKS_H and BLOCKS_I, then how a row of bf16 travels, and a row of codes."""
    boxes = row_box(hidden_size), code_box(hidden_size)
    return plan.top_k, hidden_size // BLOCK, width // BLOCK, *(n for box in boxes for n in (box.parts, box.part, box.box_parts))


def _codes(like: Tensor, rows: int, columns: int) -> Tensor:
    return torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=like.device)


def _scales(like: Tensor, columns: int, rows: int) -> Tensor:
    return torch.empty(columns // BLOCK, rows, dtype=torch.uint8, device=like.device)


def _boxes(codes: Tensor, box: RowBox) -> TensorDescriptor:
    """Rows of codes as the mover carries them: elements of 16 bits."""
    return plain_rows(codes.view(torch.bfloat16), box, box.box_parts)


def coded_tiles(codes: Tensor, scales: Tensor, rows: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Of rows: BLOCK codes of each, and the scale of those."""
    return (
        TensorDescriptor.from_tensor(codes, [rows, BLOCK], coded.CODES.value),
        TensorDescriptor.from_tensor(scales, [1, rows], coded.SCALES.value),
    )


def expert_code_tile(codes: Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(codes, [1, rows, BLOCK], coded.EXPERT_CODES.value)
