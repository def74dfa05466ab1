"""One step: ignored targets, auxiliary losses, the correction bias, clipping."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mok.backends import torch as torch_backend
from mok.errors import NonFiniteError, RunError
from mok.launch.status import status_word
from mok.model.loss import IGNORED
from mok.train.optim import gradient_norm
from mok.train.step import evaluate, train_step
from tests.train.runs import make_run

GRID = ["train.batch_size=8", "distributed.lanes=2", "distributed.slices=2", "distributed.slice_sequences=1"]


def masked(run, sequences: list[int]) -> None:
    """Make every target of these sequences of a step one that is ignored."""
    real = run.batches.loader.sequence

    def sequence(index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = real(index)
        return inputs, torch.full_like(targets, IGNORED) if index % 8 in sequences else targets

    run.batches.loader.sequence = sequence


def test_a_slice_without_targets_leaves_the_gradients_of_the_others(tmp_path: Path) -> None:
    quiet = ["moe.balance_loss=0"]
    some, _ = make_run(tmp_path, *GRID, *quiet, out="a")
    masked(some, [0, 1, 2, 3])
    report = train_step(some.state, some.batches)
    alone, _ = make_run(tmp_path, *quiet, "train.batch_size=4", out="b")
    real = alone.batches.loader.sequence
    alone.batches.loader.sequence = lambda index: real(index + 4)
    expected = train_step(alone.state, alone.batches)
    assert report.tokens == expected.tokens and math.isclose(report.loss, expected.loss, rel_tol=1e-6)
    theirs = alone.state.gradients()
    for name, gradient in some.state.gradients().items():
        assert (gradient - theirs[name]).norm() <= 1e-5 * theirs[name].norm(), name


def test_a_step_without_any_target_is_skipped_with_a_warning(tmp_path: Path) -> None:
    run, lines = make_run(tmp_path, *GRID, steps=2)
    before = run.state.state_sha256()
    masked(run, list(range(8)))
    run.train()
    assert "step 1 has no valid target and was skipped" in lines.getvalue()
    assert run.state.state_sha256() == before


@pytest.mark.parametrize("loss", ["balance_loss", "z_loss"])
def test_auxiliary_losses_weigh_the_same_in_any_number_of_calls(tmp_path: Path, loss: str) -> None:
    """Bit for bit, and linear in the coefficient."""

    def router_gradient(out: str, *overrides: str) -> tuple[Tensor, float | None]:
        run, _ = make_run(tmp_path, *GRID, "moe.balance_loss=0", *overrides, out=out)
        report = train_step(run.state, run.batches)
        return run.state.gradients()["grad:model.layers.0.mlp.gate.weight"].clone(), getattr(report, loss)

    none, _ = router_gradient("0")
    once, shown = router_gradient("1", f"moe.{loss}=0.1")
    twice, _ = router_gradient("2", f"moe.{loss}=0.2")
    calls, shown_in_calls = router_gradient("3", f"moe.{loss}=0.1", "distributed.slices_per_call=2")
    assert torch.equal(once, calls) and shown == shown_in_calls
    assert (once - none).norm() > 1e-3 * none.norm()
    assert ((twice - once) - (once - none)).norm() < 1e-4 * (once - none).norm()


def test_the_correction_bias_moves_once_a_step(tmp_path: Path) -> None:
    """By exactly the rate, up or down or not at all, in any number of calls, recomputed or not; never in an evaluation."""
    sigmoid = [*GRID, "moe.score=sigmoid", "moe.correction_bias=true", "moe.bias_update_rate=0.001"]
    found = []
    for out, overrides in enumerate(
        ([], ["distributed.slices_per_call=2"], ["distributed.slices_per_call=2", "train.recompute=blocks"])
    ):
        run, _ = make_run(tmp_path, *sigmoid, *overrides, out=str(out))
        train_step(run.state, run.batches)
        bias = run.state.model.moe_layers[0].router.correction_bias
        after = bias.clone()
        evaluate(run.state, run.held_out, 1)
        assert torch.equal(bias, after)
        found.append(after)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    rate = torch.tensor(0.001)
    assert all(value in (rate, -rate, 0) for value in found[0]) and found[0].any()


def test_the_correction_bias_stays_fp32_in_a_bf16_run(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, "train.dtype=bf16", "moe.score=sigmoid", "moe.correction_bias=true")
    run.state.model.to(torch.bfloat16)
    router = run.state.model.moe_layers[0].router
    counts = torch.tensor([10, 10, 10, 0])
    for _ in range(2000):
        router.update_bias(counts, 0.001)
    assert router.correction_bias.dtype == torch.float32
    assert abs(router.correction_bias[3].item() - 2.0) < 1e-3
    name = "model.layers.0.mlp.gate.e_score_correction_bias"
    assert run.state.tensors()[name].dtype == torch.float32


def test_the_norm_adds_all_tensors_and_scales_them_alike(tmp_path: Path) -> None:
    assert gradient_norm(torch.tensor([20.0, 100.0, 0.0], dtype=torch.float64)).item() == math.sqrt(120.0)
    run, _ = make_run(tmp_path, "optim.clip_norm=0.01", "optim.weight_decay=0")
    report = train_step(run.state, run.batches)
    expected = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in run.state.gradients().values()))
    assert math.isclose(report.grad_norm, expected, rel_tol=1e-6)
    m = run.state.tensors()["exp_avg:model.norm.weight"]
    clipped = run.state.gradients()["grad:model.norm.weight"] * (0.01 / expected) * 0.1
    assert (m - clipped).norm() < 1e-5 * clipped.norm()


@pytest.mark.parametrize("trouble", ["kernel", "router", "loss"])
def test_what_goes_wrong_on_a_device_leaves_everything_as_it_was(tmp_path: Path, trouble: str) -> None:
    """Nobody waits for a GPU before the update is queued, so the update itself must not happen."""
    run, _ = make_run(tmp_path, "moe.score=sigmoid", "moe.correction_bias=true", "optim.weight_decay=0.5", steps=4)
    train_step(run.state, run.batches)
    state, before = run.state, run.state.state_sha256()
    with torch.no_grad():
        if trouble == "kernel":
            status_word(state.device, 0).fill_(3)
        elif trouble == "router":
            state.model.moe_layers[0].router.num_bad_rows.fill_(5)
        else:
            saved = state.model.w_head[7, 3].clone()
            state.model.w_head[7, 3] = torch.inf
    words = {
        "kernel": "layer 0 on rank 0: a tile waited",
        "router": "layer 0 on rank 0: 5 rows",
        "loss": "the loss is not finite",
    }
    with pytest.raises(RunError, match=words[trouble]) as caught:
        train_step(state, run.batches)
    assert trouble != "kernel" or "out of range" in str(caught.value)
    if trouble == "loss":
        state.model.w_head.data[7, 3] = saved
    assert state.step == 1 and state.state_sha256() == before
    train_step(state, run.batches)
    assert state.step == 2 and state.state_sha256() != before


def test_adamw_against_float64(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, "optim.weight_decay=0.5", steps=20)
    state = run.state
    names = ["lm_head.weight", "model.norm.weight", "model.layers.0.mlp.experts.2.down_proj.weight"]
    reference = {name: torch.nn.Parameter(state.tensors()[name].double()) for name in names}
    optimizer = torch.optim.AdamW(
        [{"params": [p], "weight_decay": 0.5 if p.dim() > 1 else 0.0} for p in reference.values()], betas=(0.9, 0.95), eps=1e-8
    )
    for _ in range(4):
        report = train_step(state, run.batches)
        for name, parameter in reference.items():
            gradient = state.gradients()[f"grad:{name}"].double()
            parameter.grad = gradient * min(1.0, 1.0 / report.grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = report.lr
        optimizer.step()
    for name, parameter in reference.items():
        found = state.tensors()[name].double()
        assert (found - parameter).norm() < 1e-5 * parameter.norm(), name


def test_weights_are_quantised_once_per_step_and_anew_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two weights of one layer, in eight calls a step; evaluation after the step sees the new weights."""
    overrides = ["train.dtype=mxfp8", "distributed.slices_per_call=1", "distributed.segment=1"]
    run, _ = make_run(tmp_path, *GRID, *overrides)
    real, rounded = torch_backend.round_weight, []
    monkeypatch.setattr(torch_backend, "round_weight", lambda w, form: (rounded.append(w.data_ptr()), real(w, form))[1])
    for step in (1, 2):
        train_step(run.state, run.batches)
        assert len(run.state.calls) == 8 and len(rounded) == 2 * step
    kept = evaluate(run.state, run.held_out, 1)[0]
    assert len(rounded) == 6
    run.state.model.weights_changed()
    assert evaluate(run.state, run.held_out, 1)[0] == kept


def test_an_infinite_weight_ends_an_8_bit_step_with_an_error(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, "train.dtype=mxfp8", "moe.top_k=4")
    before, weight = run.state.state_sha256(), run.state.model.moe_layers[0].w_down[1, 5, 7]
    with torch.no_grad():
        kept = weight.clone()
        weight.fill_(torch.inf)
        with pytest.raises(NonFiniteError, match="the loss is not finite; nothing was updated"), torch.enable_grad():
            train_step(run.state, run.batches)
        weight.copy_(kept)
    assert run.state.state_sha256() == before
