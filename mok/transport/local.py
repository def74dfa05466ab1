"""Rows that stay where they are: every expert is on this rank. Owns the gathers between token order and expert order."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mok.schedule import Schedule

__all__ = ["LocalTransport"]


class LocalTransport:
    """See `mok.transport.interface.RowTransport`."""

    name = "local"

    def all_counts(self, counts_CE: Tensor) -> Tensor:
        return counts_CE

    def rows_of_tokens(self, values_TX: Tensor, schedule: Schedule) -> Tensor:
        rows_PX = torch.index_select(values_TX, 0, schedule.token_of_row_P)
        return rows_PX.index_fill_(0, schedule.padding_rows, 0)

    def rows_of_routes(self, values_N: Tensor, schedule: Schedule) -> Tensor:
        rows_P = torch.index_select(values_N, 0, schedule.route_of_row_P.clamp(min=0))
        return rows_P.index_fill_(0, schedule.padding_rows, 0)

    def slots_of_rows(self, rows_PX: Tensor, schedule: Schedule) -> Iterator[Tensor]:
        for row_T in schedule.row_of_slot_KT:
            if not schedule.num_masked:
                yield torch.index_select(rows_PX, 0, row_T)
            elif schedule.num_rows:
                slot_TX = torch.index_select(rows_PX, 0, row_T.clamp(min=0))
                yield slot_TX.masked_fill_((row_T < 0).unsqueeze(1), 0)
            else:
                yield rows_PX.new_zeros(row_T.shape[0], rows_PX.shape[1])
