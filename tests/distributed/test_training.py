"""Training steps on several gloo ranks: the bytes of weights, moments, gradients and reports are those of one rank."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch.distributed.tensor import DTensor

from mok import recipe as recipes
from mok.config import Recipe
from mok.data.loader import IGNORED
from mok.grid import Grid, Layout
from mok.shapes import rank_bytes
from mok.train.batches import Batches
from mok.train.optim import ParameterGroup
from mok.train.processes import assemble
from mok.train.ranks import OneRank
from mok.train.state import TrainState
from mok.train.step import train_step
from tests.distributed.processes import run_distributed

VOCABULARY = 64
SMALL = (
    "model.hidden_size=32",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.head_dim=16",
    "moe.num_experts=8",
    "moe.intermediate_size=32",
    "moe.z_loss=0.001",
    "train.batch_size=16",
    "train.sequence_length=16",
    "distributed.lanes=4",
    "distributed.slices=4",
)


class Sequences:
    """A loader whose sample i is a function of i. masked: samples whose targets are all ignored. token_of_lane: the only
    token of each lane of a step."""

    def __init__(self, length: int, masked: tuple[int, ...] = (), token_of_lane: tuple[int, ...] = ()) -> None:
        self.length, self.masked, self.token_of_lane = length, masked, token_of_lane

    def sequence(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.randint(0, VOCABULARY, (self.length + 1,), generator=torch.Generator().manual_seed(index))
        if self.token_of_lane:
            ids[:] = self.token_of_lane[index % 16 // 4]
        targets = ids[1:].clone()
        if index in self.masked:
            targets[:] = IGNORED
        return ids[:-1], targets


@dataclasses.dataclass(frozen=True)
class Work:
    """Steps to make. layout: (replicas, ep)."""

    layout: tuple[int, int] = (1, 1)
    changes: tuple[str, ...] = ()
    steps: int = 2
    masked: tuple[int, ...] = ()
    token_of_lane: tuple[int, ...] = ()


def recipe_of(work: Work) -> Recipe:
    return recipes.load("toy", (*SMALL, *work.changes))


def steps(rank: int, world_size: int, works: list[Work]) -> list[dict]:
    return [train(rank, work) for work in works]


def train(rank: int, work: Work) -> dict:
    return train_recipe(recipe_of(work), rank, work)


def train_recipe(recipe: Recipe, rank: int, work: Work) -> dict:
    device = torch.device("cpu")
    layout = Layout(Grid.of(recipe), *work.layout, rank)
    ranks = OneRank(layout) if layout.world_size == 1 else assemble(layout, device, 60.0)
    state = TrainState(recipe, VOCABULARY, ranks, device)
    batches = Batches(Sequences(recipe.train.sequence_length, work.masked, work.token_of_lane), layout.grid)
    reports = [train_step(state, batches) for _ in range(work.steps)]
    found = {
        "sha": state.state_sha256(),
        "reports": reports,
        "gradients": {name: tensor.clone() for name, tensor in state.gradients().items()},
        "dense": {name: tensor.clone() for name, tensor in state.tensors().items() if ".experts." not in name},
        "stored": [stored_whole(group) for group in state.optimizer.groups if not group.bank.experts],
    }
    if layout.world_size > 1:
        ranks.watch.stop()
    return found


def stored_whole(group: ParameterGroup) -> list[torch.Tensor]:
    """Master weights and moments of a group, put together by DTensor itself; without the zeros that fill up the last shard."""
    end = group.bank.starts[-1] + group.bank.parameters[-1].numel()
    stored = (group.master, group.exp_avg, group.exp_avg_sq)
    return [(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)[:end].clone() for tensor in stored]


def check(works: list[Work]) -> None:
    world_size = works[0].layout[0] * works[0].layout[1]
    found = run_distributed(steps, world_size, works, limit_s=120.0)
    for i, work in enumerate(works):
        expected = train(0, dataclasses.replace(work, layout=(1, 1)))
        for rank in range(world_size):
            result = found[rank][i]
            assert result["sha"] == expected["sha"], work
            assert result["reports"] == expected["reports"], work
            for name, tensor in result["gradients"].items():
                assert torch.equal(tensor, expected["gradients"][name]), (work, rank, name)
            for name, tensor in result["dense"].items():
                assert torch.equal(tensor, expected["dense"][name]), (work, rank, name)
            assert len(result["stored"]) == len(expected["stored"])
            for here, there in zip(result["stored"], expected["stored"], strict=True):
                assert all(torch.equal(*pair) for pair in zip(here, there, strict=True)), (work, rank)
        spoken = [name for rank in found for name in rank[i]["gradients"]]
        assert sorted(spoken) == sorted(expected["gradients"]), "one rank speaks for each gradient"


def test_two_ranks() -> None:
    check(
        [
            Work((2, 1)),
            Work((1, 2)),
            # Tied embeddings, shared experts, bias correction, low precision.
            Work(
                (1, 2), ("model.tie_embeddings=true", "moe.num_shared_experts=1", "train.dtype=bf16", "optim.moment_dtype=bf16")
            ),
            Work((2, 1), ("moe.score=sigmoid", "moe.correction_bias=true", "train.recompute=blocks", "moe.recompute=all")),
            # Replicas that have one token each, and so other experts: those of the other get zeros from here.
            Work((2, 1), ("moe.top_k=1",), token_of_lane=(3, 9, 3, 9)),
            # A rank whose labels are all ignored, in every step.
            Work((2, 1), masked=tuple(step * 16 + i for step in range(2) for i in (0, 1, 2, 3, 8, 9, 10, 11))),
            Work((1, 2), ("distributed.segment=2", "distributed.slices_per_call=2")),
            # Tensors frozen inside a parameter, with the shard's border in them.
            Work((2, 1), ("train.freeze=*.q_proj.*,*.experts.3.gate_proj.*,*.experts.2.*", "train.dtype=bf16")),
            Work((1, 2), ("train.dtype=mxfp8", "moe.quantize_weight_gradients=true", "moe.quantize_dispatch=true")),
        ]
    )


def test_four_ranks() -> None:
    check(
        [
            Work((4, 1)),
            Work((2, 2)),
            Work((1, 4)),
            # Every token goes to the experts of the first rank; the others have nothing to do, and are not waited for.
            Work((1, 4), ("moe.force_routing=one-hot", "moe.top_k=1")),
        ]
    )


def with_made_up_gradients(rank: int, world_size: int) -> tuple[float, float]:
    """(gradient norm, the first moment's change per unit of gradient) where the experts of rank r have the sum of squares
    (20, 100)[r] and nothing else has a gradient."""
    recipe = recipe_of(Work(changes=("optim.clip_norm=1.0",)))
    ranks = assemble(Layout(Grid.of(recipe), 1, 2, rank), torch.device("cpu"), 60.0)
    state = TrainState(recipe, VOCABULARY, ranks, torch.device("cpu"))
    batches = Batches(Sequences(recipe.train.sequence_length), ranks.layout.grid)

    def made_up(exchange: object) -> None:
        for grads in state.store.grads:
            grads.zero_()
        state.places[name].kept[0] = math.sqrt((20.0, 100.0)[rank])

    name = f"grad:model.layers.0.mlp.experts.{4 * rank}.up_proj.weight"
    state.store.finish = made_up
    report = train_step(state, batches)
    ranks.watch.stop()
    moment = state.places[name.replace("grad:", "exp_avg:")].kept[0]
    return report.grad_norm, float(moment / state.places[name].kept[0])


def test_experts_of_all_ranks_make_one_norm_and_are_scaled_alike() -> None:
    """Not the mean over ranks, not a norm for each group."""
    beta1 = recipe_of(Work()).optim.beta1
    for norm, factor in run_distributed(with_made_up_gradients, 2):
        assert norm == pytest.approx(math.sqrt(120.0), rel=1e-6)
        assert factor == pytest.approx((1 - beta1) / math.sqrt(120.0), rel=1e-5)


def kept_bytes(rank: int, world_size: int, layout: tuple[int, int]) -> dict[str, int]:
    work = Work(layout, ("train.dtype=bf16",))
    recipe = recipe_of(work)
    ranks = assemble(Layout(Grid.of(recipe), *layout, rank), torch.device("cpu"), 60.0)
    places = TrainState(recipe, VOCABULARY, ranks, torch.device("cpu")).places
    ranks.watch.stop()
    kinds = {"weights": ("model.", "lm_head."), "master weights": ("master:",), "moments": ("exp_avg:", "exp_avg_sq:")}
    return {
        kind: sum(place.kept.nbytes for name, place in places.items() if name.startswith(starts))
        for kind, starts in kinds.items()
    }


def test_each_rank_keeps_its_share_of_master_weights_and_moments_as_the_dry_run_says() -> None:
    recipe = recipe_of(Work(changes=("train.dtype=bf16",)))
    for replicas, ep in ((4, 1), (2, 2), (1, 4)):
        priced = rank_bytes(recipe, VOCABULARY, ep=ep, replicas=replicas, lanes=1, positions=1, tokens=0)
        found = run_distributed(kept_bytes, 4, (replicas, ep))
        for kind in ("weights", "master weights", "moments"):
            assert sum(rank[kind] for rank in found) == 4 * priced[kind], (kind, replicas, ep)
            # Shards are equal but for the gaps between tensors, of less than a block each.
            assert max(rank[kind] for rank in found) < 1.1 * priced[kind], (kind, replicas, ep)


def test_the_comparison_would_see_another_order_of_sums() -> None:
    """The recipe's grid is what lays the order down: another grid, other bits."""
    grid = [entry for entry in SMALL if entry.startswith("distributed.")]
    found = []
    for changes in (grid, ["distributed.lanes=2", "distributed.slices=4"]):
        recipe = recipes.load("toy", [entry for entry in SMALL if entry not in grid] + changes)
        found.append(train_recipe(recipe, 0, Work(steps=1))["sha"])
    assert found[0] != found[1]
