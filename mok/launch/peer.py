"""Launches of the peer-memory protocol: the plan of a call over several ranks, rows out and back, nothing waiting for the host.

Owns the order of the launches on one rank and what they leave on its device. Every rank of the group makes the same calls.
Knows nothing of how experts compute. Read next: `mok/kernels/peer.py`, the protocol; `mok/backends/staged.py`, a user.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mok.errors import UsageError
from mok.grid import CallGrid
from mok.kernels import peer as kernels
from mok.kernels import tasks
from mok.launch.plan import DevicePlan, TaskOrder, ceil_div, empty, max_rows, place_experts, plan_on_device
from mok.launch.status import status_word
from mok.transport.peer import PeerTransport

__all__ = [
    "PeerPlan",
    "await_rows",
    "partials_back",
    "plan_over_ranks",
    "pull_rows",
    "pull_weights",
    "return_rows",
    "returned_rows",
    "send_tokens",
]

WIDTH = 256
"""Routes or rows of one program."""

WAITERS = 8
"""Programs that wait for rows."""

AWAITED = 1024
"""Routes that one of them looks at together."""

COLUMNS = 2048
"""Values of a row that a program moves at a time."""


@dataclass(frozen=True)
class PeerPlan:
    """What a rank knows of a call over R ranks; int32 on its device. N routes of its own, P rows of its experts.

    transport: whose workspace the rows travel through. rows: the plan of its rows; its routes are those of all ranks, in slice
    order. own: the same tasks for what reads and writes this rank's memory: the "row" of a route is the place where it comes
    back, the route itself, -1 for a masked one; the "route" of a row, which its weight has in the backward, the row itself.
    counts_CE: routes of each slice to each expert of all ranks. rank_of_row_P, place_of_row_P: whose route a row holds, -1 for
    padding, and token * K + slot there. rank_of_route_N: who computes this rank's routes.
    """

    transport: PeerTransport
    rows: DevicePlan
    own: DevicePlan
    counts_CE: Tensor
    rank_of_row_P: Tensor
    place_of_row_P: Tensor
    rank_of_route_N: Tensor

    @property
    def status(self) -> Tensor:
        return self.rows.status


def plan_over_ranks(
    expert_ids_TK: Tensor,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    forward_order: TaskOrder,
    backward_order: TaskOrder | None,
    transport: PeerTransport,
    *,
    grid: CallGrid,
    units: int = 1,
    again: bool = False,
    shared_size: int = 0,
    layer: int = 0,
) -> PeerPlan:
    """Publish this rank's routes, wait for all others', and place the rows of this rank's experts.

    expert_ids_TK and what follows: as for `mok.launch.plan.plan_on_device`, global ids. Raises UsageError where the call does
    not fit the workspace; too many rows for some rank's room is found on the device, by all ranks, and left in the status word.
    """
    tokens, top_k = expert_ids_TK.shape
    transport.check(tokens, top_k, hidden_size, intermediate_size)
    slices, ranks = len(grid.local_slices), grid.ranks
    if tokens % slices:
        raise UsageError(f"{tokens} tokens do not fill {slices} slices evenly; give every slice the same number of tokens")
    ids, device, local = expert_ids_TK.contiguous(), expert_ids_TK.device, num_experts // ranks
    status, peers = status_word(device, layer), _power(ranks)
    at = (transport.start["ids"], transport.ids_stride)
    kernels.publish_ids[(max(ceil_div(ids.numel(), WIDTH), 1),)](
        ids, transport.bases, transport.epoch, status, transport.rank, *at, tokens, ids.numel(), num_experts, WIDTH=WIDTH
    )
    meet(transport, status)

    room = transport.shape.tokens // slices * top_k  # routes of a slice, on the rank that has the most
    routes = grid.num_slices * room
    all_ids, local_ids = empty(device, routes), empty(device, routes)
    chunks = ceil_div(room, WIDTH)
    kernels.gather_ids[(grid.num_slices * chunks,)](
        transport.bases, transport.epoch, all_ids, ranks, slices, room, *at, chunks, K=top_k, WIDTH=WIDTH
    )
    expert_start, counts_CE, *_ = place_experts(all_ids, num_experts, grid, layer)
    capacity = row_capacity(transport, local, grid)
    slot_of_route_N, rank_of_route_N = empty(device, ids.numel()), empty(device, ids.numel())
    kernels.keep_local[(ceil_div(routes, WIDTH),)](
        all_ids, expert_start, local_ids, slot_of_route_N, rank_of_route_N, status, transport.given_up, transport.rank, ranks,
        local, capacity, slices, tokens // slices * top_k, room, routes, RANKS=peers, WIDTH=WIDTH,
        BLOCK=tasks.ROW_BLOCK.value,
    )  # fmt: skip
    rows = plan_on_device(
        local_ids.view(-1, top_k), local, hidden_size, intermediate_size, forward_order, backward_order,
        grid=CallGrid(grid.num_slices, grid.segment, grid.lane_of_segment), units=units, again=again, shared_size=shared_size,
        layer=layer, capacity=capacity, own_tokens=tokens,
    )  # fmt: skip
    rank_of_row_P, place_of_row_P, self_of_row_P = empty(device, 3, rows.max_rows)
    kernels.trace_rows[(ceil_div(rows.max_rows, WIDTH),)](
        transport.bases, transport.epoch, rows.route_of_row_P, rank_of_row_P, place_of_row_P, self_of_row_P, rows.max_rows,
        ranks, slices, room, *at, K=top_k, WIDTH=WIDTH,
    )  # fmt: skip
    own = replace(rows, row_of_route_N=slot_of_route_N, route_of_row_P=self_of_row_P)
    return PeerPlan(transport, rows, own, counts_CE, rank_of_row_P, place_of_row_P, rank_of_route_N)


def row_capacity(transport: PeerTransport, num_local_experts: int, grid: CallGrid) -> int:
    """Rows that a rank makes room for: the same on all ranks."""
    mean = transport.shape.tokens * transport.shape.top_k
    most = max_rows(mean * transport.ranks, num_local_experts, grid.num_segments)
    if not transport.row_room:
        return most
    return min(most, max_rows(int(mean * transport.row_room), num_local_experts, grid.num_segments))


def meet(transport: PeerTransport, status: Tensor) -> None:
    """What this rank has written so far is there for all ranks, and what they have written for this one."""
    peers = _power(transport.ranks)
    kernels.raise_and_await[(1,)](
        transport.bases, transport.epoch, transport.given_up, status, transport.rank, transport.ranks, transport.limit_ns,
        RANKS=peers, num_warps=max(peers // 32, 1),
    )  # fmt: skip


def send_tokens(plan: PeerPlan, **values: Tensor) -> None:
    """Put tensors into the regions of their names, for the ranks that pull them, and meet.

    x, dy: bf16 [T, H]. weights: fp32 [T, K].
    """
    for name, tensor in values.items():
        plan.transport.view(name, tensor.dtype, *tensor.shape).copy_(tensor)
    meet(plan.transport, plan.status)


def pull_rows(plan: PeerPlan, name: str, rows_PH: Tensor) -> None:
    """rows[p] = what row p's token has in region `name` of its rank; zeros for padding, nothing beyond the last row."""
    transport, rows = plan.transport, plan.rows
    kernels.pull_rows[(rows.max_rows,)](
        transport.bases, transport.start[name], rows_PH, plan.rank_of_row_P, plan.place_of_row_P, rows.route_of_row_P,
        rows.row_of_route_N, rows.sizes, rows_PH.shape[1], K=rows.top_k, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip


def pull_weights(plan: PeerPlan) -> Tensor:
    """fp32 [P]: the router weight of each row, 0 for padding."""
    weight_of_row_P = torch.empty(plan.rows.max_rows, dtype=torch.float32, device=plan.rank_of_row_P.device)
    kernels.pull_weights[(ceil_div(plan.rows.max_rows, WIDTH),)](
        plan.transport.bases, plan.transport.start["weights"], weight_of_row_P, plan.rank_of_row_P, plan.place_of_row_P,
        plan.rows.max_rows, WIDTH=WIDTH,
    )  # fmt: skip
    return weight_of_row_P


def return_rows(plan: PeerPlan, rows_PH: Tensor, partial: Tensor | None = None) -> None:
    """Send every row to the place of its route, with its line of `partial`, fp32 [P, n]."""
    transport, rows = plan.transport, plan.rows
    kernels.return_rows[(rows.max_rows,)](
        transport.bases, transport.epoch, rows_PH, rows_PH if partial is None else partial, plan.rank_of_row_P,
        plan.place_of_row_P, rows.sizes, rows_PH.shape[1], transport.start["returned"], transport.start["row_flags"],
        transport.start["partials"], SUMS=0 if partial is None else partial.shape[1], COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip


def await_rows(plan: PeerPlan) -> Tensor:
    """Wait, on the device, until the rows of all of this rank's routes are back: bf16 [T * K, H], as `plan.own` says."""
    transport, routes = plan.transport, plan.rank_of_route_N.numel()
    if routes:
        kernels.await_rows[(min(WAITERS, ceil_div(routes, AWAITED)),)](
            transport.bases, transport.epoch, transport.given_up, plan.status, plan.own.row_of_route_N, plan.rank_of_route_N,
            transport.rank, routes, transport.start["row_flags"], transport.limit_ns, WIDTH=AWAITED,
        )  # fmt: skip
    return returned_rows(plan)


def returned_rows(plan: PeerPlan) -> Tensor:
    """bf16 [T * K, H], or one row where there are none: where rows come back."""
    routes, shape = plan.rank_of_route_N.numel(), plan.transport.shape
    return plan.transport.view("returned", torch.bfloat16, max(routes, 1), shape.hidden_size)


def partials_back(plan: PeerPlan) -> Tensor:
    """fp32 [T * K, n]: the partial sums that came back with the rows, as `plan.own` says."""
    shape = plan.transport.shape
    return plan.transport.view("partials", torch.float32, max(plan.rank_of_route_N.numel(), 1), shape.num_partials)


def _power(ranks: int) -> int:
    return 1 << (ranks - 1).bit_length()
