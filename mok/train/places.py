"""Where each tensor of a training state is kept: whole on this rank, or as ranges of flat tensors that ranks keep a shard of.

Owns the way from a name to the elements that this rank keeps, and from those of all ranks to a whole tensor. Knows nothing of
models, files or optimizers. Read next: `Bank` in `mok/gradients.py`, which cuts flat tensors into shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mok.gradients import Bank, Exchange

__all__ = ["Place", "WholeTensors"]


@dataclass(frozen=True)
class Place:
    """One tensor, of which this rank keeps `kept`: elements first..first + len(kept) of the flattened tensor.

    kept: flat, a view. bank, start: the bank in whose flat tensors it lies, from which element on; None for a tensor that is
    whole here.
    """

    shape: torch.Size
    kept: Tensor
    first: int = 0
    bank: Bank | None = None
    start: int = 0

    @classmethod
    def in_shard(cls, bank: Bank, flat_shard: Tensor, start: int, shape: torch.Size) -> Place:
        """A tensor of `shape` that begins at element `start` of the bank, of whose flat tensor this rank keeps `flat_shard`."""
        stop = start + shape.numel()
        low = min(max(start, bank.shard.start), stop)
        high = max(min(stop, bank.shard.stop), low)
        kept = flat_shard[low - bank.shard.start : high - bank.shard.start] if low < high else flat_shard[:0]
        return cls(shape, kept, low - start, bank, start)

    @property
    def is_sharded(self) -> bool:
        """Whether other ranks keep parts of it."""
        return self.bank is not None and self.bank.num_shards > 1

    def put(self, value: Tensor) -> None:
        """Set what is kept here from the whole tensor."""
        self.kept.copy_(value.reshape(-1)[self.first : self.first + self.kept.numel()])

    def whole(self, exchange: Exchange | None) -> Tensor:
        """The tensor: a view where one rank keeps all of it, else put together by the ranks that keep it, all of which call."""
        if not self.is_sharded:
            return self.kept.view(self.shape)
        assert self.bank is not None and exchange is not None
        values = torch.empty(self.shape.numel(), dtype=self.kept.dtype, device=self.kept.device)
        values[self.first : self.first + self.kept.numel()] = self.kept
        exchange.fetch(values, self.start, self.bank.shard_size, self.bank.experts)
        return values.view(self.shape)


class WholeTensors(Mapping[str, Tensor]):
    """name -> whole tensor. On several ranks each is put together when it is asked for, so all of them must ask for the same
    ones in the same order, as going through `items()` does."""

    def __init__(self, places: Mapping[str, Place], exchange: Exchange | None) -> None:
        self.places, self._exchange = places, exchange

    def __getitem__(self, name: str) -> Tensor:
        return self.places[name].whole(self._exchange)

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)
