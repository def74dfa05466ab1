"""Gradients across ranks, added in the order of the contract (docs/numerics.md, rules 7 and 10) and in no other.

Owns the exchange of parts: each rank receives its share of every other rank's part, adds them as a halving tree by itself, and
passes the sum on. No reduction of gloo or NCCL is used, since neither promises an order. Knows nothing of models or optimizers.
Read next: `mok/gradients.py`, which calls it between the trees that one rank can add alone.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mok.gradients import halving_tree
from mok.transport.collective import all_gather
from mok.transport.progress import Progress

__all__ = ["OrderedReduction", "tree_sum"]

BUCKET = 1 << 24
"""Elements exchanged at once: bounds the memory of the received parts to 64 MiB of fp32."""


def tree_sum(parts_LN: Tensor, group: dist.ProcessGroup, progress: Progress) -> None:
    """Replace each row by the halving tree of that row over the ranks of the group, in rank order; equal on all ranks after.

    parts_LN: fp32, rows contiguous. Example, three ranks with rows a, b, c: all end with (a + c) + b.
    """
    ranks = group.size()
    if ranks == 1:
        return
    for row in parts_LN:
        for start in range(0, row.numel(), BUCKET):
            _tree_sum_bucket(row[start : start + BUCKET], group, progress)


def _tree_sum_bucket(part_N: Tensor, group: dist.ProcessGroup, progress: Progress) -> None:
    ranks = group.size()
    share = -(-part_N.numel() // ranks)
    padded = part_N
    if share * ranks != part_N.numel():
        padded = torch.nn.functional.pad(part_N, (0, share * ranks - part_N.numel()))
    received = torch.empty(ranks, share, dtype=part_N.dtype, device=part_N.device)
    with progress.waiting("gradients"):
        dist.all_to_all_single(received.view(-1), padded, group=group)
    total = halving_tree(received)
    with progress.waiting("gradients"):
        all_gather(padded, total, group)
    if padded is not part_N:
        part_N.copy_(padded[: part_N.numel()])


class OrderedReduction:
    """See `mok.gradients.Exchange`."""

    def __init__(self, positions: dist.ProcessGroup, lanes: dist.ProcessGroup, progress: Progress) -> None:
        """positions: the expert-parallel group. lanes: the ranks in the same place of every replica."""
        self._positions, self._lanes, self._progress = positions, lanes, progress

    def over_positions(self, parts_LN: Tensor) -> None:
        tree_sum(parts_LN, self._positions, self._progress)

    def over_lanes(self, part_N: Tensor) -> None:
        tree_sum(part_N.unsqueeze(0), self._lanes, self._progress)
