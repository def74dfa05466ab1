"""Launches of the megakernel: descriptors, tables and shapes from tensors, and nothing about autograd.

Owns how tensors become arguments of `mok.kernels.mega`, and the row buffers that live only as long as a launch. Knows nothing
of routers, modules or owners of gradients. Read next: `mok/backends/mega.py` above it, `mok/launch/config.py` for its knobs.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mok.kernels import mega, ring, tasks
from mok.kernels.rows import sum_partials
from mok.launch.config import KernelConfig
from mok.launch.peer import PeerPlan, partials_back, pull_weights, returned_rows
from mok.launch.plan import DevicePlan, ceil_div
from mok.topology.own_gpu import ranks_of_a_gpu

__all__ = [
    "Backward",
    "Gradients",
    "Kept",
    "RowBox",
    "Shared",
    "Weights",
    "backward",
    "combine_box_parts",
    "expert_tile",
    "forward",
    "gradient_tile",
    "num_programs",
    "plain_rows",
    "row_box",
    "run",
    "sum_partial_rows",
    "tables_of",
    "tile",
]

PARTIAL_COLUMNS = 128
"""Columns of one partial sum of the router weights' gradient (docs/numerics.md, rule 6)."""


class Weights(NamedTuple):
    """gate, up [L, I, H], down [L, H, I]: bf16, rows contiguous, other strides multiples of 8 elements."""

    gate: Tensor
    up: Tensor
    down: Tensor


class Gradients(NamedTuple):
    """fp32 main gradients shaped like `Weights`, and whether they hold a chain to continue (else every element is written)."""

    gate: Tensor
    up: Tensor
    down: Tensor
    started: bool


class Shared(NamedTuple):
    """Shared experts as one expert that every token goes to: weights [1, S, H], [1, S, H], [1, H, S] and, fp32 [T], the factor
    of each token's row, or None for 1."""

    weights: Weights
    scale_T: Tensor | None


class Kept(NamedTuple):
    """Pre-activations for the backward: gate_rows, up_rows [P, I], and those of shared experts [T in whole blocks, S]."""

    gate_rows: Tensor
    up_rows: Tensor
    shared_gate_rows: Tensor | None
    shared_up_rows: Tensor | None


class Backward(NamedTuple):
    """dx_TH bf16, dweights_TK fp32. Of shared experts, whose weight gradients are dense products of these: d(gate), d(up) and
    h, the scale in each, [T in whole blocks, S] bf16; dscale_T fp32 if there is a scale."""

    dx_TH: Tensor
    dweights_TK: Tensor
    shared_gate_rows: Tensor | None
    shared_up_rows: Tensor | None
    shared_wh_rows: Tensor | None
    dscale_T: Tensor | None


class Tables(NamedTuple):
    """What the planner left on the device, the router weights, the shared experts' rows and scales, this launch's counters,
    status word and trace, and what is known of other ranks (`mok.kernels.peer_mover.Peers`)."""

    tasks: Tensor
    sizes: Tensor
    counters: Tensor
    status: Tensor
    route_of_row: Tensor
    row_of_route: Tensor
    weights: Tensor
    shared: Tensor
    shared_scale: Tensor
    trace: Tensor
    expert_start: Tensor
    expert_of_block: Tensor
    combine_token: Tensor
    combine_group: Tensor
    group_target: Tensor
    bases: Tensor
    facts: Tensor
    epoch: Tensor
    given_up: Tensor
    rank_of_row: Tensor
    place_of_row: Tensor
    route_of_pulled_row: Tensor
    pulled_row_of_route: Tensor
    group_of_block: Tensor
    rank_of_route: Tensor


class RowBox(NamedTuple):
    """How the mover carries one row of H elements: `pieces` boxes of [box_parts, part] elements, `rows` rows a unit."""

    part: int
    parts: int
    box_parts: int
    pieces: int
    rows: int

    @property
    def units_per_block(self) -> int:
        """Signals that the mover gives for each block of 64 rows."""
        return tasks.ROW_BLOCK.value // self.rows * self.pieces


def row_box(hidden_size: int) -> RowBox:
    """The widest box for rows of `hidden_size` elements: sides at most 256, at most one slot, at least 128 bytes.

    Example: H = 7168 is 28 parts of 256; a slot holds 16 of them, so a row is two boxes, the second one with 4 parts outside.
    """
    part = math.gcd(hidden_size, 256)
    parts = hidden_size // part
    slot = ring.MOVER_SLOT_ELEMENTS.value
    next_power = 1 << (parts - 1).bit_length()
    box_parts = max(min(next_power, 256, slot // part), 64 // part, 1)
    return RowBox(part, parts, box_parts, -(-parts // box_parts), min(8, slot // (box_parts * part)))


def combine_box_parts(box: RowBox, top_k: int) -> int:
    """Parts of a row that the mover sums at a time: a slot holds 2, 4 or 8 rows."""
    slots = 8 if top_k > 4 else (4 if top_k > 2 else 2)
    return ring.MOVER_SLOT_ELEMENTS.value // slots // box.part


def forward(
    x_TH: Tensor,
    weights_TK: Tensor,
    experts: Weights,
    plan: DevicePlan,
    config: KernelConfig,
    *,
    clamp: float,
    keep: bool,
    shared: Shared | None = None,
    peers: PeerPlan | None = None,
    trace: Tensor | None = None,
) -> tuple[Tensor, Kept | None]:
    """y_TH, and if `keep` what `backward` needs.

    x_TH bf16 contiguous, T >= 1, with peers T >= 0; weights_TK fp32 contiguous. shared: experts whose rows are added last in
    each token's sum; the plan was made for their width. peers: of several ranks, whose `own` the plan is, and to whom
    `mok.launch.peer.send_tokens` has shown x. trace: int64 [forward tasks + programs, 4], see `mok.kernels.ring`; a traced
    launch is another binary.
    """
    hidden_size, width = x_TH.shape[1], experts.gate.shape[1]
    rows, blocks, top_k = plan.max_rows, plan.max_blocks, plan.top_k
    box = row_box(hidden_size)
    y_TH = torch.empty_like(x_TH)
    x_rows = x_TH.new_empty(rows, hidden_size)
    y_rows = x_rows  # a DOWN tile waits for the tiles that read its rows of x
    h_rows = x_TH.new_empty(rows, width)
    gate_rows, up_rows = (x_TH.new_empty(rows, width) if keep else None for _ in range(2))
    shared_arguments: list[TensorDescriptor | None] = [None] * 9
    shared_rows = shared_gate_rows = shared_up_rows = None
    if shared is not None:
        token_rows, shared_width = plan.token_blocks * tasks.ROW_BLOCK.value, shared.weights.gate.shape[1]
        shared_rows = x_TH.new_empty(token_rows, hidden_size)
        shared_h_rows = x_TH.new_empty(token_rows, shared_width)
        shared_gate_rows, shared_up_rows = (x_TH.new_empty(token_rows, shared_width) if keep else None for _ in range(2))
        shared_arguments = [
            tile(x_TH, 128, 64),
            expert_tile(shared.weights.gate, 128, 64),
            expert_tile(shared.weights.up, 128, 64),
            tile(shared_h_rows, 128, 64),
            expert_tile(shared.weights.down, 256, 64),
            tile(shared_h_rows, 64, 64),
            tile(shared_h_rows if shared_gate_rows is None else shared_gate_rows, 64, 64),
            tile(shared_h_rows if shared_up_rows is None else shared_up_rows, 64, 64),
            tile(shared_rows, 64, 64),
        ]
    scale_T = None if shared is None else shared.scale_T
    summed_rows = y_rows if peers is None else returned_rows(peers)
    run(
        mega.mega_forward,
        config,
        plain_rows(x_TH if peers is None else x_rows, box, box.box_parts),
        plain_rows(x_rows, box, box.box_parts),
        plain_rows(summed_rows, box, combine_box_parts(box, top_k)),
        tile(x_rows, 128, 64),
        expert_tile(experts.gate, 128, 64),
        expert_tile(experts.up, 128, 64),
        tile(h_rows, 128, 64),
        expert_tile(experts.down, 256, 64),
        tile(h_rows, 64, 64),
        tile(h_rows if gate_rows is None else gate_rows, 64, 64),
        tile(h_rows if up_rows is None else up_rows, 64, 64),
        tile(y_rows, 64, 64),
        *shared_arguments,
        tables_of(plan, plan.forward_tasks, plan.counters[0], weights_TK, shared_rows, scale_T, trace, peers),
        summed_rows,
        y_TH,
        y_TH.shape[0],
        int(x_TH.shape[0] * config.mover_share),
        blocks,
        top_k,
        box.parts,
        box.part,
        box.box_parts,
        keep,
        shared is not None,
        scale_T is not None,
        clamp,
        trace is not None,
        config.stages,
        config.pieces,
        config.tensor_memory,
        peers is not None,
    )
    if gate_rows is None or up_rows is None:
        return y_TH, None
    return y_TH, Kept(gate_rows, up_rows, shared_gate_rows, shared_up_rows)


def backward(
    dy_TH: Tensor,
    x_TH: Tensor,
    weights_TK: Tensor,
    experts: Weights,
    kept: Kept | None,
    plan: DevicePlan,
    gradients: Gradients | None,
    config: KernelConfig,
    *,
    clamp: float,
    shared: Shared | None = None,
    peers: PeerPlan | None = None,
    trace: Tensor | None = None,
) -> Backward:
    """Gradients of the inputs; the expert gradients are continued or begun in `gradients` (None: frozen experts).

    kept: as from `forward`; its rows are overwritten by their gradients, router weight included. None for a plan that computes
    them again. shared, peers, trace: as for `forward`, over backward tasks; peers were also shown dy and the router weights.
    """
    assert plan.backward_tasks is not None and plan.again == (kept is None)
    hidden_size, width = x_TH.shape[1], experts.gate.shape[1]
    rows, blocks, top_k = plan.max_rows, plan.max_blocks, plan.top_k
    box = row_box(hidden_size)
    # Perhaps x, then dy, then x, then dx: the tasks that read the one before are waited for, see `mok.kernels.tasks`.
    dy_rows = x_rows = dx_rows = x_TH.new_empty(rows, hidden_size)
    wh_rows = x_TH.new_empty(rows, width)
    gate_rows, up_rows = (x_TH.new_empty(rows, width) for _ in range(2)) if kept is None else kept[:2]
    num_partials = -(-width // PARTIAL_COLUMNS)
    partial = weights_TK.new_empty(rows, num_partials)
    dx_TH = torch.empty_like(x_TH)
    if gradients is None:
        nowhere = weights_TK.new_empty(1, 1, 16)
        gradients, last_kind = Gradients(nowhere, nowhere, nowhere, False), tasks.DX.value
    else:
        last_kind = tasks.DW_DOWN.value
    shared_rows = shared_gate_rows = shared_up_rows = shared_wh_rows = scale_T = None
    shared_arguments: list[TensorDescriptor | None] = [None] * 13
    shared_partial, num_shared_partials = partial, 1
    if shared is not None:
        token_rows, shared_width = plan.token_blocks * tasks.ROW_BLOCK.value, shared.weights.gate.shape[1]
        shared_rows, scale_T = x_TH.new_empty(token_rows, hidden_size), shared.scale_T
        shared_wh_rows = x_TH.new_empty(token_rows, shared_width)
        if kept is None:
            shared_gate_rows, shared_up_rows = (x_TH.new_empty(token_rows, shared_width) for _ in range(2))
        else:
            assert kept.shared_gate_rows is not None and kept.shared_up_rows is not None
            shared_gate_rows, shared_up_rows = kept.shared_gate_rows, kept.shared_up_rows
        num_shared_partials = -(-shared_width // PARTIAL_COLUMNS)
        shared_partial = weights_TK.new_empty(token_rows, num_shared_partials)
        shared_arguments = [
            tile(dy_TH, 128, 64),
            expert_tile(shared.weights.down, 64, 256),
            tile(shared_gate_rows, 128, 64),
            tile(shared_up_rows, 128, 64),
            expert_tile(shared.weights.gate, 64, 256),
            expert_tile(shared.weights.up, 64, 256),
            tile(shared_wh_rows, 64, 64),
            tile(shared_gate_rows, 64, 64),
            tile(shared_up_rows, 64, 64),
            tile(shared_rows, 64, 64),
            *_gate_up_operands(x_TH, shared.weights, plan.again),
        ]
    row_weights = weights_TK if peers is None else pull_weights(peers)
    summed_rows = dx_rows if peers is None else returned_rows(peers)
    run(
        mega.mega_backward,
        config,
        plain_rows(dy_TH if peers is None else dy_rows, box, box.box_parts),
        plain_rows(dy_rows, box, box.box_parts),
        plain_rows(x_TH if peers is None else x_rows, box, box.box_parts),
        plain_rows(x_rows, box, box.box_parts),
        plain_rows(summed_rows, box, combine_box_parts(box, top_k)),
        tile(dy_rows, 128, 64),
        tile(dy_rows, 64, 128),
        tile(x_rows, 64, 256),
        tile(wh_rows, 64, 256),
        expert_tile(experts.down, 64, 256),
        expert_tile(experts.gate, 64, 256),
        expert_tile(experts.up, 64, 256),
        tile(gate_rows, 128, 64),
        tile(up_rows, 128, 64),
        tile(gate_rows, 64, 128),
        tile(up_rows, 64, 128),
        tile(wh_rows, 64, 64),
        tile(gate_rows, 64, 64),
        tile(up_rows, 64, 64),
        tile(dx_rows, 64, 64),
        *_gate_up_operands(x_rows, experts, plan.again),
        gradient_tile(gradients.gate),
        gradient_tile(gradients.up),
        gradient_tile(gradients.down),
        *shared_arguments,
        tables_of(plan, plan.backward_tasks, plan.counters[1], row_weights, shared_rows, scale_T, trace, peers),
        partial,
        shared_partial,
        summed_rows,
        dx_TH,
        x_TH.shape[0],
        int(x_TH.shape[0] * config.mover_share),
        blocks,
        plan.num_experts,
        2 * ceil_div(hidden_size, tasks.TILE_M.value) * ceil_div(width, tasks.TILE_N.value),
        ceil_div(width, tasks.TILE_M.value),
        int(gradients.started),
        top_k,
        num_partials,
        num_shared_partials,
        box.parts,
        box.part,
        box.box_parts,
        shared is not None,
        scale_T is not None,
        plan.again,
        clamp,
        last_kind,
        trace is not None,
        config.stages,
        config.pieces,
        config.tensor_memory,
        peers is not None,
    )
    dweights_TK = torch.empty_like(weights_TK)
    sum_partial_rows(partial if peers is None else partials_back(peers), plan.row_of_route_N, dweights_TK)
    dscale_T = None
    if scale_T is not None:
        dscale_T = torch.empty_like(scale_T)
        sum_partial_rows(shared_partial, torch.arange(scale_T.numel(), dtype=torch.int32, device=scale_T.device), dscale_T)
    return Backward(dx_TH, dweights_TK, shared_gate_rows, shared_up_rows, shared_wh_rows, dscale_T)


def _gate_up_operands(rows: Tensor, weights: Weights, again: bool) -> list[TensorDescriptor | None]:
    """What GATE_UP tiles of a backward read."""
    if not again:
        return [None] * 3
    return [tile(rows, 128, 64), expert_tile(weights.gate, 128, 64), expert_tile(weights.up, 128, 64)]


def sum_partial_rows(partial: Tensor, row_of_result: Tensor, out: Tensor) -> None:
    sum_partials[(ceil_div(out.numel(), 128),)](partial, row_of_result, out, out.numel(), partial.shape[1], WIDTH=128)


def num_programs(config: KernelConfig) -> int:
    """Programs of a launch on the current device: as many as can be resident at once, one per multiprocessor, beside those of
    ranks that share the GPU and wait for this one."""
    if config.programs:
        return config.programs
    multiprocessors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return max(multiprocessors // ranks_of_a_gpu(), 1)


def run(kernel: Any, config: KernelConfig, *arguments: Any) -> None:
    """Launch `num_programs`; the driver refuses a cooperative launch of more than fit.

    168 registers for each of twelve warps fill the register file; the roles then share them out unevenly. Contraction of
    a product and a sum is switched off because rule 4 of docs/numerics.md rounds them apart.
    """
    programs = num_programs(config)
    kernel[(programs,)](
        *arguments,
        num_warps=8 if config.tensor_memory else 4,
        maxnreg=168,
        enable_fp_fusion=False,
        launch_cooperative_grid=True,
    )


def tables_of(
    plan: DevicePlan,
    records: Tensor,
    num_counters: int,
    weights_TK: Tensor,
    shared_rows: Tensor | None,
    shared_scale_T: Tensor | None,
    trace: Tensor | None,
    peers: PeerPlan | None = None,
) -> Tables:
    device, nothing = weights_TK.device, plan.sizes  # what a launch does not read
    return Tables(
        tasks=records,
        sizes=plan.sizes,
        counters=torch.zeros(num_counters, dtype=torch.int32, device=device),
        status=plan.status,
        route_of_row=plan.route_of_row_P,
        row_of_route=plan.row_of_route_N,
        weights=weights_TK,
        shared=weights_TK if shared_rows is None else shared_rows,
        shared_scale=weights_TK if shared_scale_T is None else shared_scale_T,
        trace=nothing if trace is None else trace,
        expert_start=plan.expert_start,
        expert_of_block=plan.expert_of_block_B,
        combine_token=plan.combine_token_T,
        combine_group=plan.combine_group_T,
        group_target=plan.group_target_G,
        bases=nothing if peers is None else peers.transport.bases,
        facts=nothing if peers is None else peers.transport.facts,
        epoch=nothing if peers is None else peers.transport.epoch,
        given_up=nothing if peers is None else peers.transport.given_up,
        rank_of_row=nothing if peers is None else peers.rank_of_row_P,
        place_of_row=nothing if peers is None else peers.place_of_row_P,
        route_of_pulled_row=nothing if peers is None else peers.rows.route_of_row_P,
        pulled_row_of_route=nothing if peers is None else peers.rows.row_of_route_N,
        group_of_block=nothing if peers is None else plan.group_of_block_B,
        rank_of_route=nothing if peers is None else peers.rank_of_route_N,
    )


def plain_rows(rows_RH: Tensor, box: RowBox, box_parts: int) -> TensorDescriptor:
    """Rows [R, H] seen as [R, parts, part], one box of `box_parts` parts of one row."""
    view = rows_RH.view(rows_RH.shape[0], box.parts, box.part)
    return TensorDescriptor.from_tensor(view, [1, box_parts, box.part], ring.PLAIN_ROWS.value)


def tile(rows_RH: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(rows_RH, [rows, columns], ring.TILE.value)


def expert_tile(weight: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(weight, [1, rows, columns], ring.EXPERT_TILE.value)


def gradient_tile(gradient: Tensor) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(gradient, [1, ring.HALF_M.value, ring.PIECE_N.value // 2], ring.GRADIENT_TILE.value)
