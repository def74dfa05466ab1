"""The routing plan of one call: which row of which expert each route becomes.

Owns counts, starts and the row <-> route maps, made from expert ids by integer operations alone: no float, no scatter-add,
nothing that depends on the order in which threads run. Must not know of weights, activations or transports. The rows of an
expert lie in (segment, slice, token, slot) order, whichever rank they came from, so the plan is the same for every number
of ranks. Read next: `mok/backends/torch.py`, which walks it, and `mok/grid.py`, which says what slices and segments are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mok.errors import UsageError
from mok.grid import CallGrid

__all__ = ["SEGMENT_ROWS", "ExchangeMaps", "Schedule", "build_schedule", "count_routes", "exchange_maps"]

SEGMENT_ROWS = 16
"""Every (expert, segment) starts on a multiple of so many rows: the granularity of a tensor-core chain (docs/numerics.md)."""


@dataclass(frozen=True)
class Schedule:
    """Where every route of a call goes. T tokens, K slots, N = T*K routes (token * K + slot) on this rank; C slices, X segments
    and E experts over all ranks of the group; P rows in this rank's buffer. Rows are counted in the buffer of the rank that
    owns the expert.

    grid: the call.
    num_experts: E; rank r owns experts r * E/R .. (r + 1) * E/R.
    tile_rows: every expert starts on a multiple of it.
    num_rows: P, padding included.
    expert_ids_TK: int32; -1 for a masked route.
    counts_CE: int64, routes of each slice to each expert.
    segment_rows_XE: int64, rows of each expert in each segment, without padding.
    segment_start_XE: int64, first row of each (segment, expert).
    expert_start_E, expert_rows_E: int64, first row and number of rows of each expert, padding included.
    row_of_route_N: int64, the row each of this rank's routes becomes; -1 for a masked route.
    route_of_row_P: int64, the route of this rank that each row of its buffer holds; -1 for padding (and for the rows of
        other ranks, which `exchange_maps` places).

    Example, 3 tokens, K = 2, E = 2, one slice, tile_rows = 16: ids [[0, 1], [1, -1], [0, 1]] give counts [[2, 3]], starts
    [0, 16], row_of_route [0, 16, 17, -1, 1, 18], and route_of_row 0, 4 at rows 0, 1 and 1, 2, 5 at rows 16, 17, 18.
    """

    grid: CallGrid
    num_experts: int
    tile_rows: int
    num_rows: int
    expert_ids_TK: Tensor
    counts_CE: Tensor
    segment_rows_XE: Tensor
    segment_start_XE: Tensor
    expert_start_E: Tensor
    expert_rows_E: Tensor
    row_of_route_N: Tensor
    route_of_row_P: Tensor

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.grid.ranks

    @property
    def first_expert(self) -> int:
        """Global id of this rank's first expert."""
        return self.grid.rank * self.num_local_experts

    @cached_property
    def expert_sizes(self) -> tuple[int, ...]:
        """Rows of each expert of this rank, padding included, as Python numbers: one transfer from a GPU."""
        local = slice(self.first_expert, self.first_expert + self.num_local_experts)
        return tuple(self.expert_rows_E[local].tolist())

    @cached_property
    def segment_sizes(self) -> tuple[int, ...]:
        """Rows of each segment of each expert of this rank, expert by expert, with the zero rows up to a multiple of 16; they
        fill the buffer where `tile_rows` is 16."""
        local = slice(self.first_expert, self.first_expert + self.num_local_experts)
        rows_XL = self.segment_rows_XE[:, local].cpu().numpy()
        return tuple(_round_up(rows_XL, SEGMENT_ROWS).T.reshape(-1).tolist())

    @cached_property
    def expert_ends(self) -> Tensor:
        """int32, the running sum of `expert_sizes`, on the host."""
        return torch.from_numpy(np.cumsum(self.expert_sizes, dtype=np.int32))

    @cached_property
    def segment_ends(self) -> Tensor:
        """int32, the running sum of `segment_sizes`, on the host."""
        return torch.from_numpy(np.cumsum(self.segment_sizes, dtype=np.int32))

    @cached_property
    def num_masked(self) -> int:
        """Routes of this rank that go nowhere."""
        return self.row_of_route_N.numel() - int(self.counts_CE[self.grid.rank :: self.grid.ranks].sum())

    @cached_property
    def exchange(self) -> ExchangeMaps:
        """`exchange_maps` of this schedule, made once for all exchanges of a layer."""
        return exchange_maps(self)

    @cached_property
    def token_of_row_P(self) -> Tensor:
        """int64, the token each row of the buffer holds; 0 for padding rows."""
        return self.route_of_row_P.clamp(min=0) // self.expert_ids_TK.shape[1]

    @cached_property
    def padding_rows(self) -> Tensor:
        """int64, rows of the buffer that hold no route of this rank."""
        return torch.nonzero(self.route_of_row_P < 0).view(-1)

    @cached_property
    def row_of_slot_KT(self) -> Tensor:
        """`row_of_route_N` with one contiguous line per slot."""
        tokens, top_k = self.expert_ids_TK.shape
        return self.row_of_route_N.view(tokens, top_k).t().contiguous()


@dataclass(frozen=True)
class ExchangeMaps:
    """How the rows of a call travel over a collective transport: a rank sends its routes in `route_of_sent_M` order, cut by
    `sent_R`; what it receives comes in rank order, cut by `received_R`, and lands in `row_of_received_M`.

    sent_R, received_R: routes to, and from, each rank.
    route_of_sent_M: int64, this rank's unmasked routes by (rank they go to, row there).
    row_of_received_M: int64, this rank's rows by (rank they came from, row).
    """

    sent_R: tuple[int, ...]
    received_R: tuple[int, ...]
    route_of_sent_M: Tensor
    row_of_received_M: Tensor


def count_routes(expert_ids_TK: Tensor, num_experts: int, grid: CallGrid) -> Tensor:
    """Routes of each of this rank's slices to each expert: int64 [local slices, E]; -1 counts nowhere."""
    sorted_ids, _, starts = _sort_slices(expert_ids_TK, num_experts, grid)
    return torch.diff(starts, dim=1, append=starts.new_full((starts.shape[0], 1), sorted_ids.shape[1]))[:, :num_experts]


def build_schedule(
    expert_ids_TK: Tensor,
    num_experts: int,
    grid: CallGrid | None = None,
    counts_CE: Tensor | None = None,
    tile_rows: int = SEGMENT_ROWS,
) -> Schedule:
    """The plan for this rank's routes.

    expert_ids_TK: integer [T, K], any device; -1 masks a route.
    grid: the call; None is one slice on one rank.
    counts_CE: routes of every slice of the call to every expert, in slice order: what the ranks tell one another
        (`count_routes`). May be left out with one rank.
    tile_rows: a multiple of 16 that every expert's first row is a multiple of.
    Raises UsageError for ids out of range, tokens that do not fill whole slices, or experts that ranks cannot share.
    """
    grid = grid or CallGrid()
    tokens, top_k = expert_ids_TK.shape
    device = expert_ids_TK.device
    if num_experts % grid.ranks:
        raise UsageError(f"{num_experts} experts cannot be shared by {grid.ranks} ranks evenly; use a divisor of {num_experts}")
    if tile_rows % SEGMENT_ROWS:
        raise UsageError(f"tile_rows = {tile_rows}: must be a multiple of {SEGMENT_ROWS}")
    sorted_ids, order, starts = _sort_slices(expert_ids_TK, num_experts, grid)
    if counts_CE is None:
        if grid.ranks > 1:
            raise UsageError(f"a schedule for {grid.ranks} ranks needs counts_CE, the counts of all of them")
        counts_CE = torch.diff(starts)
    # The plan of the few [slices, experts] numbers is made on the host, where such small operations are cheapest.
    counts_host_CE = counts_CE.cpu().numpy().astype(np.int64, copy=False)
    host = _plan(counts_host_CE, grid, tile_rows)
    counts_CE, segment_rows_XE, segment_start_XE, expert_start_E, expert_rows_E, slice_start_CE = (
        torch.from_numpy(array).to(device) for array in (counts_host_CE, *host)
    )
    num_rows = int(host.expert_rows_E.reshape(grid.ranks, -1)[grid.rank].sum())

    # The i-th route of a sorted slice is route i - start of its expert there. Masked routes sort last, behind expert E - 1.
    shift_CE = torch.full_like(starts, -1)
    torch.sub(slice_start_CE[grid.rank :: grid.ranks], starts[:, :num_experts], out=shift_CE[:, :num_experts])
    row_sorted = shift_CE.gather(1, sorted_ids).add_(torch.arange(sorted_ids.shape[1], device=device))
    row_of_route_N = torch.empty_like(row_sorted).scatter_(1, order, row_sorted).view(-1)
    if int(counts_host_CE[grid.rank :: grid.ranks].sum()) < tokens * top_k:
        row_of_route_N.masked_fill_(expert_ids_TK.reshape(-1) < 0, -1)

    # Routes without a row in this buffer are written behind its end, and cut off.
    row_here_N = row_of_route_N.masked_fill(row_of_route_N < 0, num_rows)
    if grid.ranks > 1:
        row_here_N.masked_fill_(expert_ids_TK.reshape(-1) // (num_experts // grid.ranks) != grid.rank, num_rows)
    route_of_row = torch.full((num_rows + 1,), -1, dtype=torch.int64, device=device)
    route_of_row.scatter_(0, row_here_N, torch.arange(tokens * top_k, device=device))
    return Schedule(
        grid=grid,
        num_experts=num_experts,
        tile_rows=tile_rows,
        num_rows=num_rows,
        expert_ids_TK=expert_ids_TK.to(torch.int32),
        counts_CE=counts_CE,
        segment_rows_XE=segment_rows_XE,
        segment_start_XE=segment_start_XE,
        expert_start_E=expert_start_E,
        expert_rows_E=expert_rows_E,
        row_of_route_N=row_of_route_N,
        route_of_row_P=route_of_row[:num_rows],
    )


def exchange_maps(schedule: Schedule) -> ExchangeMaps:
    """What a collective transport needs to carry the rows of `schedule`; on a GPU this waits for the counts.

    Example, two ranks, E = 2, K = 1, one slice each: rank 0 has ids [1, 0, 1], rank 1 has ids [0, 1]. Rank 0 sends routes
    [1 | 0, 2] with sent_R = (1, 2) and receives (1, 1) rows: its own into row 0, rank 1's into row 1. Rank 1 receives (2, 1).
    """
    grid = schedule.grid
    ranks, local = grid.ranks, schedule.num_local_experts
    row_N = schedule.row_of_route_N
    owner_N = schedule.expert_ids_TK.view(-1).to(torch.int64) // local
    routes = torch.nonzero(row_N >= 0).view(-1)
    by_row = routes[torch.argsort(row_N[routes], stable=True)]
    route_of_sent_M = by_row[torch.argsort(owner_N[by_row], stable=True)]

    counts_CE = schedule.counts_CE.cpu().numpy()
    counts_SRL = counts_CE.reshape(-1, ranks, ranks, local)  # slices of a rank, rank they are on, owner, its experts
    sent_R = counts_SRL[:, grid.rank].sum((0, 2))
    received_R = counts_SRL[:, :, grid.rank].sum((0, 2))

    # Rows of this rank in the order of its buffer: expert, segment, slice. Each (expert, slice) block came from slice % R.
    plan = _plan(counts_CE, grid, schedule.tile_rows)
    mine = slice(schedule.first_expert, schedule.first_expert + local)
    counts, starts = counts_CE[:, mine].T.reshape(-1), plan.slice_start_CE[:, mine].T.reshape(-1)
    within = np.arange(counts.sum()) - np.repeat(_exclusive_sum(counts, 0), counts)
    row_M = np.repeat(starts, counts) + within
    source_M = np.repeat(np.tile(np.arange(grid.num_slices) % ranks, local), counts)
    row_of_received_M = torch.from_numpy(row_M[np.argsort(source_M, kind="stable")]).to(row_N.device)
    return ExchangeMaps(tuple(sent_R.tolist()), tuple(received_R.tolist()), route_of_sent_M, row_of_received_M)


class _Plan(NamedTuple):
    """int64 arrays on the host: those of `Schedule`, and the first row of each (slice, expert)."""

    segment_rows_XE: np.ndarray
    segment_start_XE: np.ndarray
    expert_start_E: np.ndarray
    expert_rows_E: np.ndarray
    slice_start_CE: np.ndarray


def _plan(counts_CE: np.ndarray, grid: CallGrid, tile_rows: int) -> _Plan:
    """Rows in the buffer of the rank that owns the expert: expert by expert, segment by segment, slice by slice."""
    slices, num_experts = counts_CE.shape
    counts_XSE = counts_CE.reshape(grid.num_segments, grid.segment, num_experts)
    segment_rows_XE = counts_XSE.sum(1)
    padded_XE = _round_up(segment_rows_XE, SEGMENT_ROWS)
    expert_rows_E = _round_up(padded_XE.sum(0), tile_rows)
    expert_start_E = _exclusive_sum(expert_rows_E.reshape(grid.ranks, -1), 1).reshape(-1)
    segment_start_XE = expert_start_E + _exclusive_sum(padded_XE, 0)
    slice_start_XSE = segment_start_XE[:, None] + _exclusive_sum(counts_XSE, 1)
    return _Plan(segment_rows_XE, segment_start_XE, expert_start_E, expert_rows_E, slice_start_XSE.reshape(slices, num_experts))


def _sort_slices(expert_ids_TK: Tensor, num_experts: int, grid: CallGrid) -> tuple[Tensor, Tensor, Tensor]:
    """Each local slice's routes in stable order of expert, masked ones last.

    Returns sorted ids (int64, E for masked) and their routes within the slice, both [local slices, routes of a slice], and the
    place of each expert's first route [local slices, E + 1].
    """
    slices = len(grid.local_slices)
    tokens, top_k = expert_ids_TK.shape
    if tokens % slices:
        raise UsageError(f"{tokens} tokens do not fill {slices} slices evenly; give every slice the same number of tokens")
    ids = expert_ids_TK.reshape(slices, tokens // slices * top_k)
    if ids.device.type == "cpu" and ids.numel():
        low, high = (int(bound) for bound in torch.aminmax(ids))
        if low < -1 or high >= num_experts:
            raise UsageError(f"expert ids run from {low} to {high}: must be -1 (masked) or 0 to {num_experts - 1}")
    # -1 becomes E. int16 holds every id and has the fastest stable sort: NumPy's, on a CPU, is a radix sort.
    keys = torch.where(ids < 0, num_experts, ids).to(torch.int16)
    if keys.device.type == "cpu":
        order = torch.from_numpy(np.argsort(keys.numpy(), axis=1, kind="stable"))
    else:
        order = torch.sort(keys, dim=1, stable=True).indices
    sorted_keys = keys.gather(1, order)
    borders = torch.arange(num_experts + 1, dtype=torch.int16, device=ids.device).expand(slices, -1).contiguous()
    return sorted_keys.to(torch.int64), order, torch.searchsorted(sorted_keys, borders)


def _round_up(value: np.ndarray, multiple: int) -> np.ndarray:
    return (value + (multiple - 1)) // multiple * multiple


def _exclusive_sum(value: np.ndarray, axis: int) -> np.ndarray:
    return value.cumsum(axis) - value
