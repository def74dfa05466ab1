"""The plain PyTorch backend: fast on a CPU, usable on any GPU, with an explicit forward and backward.

Rows are gathered into expert order, each expert is three matrix products, and every token sums its own rows: no scatter-add,
no atomics, so the same bits for any number of threads. A row of a product depends on that row and the weights alone, which on
a CPU needs operands of whole groups of 16 rows and columns at aligned addresses (docs/numerics.md); `check_gemm_rows` tries it
once per process. Knows nothing of autograd or of how a schedule is made. Read next: `mok/reference/moe.py`, the same in loops.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, pad

from mok.backends.activation import silu, silu_backward
from mok.backends.interface import ExpertWeights, InputGrads, LayerShape, Options, SharedGrads
from mok.backends.quantization import Operand, pack_rows, round_row_groups, round_rows, round_weight, unpack_rows
from mok.errors import MokError
from mok.gradients import GEMM_MULTIPLE, GradBuffers
from mok.quantization import Quantization
from mok.schedule import Schedule
from mok.transport.interface import RowTransport
from mok.transport.local import LocalTransport

__all__ = ["TRANSPORTS", "Saved", "backward", "check_gemm_rows", "forward", "why_not"]

TRANSPORTS = ("collective",)
"""How rows may travel between ranks, see `mok.backends.interface`."""

SUM_BLOCK = 128  # columns that one block of the router-weight gradient adds up
GEMM_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class Saved:
    """What the backward needs; None for what it computes again, and for what the layer does not have.

    J = 2I: gate columns, then up columns. Widths are padded to multiples of 16;
    hidden_size and shared_size are the true H and S. Weights are as products take them: where operands are 8-bit, `_back` are
    those of products towards the input; else they are the same. silu_PI and hidden_PI are kept in fp32 only.
    """

    hidden_size: int
    shared_size: int
    schedule: Schedule
    options: Options
    weights_TK: Tensor
    w_gate_up_LJH: Tensor
    w_gate_up_back_LJH: Tensor
    w_down_back_LHI: Tensor
    x_TH: Tensor | None
    x_PH: Tensor | None = None
    gate_up_PJ: Tensor | None = None
    silu_PI: Tensor | None = None
    hidden_PI: Tensor | None = None
    shared_gate_up_JH: Tensor | None = None
    shared_gate_up_back_JH: Tensor | None = None
    shared_down_back_HS: Tensor | None = None
    shared_scale_T: Tensor | None = None
    shared_gate_up_TJ: Tensor | None = None


def why_not(shape: LayerShape, dtype: torch.dtype, device: torch.device, quantization: Quantization | None = None) -> list[str]:
    """Why this backend cannot run, or an empty list. Any sizes will do."""
    reasons = []
    if dtype not in (torch.float32, torch.bfloat16):
        reasons.append(f"dtype {dtype}: computes in torch.float32 and torch.bfloat16 only")
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        reasons.append(
            f"torch.get_float32_matmul_precision() is {torch.get_float32_matmul_precision()!r}: products would lose bits; "
            'call torch.set_float32_matmul_precision("highest")'
        )
    return reasons


def forward(
    x_TH: Tensor,
    weights_TK: Tensor,
    schedule: Schedule,
    experts: ExpertWeights,
    options: Options,
    shared_scale_T: Tensor | None = None,
) -> tuple[Tensor, Saved]:
    """y[t] = sum over slots k of weights[t, k] * expert(ids[t, k])(x[t]), then + scale[t] * shared(x[t]); one rounding.

    x_TH: fp32 or bf16. weights_TK, shared_scale_T: fp32; no scale is a factor of 1. Returns y_TH in the dtype of x, and what
    `backward` needs. Raises MokError where the CPU's matrix products fail `check_gemm_rows`.
    """
    if x_TH.device.type == "cpu":
        check_gemm_rows(x_TH.dtype)
    transport = _transport(options)
    hidden_size = x_TH.shape[1]
    x_TH = _pad_columns(x_TH)
    block, shared_block = _blocks(options)
    w_gate_up = _operand("gate_up", _gate_up_weights(experts.gate_LIH, experts.up_LIH), block, options)
    w_down = _operand("down", _gemm_ready(_pad_matrix(experts.down_LHI)), block, options)
    if schedule.num_masked:
        weights_TK = weights_TK.masked_fill(schedule.expert_ids_TK < 0, 0)

    x_PH = _dispatched(x_TH, schedule, options)
    gate_up_PJ = _product_by_expert(_rows(x_PH, block), w_gate_up.over_columns.transpose(1, 2), schedule)
    silu_PI, hidden_PI = _swiglu(gate_up_PJ, options.clamp)
    y_PH = _product_by_expert(_rows(hidden_PI.to(x_TH.dtype), block), w_down.over_columns.transpose(1, 2), schedule)
    sum_TH = _combine(transport.slots_of_rows(y_PH, schedule), weights_TK)

    shared_gate_up = shared_down = shared_gate_up_TJ = None
    if experts.shared is not None:
        gate_up_1JH = _gate_up_weights(*experts.shared.gate_up_JH.unsqueeze(0).chunk(2, dim=1))
        shared_gate_up = _operand("shared_gate_up", gate_up_1JH, shared_block, options)
        shared_down = _operand("shared_down", _gemm_ready(_pad_matrix(experts.shared.down_HS[None])), shared_block, options)
        shared_gate_up_TJ = _product(_rows(_pad_rows(x_TH), shared_block), shared_gate_up.over_columns[0].t())
        hidden_TS = _swiglu(shared_gate_up_TJ, options.clamp)[1].to(x_TH.dtype)
        shared_TH = _product(_rows(hidden_TS, shared_block), shared_down.over_columns[0].t())[: x_TH.shape[0]].float()
        sum_TH.add_(shared_TH if shared_scale_T is None else shared_TH * shared_scale_T.unsqueeze(1))
    y_TH = _true_columns(sum_TH.to(x_TH.dtype), hidden_size)

    keep_all, keep_gate_up = options.recompute == "none", options.recompute != "all"
    keep_hidden = keep_all and x_TH.dtype == torch.float32  # beside bf16 rows it would double what is saved
    return y_TH, Saved(
        hidden_size=hidden_size,
        shared_size=experts.shared.down_HS.shape[1] if experts.shared else 0,
        schedule=schedule,
        options=options,
        weights_TK=weights_TK,
        w_gate_up_LJH=w_gate_up.over_columns,
        w_gate_up_back_LJH=w_gate_up.over_rows,
        w_down_back_LHI=w_down.over_rows,
        x_TH=None if keep_all and experts.shared is None else x_TH,
        x_PH=x_PH if keep_all else None,
        gate_up_PJ=gate_up_PJ if keep_gate_up else None,
        silu_PI=silu_PI if keep_hidden else None,
        hidden_PI=hidden_PI if keep_hidden else None,
        shared_gate_up_JH=shared_gate_up.over_columns[0] if shared_gate_up else None,
        shared_gate_up_back_JH=shared_gate_up.over_rows[0] if shared_gate_up else None,
        shared_down_back_HS=shared_down.over_rows[0] if shared_down else None,
        shared_scale_T=shared_scale_T,
        shared_gate_up_TJ=shared_gate_up_TJ if keep_gate_up else None,
    )


def backward(dy_TH: Tensor, saved: Saved, grads: GradBuffers | None) -> InputGrads:
    """Gradients of the inputs; those of the expert weights are continued in `grads` (None: frozen), by one fp32 term per
    (expert, segment).

    dy_TH: in the dtype of the activations. With h the hidden row as stored and dh = w_down^T dy in fp32, the weight of a route
    gets the sum of dh * h, and enters d(gate), d(up) and the h of ddown once, as a factor in fp32 before their one rounding.
    """
    schedule, options = saved.schedule, saved.options
    block, shared_block = _blocks(options)
    transport = _transport(options)
    dy_TH = _pad_columns(dy_TH)
    x_PH = saved.x_PH
    if x_PH is None:
        assert saved.x_TH is not None
        x_PH = _dispatched(saved.x_TH, schedule, options)
    gate_up_PJ = saved.gate_up_PJ
    if gate_up_PJ is None:
        gate_up_PJ = _product_by_expert(_rows(x_PH, block), saved.w_gate_up_LJH.transpose(1, 2), schedule)
    silu_PI, hidden_PI = saved.silu_PI, saved.hidden_PI
    if silu_PI is None or hidden_PI is None:
        silu_PI, hidden_PI = _swiglu(gate_up_PJ, options.clamp)

    dy_PH = _dispatched(dy_TH, schedule, options)
    weights_P = transport.rows_of_routes(saved.weights_TK.reshape(-1), schedule)
    dh_PI = _product_by_expert(_rows(dy_PH, block), saved.w_down_back_LHI, schedule, fp32=True)
    d_gate_up_PJ, scaled_hidden_PI, dweights_P = _swiglu_backward(
        dh_PI, gate_up_PJ, silu_PI, hidden_PI, weights_P, options.clamp
    )
    dx_PH = _product_by_expert(_rows(d_gate_up_PJ, block), saved.w_gate_up_back_LJH, schedule)
    dx_sum_TH = _combine(transport.slots_of_rows(dx_PH, schedule))
    if grads is not None:
        rows_block = block if options.quantization is not None and options.quantization.weight_gradients else 0
        _add_weight_grads(grads, schedule, d_gate_up_PJ, x_PH, dy_PH, scaled_hidden_PI, rows_block)
    dweights_TK = torch.cat(list(transport.slots_of_rows(dweights_P.unsqueeze(1), schedule)), dim=1)

    shared = dscale_T = None
    if saved.shared_gate_up_JH is not None and saved.shared_gate_up_back_JH is not None:
        assert saved.shared_down_back_HS is not None
        tokens = dy_TH.shape[0]
        gate_up_TJ = saved.shared_gate_up_TJ
        if gate_up_TJ is None:
            assert saved.x_TH is not None
            gate_up_TJ = _product(_rows(_pad_rows(saved.x_TH), shared_block), saved.shared_gate_up_JH.t())
        dh_TS = _product(_rows(_pad_rows(dy_TH), shared_block), saved.shared_down_back_HS, fp32=True)
        scale_T = None if saved.shared_scale_T is None else pad(saved.shared_scale_T, (0, dh_TS.shape[0] - tokens))
        silu_TS, hidden_TS = _swiglu(gate_up_TJ, options.clamp)
        d_gate_up_TJ, scaled_hidden_TS, dscale = _swiglu_backward(dh_TS, gate_up_TJ, silu_TS, hidden_TS, scale_T, options.clamp)
        dx_sum_TH.add_(_product(_rows(d_gate_up_TJ, shared_block), saved.shared_gate_up_back_JH)[:tokens])
        size = saved.shared_size
        shared = SharedGrads(_true_halves(d_gate_up_TJ[:tokens], size), scaled_hidden_TS[:tokens, :size])
        dscale_T = None if scale_T is None else dscale[:tokens]
    return InputGrads(_true_columns(dx_sum_TH.to(dy_TH.dtype), saved.hidden_size), dweights_TK, dscale_T, shared)


@cache
def check_gemm_rows(dtype: torch.dtype) -> None:
    """Try, once per process and dtype, that a row of a CPU matrix product depends neither on the rows around it nor, in fp32,
    on the number of threads.

    Raises MokError if it does: no layout, batch or machine would then give the bits of another.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(176, 160, generator=generator).to(dtype)
    weights = torch.randn(48, 160, generator=generator).to(dtype)
    whole = torch.mm(rows, weights.t())
    parts = [torch.mm(rows[start : start + count], weights.t()) for start, count in ((0, 16), (16, 112), (128, 48))]
    narrow = torch.mm(rows, weights[16:32].t())
    if not (torch.equal(torch.cat(parts), whole) and torch.equal(narrow, whole[:, 16:32])):
        raise MokError(
            f"matrix products of {dtype} on this CPU give a row other bits beside other rows, so mok's results would depend on "
            f"the layout: torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}; try another build of torch, or "
            "moe.backend = reference"
        )
    if dtype == torch.float32 and not _threads_do_not_show(generator):
        raise MokError(
            "a long matrix product on this CPU has other bits with other numbers of threads: set MKL_CBWR=AUTO,STRICT in the "
            "environment before Python starts, or import mok before anything that computes"
        )


def _threads_do_not_show(generator: torch.Generator) -> bool:
    """Whether a product with a sum over 4096 and few results is the same with one thread and with several."""
    a, b = torch.randn(64, 4096, generator=generator), torch.randn(4096, 64, generator=generator)
    threads = torch.get_num_threads()
    try:
        products = []
        for count in (1, 2, max(threads, 3)):
            torch.set_num_threads(count)
            products.append(torch.mm(a, b))
    finally:
        torch.set_num_threads(threads)
    return all(torch.equal(products[0], product) for product in products[1:])


def _dispatched(values_TH: Tensor, schedule: Schedule, options: Options) -> Tensor:
    """[P, H]: each row gets the values of its token; padding rows are zero. In 8 bits on the way where the options say so."""
    transport = _transport(options)
    if options.quantization is None or not options.quantization.dispatch:
        return transport.rows_of_tokens(values_TH, schedule)
    packed = transport.rows_of_tokens(pack_rows(values_TH, options.quantization.of_blocks.block), schedule)
    return unpack_rows(packed, values_TH.shape[1], values_TH.dtype)


def _transport(options: Options) -> RowTransport:
    """Whoever carries the rows of a call; `TRANSPORTS` keeps others away."""
    if options.transport is None:
        return LocalTransport()
    assert isinstance(options.transport, RowTransport)
    return options.transport


def _blocks(options: Options) -> tuple[int, int]:
    """Values that share a scale in the operands of the routed and of the shared experts; 0 where they are not rounded."""
    if options.quantization is None:
        return 0, 0
    block = options.quantization.of_blocks.block
    return block, block if options.quantization.shared_experts else 0


def _operand(name: str, w_LAB: Tensor, block: int, options: Options) -> Operand:
    """A weight as products take it; where it is rounded, from the layer's cache if it has one."""
    if not block or options.quantization is None:
        return Operand(w_LAB, w_LAB)
    form = options.quantization.of_blocks
    if options.weight_cache is None:
        return round_weight(w_LAB, form)
    return options.weight_cache.get(name, lambda: round_weight(w_LAB, form))


def _rows(x_PC: Tensor, block: int) -> Tensor:
    """Rows as products take them: each rounded by itself."""
    return round_rows(x_PC, block) if block else x_PC


def _product_by_expert(rows_PA: Tensor, weights_LAB: Tensor, schedule: Schedule, fp32: bool = False) -> Tensor:
    """out[p] = rows[p] @ weights[expert of row p]; every row of the buffer belongs to an expert, so every row is written."""
    if rows_PA.is_cpu:
        if fp32:
            rows_PA, weights_LAB = rows_PA.float(), weights_LAB.float()
        return grouped_mm(rows_PA, weights_LAB, offs=schedule.expert_ends)  # one after the other, each as `torch.mm` would
    dtype = torch.float32 if fp32 else rows_PA.dtype
    out_PB = torch.empty(rows_PA.shape[0], weights_LAB.shape[2], dtype=dtype, device=rows_PA.device)
    sizes = schedule.expert_sizes
    for operand, weights_AB, out in zip(rows_PA.split(sizes), weights_LAB.unbind(), out_PB.split(sizes), strict=True):
        if operand.shape[0]:
            _product(operand, weights_AB, fp32, out)
    return out_PB


def _product(rows: Tensor, weights: Tensor, fp32: bool = False, out: Tensor | None = None) -> Tensor:
    """rows @ weights, in fp32 or the dtype of the rows; a row of the result depends on that row and the weights alone."""
    if rows.is_cuda:  # cuBLAS takes another kernel for another number of rows
        from mok.launch.product import product_of_rows

        return product_of_rows(rows, weights, torch.float32 if fp32 else rows.dtype, out)
    return _product_fp32(rows, weights, out) if fp32 else torch.mm(rows, weights, out=out)


def _product_fp32(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a @ b, accumulated and stored in fp32. On a CPU bf16 operands are widened, which changes no product."""
    if a.dtype == torch.float32 or a.device.type == "cpu":
        return torch.mm(a.float(), b.float(), out=out)
    return torch.mm(a, b, out_dtype=torch.float32, out=out)


def _swiglu(gate_up_PJ: Tensor, clamp: float) -> tuple[Tensor, Tensor]:
    """silu(gate), and the hidden rows silu(gate) * up; fp32."""
    gate_PI, up_PI = _clamped(gate_up_PJ, clamp)
    silu_PI = silu(gate_PI)
    return silu_PI, silu_PI * up_PI


def _swiglu_backward(
    dh_PI: Tensor, gate_up_PJ: Tensor, silu_PI: Tensor, hidden_PI: Tensor, weights_P: Tensor | None, clamp: float
) -> tuple[Tensor, Tensor, Tensor]:
    """From dh, fp32 and unweighted (it is overwritten): d(gate) and d(up) [P, J], and the hidden rows, all three times the
    row's weight, in the dtype of gate_up; and the gradient of that weight [P], fp32. silu_PI, hidden_PI: of `_swiglu`.

    d(hidden)/d(gate) = up * sigmoid * (1 + gate * (1 - sigmoid)).
    """
    dtype = gate_up_PJ.dtype
    gate_PI, up_PI = _clamped(gate_up_PJ, clamp)
    scratch_PI = dh_PI * hidden_PI.to(dtype)
    dweights_P = _row_sum(scratch_PI)
    scaled_hidden_PI = hidden_PI
    if weights_P is not None:
        weights_P1 = weights_P.unsqueeze(1)
        dh_PI.mul_(weights_P1)
        scaled_hidden_PI = torch.mul(hidden_PI, weights_P1, out=scratch_PI)
    d_gate_up_PJ = torch.empty(gate_up_PJ.shape, dtype=torch.float32, device=gate_up_PJ.device)
    d_gate_PI, d_up_PI = d_gate_up_PJ.chunk(2, dim=1)
    torch.mul(silu_PI, dh_PI, out=d_up_PI)
    silu_backward(dh_PI.mul_(up_PI), gate_PI, d_gate_PI)
    if clamp:
        raw_gate_PI, raw_up_PI = gate_up_PJ.chunk(2, dim=1)
        d_gate_PI.masked_fill_(raw_gate_PI > clamp, 0)
        d_up_PI.masked_fill_(raw_up_PI.abs() > clamp, 0)
    return d_gate_up_PJ.to(dtype), scaled_hidden_PI.to(dtype), dweights_P


def _clamped(gate_up_PJ: Tensor, clamp: float) -> tuple[Tensor, Tensor]:
    gate_PI, up_PI = gate_up_PJ.float().chunk(2, dim=1)
    if clamp:
        return gate_PI.clamp(max=clamp), up_PI.clamp(-clamp, clamp)
    return gate_PI, up_PI


def _row_sum(values_PI: Tensor) -> Tensor:
    """Sum of each row: blocks of 128 columns, then a chain over the blocks. fp32 [P]."""
    first, *rest = (block.sum(1) for block in values_PI.split(SUM_BLOCK, dim=1))
    for block in rest:
        first.add_(block)
    return first


def _combine(slots: Iterable[Tensor], weights_TK: Tensor | None = None) -> Tensor:
    """acc = +0; slot by slot acc = acc + weight * row, product and sum rounded apart. fp32 [T, H]."""
    sum_TH: Tensor | None = None
    for k, slot_TH in enumerate(slots):
        rows_TH = slot_TH.float()
        if weights_TK is not None:
            rows_TH.mul_(weights_TK[:, k : k + 1])
        # Added to +0, -0.0 becomes +0.0; anything else stays what it is.
        sum_TH = rows_TH.add_(0.0) if sum_TH is None else sum_TH.add_(rows_TH)
    assert sum_TH is not None
    return sum_TH


def _add_weight_grads(
    grads: GradBuffers,
    schedule: Schedule,
    d_gate_up_PJ: Tensor,
    x_PH: Tensor,
    dy_PH: Tensor,
    hidden_PI: Tensor,
    rows_block: int = 0,
) -> None:
    """Continue the chains in `grads` by one term per (expert, segment), segments in order.

    The first segment of a lane is stored, later ones are added; where an expert has no rows there, its zeros are. So the bits
    do not depend on which calls the segments come in. rows_block: rows, from the first of the segment on, that share a scale in
    8-bit operands; 0 leaves operands as they are.
    """
    lanes, sizes = schedule.grid.lane_of_segment, schedule.segment_sizes
    if rows_block:
        d_gate_up_PJ, x_PH, dy_PH, hidden_PI = (
            torch.cat([round_row_groups(rows, rows_block) if len(rows) else rows for rows in whole.split(sizes)])
            for whole in (d_gate_up_PJ, x_PH, dy_PH, hidden_PI)
        )
    if grads.fresh and d_gate_up_PJ.is_cpu and lanes == tuple(range(len(lanes))):
        _store_chains_of_one(grads, schedule.segment_ends, d_gate_up_PJ, x_PH, dy_PH, hidden_PI)
        return
    is_first = [not grads.started[lane] and lane not in lanes[:segment] for segment, lane in enumerate(lanes)]
    joined = None if _missing(grads.gate.shape[-2]) else _joined(grads.gate, grads.up)
    gate_up = (grads.gate, grads.up) if joined is None else (joined,)
    for targets, a_PA, b_PB in ((gate_up, d_gate_up_PJ, x_PH), ((grads.down,), dy_PH, hidden_PI)):
        a_parts, b_parts = iter(a_PA.t().split(sizes, 1)), iter(b_PB.split(sizes))
        for of_expert in zip(*(target.unbind(1) for target in targets), strict=True):
            of_lane = tuple(zip(*(target.unbind() for target in of_expert), strict=True))
            for lane, first in zip(lanes, is_first, strict=True):
                _term(first, of_lane[lane], next(a_parts), next(b_parts))


def _store_chains_of_one(
    grads: GradBuffers, segment_ends: Tensor, d_gate_up_PJ: Tensor, x_PH: Tensor, dy_PH: Tensor, hidden_PI: Tensor
) -> None:
    """What `_add_weight_grads` does where every lane has one segment, in the order of the lanes: all terms at once, in memory
    of their own."""
    lanes = grads.gate.shape[0]
    width, hidden_size = grads.gate.shape[2:]
    gate_up = grouped_mm(d_gate_up_PJ.t().float(), x_PH.float(), offs=segment_ends)
    down = grouped_mm(dy_PH.t().float(), hidden_PI.float(), offs=segment_ends)
    gate_up, down = (terms.unflatten(0, (-1, lanes)).transpose(0, 1) for terms in (gate_up, down))
    grads.gate, grads.up = (half[:, :, :width, :hidden_size] for half in gate_up.chunk(2, dim=2))
    grads.down = down[:, :, :hidden_size, :width]


def _term(first: bool, targets: tuple[Tensor, ...], a_AM: Tensor, b_MB: Tensor) -> None:
    """Store (first) or add a @ b, whose rows are dealt to the targets in equal shares, padded rows and columns left out."""
    if not b_MB.shape[0]:
        for target in targets if first else ():
            target.zero_()
        return
    whole = targets[0] if len(targets) == 1 else None
    if first and whole is not None and whole.shape == (a_AM.shape[0], b_MB.shape[1]) and whole.stride(1) == 1:
        _product_fp32(a_AM, b_MB, whole)
        return
    term = _product_fp32(a_AM, b_MB)
    for target, part in zip(targets, term.chunk(len(targets)), strict=True):
        part = part[: target.shape[0], : target.shape[1]]
        if first:
            target.copy_(part)
        else:
            target.add_(part)


def _gate_up_weights(gate_LIH: Tensor, up_LIH: Tensor) -> Tensor:
    """[L, 2I, H], gate rows first: a view where the two lie together in memory, else a copy."""
    if not (gate_LIH.shape[1] % GEMM_MULTIPLE or gate_LIH.shape[2] % GEMM_MULTIPLE):
        joined = _joined(gate_LIH, up_LIH)
        if joined is not None:
            return _gemm_ready(joined)
    return torch.cat((_pad_matrix(gate_LIH), _pad_matrix(up_LIH)), dim=1)


def _joined(first: Tensor, second: Tensor) -> Tensor | None:
    """The rows (dim -2) of `first`, then of `second`, as one view; None where they do not follow one another in memory."""
    rows = first.shape[-2]
    step = rows * first.stride(-2) * first.element_size()
    same = first.stride() == second.stride() and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    if not same or second.data_ptr() - first.data_ptr() != step:
        return None
    return first.as_strided((*first.shape[:-2], 2 * rows, first.shape[-1]), first.stride())


def _gemm_ready(weights: Tensor) -> Tensor:
    """`weights` where its rows are contiguous and start on aligned addresses, else a copy of which that is true."""
    size = weights.element_size()
    aligned = weights.stride(-1) == 1 and not weights.data_ptr() % GEMM_ALIGNMENT_BYTES
    if aligned and all(stride * size % GEMM_ALIGNMENT_BYTES == 0 for stride in weights.stride()[:-1]):
        return weights
    return weights.clone(memory_format=torch.contiguous_format)


def _missing(size: int) -> int:
    return -size % GEMM_MULTIPLE


def _pad_columns(values_TX: Tensor) -> Tensor:
    columns = _missing(values_TX.shape[1])
    return pad(values_TX, (0, columns)) if columns else values_TX


def _pad_rows(values_TX: Tensor) -> Tensor:
    """Whole groups of 16 contiguous, aligned rows."""
    return _gemm_ready(pad(values_TX, (0, 0, 0, _missing(values_TX.shape[0]))))


def _pad_matrix(weights_LAB: Tensor) -> Tensor:
    rows, columns = _missing(weights_LAB.shape[1]), _missing(weights_LAB.shape[2])
    return pad(weights_LAB, (0, columns, 0, rows)) if rows or columns else weights_LAB


def _true_columns(values_TH: Tensor, hidden_size: int) -> Tensor:
    return values_TH if values_TH.shape[1] == hidden_size else values_TH[:, :hidden_size].contiguous()


def _true_halves(values_TJ: Tensor, size: int) -> Tensor:
    """Two blocks of columns, padded, as two blocks of `size` columns."""
    first, second = values_TJ.chunk(2, dim=1)
    return values_TJ if first.shape[1] == size else torch.cat((first[:, :size], second[:, :size]), dim=1)
