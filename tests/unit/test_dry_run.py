"""Pricing a run: ranks that fit and do not fit, and a report that people and scripts can read."""

from __future__ import annotations

import json
import os

import pytest
from click.testing import CliRunner

from mok.errors import UsageError
from mok.recipe import load, shipped
from mok_cli.dry_run import price
from mok_cli.main import cli

NO_GRID = ["distributed.lanes=0", "distributed.slices=0"]
"""The toy recipe states a grid; without one it takes that of the launch."""


def test_experts_are_shared_and_lanes_are_dealt():
    priced = price(load("small", ["moe.ep=4"]), world_size=8)
    assert (priced.layout.replicas, priced.layout.ep) == (2, 4)
    assert priced.tokens_per_step == 64 * 1024
    alone = price(load("small"))
    experts = alone.parameters["experts"]
    assert alone.rank_bytes["weights"] - priced.rank_bytes["weights"] == 2 * experts * 3 // 4
    assert alone.exchange_bytes == 0
    assert priced.exchange_bytes > 0


def test_fewer_ranks_than_lanes_pay_with_gradient_memory():
    recipe = load("toy", ["distributed.lanes=4"])
    assert price(recipe, 1).rank_bytes["gradients"] == 4 * price(recipe, 4).rank_bytes["gradients"]


def test_a_group_of_the_recipe_is_the_default_world():
    assert price(load("toy", ["moe.ep=4"])).layout.world_size == 4
    assert price(load("toy", [*NO_GRID, "moe.ep=auto", "train.batch_size=12"]), 6).layout.ep == 2
    assert price(load("toy", ["moe.ep=auto"])).layout.world_size == 1


@pytest.mark.parametrize(
    ("overrides", "world_size", "words"),
    [
        (
            ["moe.num_experts=6", "moe.ep=3"],
            4,
            "the ranks of a launch must be a multiple of 3",
        ),
        ([*NO_GRID, "train.batch_size=10"], 4, "train.batch_size = 10 does not fill a grid of 4 lanes"),
        (["distributed.lanes=6", "distributed.slices=0", "train.batch_size=12"], 2, "the quotient must be a power of two"),
    ],
)
def test_ranks_that_do_not_fit_are_refused_with_the_numbers(overrides, world_size, words):
    with pytest.raises(UsageError, match=words):
        price(load("toy", overrides), world_size)


def test_checkpoints_are_counted_with_the_last_step():
    priced = price(load("toy", ["train.steps=25", "checkpoint.every=10", "checkpoint.keep_last=2"]))
    assert priced.checkpoints_written == 3  # after steps 10, 20 and 25
    assert priced.checkpoints_kept == 2
    assert price(load("toy", ["checkpoint.every=0", "checkpoint.keep_last=0"])).checkpoints_written == 1


@pytest.mark.parametrize("name", sorted(shipped()))
def test_shipped_recipes_are_priced_on_the_ranks_they_state_in_80_columns(name):
    (stated,) = [line for line in shipped()[name].read_text().splitlines() if line.startswith("# Ranks: ")]
    arguments = ["recipes", "check", name, "--world-size", stated.removeprefix("# Ranks: ")]
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert max(map(len, result.output.replace(os.fspath(shipped()[name]), "").splitlines())) <= 80

    report = json.loads(CliRunner().invoke(cli, [*arguments, "--json"]).stdout)
    assert report["schema_version"] == 1
    assert report["parameters"]["total"] == sum(
        count for kind, count in report["parameters"].items() if kind not in ("total", "active")
    )
