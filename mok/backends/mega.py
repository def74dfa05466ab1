"""The mega backend: the expert layer on a Hopper GPU as one persistent launch forward and one backward.

Owns what is kept between the two and where each gradient goes; `mok.launch.mega` owns the launches. The schedule is made on the
device and read only by kernels, so nothing waits for the GPU and a whole step can be captured in a CUDA graph. Knows nothing of
autograd. Read next: `mok/launch/mega.py`, and `mok/backends/torch.py` for the same in plain PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mok.backends.interface import ExpertWeights, InputGrads, LayerShape, Options, SharedGrads
from mok.backends.quantization import coded_weight, dispatched, why_not_coded
from mok.errors import UsageError
from mok.gradients import GradBuffers
from mok.grid import CallGrid
from mok.quantization import Quantization
from mok.transport.peer import PeerTransport

if TYPE_CHECKING:  # Triton is missing on some systems, and `why_not` must be able to say so
    from mok.launch.coded import CodedWeights
    from mok.launch.config import KernelConfig
    from mok.launch.mega import Gradients
    from mok.launch.peer import PeerPlan
    from mok.launch.plan import DevicePlan

__all__ = ["TRANSPORTS", "MegaSchedule", "Saved", "backward", "build_schedule", "forward", "settings", "why_not"]

TRANSPORTS = ("peer",)
"""See `mok.backends.interface`: its launches pull and return rows themselves."""


@dataclass(frozen=True)
class MegaSchedule:
    """What a call is walked by: the grid, the device's plan, and the settings the plan's order was made for. peers: what more
    there is to know of several ranks; the plan is then its `own`."""

    grid: CallGrid
    plan: DevicePlan
    config: KernelConfig
    peers: PeerPlan | None = None

    @property
    def counts_CE(self) -> Tensor:
        return self.plan.counts_CE if self.peers is None else self.peers.counts_CE


@dataclass(frozen=True)
class Saved:
    """What the backward needs. gate_rows, up_rows: pre-activations [P, I], which the backward overwrites with their gradients;
    None where they are computed again. codes: the routed weights where they are quantised, else None. x_TH: as `dispatched`."""

    schedule: MegaSchedule
    options: Options
    x_TH: Tensor
    weights_TK: Tensor
    gate_LIH: Tensor
    up_LIH: Tensor
    down_LHI: Tensor
    gate_rows: Tensor | None
    up_rows: Tensor | None
    shared_gate_1SH: Tensor | None
    shared_up_1SH: Tensor | None
    shared_down_1HS: Tensor | None
    shared_scale_T: Tensor | None
    shared_gate_rows: Tensor | None
    shared_up_rows: Tensor | None
    codes: CodedWeights | None


def why_not(shape: LayerShape, dtype: torch.dtype, device: torch.device, quantization: Quantization | None = None) -> list[str]:
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
    if quantization is not None:
        reasons += why_not_coded(quantization, shape.ranks)
        if shape.shared_size:
            reasons.append("shared experts beside 8-bit routed ones are not built into it: use moe.backend = staged")
        if shape.ranks > 1:
            reasons.append(f"8-bit operands over {shape.ranks} ranks are not built into it: use moe.backend = staged")
    if dtype != torch.bfloat16:
        reasons.append(f"dtype {dtype}: computes in torch.bfloat16 only")
    return reasons + config_why_not(settings(shape, device), shape, facts, quantization is not None)


def build_schedule(expert_ids_TK: Tensor, shape: LayerShape, grid: CallGrid, options: Options) -> MegaSchedule:
    """The plan of a call, made on the device. Ids out of range are taken as masked, and left in the layer's status word. Over
    several ranks every rank makes it together with the others, from all their ids."""
    from mok.kernels.tasks import ROW_BLOCK
    from mok.launch.coded import code_box
    from mok.launch.mega import row_box
    from mok.launch.peer import plan_over_ranks
    from mok.launch.plan import plan_on_device

    config = options.kernel or settings(shape, expert_ids_TK.device, expert_ids_TK.shape[0])
    box = row_box(shape.hidden_size)
    sizes = shape.num_experts, shape.hidden_size, shape.intermediate_size, config.forward_order, config.backward_order
    facts: dict[str, Any] = {
        "grid": grid,
        "again": options.recompute != "none",
        "shared_size": shape.shared_size,
        "layer": options.layer,
    }
    if isinstance(options.transport, PeerTransport):
        # There each row signals for itself.
        units = ROW_BLOCK.value * box.pieces
        peers = plan_over_ranks(expert_ids_TK, *sizes, options.transport, units=units, **facts)
        return MegaSchedule(grid, peers.own, config, peers)
    units, row_units = box.units_per_block, None
    if options.quantization is not None:
        units, row_units = code_box(shape.hidden_size).units_per_block, box.units_per_block
    plan = plan_on_device(expert_ids_TK, *sizes, units=units, row_units=row_units, **facts)
    return MegaSchedule(grid, plan, config)


def forward(
    x_TH: Tensor,
    weights_TK: Tensor,
    schedule: MegaSchedule,
    experts: ExpertWeights,
    options: Options,
    shared_scale_T: Tensor | None = None,
) -> tuple[Tensor, Saved]:
    """y[t] = sum over slots k of weights[t, k] * expert(ids[t, k])(x[t]), then + scale[t] * shared(x[t]), rounded once to bf16;
    and what `backward` needs.
    """
    from mok.launch import coded
    from mok.launch import mega as launch
    from mok.launch.peer import send_tokens

    x_TH, weights_TK = dispatched(x_TH.contiguous(), options.quantization), weights_TK.contiguous()
    weights = launch.Weights(*(_copyable(w) for w in (experts.gate_LIH, experts.up_LIH, experts.down_LHI)))
    shared = shared_weights = kept = None
    if experts.shared is not None:
        gate_SH, up_SH = experts.shared.gate_up_JH.chunk(2)
        shared_weights = launch.Weights(*(_copyable(w.unsqueeze(0)) for w in (gate_SH, up_SH, experts.shared.down_HS)))
        shared = launch.Shared(shared_weights, None if shared_scale_T is None else shared_scale_T.contiguous())
    codes = None
    if options.quantization is not None:
        form, cache = options.quantization.of_blocks, options.weight_cache
        named = zip(weights._fields, weights, strict=True)
        codes = coded.CodedWeights(*(coded_weight(name, weight, form, cache) for name, weight in named))
    y_TH, plan, config, peers = torch.empty_like(x_TH), schedule.plan, schedule.config, schedule.peers
    clamp, keep = options.clamp, options.recompute == "none"
    if peers is not None:
        send_tokens(peers, x=x_TH)
        seen = shared if x_TH.shape[0] else None
        y_TH, kept = launch.forward(x_TH, weights_TK, weights, plan, config, clamp=clamp, keep=keep, shared=seen, peers=peers)
    elif x_TH.shape[0] and codes is not None:
        y_TH, kept = coded.forward(x_TH, weights_TK, codes, plan, config, clamp=clamp, keep=keep)
    elif x_TH.shape[0]:
        y_TH, kept = launch.forward(x_TH, weights_TK, weights, plan, config, clamp=clamp, keep=keep, shared=shared)
    gate_rows, up_rows, shared_gate_rows, shared_up_rows = kept or (None, None, None, None)
    shared_gate, shared_up, shared_down = shared_weights or (None, None, None)
    return y_TH, Saved(
        schedule,
        options,
        x_TH,
        weights_TK,
        *weights,
        gate_rows,
        up_rows,
        shared_gate,
        shared_up,
        shared_down,
        shared_scale_T,
        shared_gate_rows,
        shared_up_rows,
        codes,
    )


def backward(dy_TH: Tensor, saved: Saved, grads: GradBuffers | None) -> InputGrads:
    """Gradients of the inputs; those of the expert weights are continued, or begun, in the lane of the call (None: frozen)."""
    from mok.launch import coded
    from mok.launch import mega as launch
    from mok.launch.peer import send_tokens

    schedule, x_TH, dy_TH = saved.schedule, saved.x_TH, dispatched(dy_TH.contiguous(), saved.options.quantization)
    gradients, tokens = _lane(grads, schedule.grid), saved.x_TH.shape[0]
    if schedule.peers is not None:
        send_tokens(schedule.peers, x=x_TH, dy=dy_TH, weights=saved.weights_TK)
    elif not tokens:
        return _no_tokens(saved, gradients)
    shared = kept = None
    if tokens and saved.shared_gate_1SH is not None and saved.shared_up_1SH is not None and saved.shared_down_1HS is not None:
        shared_weights = launch.Weights(saved.shared_gate_1SH, saved.shared_up_1SH, saved.shared_down_1HS)
        shared = launch.Shared(shared_weights, None if saved.shared_scale_T is None else saved.shared_scale_T.contiguous())
    if saved.gate_rows is not None and saved.up_rows is not None:
        kept = launch.Kept(saved.gate_rows, saved.up_rows, saved.shared_gate_rows, saved.shared_up_rows)
    weights_TK, plan, config, clamp = saved.weights_TK, schedule.plan, schedule.config, saved.options.clamp
    if saved.codes is not None:
        found = coded.backward(dy_TH, x_TH, weights_TK, saved.codes, kept, plan, gradients, config, clamp=clamp)
    else:
        weights = launch.Weights(saved.gate_LIH, saved.up_LIH, saved.down_LHI)
        found = launch.backward(
            dy_TH, x_TH, weights_TK, weights, kept, plan, gradients, config, clamp=clamp, shared=shared, peers=schedule.peers
        )
    # Autograd must refuse a second backward through them.
    torch.autograd.graph.increment_version([rows for rows in kept or () if rows is not None])
    if not tokens:  # of this rank; its experts have seen those of others
        return _no_tokens(saved, None)
    shared_grads = None
    if found.shared_gate_rows is not None and found.shared_up_rows is not None and found.shared_wh_rows is not None:
        # Their rows are the tokens in order.
        d_gate_up_TJ = torch.cat((found.shared_gate_rows[:tokens], found.shared_up_rows[:tokens]), dim=1)
        shared_grads = SharedGrads(d_gate_up_TJ, found.shared_wh_rows[:tokens])
    return InputGrads(found.dx_TH, found.dweights_TK, found.dscale_T, shared_grads)


def _no_tokens(saved: Saved, gradients: Gradients | None) -> InputGrads:
    """A call without tokens begins its chains with zeros and adds nothing."""
    if gradients is not None and not gradients.started:
        for gradient in (gradients.gate, gradients.up, gradients.down):
            gradient.zero_()
    shared = None
    if saved.shared_down_1HS is not None:
        width = saved.shared_down_1HS.shape[2]
        shared = SharedGrads(saved.x_TH.new_empty(0, 2 * width), saved.x_TH.new_empty(0, width))
    dscale_T = None if saved.shared_scale_T is None else torch.empty_like(saved.shared_scale_T)
    return InputGrads(torch.empty_like(saved.x_TH), torch.empty_like(saved.weights_TK), dscale_T, shared)


def settings(shape: LayerShape, device: torch.device, tokens: int | None = None) -> KernelConfig:
    """See `mok.backends.interface`."""
    from mok.launch.config import KernelConfig, device_facts
    from mok.launch.tables import choose_config

    facts = device_facts(device)
    return choose_config(shape, facts, tokens) if facts else KernelConfig()


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
