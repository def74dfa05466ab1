"""Launches of the staged kernels: one per kind of task, on whatever GPU Triton compiles for.

Owns the choice of a `StagedConfig`, the descriptors and the grids. Must not know of autograd, or which tensors are kept. Every
launch switches fused multiply-add off, so that products and sums are rounded apart. Read next: `mok/kernels/staged.py` and
`mok/kernels/rows.py`, the kernels; `mok/backends/staged.py`, which calls these in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mok.errors import UsageError
from mok.kernels import rows as row_kernels
from mok.kernels import staged as kernels
from mok.kernels import tasks
from mok.launch.plan import DevicePlan, ceil_div
from mok.launch.quantize import CodedRows, CodedWeight, quantize

__all__ = ["Gpu", "StagedConfig", "choose_config", "gpu_of"]

TILE_M, TILE_N = tasks.TILE_M.value, tasks.TILE_N.value
SUM_COLUMNS = kernels.SUM_COLUMNS.value


@dataclass(frozen=True)
class Gpu:
    """What the choice of a configuration depends on. arch: 10 * major + minor of the compute capability;
    shared_memory_bytes: the most that one block may have."""

    arch: int
    num_sms: int
    shared_memory_bytes: int


@cache
def gpu_of(device: torch.device) -> Gpu:
    """The GPU `device` is. Raises UsageError for any other device."""
    if device.type != "cuda":
        raise UsageError(f"the staged kernels need tensors on a CUDA device, not on {device}; use the torch backend there")
    found: Any = torch.cuda.get_device_properties(device)
    return Gpu(10 * found.major + found.minor, found.multi_processor_count, found.shared_memory_per_block_optin)


@dataclass(frozen=True)
class StagedConfig:
    """How a tile is worked on; no field changes a bit.

    block_n: columns at a time, 256 or 128. block_c: contraction elements per step, a power of two from 16.
    num_stages: steps whose operands are in flight. num_warps: 4 or 8.
    bulk_copies: operands by the tensor memory accelerator, from compute capability 9.0 on; else by asynchronous copies.
    """

    block_n: int = 256
    block_c: int = 64
    num_stages: int = 3
    num_warps: int = 8
    bulk_copies: bool = True

    @property
    def shared_memory_bytes(self) -> int:
        """Operands in flight, and room for barriers. What tiles need on their way to memory is less (tests/kernels)."""
        return self.num_stages * (TILE_M + self.block_n) * self.block_c * 2 + 1024


CANDIDATES = (
    StagedConfig(256, 64, 3),
    StagedConfig(128, 64, 4),
    StagedConfig(128, 64, 3),
    StagedConfig(128, 32, 3),
    StagedConfig(128, 16, 2),
)
"""In order of preference."""

WIDE_TILES = (90, 100, 103)
"""Architectures whose tensor cores work on operands in shared memory; elsewhere 256 columns do not fit into registers."""


def choose_config(gpu: Gpu) -> StagedConfig:
    """The first candidate that fits `gpu`: a pure function, the same in every process. UsageError if none does."""
    for config in CANDIDATES:
        fits = config.shared_memory_bytes <= gpu.shared_memory_bytes
        if fits and (config.block_n == 128 or gpu.arch in WIDE_TILES):
            return replace(config, bulk_copies=gpu.arch >= 90)
    least = min(config.shared_memory_bytes for config in CANDIDATES)
    raise UsageError(
        f"this GPU gives a block {gpu.shared_memory_bytes} bytes of shared memory and the smallest staged tile needs {least}; "
        "use the torch backend"
    )


CODED_CONFIG = StagedConfig(128, kernels.CODED_C.value, 3)
"""For operands of 8 bits: a step is one block of the contraction, and all columns at a time share a weight's scale."""


def operand(config: StagedConfig, matrices: Tensor, rows: int, columns: int) -> Any:
    """`matrices` [n, M, N] or [M, N], read in blocks [rows, columns] of one matrix: what `load_block` of the kernels takes."""
    matrices = matrices if matrices.dim() == 3 else matrices.unsqueeze(0)
    if not matrices.numel():  # a descriptor cannot say nothing; no task will read it
        matrices = matrices.new_empty(1, 1, matrices.shape[2])
    if config.bulk_copies:
        return TensorDescriptor.from_tensor(matrices, [1, rows, columns])
    return matrices, matrices.stride(0), matrices.stride(1), matrices.shape[1], matrices.shape[2]


def coded_config(gpu: Gpu) -> StagedConfig:
    return replace(CODED_CONFIG, bulk_copies=gpu.arch >= 90)


def coded_rows(rows: Tensor, block: int) -> CodedRows:
    """Rows in expert order, bf16, each quantised by itself, `block` values at a time."""
    found = quantize(rows, block, along_columns=False).rows
    return CodedRows(found.codes, found.scales.view(torch.uint8).t().contiguous())


def scales_of(rows: CodedRows, others: CodedRows, *weight_scales: Tensor) -> tuple[object, ...]:
    """What `multiply_coded` of the kernels reads beside codes: scales of rows, and of the second operand's where there are two,
    rows in the buffer, groups along the contraction, scales of weights."""
    return rows.scales, others.scales, rows.scales.shape[1], rows.scales.shape[0], *weight_scales


def options(config: StagedConfig) -> dict[str, object]:
    return {
        "BLOCK_N": config.block_n,
        "BLOCK_C": config.block_c,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": False,
    }


def dispatch(x_TH: Tensor, x_rows: Tensor, plan: DevicePlan) -> None:
    """x_rows[p] = the token of row p, zeros for padding; rows past the last are left alone."""
    rows_of_program, width = 16, x_TH.shape[1]
    row_kernels.dispatch_rows[(ceil_div(plan.max_rows, rows_of_program),)](
        x_TH, x_rows, plan.route_of_row_P, plan.sizes, width, x_TH.stride(0),
        K=plan.top_k, ROWS=rows_of_program, COLUMNS=256, num_warps=4,
    )  # fmt: skip


def gate_up(
    x_rows: Tensor | CodedRows,
    gate_LIH: Tensor | CodedWeight,
    up_LIH: Tensor | CodedWeight,
    h_rows: Tensor,
    kept: Tensor | None,
    plan: DevicePlan,
    clamp: float,
    gpu: Gpu,
    config: StagedConfig,
) -> None:
    """h_rows = silu(x gate^T) * (x up^T) of every row; `kept` [2, P, I] receives both pre-activations."""
    scales, squares = None, True
    if isinstance(x_rows, CodedRows) and isinstance(gate_LIH, CodedWeight) and isinstance(up_LIH, CodedWeight):
        scales, squares = scales_of(x_rows, x_rows, gate_LIH.scales, up_LIH.scales), gate_LIH.square
        x_rows, gate_LIH, up_LIH, config = x_rows.codes, gate_LIH.codes, up_LIH.codes, coded_config(gpu)
    assert isinstance(x_rows, Tensor) and isinstance(gate_LIH, Tensor) and isinstance(up_LIH, Tensor)
    _, width, hidden = gate_LIH.shape
    n, c = config.block_n, config.block_c
    gate_rows, up_rows = (h_rows, h_rows) if kept is None else kept
    kernels.run_gate_up[(gpu.num_sms,)](
        plan.forward_tasks, plan.sizes, ceil_div(width, TILE_N // 2),
        operand(config, x_rows, TILE_M, c), operand(config, gate_LIH, n // 2, c), operand(config, up_LIH, n // 2, c),
        scales, h_rows, gate_rows, up_rows, width, ceil_div(hidden, c),
        KEEP=kept is not None, CLAMP=clamp, SQUARES=squares, **options(config),
    )  # fmt: skip


def down(
    h_rows: Tensor | CodedRows,
    down_LHI: Tensor | CodedWeight,
    y_rows: Tensor,
    plan: DevicePlan,
    gpu: Gpu,
    config: StagedConfig,
) -> None:
    """y_rows = h down^T."""
    scales, squares = None, True
    if isinstance(h_rows, CodedRows) and isinstance(down_LHI, CodedWeight):
        scales, squares = scales_of(h_rows, h_rows, down_LHI.scales), down_LHI.square
        h_rows, down_LHI, config = h_rows.codes, down_LHI.codes, coded_config(gpu)
    assert isinstance(h_rows, Tensor) and isinstance(down_LHI, Tensor)
    _, hidden, width = down_LHI.shape
    n, c = config.block_n, config.block_c
    kernels.run_down[(gpu.num_sms,)](
        plan.forward_tasks, plan.sizes, ceil_div(width, TILE_N // 2), ceil_div(hidden, TILE_N),
        operand(config, h_rows, TILE_M, c), operand(config, down_LHI, n, c), scales, y_rows, hidden, ceil_div(width, c),
        SQUARES=squares, **options(config),
    )  # fmt: skip


def combine(
    rows: Tensor,
    plan: DevicePlan,
    weights_TK: Tensor | None,
    shared_TH: Tensor | None,
    shared_scale_T: Tensor | None,
    out_TH: Tensor,
) -> None:
    """out = the sum of each token's rows in slot order, times their weights if given, then of its shared row; one rounding."""
    tokens, width = out_TH.shape
    columns = 1024
    row_kernels.combine_rows[(tokens, ceil_div(width, columns))](
        rows, plan.row_of_route_N, rows if weights_TK is None else weights_TK, rows if shared_TH is None else shared_TH,
        rows if shared_scale_T is None else shared_scale_T, out_TH, width, out_TH.stride(0), K=plan.top_k,
        WEIGHTED=weights_TK is not None, SHARED=shared_TH is not None, SCALED=shared_scale_T is not None,
        COLUMNS=columns, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def dh(
    dy_rows: Tensor | CodedRows,
    down_LHI: Tensor | CodedWeight,
    gate_up_2PI: Tensor,
    wh_rows: Tensor,
    partial: Tensor,
    weights_N: Tensor,
    plan: DevicePlan,
    clamp: float,
    gpu: Gpu,
    config: StagedConfig,
) -> None:
    """From dy_rows and the pre-activations: wh_rows = weight * h, the partial sums of dH * h, and, in place of the
    pre-activations, their gradients. weights_N: fp32, the factor of each route."""
    scales, squares = None, True
    if isinstance(dy_rows, CodedRows) and isinstance(down_LHI, CodedWeight):
        scales, squares = scales_of(dy_rows, dy_rows, down_LHI.scales_transposed), down_LHI.square
        dy_rows, weight, config = dy_rows.codes, down_LHI.transposed, coded_config(gpu)
        width, hidden = weight.shape[1:]
    else:
        assert isinstance(down_LHI, Tensor)
        weight = down_LHI
        hidden, width = weight.shape[1:]
    assert isinstance(dy_rows, Tensor)
    n, c = config.block_n, config.block_c
    gate_rows, up_rows = gate_up_2PI
    kernels.run_dh[(gpu.num_sms,)](
        plan.backward_tasks, plan.sizes, ceil_div(width, TILE_N),
        operand(config, dy_rows, TILE_M, c), operand(config, weight, *((c, n) if scales is None else (n, c))),
        scales, gate_rows, up_rows, wh_rows, gate_rows, up_rows, partial, partial.shape[1], plan.route_of_row_P, weights_N,
        width, ceil_div(hidden, c), CLAMP=clamp, SQUARES=squares, **options(config),
    )  # fmt: skip


def dx(
    d_gate_up_2PI: Tensor | tuple[Tensor | CodedRows, Tensor | CodedRows],
    gate_LIH: Tensor | CodedWeight,
    up_LIH: Tensor | CodedWeight,
    dx_rows: Tensor,
    plan: DevicePlan,
    gpu: Gpu,
    config: StagedConfig,
) -> None:
    """dx_rows = d(gate) gate + d(up) up."""
    dgate, dup = d_gate_up_2PI
    if isinstance(gate_LIH, CodedWeight) and isinstance(up_LIH, CodedWeight):
        assert isinstance(dgate, CodedRows) and isinstance(dup, CodedRows)
        scales = scales_of(dgate, dup, gate_LIH.scales_transposed, up_LIH.scales_transposed)
        squares = gate_LIH.square
        dgate_rows, dup_rows, config = dgate.codes, dup.codes, coded_config(gpu)
        gate, up = gate_LIH.transposed, up_LIH.transposed
        hidden, width = gate.shape[1:]
    else:
        assert isinstance(gate_LIH, Tensor) and isinstance(up_LIH, Tensor)
        assert isinstance(dgate, Tensor) and isinstance(dup, Tensor)
        scales, squares = None, True
        dgate_rows, dup_rows, gate, up = dgate, dup, gate_LIH, up_LIH
        width, hidden = gate.shape[1:]
    n, c = config.block_n, config.block_c
    block = (c, n) if scales is None else (n, c)
    kernels.run_dx[(gpu.num_sms,)](
        plan.backward_tasks, plan.sizes, ceil_div(width, TILE_N), sum(weight_tasks(plan, hidden, width)),
        ceil_div(hidden, TILE_N), operand(config, dgate_rows, TILE_M, c), operand(config, dup_rows, TILE_M, c),
        operand(config, gate, *block), operand(config, up, *block), scales, dx_rows, hidden,
        ceil_div(width, c), SQUARES=squares, **options(config),
    )  # fmt: skip


def down_gradient(
    dy_rows: Tensor,
    wh_rows: Tensor,
    d_down_LHI: Tensor,
    started: bool,
    plan: DevicePlan,
    gpu: Gpu,
    config: StagedConfig,
) -> None:
    """d_down_LHI = dy^T (weight * h) of each expert's rows, fp32, begun or continued; its rows must be contiguous."""
    _, hidden, width = d_down_LHI.shape
    n, c = config.block_n, config.block_c
    down_tasks, _ = weight_tasks(plan, hidden, width)
    kernels.run_weights[(gpu.num_sms,)](
        plan.backward_tasks, plan.sizes, ceil_div(width, TILE_N), 0, down_tasks,
        operand(config, dy_rows, c, TILE_M), operand(config, wh_rows, c, n), d_down_LHI, d_down_LHI,
        d_down_LHI.stride(0), d_down_LHI.stride(0), hidden, width, CONTINUE=started, **options(config),
    )  # fmt: skip


def gate_up_gradients(
    d_gate_up_2PI: Tensor,
    x_rows: Tensor,
    d_gate_LIH: Tensor,
    d_up_LIH: Tensor,
    started: bool,
    plan: DevicePlan,
    gpu: Gpu,
    config: StagedConfig,
) -> None:
    """d_gate_LIH, d_up_LIH = d_gate_up_2PI[0, 1]^T x of each expert's rows; as `down_gradient`. d_gate_up_2PI: [2, P, I]."""
    _, width, hidden = d_gate_LIH.shape
    n, c = config.block_n, config.block_c
    kernels.run_weights[(gpu.num_sms,)](
        plan.backward_tasks, plan.sizes, ceil_div(width, TILE_N), *weight_tasks(plan, hidden, width),
        operand(config, d_gate_up_2PI, c, TILE_M), operand(config, x_rows, c, n),
        d_gate_LIH, d_up_LIH, d_gate_LIH.stride(0), d_up_LIH.stride(0), width, hidden, CONTINUE=started, **options(config),
    )  # fmt: skip


def weight_tasks(plan: DevicePlan, hidden: int, width: int) -> tuple[int, int]:
    """(DW_DOWN tasks, DW_GATE_UP tasks) of a plan."""
    down_tasks = ceil_div(hidden, TILE_M) * ceil_div(width, TILE_N)
    return plan.num_experts * down_tasks, plan.num_experts * 2 * ceil_div(width, TILE_M) * ceil_div(hidden, TILE_N)


def partial_sums(rows: int, width: int, device: torch.device) -> Tensor:
    """Room for what `dh` leaves per row and 128 columns: fp32."""
    return torch.empty(rows, ceil_div(width, SUM_COLUMNS), dtype=torch.float32, device=device)


@contextmanager
def plain_rows(gradient: Tensor) -> Iterator[Tensor]:
    """`gradient` [L, M, N] if its rows follow one another, as the kernels need; else a copy that is written back at the end."""
    if gradient.stride()[1:] == (gradient.shape[2], 1):
        yield gradient
        return
    copy = gradient.contiguous()
    yield copy
    gradient.copy_(copy)


def route_weight_gradients(partial: Tensor, plan: DevicePlan, dweights_N: Tensor) -> None:
    """dweights[n] = the partial sums of its row, added in order; 0 for a masked route."""
    width = 128
    row_kernels.sum_partials[(ceil_div(dweights_N.numel(), width),)](
        partial, plan.row_of_route_N, dweights_N, dweights_N.numel(), partial.shape[1], WIDTH=width, enable_fp_fusion=False
    )  # fmt: skip
