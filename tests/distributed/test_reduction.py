"""Sums over ranks follow the tree of the contract, whatever the number of ranks and elements."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mok.gradients import halving_tree
from mok.train.reduction import tree_sum
from mok.transport.progress import Progress
from tests.distributed.processes import run_distributed


def part_of(rank: int, num_elements: int) -> torch.Tensor:
    """Values of very different size, so that every order of addition gives other bits."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(2, num_elements, generator=generator) * 10.0 ** torch.randint(
        -4, 4, (2, num_elements), generator=generator
    )


def sums(rank: int, world_size: int, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    found = []
    for num_elements in sizes:
        parts = part_of(rank, num_elements)
        tree_sum(parts, dist.group.WORLD, Progress())
        found.append(parts)
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_sum_is_the_halving_tree_on_every_rank(world_size: int) -> None:
    sizes = (1, 5, 256, 1000)
    for found in run_distributed(sums, world_size, sizes):
        for num_elements, parts in zip(sizes, found, strict=True):
            expected = halving_tree(torch.stack([part_of(rank, num_elements) for rank in range(world_size)]))
            assert torch.equal(parts, expected)
            if num_elements == 1000 and world_size > 2:
                chain = sum(part_of(rank, num_elements) for rank in range(world_size))
                assert not torch.equal(parts, chain), "the data cannot tell orders apart"
