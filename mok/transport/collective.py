"""Rows that travel between ranks by all-to-all, over gloo or NCCL: bytes are moved, nothing is added on the wire.

Owns the exchange of one expert-parallel group. Every rank enters every exchange, also one that has nothing to send or to
receive, so that no rank waits for one that stayed away. Read next: `mok/transport/progress.py`, which says where a rank is
when another is lost, and `exchange_maps` in `mok/schedule.py` for the order of the rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mok.schedule import Schedule
from mok.transport.progress import Progress

__all__ = ["CollectiveTransport", "all_gather", "all_to_all_rows"]


def all_to_all_rows(rows_MX: Tensor, sent_R: Sequence[int], received_R: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send the next sent_R[r] rows of `rows_MX` to each rank r of the group, return [sum(received_R), X] in rank order.

    Travels as bytes, so any dtype works on any backend. Example, two ranks: rank 0 with rows a, b, c and sent_R = (1, 2),
    rank 1 with row d and sent_R = (1, 0); rank 0 gets (a, d), rank 1 gets (b, c).
    """
    rows_MX = rows_MX.contiguous()
    received = rows_MX.new_empty(sum(received_R), *rows_MX.shape[1:])
    dist.all_to_all_single(_as_bytes(received), _as_bytes(rows_MX), list(received_R), list(sent_R), group=group)
    return received


def all_gather(gathered: Tensor, part: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Fill `gathered` with the contiguous `part` of every rank of the group (None: of all ranks), in rank order."""
    # torch 2.13 renamed it and warns about the old name, which is all that 2.11 has.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered, part, group=group)


def _as_bytes(rows: Tensor) -> Tensor:
    """The same memory as uint8 [rows, bytes of a row]."""
    return rows.view(rows.shape[0], math.prod(rows.shape[1:])).view(torch.uint8)


class CollectiveTransport:
    """See `mok.transport.interface.RowTransport`.

    group: the ranks that share the experts, in the order of the grid. progress: told when this rank enters an exchange.
    """

    name = "collective"

    def __init__(self, group: dist.ProcessGroup, progress: Progress | None = None) -> None:
        self.group = group
        self.ranks = group.size()
        self._progress = progress or Progress()

    def all_counts(self, counts_CE: Tensor) -> Tensor:
        slices, num_experts = counts_CE.shape
        gathered = counts_CE.new_empty(self.ranks * slices, num_experts)
        with self._progress.waiting("counts"):
            all_gather(gathered, counts_CE.contiguous(), self.group)
        # Slice i of the call is slice i // R of rank i % R.
        return gathered.view(self.ranks, slices, num_experts).transpose(0, 1).reshape(-1, num_experts)

    def rows_of_tokens(self, values_TX: Tensor, schedule: Schedule) -> Tensor:
        top_k = schedule.expert_ids_TK.shape[1]
        return self._to_rows(values_TX.index_select(0, schedule.exchange.route_of_sent_M // top_k), schedule)

    def rows_of_routes(self, values_N: Tensor, schedule: Schedule) -> Tensor:
        return self._to_rows(values_N.index_select(0, schedule.exchange.route_of_sent_M), schedule)

    def slots_of_rows(self, rows_PX: Tensor, schedule: Schedule) -> Iterator[Tensor]:
        maps = schedule.exchange
        with self._progress.waiting("combine"):
            back_MX = all_to_all_rows(rows_PX.index_select(0, maps.row_of_received_M), maps.received_R, maps.sent_R, self.group)
        tokens, top_k = schedule.expert_ids_TK.shape
        place_N = torch.full((tokens * top_k,), -1, dtype=torch.int64, device=rows_PX.device)
        place_N[maps.route_of_sent_M] = torch.arange(len(maps.route_of_sent_M), device=rows_PX.device)
        for place_T in place_N.view(tokens, top_k).t().contiguous():
            if not len(back_MX):
                yield rows_PX.new_zeros(tokens, *rows_PX.shape[1:])
                continue
            slot_TX = back_MX.index_select(0, place_T.clamp(min=0))
            yield slot_TX.masked_fill_((place_T < 0).view(-1, *[1] * (slot_TX.dim() - 1)), 0)

    def _to_rows(self, sent_MX: Tensor, schedule: Schedule) -> Tensor:
        maps = schedule.exchange
        with self._progress.waiting("dispatch"):
            received_MX = all_to_all_rows(sent_MX, maps.sent_R, maps.received_R, self.group)
        rows_PX = received_MX.new_zeros(schedule.num_rows, *received_MX.shape[1:])
        return rows_PX.index_copy_(0, maps.row_of_received_M, received_MX)
