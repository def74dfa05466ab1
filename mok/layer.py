"""`mok.moe`: the experts of a MoE layer for a router of one's own.

Owns the checks of what users pass in, and the way from expert ids to a schedule, a backend and a result. Read next:
`mok/model/moe.py`, the layer with its router, and `mok/autograd.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mok.autograd import Plan, experts
from mok.backends.interface import LayerShape, Options
from mok.compiled import compiled_experts
from mok.errors import UsageError
from mok.grid import CallGrid
from mok.launch.status import raise_if_seen, tell_host
from mok.quantization import Quantization
from mok.transport.collective import CollectiveTransport

__all__ = ["grid_of", "moe", "moe_layer"]

RECOMPUTE = ("none", "activations", "all")


def moe(
    x_TH: Tensor,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    w_gate_EIH: Tensor,
    w_up_EIH: Tensor,
    w_down_EHI: Tensor,
    *,
    clamp: float = 0.0,
    backend: str = "auto",
    recompute: str = "none",
    quantization: Quantization | None = None,
    grid: CallGrid | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """y[t] = sum over k of weights[t, k] * down_e(silu(gate_e x[t]) * up_e x[t]) with e = expert_ids[t, k]; [T, H].

    x_TH: fp32 or bf16 (float64 with backend "reference"), any strides, T may be 0; leading dimensions before H are kept.
    expert_ids_TK: int32 or int64 of the same leading shape; -1 masks a route, which then contributes exactly nothing.
    weights_TK: router weights, any sign; used in fp32. w_gate_EIH, w_up_EIH [E, I, H], w_down_EHI [E, H, I]: in the dtype of
    x, any strides and sizes; with several ranks this rank's E / ranks experts.
    clamp: SwiGLU takes min(gate, clamp) and up within +-clamp; 0 for no limits. backend: auto, or a name that must be able to
    run. recompute: none, activations or all of what the backward needs is computed again instead of kept. quantization:
    operands in 8 bits (docs/numerics.md); H and I are then multiples of its block. group: the ranks that share the experts,
    each with its own tokens or none. grid: for calls of several slices (docs/numerics.md).

    Differentiable in x, weights and the expert weights, whose fp32 gradient is added to `main_grad` where that attribute
    exists, else goes to `.grad`. Raises UsageError for arguments that do not fit together, which on a CPU includes ids out of
    range. The kernels of a GPU take those as masked, nobody waits for them, and RunError follows: at `mok.check_status()`, or
    at the first call after the host has heard of it.
    """
    leading = x_TH.shape[:-1]
    if expert_ids_TK.shape[:-1] != leading or weights_TK.shape != expert_ids_TK.shape:
        raise UsageError(
            f"expert_ids {tuple(expert_ids_TK.shape)} and weights {tuple(weights_TK.shape)}: must both be {(*leading, 'K')}, "
            f"one line per row of x {tuple(x_TH.shape)}"
        )
    eager = not torch.compiler.is_compiling()
    if eager:
        raise_if_seen(x_TH.device)
    y_TH, _ = moe_layer(
        x_TH.reshape(-1, x_TH.shape[-1]),
        expert_ids_TK.reshape(-1, expert_ids_TK.shape[-1]),
        weights_TK.reshape(-1, weights_TK.shape[-1]),
        (w_gate_EIH, w_up_EIH, w_down_EHI),
        options=Options(clamp, recompute, None if group is None else CollectiveTransport(group), quantization=quantization),
        backend=backend,
        grid=grid or grid_of(group),
    )
    if eager:
        tell_host(x_TH.device)
    return y_TH.view(x_TH.shape)


def grid_of(group: ProcessGroup | None) -> CallGrid:
    """A call of one slice on each rank, all in one segment."""
    if group is None:
        return CallGrid()
    ranks = group.size()
    return CallGrid(ranks, ranks, (0,), ranks, group.rank())


def moe_layer(
    x_TH: Tensor,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    routed: tuple[Tensor, ...],
    *,
    options: Options,
    backend: str,
    grid: CallGrid,
    shared: tuple[Tensor, Tensor] | None = None,
    shared_scale_T: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`moe` on [T, H], with expert weights as `mok.autograd.experts` takes them, and shared experts.

    Returns y_TH and the routes of each of this rank's slices to each expert, int64 [local slices, E]."""
    shape = _checked_shape(x_TH, expert_ids_TK, weights_TK, routed, shared, grid, options)
    wide = torch.float64 if x_TH.dtype == torch.float64 else torch.float32
    weights_TK = weights_TK.to(wide)
    if torch.compiler.is_compiling():
        return compiled_experts(x_TH, expert_ids_TK, weights_TK, routed, shared, shared_scale_T, options, backend, grid)
    plan = Plan.of(backend, shape, expert_ids_TK, options, grid, x_TH.dtype)
    y_TH = experts(x_TH, weights_TK, routed, plan, shared, shared_scale_T)
    return y_TH, plan.schedule.counts_CE[grid.rank :: grid.ranks]


def _checked_shape(
    x_TH: Tensor,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    routed: tuple[Tensor, ...],
    shared: tuple[Tensor, Tensor] | None,
    grid: CallGrid,
    options: Options,
) -> LayerShape:
    """The sizes of the call; UsageError names the argument that does not fit."""
    hidden_size = x_TH.shape[-1]
    down_LHI = routed[-1]
    if down_LHI.dim() != 3 or down_LHI.shape[1] != hidden_size:
        raise UsageError(f"w_down {tuple(down_LHI.shape)}: must be [experts, H, I] with H = {hidden_size}, the width of x")
    local, _, width = down_LHI.shape
    expected = (local, 2, width, hidden_size) if len(routed) == 2 else (local, width, hidden_size)
    for name, weight in zip(("w_gate_up",) if len(routed) == 2 else ("w_gate", "w_up"), routed[:-1], strict=True):
        if weight.shape != expected:
            raise UsageError(f"{name} {tuple(weight.shape)}: must be {expected} beside w_down {tuple(down_LHI.shape)}")
    if expert_ids_TK.dtype not in (torch.int32, torch.int64):
        raise UsageError(f"expert_ids are {expert_ids_TK.dtype}: must be torch.int32 or torch.int64")
    if not weights_TK.is_floating_point():
        raise UsageError(f"router weights are {weights_TK.dtype}: must be a floating-point type")
    named = {"expert_ids": expert_ids_TK, "router weights": weights_TK}
    for i, weight in enumerate((*routed, *(shared or ()))):
        if weight.dtype != x_TH.dtype:
            raise UsageError(f"x is {x_TH.dtype} and expert weight {i} {weight.dtype}: must be the same; cast one of them")
        named[f"expert weight {i}"] = weight
    for name, tensor in named.items():
        if tensor.device != x_TH.device:
            raise UsageError(f"x is on {x_TH.device} and {name} on {tensor.device}: move one of them")
    if options.clamp < 0:
        raise UsageError(f"clamp = {options.clamp}: must be 0 (no limit) or positive")
    if options.recompute not in RECOMPUTE:
        raise UsageError(f"recompute = {options.recompute!r}: must be one of {', '.join(RECOMPUTE)}")
    if grid.ranks > 1 and options.transport is None:
        raise UsageError(f"a call over {grid.ranks} ranks needs a transport")
    shared_size = shared[1].shape[1] if shared else 0
    if options.quantization is not None:
        sizes = {"H": hidden_size, "I": width} | ({"S": shared_size} if options.quantization.shared_experts else {})
        if misfits := options.quantization.of_blocks.misfits(sizes):
            raise UsageError(f"{'; '.join(misfits)}: choose other widths, or another format")
    top_k, num_experts = expert_ids_TK.shape[1], local * grid.ranks
    if not 1 <= top_k <= num_experts:
        raise UsageError(f"expert_ids name {top_k} experts per token: must be 1 to {num_experts}")
    return LayerShape(hidden_size, width, num_experts, top_k, grid.ranks, shared_size)
