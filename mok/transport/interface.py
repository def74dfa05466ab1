"""What a backend asks of whatever carries rows between ranks. Owns the protocol only; read next: `mok/transport/local.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from torch import Tensor

from mok.schedule import Schedule

__all__ = ["RowTransport", "Transport"]


class Transport(Protocol):
    """What a layer is told of the ranks it shares experts with.

    name: as in `moe.transport`. "collective" is a `RowTransport`; "peer" a `mok.transport.peer.PeerTransport`, whose rows are
    moved by the kernels of those backends that can.
    """

    name: str


@runtime_checkable
class RowTransport(Transport, Protocol):
    """Carries rows out to the experts' ranks and back. P rows of the schedule's buffer; T tokens, N = T*K routes here."""

    def all_counts(self, counts_CE: Tensor) -> Tensor:
        """Counts of this rank's slices [local slices, E] -> of all slices of the call [C, E], in slice order."""

    def rows_of_tokens(self, values_TX: Tensor, schedule: Schedule) -> Tensor:
        """[P, X]: each row gets the values of its token; padding rows are zero."""

    def rows_of_routes(self, values_N: Tensor, schedule: Schedule) -> Tensor:
        """[P]: each row gets the value of its route; padding rows are zero."""

    def slots_of_rows(self, rows_PX: Tensor, schedule: Schedule) -> Iterator[Tensor]:
        """K tensors [T, X], slot by slot: each token's row there, zeros where the route is masked. All are
        new memory, which the receiver may keep and overwrite."""
