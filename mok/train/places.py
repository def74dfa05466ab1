"""Where each tensor of a training state is kept: whole on this rank, or as a range of a flat DTensor that ranks keep shards of.

Owns the way from a name to the elements that this rank keeps, and from those of all ranks to a whole tensor. Knows nothing of
models, files or optimizers. Read next: `Bank` in `mok/gradients.py`, which lays tensors out in flat ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from mok.gradients import Exchange

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["Place", "boxes", "local_shard", "spoken_for"]


Box = tuple[int, tuple[int, ...], tuple[int, ...]]
"""(first element, offsets, sizes) of a part of a tensor whose elements lie together."""


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Elements start..stop of a flattened tensor of `shape` as boxes of it, in order: for a matrix at most three.

    Example: elements 2..9 of a 4 x 3 matrix are the end of row 0, rows 1 and 2, nothing of row 3:
    (2, (0, 2), (1, 1)) and (3, (1, 0), (2, 3)).
    """
    if start >= stop:
        return []
    if len(shape) == 1:
        return [(start, (start,), (stop - start,))]
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # rows first..last are whole
    if first > last:
        return _in_row(shape, last, start, stop)
    whole = [(first * row, (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]))] if first < last else []
    return _in_row(shape, first - 1, start, first * row) + whole + _in_row(shape, last, last * row, stop)


def _in_row(shape: Sequence[int], index: int, start: int, stop: int) -> list[Box]:
    origin = index * prod(shape[1:])
    inner = boxes(shape[1:], start - origin, stop - origin)
    return [(origin + begin, (index, *offsets), (1, *sizes)) for begin, offsets, sizes in inner]


def local_shard(tensor: Tensor) -> Tensor:
    """What this rank keeps of a DTensor; any other tensor as it is."""
    # Asking for the class would load DTensor, half a second, where one rank has none.
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@dataclass(frozen=True)
class Place:
    """One tensor, of which this rank keeps `kept`: elements first..first + len(kept) of the flattened tensor.

    kept: flat, a view. sharded, start: the flat DTensor in which it lies, from which element on; None where one rank keeps all.
    """

    shape: torch.Size
    kept: Tensor
    first: int = 0
    sharded: DTensor | None = None
    start: int = 0

    @classmethod
    def in_flat(cls, flat: Tensor, start: int, shape: torch.Size) -> Place:
        """A tensor of `shape` that begins at element `start` of a flat tensor, which may be a DTensor."""
        shard = local_shard(flat)
        if shard is flat:
            return cls(shape, flat[start : start + shape.numel()])
        sharded = cast("DTensor", flat)
        (chunk,) = sharded.__create_chunk_list__()
        offset, stop = chunk.offsets[0], start + shape.numel()
        low = min(max(start, offset), stop)
        high = max(min(stop, offset + len(shard)), low)
        kept = shard[low - offset : high - offset] if low < high else shard[:0]
        return cls(shape, kept, low - start, sharded if len(shard) < len(flat) else None, start)

    @cached_property
    def is_shared(self) -> bool:
        """Whether several ranks keep parts of it."""
        if self.sharded is None:
            return False
        size = len(local_shard(self.sharded))
        return self.start // size != (self.start + self.shape.numel() - 1) // size

    @cached_property
    def speaks(self) -> bool:
        """Whether this rank speaks for the tensor where one is enough: it has it, or keeps its first element."""
        return self.first == 0 and self.kept.numel() > 0

    def put(self, value: Tensor) -> None:
        """Set what is kept here from the whole tensor."""
        self.kept.copy_(value.reshape(-1)[self.first : self.first + self.kept.numel()])

    @property
    def dtype(self) -> torch.dtype:
        return self.kept.dtype

    def __create_chunk_list__(self) -> list[Any]:
        """What is kept here as chunks of the tensor, for the planners of torch.distributed.checkpoint."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for _, offsets, sizes in self._boxes]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """The chunk that begins at `index.offset`, a view."""
        start, sizes = next((start, sizes) for start, offsets, sizes in self._boxes if offsets == tuple(index.offset))
        return self.kept[start - self.first :][: prod(sizes)].view(sizes)

    @cached_property
    def _boxes(self) -> list[Box]:
        return boxes(self.shape, self.first, self.first + self.kept.numel())

    @cached_property
    def _view(self) -> Tensor:
        return self.kept.view(self.shape)

    def whole(self, exchange: Exchange | None) -> Tensor:
        """The tensor: a view where this rank keeps all of it, else put together by all ranks that keep shards."""
        if not self.is_shared:
            return self._view
        assert self.sharded is not None and exchange is not None
        values = torch.empty(self.shape.numel(), dtype=self.kept.dtype, device=self.kept.device)
        values[self.first : self.first + self.kept.numel()] = self.kept
        exchange.fetch(values, self.start, self.sharded)
        return values.view(self.shape)


def spoken_for(places: Mapping[str, Place], exchange: Exchange | None) -> dict[str, Tensor]:
    """The whole tensors that this rank speaks for, views as far as possible. Every rank of a launch must call this, since the
    few tensors that lie across the border of two shards are put together by all."""
    found = {}
    for name, place in places.items():
        if place.is_shared or place.speaks:
            tensor = place.whole(exchange)
            if place.speaks:
                found[name] = tensor
    return found
