"""The sequences of each step, call and evaluation, as tensors.

Owns which sample of the data is which slice of the grid: sample index = samples seen before the step + place in the step. No
random state: everything is a function of those numbers and the seed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mok.data.loader import IGNORED, Loader
from mok.grid import Call, Grid

__all__ = ["Batches", "send"]


class Batches:
    """Batches of a grid from a loader. count: samples there are before the data repeats; None where repeating is meant."""

    def __init__(self, loader: Loader, grid: Grid, count: int | None = None) -> None:
        self.loader, self.grid, self.count = loader, grid, count

    def of(self, first_sample: int, call: Call) -> tuple[Tensor, Tensor]:
        """(inputs, targets), int64 [B, S] on the CPU, of this rank's slices of a call; sample `first_sample` is the step's
        first.

        Samples from `count` on are there for their shape only: all their targets are ignored.
        """
        inputs, targets = [], []
        for index in call.slices:
            for place in range(index * self.grid.slice_sequences, (index + 1) * self.grid.slice_sequences):
                sample = first_sample + place
                beyond = self.count is not None and sample >= self.count
                sequence, target = self.loader.sequence(0 if beyond else sample)
                inputs.append(sequence)
                targets.append(torch.full_like(target, IGNORED) if beyond else target)
        return torch.stack(inputs), torch.stack(targets)


def send(values: Tensor, device: torch.device) -> Tensor:
    """CPU values on `device`, for whose arrival nobody waits; values that are there already as they are."""
    if device.type == "cpu" or values.is_cuda:
        return values
    return values.pin_memory().to(device, non_blocking=True)
