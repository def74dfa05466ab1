"""The mega backend: the expert layer on a Hopper GPU as one persistent launch forward and one backward.

Owns what is kept between the two and where each gradient goes; `mok.launch.mega` owns the launches. The schedule is made on the
device and read only by kernels, so nothing waits for the GPU and a whole step can be captured in a CUDA graph. Knows nothing of
autograd. Read next: `mok/launch/mega.py`, and `mok/backends/torch.py` for the same in plain PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mok.backends.interface import ExpertWeights, InputGrads, LayerShape, Options
from mok.errors import UsageError
from mok.gradients import GradBuffers
from mok.grid import CallGrid

if TYPE_CHECKING:  # Triton is missing on some systems, and `why_not` must be able to say so
    from mok.launch.config import KernelConfig
    from mok.launch.mega import Gradients
    from mok.launch.plan import DevicePlan

__all__ = ["MegaSchedule", "Saved", "backward", "build_schedule", "forward", "why_not"]


@dataclass(frozen=True)
class MegaSchedule:
    """What a call is walked by: the grid, the device's plan, and the settings the plan's order was made for."""

    grid: CallGrid
    plan: DevicePlan
    config: KernelConfig

    @property
    def counts_CE(self) -> Tensor:
        return self.plan.counts_CE


@dataclass(frozen=True)
class Saved:
    """What the backward needs. gate_rows, up_rows: pre-activations [P, I], which the backward overwrites with their gradients;
    None where they are computed again."""

    schedule: MegaSchedule
    options: Options
    x_TH: Tensor
    weights_TK: Tensor
    gate_LIH: Tensor
    up_LIH: Tensor
    down_LHI: Tensor
    gate_rows: Tensor | None
    up_rows: Tensor | None


def why_not(shape: LayerShape, dtype: torch.dtype, device: torch.device) -> list[str]:
    """Why this backend cannot run, or an empty list."""
    if find_spec("triton") is None:
        return ["Triton is not installed"]
    if device.type != "cuda":
        return [f"device {device}: needs a CUDA device of compute capability 9.0"]
    from mok.kernels.gluon_compat import UNSUPPORTED
    from mok.launch.config import device_facts
    from mok.launch.config import why_not as config_why_not

    facts = device_facts(device)
    reasons = [UNSUPPORTED] if UNSUPPORTED else []
    if dtype != torch.bfloat16:
        reasons.append(f"dtype {dtype}: computes in torch.bfloat16 only")
    if shape.shared_size:
        reasons.append("shared experts are not part of its launch yet: use moe.backend = staged or torch")
    return reasons + config_why_not(_config(shape, device), shape, facts)


def build_schedule(expert_ids_TK: Tensor, shape: LayerShape, grid: CallGrid, options: Options) -> MegaSchedule:
    """The plan of a call, made on the device. Ids out of range are taken as masked: nobody waits to look at them."""
    from mok.launch.mega import row_box
    from mok.launch.plan import plan_on_device

    config = options.kernel or _config(shape, expert_ids_TK.device)
    plan = plan_on_device(
        expert_ids_TK,
        shape.num_experts,
        shape.hidden_size,
        shape.intermediate_size,
        config.forward_order,
        config.backward_order,
        grid=grid,
        units=row_box(shape.hidden_size).units_per_block,
    )
    return MegaSchedule(grid, plan, config)


def forward(
    x_TH: Tensor,
    weights_TK: Tensor,
    schedule: MegaSchedule,
    experts: ExpertWeights,
    options: Options,
    shared_scale_T: Tensor | None = None,
) -> tuple[Tensor, Saved]:
    """y[t] = sum over slots k of weights[t, k] * expert(ids[t, k])(x[t]), rounded once to bf16; and what `backward` needs."""
    from mok.launch import mega as launch

    assert shared_scale_T is None and experts.shared is None, "why_not refuses shared experts"
    x_TH, weights_TK = x_TH.contiguous(), weights_TK.contiguous()
    weights = launch.Weights(*(_copyable(w) for w in (experts.gate_LIH, experts.up_LIH, experts.down_LHI)))
    y_TH, gate_rows, up_rows = torch.empty_like(x_TH), None, None
    if x_TH.shape[0]:
        y_TH, gate_rows, up_rows = launch.forward(
            x_TH,
            weights_TK,
            weights,
            schedule.plan,
            schedule.config,
            clamp=options.clamp,
            keep=options.recompute == "none",
        )
    return y_TH, Saved(schedule, options, x_TH, weights_TK, *weights, gate_rows, up_rows)


def backward(dy_TH: Tensor, saved: Saved, grads: GradBuffers | None) -> InputGrads:
    """Gradients of the inputs; those of the expert weights are continued, or begun, in the lane of the call (None: frozen)."""
    from mok.launch import mega as launch

    schedule, weights = saved.schedule, launch.Weights(saved.gate_LIH, saved.up_LIH, saved.down_LHI)
    gradients = _lane(grads, schedule.grid)
    if not saved.x_TH.shape[0]:
        if gradients is not None and not gradients.started:
            for gradient in gradients[:3]:
                gradient.zero_()
        return InputGrads(torch.empty_like(saved.x_TH), torch.empty_like(saved.weights_TK))
    gate_rows, up_rows = saved.gate_rows, saved.up_rows
    if gate_rows is None or up_rows is None:
        gate_rows, up_rows = launch.recompute(
            saved.x_TH, saved.weights_TK, weights, schedule.plan, schedule.config, clamp=saved.options.clamp
        )
    dx_TH, dweights_TK = launch.backward(
        dy_TH.contiguous(),
        saved.x_TH,
        saved.weights_TK,
        weights,
        gate_rows,
        up_rows,
        schedule.plan,
        gradients,
        schedule.config,
        clamp=saved.options.clamp,
    )
    # They now hold gradients: autograd must refuse a second backward through them.
    torch.autograd.graph.increment_version((gate_rows, up_rows))
    return InputGrads(dx_TH, dweights_TK)


def _config(shape: LayerShape, device: torch.device) -> KernelConfig:
    from mok.launch.config import KernelConfig, choose_config, device_facts

    facts = device_facts(device)
    return choose_config(shape, facts) if facts else KernelConfig()


def _copyable(weight: Tensor) -> Tensor:
    """The weight as bulk copies can read it: contiguous rows, 16-byte starts and strides; copied if it is not."""
    aligned = weight.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in weight.stride()[:-1])
    return weight if weight.stride(-1) == 1 and aligned else weight.contiguous()


def _lane(grads: GradBuffers | None, grid: CallGrid) -> Gradients | None:
    """The gradients of the one lane that the segments of the call belong to."""
    from mok.launch.mega import Gradients

    if grads is None:
        return None
    lanes = set(grid.lane_of_segment)
    if len(lanes) > 1:
        raise UsageError(f"the mega backend adds the gradients of one lane in a call, not of {len(lanes)}; use smaller calls")
    lane = lanes.pop()
    return Gradients(grads.gate[lane], grads.up[lane], grads.down[lane], grads.started[lane])
