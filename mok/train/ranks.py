"""What a step asks of the other ranks, and the answer of a launch that has only one.

Owns the interface between training and whatever carries data between processes; `mok/train/step.py` uses it and nothing else.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import Tensor

from mok.checkpoint import Collective
from mok.gradients import Exchange
from mok.grid import Layout
from mok.model.transformer import Group

__all__ = ["OneRank", "Ranks"]

T = TypeVar("T")


class Ranks(Protocol):
    """The ranks of a launch, seen from one of them.

    layout: which part of the grid this rank owns. group: its expert-parallel group. exchange: adds gradient parts; None where
    there is nobody to add to. collective: for checkpoints, which all ranks save and load together.
    """

    layout: Layout
    group: Group
    exchange: Exchange | None
    collective: Collective

    def sharded(self, shard_N: Tensor, experts: bool) -> Tensor:
        """This rank's shard of a bank's flat tensor as the DTensor of it, over the ranks that keep the others; the same memory.
        The shard itself where one rank keeps all."""

    def gather(self, value: T) -> list[T]:
        """The value of every rank, in rank order; small Python values, known to all ranks afterwards."""

    def gather_numbers(self, numbers_N: Tensor) -> Tensor:
        """[R, N]: the equally many numbers of every rank, in rank order, on their device; a GPU is not waited for."""

    def enter(self, stage: str, step: int | None = None) -> None:
        """This rank now works on `stage` (of `step`): what the others read if it never comes back."""


class OneRank:
    """A launch of one process."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.group = Group()
        self.exchange: Exchange | None = None
        self.collective = Collective()

    def sharded(self, shard_N: Tensor, experts: bool) -> Tensor:
        return shard_N

    def gather(self, value: T) -> list[T]:
        return [value]

    def gather_numbers(self, numbers_N: Tensor) -> Tensor:
        return numbers_N.unsqueeze(0)

    def enter(self, stage: str, step: int | None = None) -> None:
        """Nobody waits for the only rank."""
