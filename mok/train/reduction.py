"""What ranks do together with flat tensors: gradients added in the order of the contract, shards gathered again.

Owns the exchange of parts (docs/numerics.md, rules 7 and 10): each rank receives its piece of every other rank's part and adds
them as a halving tree by itself. No reduction of gloo or NCCL is used, since neither promises an order. The piece is the shard
whose optimizer state this rank keeps, so nothing but updated weights travels back. Knows nothing of models or optimizers.
Read next: `mok/gradients.py`, which calls it between the trees that one rank can add alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from mok.gradients import halving_tree
from mok.grid import Layout
from mok.transport.collective import all_gather
from mok.transport.progress import Progress

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["OrderedReduction", "tree_sum"]

BUCKET = 1 << 24
"""Elements exchanged at once: bounds the memory of the received parts to 64 MiB of fp32."""


def tree_sum(part_N: Tensor, group: dist.ProcessGroup, progress: Progress) -> Tensor:
    """[N] to [N / ranks]: this rank's piece of the halving tree over the parts of the group, in rank order.

    part_N: fp32, N a multiple of the ranks. Example, three ranks with parts a, b, c of three elements: rank 1 gets element 1 of
    (a + c) + b.
    """
    ranks = group.size()
    if ranks == 1:
        return part_N
    pieces = part_N.view(ranks, -1)
    total = torch.empty_like(pieces[0])
    width = BUCKET // ranks
    for start in range(0, total.numel(), width):
        sent = pieces[:, start : start + width].contiguous()
        received = torch.empty_like(sent)
        with progress.waiting("gradients"):
            dist.all_to_all_single(received, sent, group=group)
        total[start : start + width] = halving_tree(received)
    return total


class OrderedReduction:
    """See `mok.gradients.Exchange`."""

    def __init__(self, layout: Layout, positions: dist.ProcessGroup, lanes: dist.ProcessGroup, progress: Progress) -> None:
        """positions: the expert-parallel group. lanes: the ranks in the same place of every replica."""
        self._layout, self._positions, self._lanes, self._progress = layout, positions, lanes, progress

    def over_positions(self, parts_LN: Tensor) -> Tensor:
        if self._layout.ep == 1:
            return parts_LN
        return torch.stack([tree_sum(row, self._positions, self._progress) for row in parts_LN])

    def over_lanes(self, part_N: Tensor) -> Tensor:
        return tree_sum(part_N, self._lanes, self._progress)

    def gather_shards(self, flat_N: Tensor, experts: bool) -> None:
        whole = flat_N.view(torch.uint8)
        of_member = whole if experts else whole.view(self._layout.ep, -1)[self._layout.member]
        self._gather(of_member, self._layout.replica, self._lanes)
        if not experts:
            self._gather(whole, self._layout.member, self._positions)

    def fetch(self, values_N: Tensor, start: int, sharded: DTensor) -> None:
        keepers = sharded.device_mesh.mesh.flatten().tolist()
        group = self._lanes if len(keepers) < self._layout.world_size else None
        size = sharded.to_local().numel()
        stop = start + values_N.numel()
        for shard in range(start // size, -(-stop // size)):
            first, last = max(start, shard * size), min(stop, (shard + 1) * size)
            with self._progress.waiting("gather"):
                dist.broadcast(values_N[first - start : last - start].view(torch.uint8), keepers[shard], group)

    def _gather(self, whole: Tensor, place: int, group: dist.ProcessGroup) -> None:
        if group.size() > 1:
            # A copy: no backend promises to take a part of the output for its input.
            mine = whole.view(group.size(), -1)[place].clone()
            with self._progress.waiting("weights"):
                all_gather(whole, mine, group)
