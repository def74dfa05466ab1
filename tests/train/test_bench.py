"""`mok bench train`: what a report holds, and that a peer that computes something else is not timed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from mok import shapes
from mok.bench.reduction import bench_reduction
from mok.bench.train import _Measurement, _Mok, bench_train
from mok.config import DistributedConfig, ModelConfig, MoEConfig, OptimConfig, Recipe, TrainConfig
from mok.determinism.trace import Recorder
from mok.errors import CheckFailed, UsageError

RECIPE = Recipe(
    model=ModelConfig(hidden_size=32, num_layers=1, head_dim=16),
    moe=MoEConfig(num_experts=4, intermediate_size=32, balance_loss=0.0),
    train=TrainConfig(batch_size=4, sequence_length=32),
    optim=OptimConfig(schedule="constant", warmup_steps=0),
    distributed=DistributedConfig(lanes=2),
)


@pytest.mark.interop
def test_a_report_beside_transformers() -> None:
    pytest.importorskip("transformers")
    report = bench_train(RECIPE, ["hf"], vocab_size=64, rounds=2, steps=2, check=True, device=CPU, digests=True)
    assert [row.name for row in report.rows] == ["mok", "mok, one slice", "mok, digests", "hf"]
    ours, _, recorded, theirs = report.rows
    assert recorded.relative_error == 0
    assert ours.relative_error is None and theirs.relative_error is not None and theirs.relative_error < 1e-4
    assert ours.bitwise_repeatable
    assert ours.ratio_to["hf"] == theirs.median_ms / ours.median_ms
    assert ours.tokens_per_s == pytest.approx(128 / ours.median_ms * 1e3)
    assert all(row.peak_bytes > 2**20 and row.median_ms > 0 and row.spread_ms >= 0 for row in report.rows)
    assert report.environment["torch"]


CPU = torch.device("cpu")


class Canned:
    """The pipe of a contestant whose answers are known."""

    def __init__(self, values: list[float]) -> None:
        self.values, self.asked = values, []

    def send(self, question: Any) -> None:
        self.asked.append(question)

    def recv(self) -> Any:
        question = self.asked[-1]
        if question == "check":
            return {"values": self.values, "repeatable": True}
        if question == "environment":
            return {"threads": 1}
        return 1000 if question in ("peak", "dense") else [0.5] * question


def test_a_peer_that_computes_something_else_is_not_timed() -> None:
    mok, right, wrong = Canned([6.2, 1.0]), Canned([6.2, 1.00001]), Canned([6.2, 1.01])
    together = _Measurement(RECIPE, 64, 2, 3, True)
    together.take([("mok", mok), ("hf", right)])
    report = together.report()
    assert report.rows[0].median_ms == 500 and report.rows[0].ratio_to == {"hf": 1.0}
    assert report.environment == {"threads": 1, "turns": 2, "steps_per_turn": 3, "dense_tflops": 1e-9}
    one_by_one = _Measurement(RECIPE, 64, 2, 3, True)
    one_by_one.take([("mok", mok)])
    with pytest.raises(CheckFailed, match=r"hf: losses and gradient norms differ by 1\.0e-02") as caught:
        one_by_one.take([("hf", wrong)])
    assert caught.value.exit_code == 3 and wrong.asked == ["check"]


def test_a_contestant_takes_digests_without_another_result(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(Recorder, "see_all", lambda self, phase, tensors: seen.append((phase, len(tensors))))
    inputs_BS, targets_BS = torch.arange(4 * 32).view(4, 32) % 64, torch.arange(1, 4 * 32 + 1).view(4, 32) % 64
    traced = dataclasses.replace(RECIPE, log=dataclasses.replace(RECIPE.log, trace="steps"))
    plain, recorded = (_Mok(recipe, 64, CPU) for recipe in (RECIPE, traced))
    assert plain.step(inputs_BS, targets_BS) == recorded.step(inputs_BS, targets_BS)
    assert {phase for phase, _ in seen} == {"data", "router", "forward", "reduce", "optimizer"}


def test_a_peer_that_is_not_known_is_refused() -> None:
    with pytest.raises(UsageError, match="--against torchtitan"):
        bench_train(dataclasses.replace(RECIPE), ["torchtitan"], vocab_size=64, rounds=2, steps=1, check=True, device=CPU)


def test_the_sums_over_ranks_are_timed_beside_the_backends_own() -> None:
    recipe = dataclasses.replace(RECIPE, distributed=DistributedConfig(lanes=2, slices=1))
    cost = bench_reduction(recipe, 2, vocab_size=64, repeats=3, device="cpu")
    assert (cost.replicas, cost.ep, cost.backend) == (2, 1, "gloo")
    assert cost.step_ms > cost.ordered_ms > 0 and cost.all_reduce_ms > 0
    parameters = sum(shapes.parameters(recipe, 64).values())
    assert 4 * parameters <= cost.gradient_bytes < 4.4 * parameters
    assert cost.share_of_step == (cost.ordered_ms - cost.all_reduce_ms) / cost.step_ms
    with pytest.raises(UsageError, match="launch with 1, 2 replicas"):
        bench_reduction(recipe, 3, vocab_size=64, repeats=3, device="cpu")
