"""The experts of a MoE layer as one differentiable operation.

Owns what is saved between forward and backward, and where each gradient goes: fp32 expert gradients into the parameters'
`lane_grads` or `main_grad` if they have them, else into `.grad`; shared experts' into their `grad_sink`, `main_grad` or
`.grad`. Knows neither routers nor how a backend computes. Read next: `mok/layer.py` above it, `mok/gradients.py` for the sinks.
"""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mok.backends import choose
from mok.backends.interface import ExpertWeights, LayerShape, Options, SharedWeights
from mok.errors import UsageError
from mok.gradients import GradBuffers, add_product, halving_tree
from mok.grid import CallGrid
from mok.schedule import Schedule, build_schedule, count_routes
from mok.transport.interface import RowTransport

__all__ = ["Plan", "experts"]


@dataclass(frozen=True)
class Plan:
    """What is not differentiated: who computes, on which schedule, and how."""

    backend: ModuleType
    schedule: Schedule
    options: Options

    @classmethod
    def of(
        cls, backend: str, shape: LayerShape, expert_ids_TK: Tensor, options: Options, grid: CallGrid, dtype: torch.dtype
    ) -> Plan:
        """Choose the backend and plan the call. Raises UsageError where either cannot be; warns of a notice on the choice."""
        tokens, transport = expert_ids_TK.shape[0], options.transport.name if options.transport else "collective"
        module, notice = choose(backend, shape, dtype, expert_ids_TK.device, options.quantization, tokens, transport)
        if notice:
            warnings.warn(notice, stacklevel=4)
        if hasattr(module, "build_schedule"):  # on the device, for kernels that read it there
            return cls(module, module.build_schedule(expert_ids_TK, shape, grid, options), options)
        counts_CE = None
        if isinstance(options.transport, RowTransport):
            counts_CE = options.transport.all_counts(count_routes(expert_ids_TK, shape.num_experts, grid))
        return cls(module, build_schedule(expert_ids_TK, shape.num_experts, grid, counts_CE), options)


def experts(
    x_TH: Tensor,
    weights_TK: Tensor,
    routed: tuple[Tensor, ...],
    plan: Plan,
    shared: tuple[Tensor, Tensor] | None = None,
    shared_scale_T: Tensor | None = None,
) -> Tensor:
    """Routed and shared experts, combined: y_TH in the dtype of x, see the backend's `forward`.

    weights_TK, shared_scale_T: fp32. routed: (w_gate_LIH, w_up_LIH, w_down_LHI), or (w_gate_up_L2IH, w_down_LHI).
    shared: (w_gate_up_JH, w_down_HS), see `mok.backends.interface.SharedWeights`. Changing a saved tensor in place before the
    backward, or a second backward, raises RuntimeError.
    """
    return _Experts.apply(x_TH, weights_TK, shared_scale_T, plan, len(routed), *routed, *(shared or ()))


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, weights_TK: Tensor, shared_scale_T: Tensor | None, plan: Plan, num_routed: int, *weights: Tensor
    ) -> Tensor:
        routed, shared = weights[:num_routed], weights[num_routed:]
        gate, up = routed[0].unbind(1) if num_routed == 2 else routed[:2]
        expert_weights = ExpertWeights(gate, up, routed[-1], SharedWeights(*shared) if shared else None)
        y_TH, saved = plan.backend.forward(x_TH, weights_TK, plan.schedule, expert_weights, plan.options, shared_scale_T)
        if any(ctx.needs_input_grad):
            kept = [f.name for f in dataclasses.fields(saved) if isinstance(getattr(saved, f.name), Tensor)]
            ctx.save_for_backward(x_TH, *weights, *(getattr(saved, name) for name in kept))
            ctx.saved, ctx.kept = dataclasses.replace(saved, **dict.fromkeys(kept)), kept
            # Checkpointing gives back other tensors for saved ones; the sinks hang on the parameters themselves.
            ctx.plan, ctx.num_routed, ctx.parameters = plan, num_routed, weights
        return y_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TH: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        num_weights = len(tensors) - 1 - len(ctx.kept)
        x_TH, kept = tensors[0], tensors[1 + num_weights :]
        saved = dataclasses.replace(ctx.saved, **dict(zip(ctx.kept, kept, strict=True)))
        routed, shared = ctx.parameters[: ctx.num_routed], ctx.parameters[ctx.num_routed :]
        needs_routed = ctx.needs_input_grad[5 : 5 + len(routed)]
        needs_shared = ctx.needs_input_grad[5 + len(routed) :]

        sink = _RoutedSink(routed, needs_routed, ctx.plan.schedule) if any(needs_routed) else None
        found = ctx.plan.backend.backward(dy_TH, saved, sink.buffers if sink else None)
        routed_grads = sink.finish() if sink else (None,) * len(routed)
        shared_grads: list[Tensor | None] = [None] * len(shared)
        if any(needs_shared):
            operands = ((found.shared.d_gate_up_TJ, x_TH), (dy_TH, found.shared.hidden_TS))
            for i, (weight, (dy, x)) in enumerate(zip(shared, operands, strict=True)):
                if needs_shared[i]:
                    shared_grads[i] = add_product(weight, dy, x)
        return found.dx_TH, found.dweights_TK, found.dshared_scale_T, None, None, *routed_grads, *shared_grads


class _RoutedSink:
    """Where the backward of one call puts expert gradients: lanes of the trainer, `main_grad`, or new memory, whose sum over
    the lanes goes to the trainer's `lane_sum` or to `.grad`."""

    def __init__(self, weights: tuple[Tensor, ...], needs: tuple[bool, ...], schedule: Schedule) -> None:
        self._weights, self._needs = weights, needs
        self._lanes = schedule.grid.num_lanes
        self._used = set(schedule.grid.lane_of_segment)
        self._started = getattr(weights[0], "lanes_started", None)
        self._in_place = [self._target(weight) for weight in weights]
        stores = [self._fresh(w) if target is None else target for w, target in zip(weights, self._in_place, strict=True)]
        fresh = all(target is None for target in self._in_place)
        if fresh:
            started = (False,) * self._lanes
        elif self._started is not None:
            started = tuple(self._started)
        else:
            started = (True,) * self._lanes
        gate, up = stores[0].unbind(2) if len(weights) == 2 else stores[:2]
        self.buffers = GradBuffers(gate, up, stores[-1], started, fresh)
        if len({target is None for target in self._in_place}) > 1:
            raise UsageError("expert weights: some have a main_grad and some have none; give all of them one, or none")

    def _target(self, weight: Tensor) -> Tensor | None:
        lanes = getattr(weight, "lane_grads", None)
        if lanes is not None:
            return lanes
        if hasattr(weight, "lane_sum"):
            return None
        main = getattr(weight, "main_grad", None)
        if main is None:
            return None
        if self._lanes > 1:
            raise UsageError(f"a call with {self._lanes} lanes needs lane_grads on the expert weights, not only main_grad")
        if main.dtype != torch.float32 or main.shape != weight.shape:
            raise UsageError(f"main_grad is {main.dtype} {tuple(main.shape)}: must be float32 {tuple(weight.shape)}")
        return main.unsqueeze(0)

    def _fresh(self, weight: Tensor) -> Tensor:
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        return torch.empty((self._lanes, *weight.shape), dtype=dtype, device=weight.device)

    def finish(self) -> tuple[Tensor | None, ...]:
        """Make the tree over the lanes of new memory. Returns what autograd is to put into `.grad`, in the weights' dtype."""
        if self._started is not None:
            for weight in self._weights:
                for lane in self._used:
                    weight.lanes_started[lane] = True  # type: ignore[attr-defined]
        lanes = iter((self.buffers.gate, self.buffers.up, self.buffers.down))
        found: list[Tensor | None] = []
        for weight, need, target in zip(self._weights, self._needs, self._in_place, strict=True):
            matrices = [next(lanes) for _ in range(weight.dim() - 2)]  # [L, 2, I, H] holds two
            if target is not None or not need:
                found.append(None)
                continue
            trainer = getattr(weight, "lane_sum", None)
            total = torch.empty(weight.shape, dtype=matrices[0].dtype, device=weight.device) if trainer is None else trainer
            for terms, out in zip(matrices, total.unbind(1) if len(matrices) == 2 else (total,), strict=True):
                halving_tree(terms, out)
            found.append(total.to(weight.dtype) if trainer is None else None)
        return tuple(found)
