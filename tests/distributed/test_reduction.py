"""Sums over ranks follow the tree of the contract, whatever the ranks, elements and buckets; shards come back whole."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mok.gradients import halving_tree
from mok.grid import Grid, Layout
from mok.train import reduction
from mok.train.processes import assemble
from mok.train.reduction import tree_sum
from mok.transport.progress import Progress
from tests.distributed.processes import run_distributed


def part_of(rank: int, num_elements: int) -> torch.Tensor:
    """Values of very different size, so that every order of addition gives other bits."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(num_elements, generator=generator) * 10.0 ** torch.randint(-4, 4, (num_elements,), generator=generator)


def sums(rank: int, world_size: int, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    reduction.BUCKET = 256
    return [tree_sum(part_of(rank, num_elements), dist.group.WORLD, Progress()) for num_elements in sizes]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_each_rank_gets_its_piece_of_the_halving_tree(world_size: int) -> None:
    sizes = tuple(world_size * size for size in (1, 5, 256, 1000))
    found = run_distributed(sums, world_size, sizes)
    for i, num_elements in enumerate(sizes):
        expected = halving_tree(torch.stack([part_of(rank, num_elements) for rank in range(world_size)]))
        assert torch.equal(torch.cat([pieces[i] for pieces in found]), expected)
        chain = sum(part_of(rank, num_elements) for rank in range(world_size))
        assert world_size == 2 or num_elements < 1000 or not torch.equal(expected, chain), "the data cannot tell orders apart"


def shards(rank: int, world_size: int) -> bool:
    """Whether this rank sees what every other keeps, of dense parameters (shard i is full of i) and of its member's experts."""
    layout = Layout(Grid(2, 2, 2, 1, 4), 2, 2, rank)
    ranks = assemble(layout, torch.device("cpu"), 20.0)
    ranks.watch.stop()
    same = []
    for experts, num_shards, mine in ((False, 4, layout.dense_shard), (True, 2, layout.replica)):
        value = 10 * layout.member if experts else 0
        expected = torch.arange(num_shards).add(value).bfloat16().repeat_interleave(8)
        flat = torch.where(torch.arange(num_shards).repeat_interleave(8) == mine, expected, -1.0)
        part = flat[5:-3].clone()
        sharded = ranks.sharded(expected[8 * mine : 8 * mine + 8].clone(), experts)
        ranks.exchange.fetch(part, 5, sharded)
        ranks.exchange.gather_shards(flat, experts)
        same += [torch.equal(flat, expected), torch.equal(part, expected[5:-3]), sharded.full_tensor().equal(expected)]
    return all(same)


def test_shards_are_put_together_in_order() -> None:
    assert run_distributed(shards, 4) == [True] * 4
