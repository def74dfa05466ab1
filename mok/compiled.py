"""The experts as operations that torch.compile does not look into.

Owns their registration: shapes for tracing, and a backward that keeps nothing but the inputs and computes the rest again, so
that no shape depends on the routing. Outside of torch.compile nobody comes here: `mok/autograd.py` does the same work, keeps
activations and knows `main_grad`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mok.autograd import Plan
from mok.backends.interface import ExpertWeights, LayerShape, Options, SharedWeights
from mok.errors import UsageError
from mok.gradients import GradBuffers, halving_tree
from mok.grid import CallGrid

__all__ = ["compiled_experts"]


def compiled_experts(
    x_TH: Tensor,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    routed: tuple[Tensor, ...],
    shared: tuple[Tensor, Tensor] | None,
    shared_scale_T: Tensor | None,
    options: Options,
    backend: str,
    grid: CallGrid,
) -> tuple[Tensor, Tensor]:
    """What `mok.layer.moe_layer` returns, traceable with fullgraph=True. Gradients go to `.grad`.

    Raises UsageError for several ranks, for 8-bit operands, and for parameters with a `main_grad`, which a compiled backward
    would not fill.
    """
    if options.transport is not None:
        raise UsageError("experts on several ranks cannot be compiled; call the layer outside of torch.compile")
    for weight in (*routed, *(shared or ())):
        if hasattr(weight, "main_grad") or hasattr(weight, "lane_grads"):
            raise UsageError(
                "under torch.compile expert gradients go to .grad: remove main_grad, or call the layer outside of it"
            )
    if options.quantization is not None:
        raise UsageError(f"{options.quantization.format} experts cannot be compiled; call the layer outside of torch.compile")
    lanes = list(grid.lane_of_segment)
    scales = [] if shared_scale_T is None else [shared_scale_T]
    return torch.ops.mok.experts(
        x_TH,
        expert_ids_TK,
        weights_TK,
        scales,
        list(routed),
        list(shared or ()),
        options.clamp,
        backend,
        grid.num_slices,
        lanes,
    )


def _inputs(
    x_TH: Tensor, expert_ids_TK: Tensor, routed: list[Tensor], shared: list[Tensor], clamp: float, backend: str, slices: int,
    lanes: list[int],
) -> tuple[Plan, ExpertWeights]:  # fmt: skip
    gate, up = routed[0].unbind(1) if len(routed) == 2 else routed[:2]
    shared_size = shared[1].shape[1] if shared else 0
    shape = LayerShape(x_TH.shape[1], gate.shape[1], gate.shape[0], expert_ids_TK.shape[1], shared_size=shared_size)
    grid = CallGrid(slices, slices // len(lanes), tuple(lanes))
    plan = Plan.of(backend, shape, expert_ids_TK, Options(clamp), grid, x_TH.dtype)
    return plan, ExpertWeights(gate, up, routed[-1], SharedWeights(*shared) if shared else None)


@torch.library.custom_op("mok::experts", mutates_args=())
def _experts(
    x_TH: Tensor,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    scales: list[Tensor],
    routed: list[Tensor],
    shared: list[Tensor],
    clamp: float,
    backend: str,
    slices: int,
    lanes: list[int],
) -> tuple[Tensor, Tensor]:
    plan, weights = _inputs(x_TH, expert_ids_TK, routed, shared, clamp, backend, slices, lanes)
    scale_T = scales[0] if scales else None
    y_TH, _ = plan.backend.forward(x_TH, weights_TK, plan.schedule, weights, plan.options, scale_T)
    return y_TH, plan.schedule.counts_CE.clone()


@_experts.register_fake
def _(x_TH, expert_ids_TK, weights_TK, scales, routed, shared, clamp, backend, slices, lanes):  # type: ignore[no-untyped-def]
    return x_TH.new_empty(x_TH.shape), expert_ids_TK.new_empty((slices, routed[0].shape[0]), dtype=torch.int64)


@torch.library.custom_op("mok::experts_backward", mutates_args=())
def _experts_backward(
    dy_TH: Tensor,
    x_TH: Tensor,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    scales: list[Tensor],
    routed: list[Tensor],
    shared: list[Tensor],
    clamp: float,
    backend: str,
    slices: int,
    lanes: list[int],
) -> list[Tensor]:
    """Gradients of x, weights, scales, routed and shared, in this order."""
    plan, weights = _inputs(x_TH, expert_ids_TK, routed, shared, clamp, backend, slices, lanes)
    scale_T = scales[0] if scales else None
    _, saved = plan.backend.forward(x_TH, weights_TK, plan.schedule, weights, plan.options, scale_T)
    wide = weights_TK.dtype
    stores = [weight.new_empty((max(lanes) + 1, *weight.shape), dtype=wide) for weight in routed]
    gate, up = stores[0].unbind(2) if len(routed) == 2 else stores[:2]
    found = plan.backend.backward(dy_TH, saved, GradBuffers(gate, up, stores[-1], (False,) * (max(lanes) + 1)))
    gradients = [found.dx_TH, found.dweights_TK, *([found.dshared_scale_T] if scales else [])]
    gradients += [halving_tree(store).to(weight.dtype) for store, weight in zip(stores, routed, strict=True)]
    if shared:
        operands = ((found.shared.d_gate_up_TJ, x_TH), (dy_TH, found.shared.hidden_TS))
        gradients += [(dy.to(wide).t() @ x.to(wide)).to(x_TH.dtype) for dy, x in operands]
    return [gradient.contiguous() for gradient in gradients]


@_experts_backward.register_fake
def _(dy_TH, x_TH, expert_ids_TK, weights_TK, scales, routed, shared, *_):  # type: ignore[no-untyped-def]
    return [value.new_empty(value.shape) for value in (x_TH, weights_TK, *scales, *routed, *shared)]


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x_TH, expert_ids_TK, weights_TK, scales, routed, shared, *ctx.rest = inputs
    ctx.sizes = [len(scales), len(routed), len(shared)]
    ctx.save_for_backward(x_TH, expert_ids_TK, weights_TK, *scales, *routed, *shared)


def _differentiate(ctx, dy_TH, _):  # type: ignore[no-untyped-def]
    x_TH, expert_ids_TK, weights_TK, *others = ctx.saved_tensors
    scales, routed, shared = _cut(others, ctx.sizes)
    dx_TH, dweights_TK, *found = torch.ops.mok.experts_backward(
        dy_TH, x_TH, expert_ids_TK, weights_TK, scales, routed, shared, *ctx.rest
    )
    return dx_TH, None, dweights_TK, *_cut(found, ctx.sizes), None, None, None, None


def _cut(values: list[Tensor], sizes: list[int]) -> list[list[Tensor]]:
    parts, start = [], 0
    for size in sizes:
        parts.append(list(values[start : start + size]))
        start += size
    return parts


_experts.register_autograd(_differentiate, setup_context=_save)
