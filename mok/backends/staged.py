"""The staged backend: the tiles of the megakernel as separate launches in plain Triton, on any recent NVIDIA GPU.

Owns the order of the launches, which memory they share, and what is kept for the backward. The schedule is made on the device
and read by the kernels alone, so nothing here waits for the GPU. Knows nothing of autograd. Read next: `mok/launch/staged.py`,
and `mok/backends/torch.py`, which computes the same in plain PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from mok.backends.interface import ExpertWeights, InputGrads, LayerShape, Options, SharedGrads
from mok.backends.quantization import coded_weight, dispatched, why_not_coded
from mok.errors import UsageError
from mok.gradients import GradBuffers
from mok.grid import CallGrid
from mok.quantization import Quantization
from mok.transport.peer import PeerTransport

if TYPE_CHECKING:  # Triton is missing on some systems, and `why_not` must be able to say so
    from mok.launch.peer import PeerPlan
    from mok.launch.plan import DevicePlan
    from mok.launch.quantize import CodedRows, CodedWeight
    from mok.launch.staged import StagedConfig

__all__ = ["TRANSPORTS", "Saved", "StagedSchedule", "backward", "build_schedule", "forward", "settings", "why_not"]

TRANSPORTS = ("peer",)
"""How rows may travel between ranks, see `mok.backends.interface`."""

SIZE_MULTIPLE = 16
"""Elements: a row of bf16 then starts on 32 bytes, what bulk copies and vector accesses need."""

OLDEST_CAPABILITY = (8, 0)
"""The first GPUs with bf16 tensor cores and asynchronous copies."""

OLDEST_CODED_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class StagedSchedule:
    """What a call is walked by: the grid, and the plan on the device. peers: what more there is to know of several ranks."""

    grid: CallGrid
    plan: DevicePlan
    peers: PeerPlan | None = None

    @property
    def counts_CE(self) -> Tensor:
        return self.plan.counts_CE if self.peers is None else self.peers.counts_CE


@dataclass(frozen=True)
class SharedWeights:
    """gate, up [1, S, H] and down [1, H, S] of the shared experts, as their products take them; S."""

    width: int
    gate: Tensor | CodedWeight
    up: Tensor | CodedWeight
    down: Tensor | CodedWeight


@dataclass(frozen=True)
class Saved:
    """What the backward needs. sent_TH: x as the routed experts see it. gate_up_2PI, shared_gate_up_2TS: pre-activations, None
    where they are computed again; the backward overwrites them with their gradients. codes: of gate, up and down where they are
    quantised, else None."""

    schedule: StagedSchedule
    shared_plan: DevicePlan | None
    options: Options
    x_TH: Tensor
    sent_TH: Tensor
    weights_TK: Tensor
    gate_LIH: Tensor
    up_LIH: Tensor
    down_LHI: Tensor
    gate_up_2PI: Tensor | None
    shared_weights: SharedWeights | None
    shared_scale_T: Tensor | None
    shared_gate_up_2TS: Tensor | None
    codes: tuple[CodedWeight, CodedWeight, CodedWeight] | None


def settings(shape: LayerShape, device: torch.device, tokens: int | None = None) -> StagedConfig:
    """See `mok.backends.interface`."""
    from mok.launch import staged as launch

    return launch.choose_config(launch.gpu_of(device))


def why_not(shape: LayerShape, dtype: torch.dtype, device: torch.device, quantization: Quantization | None = None) -> list[str]:
    """Why this backend cannot run, or an empty list."""
    reasons = []
    if find_spec("triton") is None:
        reasons.append("Triton is not installed")
    if device.type != "cuda":
        reasons.append(f"device {device}: needs a CUDA device")
    elif torch.cuda.get_device_capability(device) < OLDEST_CAPABILITY:
        major, minor = torch.cuda.get_device_capability(device)
        reasons.append(f"compute capability {major}.{minor}: needs 8.0 or newer")
    if quantization is not None:
        scaled = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10
        reasons += why_not_coded(quantization, shape.ranks, scaled)
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < OLDEST_CODED_CAPABILITY:
            reasons.append(f"{quantization.format}: needs compute capability 8.9, the first with products of 8-bit floats")
    if dtype != torch.bfloat16:
        reasons.append(f"dtype {dtype}: computes in torch.bfloat16 only")
    sizes = {"hidden": shape.hidden_size, "intermediate": shape.intermediate_size, "shared intermediate": shape.shared_size}
    for name, size in sizes.items():
        if size % SIZE_MULTIPLE:
            reasons.append(f"{name} size {size}: must be a multiple of {SIZE_MULTIPLE}")
    return reasons


def build_schedule(expert_ids_TK: Tensor, shape: LayerShape, grid: CallGrid, options: Options) -> StagedSchedule:
    """The call's plan, made on the device of the ids without waiting for it; ids out of range are taken as masked, and left in
    the layer's status word. Over several ranks every rank makes it together with the others, from all their ids."""
    from mok.launch.peer import plan_over_ranks
    from mok.launch.plan import TaskOrder, plan_on_device

    if len(set(grid.lane_of_segment)) > 1:
        raise UsageError(f"moe.backend = staged takes one lane per call, not lanes {grid.lane_of_segment}; use smaller calls")
    order = TaskOrder()
    sizes = shape.num_experts, shape.hidden_size, shape.intermediate_size
    if isinstance(options.transport, PeerTransport):
        peers = plan_over_ranks(expert_ids_TK, *sizes, order, order, options.transport, grid=grid, layer=options.layer)
        return StagedSchedule(grid, peers.rows, peers)
    return StagedSchedule(grid, plan_on_device(expert_ids_TK, *sizes, order, order, grid=grid, layer=options.layer))


def forward(
    x_TH: Tensor,
    weights_TK: Tensor,
    schedule: StagedSchedule,
    experts: ExpertWeights,
    options: Options,
    shared_scale_T: Tensor | None = None,
) -> tuple[Tensor, Saved]:
    """y[t] = sum over slots k of weights[t, k] * expert(ids[t, k])(x[t]), then + scale[t] * shared(x[t]); one rounding.

    x_TH: bf16. weights_TK, shared_scale_T: fp32; no scale is a factor of 1. Returns y_TH, and what `backward` needs.
    """
    from mok.launch import peer
    from mok.launch import staged as launch

    x_TH, weights_TK = readable(x_TH), weights_TK.contiguous()
    gpu = launch.gpu_of(x_TH.device)
    config = options.kernel or launch.choose_config(gpu)
    gate_LIH, up_LIH, down_LHI = readable(experts.gate_LIH), readable(experts.up_LIH), readable(experts.down_LHI)
    plan, rows = schedule.plan, schedule.plan.max_rows
    hidden, width = down_LHI.shape[1:]
    keep = options.recompute != "all"

    x_rows = x_TH.new_empty(rows, hidden)
    gate_up_2PI = x_TH.new_empty(2, rows, width) if keep else None
    h_rows = x_TH.new_empty(rows, width)
    sent_TH = dispatched(x_TH, options.quantization)
    if schedule.peers is not None:
        peer.send_tokens(schedule.peers, x=sent_TH)
    bring("x", sent_TH, x_rows, schedule)
    y_rows = x_rows  # every row of x has been read
    codes = None
    if options.quantization is None:
        launch.gate_up(x_rows, gate_LIH, up_LIH, h_rows, gate_up_2PI, plan, options.clamp, gpu, config)
        launch.down(h_rows, down_LHI, y_rows, plan, gpu, config)
    else:
        form, cache = options.quantization.of_blocks, options.weight_cache
        gate, up = coded_weight("gate", gate_LIH, form, cache), coded_weight("up", up_LIH, form, cache)
        codes = gate, up, coded_weight("down", down_LHI, form, cache)
        launch.gate_up(launch.coded_rows(x_rows, form.block), gate, up, h_rows, gate_up_2PI, plan, options.clamp, gpu, config)
        launch.down(launch.coded_rows(h_rows, form.block), codes[2], y_rows, plan, gpu, config)
    if schedule.peers is not None:
        peer.return_rows(schedule.peers, y_rows)

    shared_plan = shared_gate_up_2TS = shared_rows = shared_weights = None
    if experts.shared is not None:
        gate_up_JH, down_HS = readable(experts.shared.gate_up_JH), readable(experts.shared.down_HS)
        shared_scale_T = None if shared_scale_T is None else shared_scale_T.contiguous()
        shared_plan = every_token_plan(x_TH.shape[0], hidden, down_HS.shape[1], x_TH.device)
        shared_gate_up_2TS = x_TH.new_empty(2, shared_plan.max_rows, down_HS.shape[1]) if keep else None
        h_rows = x_TH.new_empty(shared_plan.max_rows, down_HS.shape[1])
        shared_weights = shared_operands(gate_up_JH, down_HS, options)
        operand, weights = shared_rows_of(x_TH, shared_plan, options), (shared_weights.gate, shared_weights.up)
        launch.gate_up(operand, *weights, h_rows, shared_gate_up_2TS, shared_plan, options.clamp, gpu, config)
        shared_rows, operand = x_TH.new_empty(shared_plan.max_rows, hidden), shared_rows_of(h_rows, shared_plan, options)
        launch.down(operand, shared_weights.down, shared_rows, shared_plan, gpu, config)
    y_TH = torch.empty_like(x_TH)
    launch.combine(*arrived(y_rows, schedule), weights_TK, shared_rows, shared_scale_T, y_TH)
    return y_TH, Saved(
        schedule=schedule,
        shared_plan=shared_plan,
        options=options,
        x_TH=x_TH,
        sent_TH=sent_TH,
        weights_TK=weights_TK,
        gate_LIH=gate_LIH,
        up_LIH=up_LIH,
        down_LHI=down_LHI,
        gate_up_2PI=gate_up_2PI,
        shared_weights=shared_weights,
        shared_scale_T=shared_scale_T,
        shared_gate_up_2TS=shared_gate_up_2TS,
        codes=codes,
    )


def backward(dy_TH: Tensor, saved: Saved, grads: GradBuffers | None) -> InputGrads:
    """Gradients of the inputs; those of the expert weights are begun or continued in `grads` (None: frozen).

    A second backward from the same `saved` raises RuntimeError in autograd: the pre-activations are overwritten here, and
    marked as changed.
    """
    from mok.launch import peer
    from mok.launch import staged as launch

    dy_TH = readable(dy_TH)
    sent_dy_TH = dispatched(dy_TH, saved.options.quantization)
    gpu = launch.gpu_of(dy_TH.device)
    config, clamp = saved.options.kernel or launch.choose_config(gpu), saved.options.clamp
    plan, rows = saved.schedule.plan, saved.schedule.plan.max_rows
    hidden, width = saved.down_LHI.shape[1:]

    schedule, peers = saved.schedule, saved.schedule.peers
    rows_PH, wh_rows = dy_TH.new_empty(rows, hidden), dy_TH.new_empty(rows, width)
    weights, own = saved.weights_TK, plan
    if peers is not None:
        peer.send_tokens(peers, x=saved.sent_TH, dy=sent_dy_TH, weights=saved.weights_TK)
        weights, own = peer.pull_weights(peers), peers.own
    gate_up_2PI = saved.gate_up_2PI
    if gate_up_2PI is None:
        gate_up_2PI = dy_TH.new_empty(2, rows, width)
        bring("x", saved.sent_TH, rows_PH, schedule)
        if saved.codes is None:
            launch.gate_up(rows_PH, saved.gate_LIH, saved.up_LIH, wh_rows, gate_up_2PI, plan, clamp, gpu, config)
        else:
            gate, up, _ = saved.codes
            launch.gate_up(
                launch.coded_rows(rows_PH, block_of(saved)), gate, up, wh_rows, gate_up_2PI, plan, clamp, gpu, config
            )
    else:
        torch.autograd.graph.increment_version(gate_up_2PI)
    partial = launch.partial_sums(rows, width, dy_TH.device)
    dweights_TK = torch.empty_like(saved.weights_TK)
    bring("dy", sent_dy_TH, rows_PH, schedule)
    dy_rows, down = (
        (rows_PH, saved.down_LHI) if saved.codes is None else (launch.coded_rows(rows_PH, block_of(saved)), saved.codes[2])
    )
    launch.dh(dy_rows, down, gate_up_2PI, wh_rows, partial, weights, own, clamp, gpu, config)
    dx_rows = rows_PH
    if peers is None:
        launch.route_weight_gradients(partial, plan, dweights_TK)
    else:
        # Rows go home while weight gradients are computed: with buffers of their own, and x pulled before its owner may go on.
        dx_rows = torch.empty_like(rows_PH)
        x_rows = torch.empty_like(rows_PH)
        bring("x", saved.sent_TH, x_rows, schedule)
        rows_towards_x(gate_up_2PI, saved, dx_rows, config)
        peer.return_rows(peers, dx_rows, partial)
    if grads is not None:
        lane = saved.schedule.grid.lane_of_segment[0]
        started = grads.started[lane]
        with launch.plain_rows(grads.down[lane]) as d_down_LHI:
            launch.down_gradient(rows_PH, wh_rows, d_down_LHI, started, plan, gpu, config)
        if peers is None:
            x_rows = rows_PH
            bring("x", saved.sent_TH, x_rows, schedule)
        with launch.plain_rows(grads.gate[lane]) as d_gate_LIH, launch.plain_rows(grads.up[lane]) as d_up_LIH:
            launch.gate_up_gradients(gate_up_2PI, x_rows, d_gate_LIH, d_up_LIH, started, plan, gpu, config)
    if peers is None:
        rows_towards_x(gate_up_2PI, saved, dx_rows, config)

    shared = dscale_T = shared_dx_rows = None
    if saved.shared_plan is not None:
        shared_dx_rows, shared, dscale_T = shared_backward(dy_TH, saved)
    dx_TH = torch.empty_like(dy_TH)
    launch.combine(*arrived(dx_rows, schedule), None, shared_dx_rows, None, dx_TH)
    if peers is not None:
        launch.route_weight_gradients(peer.partials_back(peers), peers.own, dweights_TK)
    return InputGrads(dx_TH, dweights_TK, dscale_T, shared)


def block_of(saved: Saved) -> int:
    """Values that share a scale in rows."""
    assert saved.options.quantization is not None
    return saved.options.quantization.of_blocks.block


def rows_towards_x(d_gate_up_2PI: Tensor, saved: Saved, dx_rows: Tensor, config: StagedConfig) -> None:
    """dx of every row, from d(gate) and d(up)."""
    from mok.launch import staged as launch

    plan, gpu = saved.schedule.plan, launch.gpu_of(dx_rows.device)
    if saved.codes is None:
        launch.dx(d_gate_up_2PI, saved.gate_LIH, saved.up_LIH, dx_rows, plan, gpu, config)
    else:
        dgate, dup = (launch.coded_rows(rows, block_of(saved)) for rows in d_gate_up_2PI)
        launch.dx((dgate, dup), saved.codes[0], saved.codes[1], dx_rows, plan, gpu, config)


def bring(region: str, values_TH: Tensor, rows_PH: Tensor, schedule: StagedSchedule) -> None:
    """Fill rows_PH with the values of each row's token: of `values_TH`, or of what all ranks have put into `region`."""
    from mok.launch import peer
    from mok.launch import staged as launch

    if schedule.peers is None:
        launch.dispatch(values_TH, rows_PH, schedule.plan)
    else:
        peer.pull_rows(schedule.peers, region, rows_PH)


def arrived(rows_PH: Tensor, schedule: StagedSchedule) -> tuple[Tensor, DevicePlan]:
    """Where the rows of this rank's tokens are, and the plan that says which: `rows_PH` of one rank, else what came back."""
    from mok.launch import peer

    if schedule.peers is None:
        return rows_PH, schedule.plan
    return peer.await_rows(schedule.peers), schedule.peers.own


def shared_backward(dy_TH: Tensor, saved: Saved) -> tuple[Tensor, SharedGrads, Tensor | None]:
    """The shared experts' part: their rows of dx, the operands of their weight gradients, the gradient of their scale."""
    from mok.launch import staged as launch

    gpu = launch.gpu_of(dy_TH.device)
    config, clamp = saved.options.kernel or launch.choose_config(gpu), saved.options.clamp
    plan, weights, options = saved.shared_plan, saved.shared_weights, saved.options
    assert plan is not None and weights is not None
    (tokens, hidden), width = dy_TH.shape, weights.width
    wh_rows = dy_TH.new_empty(plan.max_rows, width)
    gate_up_2TS = saved.shared_gate_up_2TS
    if gate_up_2TS is None:
        gate_up_2TS = dy_TH.new_empty(2, plan.max_rows, width)
        operand = shared_rows_of(saved.x_TH, plan, options)
        launch.gate_up(operand, weights.gate, weights.up, wh_rows, gate_up_2TS, plan, clamp, gpu, config)
    else:
        torch.autograd.graph.increment_version(gate_up_2TS)
    scale_T = saved.shared_scale_T
    if scale_T is None:
        scale_T = torch.ones(tokens, dtype=torch.float32, device=dy_TH.device)
    partial = launch.partial_sums(plan.max_rows, width, dy_TH.device)
    operand = shared_rows_of(dy_TH, plan, options)
    launch.dh(operand, weights.down, gate_up_2TS, wh_rows, partial, scale_T, plan, clamp, gpu, config)
    dscale_T = None
    if saved.shared_scale_T is not None:
        dscale_T = torch.empty_like(saved.shared_scale_T)
        launch.route_weight_gradients(partial, plan, dscale_T)
    dx_rows = dy_TH.new_empty(plan.max_rows, hidden)
    dgate, dup = (shared_rows_of(rows, plan, options) for rows in gate_up_2TS)
    launch.dx((dgate, dup), weights.gate, weights.up, dx_rows, plan, gpu, config)
    d_gate_up_TJ = torch.cat((gate_up_2TS[0, :tokens], gate_up_2TS[1, :tokens]), dim=1)
    return dx_rows, SharedGrads(d_gate_up_TJ, wh_rows[:tokens]), dscale_T


def shared_operands(gate_up_JH: Tensor, down_HS: Tensor, options: Options) -> SharedWeights:
    """The shared experts' weights; where they are quantised, from the layer's cache if it has one."""
    gate_1SH, up_1SH = gate_up_JH.unsqueeze(0).chunk(2, dim=1)
    down_1HS, width = down_HS.unsqueeze(0), down_HS.shape[1]
    if options.quantization is None or not options.quantization.shared_experts:
        return SharedWeights(width, gate_1SH, up_1SH, down_1HS)
    named = ("shared gate", gate_1SH), ("shared up", up_1SH), ("shared down", down_1HS)
    form, cache = options.quantization.of_blocks, options.weight_cache
    return SharedWeights(width, *(coded_weight(name, weight, form, cache) for name, weight in named))


def shared_rows_of(rows: Tensor, plan: DevicePlan, options: Options) -> Tensor | CodedRows:
    """Rows as the shared experts' products take them: where they are quantised, with zeros up to the last tile."""
    from mok.launch import staged as launch

    if options.quantization is None or not options.quantization.shared_experts:
        return rows
    return launch.coded_rows(pad(rows, (0, 0, 0, plan.max_rows - rows.shape[0])), options.quantization.of_blocks.block)


def every_token_plan(tokens: int, hidden_size: int, width: int, device: torch.device) -> DevicePlan:
    """The plan of one expert that every token goes to, its row being the token: the shared experts'."""
    from mok.launch.plan import TaskOrder, max_rows, plan_tables

    token = torch.arange(max_rows(tokens, 1), dtype=torch.int32, device=device)
    rows_in_all = -(-tokens // 64) * 64
    return plan_tables(
        token[:tokens].view(-1, 1),
        torch.where(token < tokens, token, -1),
        torch.arange(2, dtype=torch.int32, device=device) * rows_in_all,
        torch.full((1, 1), tokens, dtype=torch.int32, device=device),
        hidden_size,
        width,
        TaskOrder(),
        TaskOrder(),
    )


def readable(tensor: Tensor) -> Tensor:
    """`tensor` if a bulk copy can read it: rows contiguous, everything on multiples of 16 bytes; else a contiguous copy."""
    size = tensor.element_size()
    aligned = tensor.data_ptr() % 16 == 0 and all(stride * size % 16 == 0 and stride > 0 for stride in tensor.stride()[:-1])
    return tensor if aligned and tensor.stride(-1) == 1 else tensor.contiguous()
