"""The cost model against figures worked out by hand, and what must hold of it whatever the rates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mok.cost import MACHINES, Machine, layer_time, step_time
from mok.recipe import load
from mok.shapes import LAYER_SHAPES, LayerShape

ROUND = Machine("round figures", flops=1e12, reach=0.5, link_bytes=1e9, link_reach=0.5, memory_bytes=1e10, domain=8)


def test_a_layer_by_hand() -> None:
    """H = 1000, I = 500, 4 experts, K = 2 on 2 ranks with 100 tokens each: 200 rows on a rank, 100 of them from the other."""
    found = layer_time(LayerShape(1000, 500, 4, 2, ranks=2), 100, ROUND)
    assert found.forward.products_s == pytest.approx(6 * 200 * 1000 * 500 / 0.5e12)
    assert found.forward.dispatch_s == found.forward.combine_s == pytest.approx(100 * 1000 * 2 / 0.5e9)
    weights, rows = 3 * 2 * 1000 * 500 * 2, 200 * (4 * 1000 + 4 * 500) * 2
    assert found.forward.memory_s == pytest.approx((weights + rows) / 1e10)
    assert found.backward.products_s == pytest.approx(2 * found.forward.products_s)
    assert found.forward.in_turn_s == pytest.approx(found.forward.products_s + 2 * found.forward.dispatch_s)
    assert found.forward.overlapped_s == pytest.approx(max(found.forward.products_s, 2 * found.forward.dispatch_s))
    once = layer_time(LayerShape(1000, 500, 4, 2, ranks=2), 100, ROUND, once=True)
    assert once.forward.dispatch_s == pytest.approx(100 * (1 - 1 / 6) * 1000 * 2 / 0.5e9)  # 1 of 6 pairs is on one rank alone
    assert once.forward.combine_s == found.forward.combine_s
    quantized = layer_time(LayerShape(1000, 500, 4, 2, ranks=2), 100, ROUND, "mxfp8")
    assert quantized.forward.products_s == pytest.approx(found.forward.products_s / 2)
    assert quantized.forward.link_s == found.forward.link_s


def test_one_rank_sends_nothing_and_uneven_experts_wait_for_the_fullest() -> None:
    shape = LAYER_SHAPES["deepseek-v3"]
    assert layer_time(shape, 2048, ROUND).forward.link_s == 0
    uneven, even = (layer_time(replace(shape, ranks=ranks), 2048, ROUND) for ranks in (72, 64))
    assert even.fullest == 1 and uneven.fullest == 72 * 4 / 256 == 9 / 8
    ratio = uneven.forward.products_s / even.forward.products_s
    assert 1 < ratio < 9 / 8  # the shared expert is not shared out


def test_a_step_is_made_of_what_a_recipe_has() -> None:
    recipe = load("small", ["train.dtype=bf16"])
    machine = MACHINES["h200"]
    alone, shared = (step_time(recipe, 512, machine, replicas=1, ep=ep) for ep in (1, 8))
    assert alone["rows between ranks"] == alone["gradients between ranks"] == 0
    assert shared["rows between ranks"] > 0 and shared["gradients between ranks"] > 0
    assert shared["everything dense"] == pytest.approx(alone["everything dense"] / 8)
    assert shared["optimizer"] < alone["optimizer"]
    again = step_time(replace(recipe, train=replace(recipe.train, recompute="blocks")), 512, machine, replicas=1, ep=1)
    assert again["everything dense"] == pytest.approx(alone["everything dense"] * 4 / 3)
    assert step_time(recipe, 512, machine, replicas=1, ep=16) == {}
