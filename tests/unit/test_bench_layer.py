"""`mok bench layer` on the CPU: what it reports, what it refuses, and that a wrong result gets no figure."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mok.bench.layer import Dense, Problem, bench_layer, make_problem, make_truth, worst_error
from mok.bench.peers import layer as peers
from mok.bench.peers.absent import Absent
from mok.bench.peers.layer import Contestant, Mok
from mok.errors import CheckFailed
from mok.quantization import Quantization
from mok.shapes import LayerShape

SMALL = LayerShape(32, 48, 4, 2)
CPU = torch.device("cpu")
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def problem() -> Problem:
    return make_problem("small", SMALL, 24, "balanced", CPU, torch.bfloat16)


def test_every_figure_of_a_report() -> None:
    report = bench_layer(
        {"small": (SMALL, 24)},
        routing="skewed",
        backend="auto",
        against=["torch", "grouped_mm"],
        recompute=("none", "all"),
        check=True,
        device=CPU,
        dtype=torch.bfloat16,
        calls=3,
        warmup=1,
        sustain_s=0.01,
    )
    assert [row.direction for row in report.rows] == ["forward", "forward+backward"] * 4
    ours = report.rows[0]
    assert set(ours.ratio_to) == {"mok auto, recompute all", "torch loop", "torch grouped_mm"} and not report.rows[2].ratio_to
    assert not report.environment["left_out"]
    for row in report.rows:
        assert row.sustained_ms and row.fraction_of_dense > 0 and row.fraction_of_sustained_dense
        assert row.clock_mhz is None and row.power_w is None  # there is no GPU here
        assert row.median_ms > 0 and row.bitwise_repeatable and 0 < row.relative_error < 0.02
        assert row.tflops == pytest.approx(
            SMALL.flops(24) * (1 if row.direction == "forward" else 3) / row.median_ms / 1e9, rel=1e-6
        )


@pytest.mark.parametrize("fault", ["swapped gate and up", "one missing route"])
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_a_wrong_result_is_found_at_any_scale(problem: Problem, fault: str, scale: float) -> None:
    for weight in (problem.gate_EIH, problem.up_EIH, problem.down_EHI):
        weight.mul_(scale)

    class Faulty(Mok):
        def forward(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
            if fault.startswith("one"):
                ids_TK = ids_TK.clone()
                ids_TK[3, 0] = -1
            return super().forward(x_TH, ids_TK, weights_TK)

    contestant = Faulty(problem, "torch")
    truth = make_truth(problem)
    worst_error(problem, Mok(problem, "torch"), truth, ours=True)
    if fault.startswith("swapped"):
        gate, up, down = contestant._weights
        contestant._weights = [up, gate, down]
    with pytest.raises(CheckFailed, match="from float64, allowed"):
        worst_error(problem, contestant, truth, ours=True)


def test_peers_that_are_absent_fail_or_are_wrong_are_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(problem: Problem) -> Contestant:
        raise Absent("it is not installed: pip install it")

    def failing(problem: Problem) -> Contestant:
        contestant = peers.torch_loop(problem)
        contestant.backward = lambda *_: 1 / 0
        return contestant

    def wrong(problem: Problem) -> Contestant:
        contestant = peers.torch_loop(problem)
        contestant._down = contestant._down * 1.5
        return contestant

    makers = {"hf": absent, "torchtitan": failing, "sonicmoe": wrong, "torch": peers.torch_loop}
    monkeypatch.setattr(peers, "find", makers.get)
    said: list[str] = []
    report = bench_layer(
        {"small": (SMALL, 24)},
        routing="balanced",
        backend="torch",
        against=list(makers),
        check=True,
        device=CPU,
        dtype=torch.bfloat16,
        calls=2,
        warmup=1,
        sustain_s=0.0,
        say=said.append,
    )
    assert [row.name for row in report.rows] == ["mok torch"] * 2 + ["torch loop"] * 2
    left_out = report.environment["left_out"]
    assert left_out["hf"] == "it is not installed: pip install it"
    assert "ZeroDivisionError" in left_out["torchtitan on small"] and "from float64, allowed" in left_out["sonicmoe on small"]
    assert report.wrong == [left_out["sonicmoe on small"]]
    assert said == [f"{what}: not measured, {why}" for what, why in left_out.items()]


def test_a_rate_that_cannot_be_is_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a forgotten wait, or a call that computes nothing, looks like."""
    monkeypatch.setattr("mok.bench.layer.dense_rate", lambda *_: Dense(1e-9, None))
    said: list[str] = []
    how = {"routing": "balanced", "backend": "torch", "check": False, "device": CPU, "dtype": torch.bfloat16}
    bench_layer({"small": (SMALL, 24)}, against=[], calls=2, warmup=1, sustain_s=0.0, say=said.append, **how)
    assert len(said) == 2 and all("cannot be" in line for line in said)


@pytest.mark.parametrize("name", ["torchtitan", "scattermoe", "sonicmoe"])
def test_what_to_install_for_a_peer_is_said(name: str, problem: Problem) -> None:
    if importlib.util.find_spec(name):
        pytest.skip(f"{name} is installed")
    with pytest.raises(Absent, match="is not installed: pip install"):
        peers.find(name)(problem)


def test_an_8_bit_layer_is_held_to_the_error_of_its_format() -> None:
    layers = {"small": (LayerShape(64, 32, 4, 2), 24)}
    how = {"routing": "balanced", "backend": "torch", "check": True, "device": CPU, "dtype": torch.bfloat16}
    report = bench_layer(layers, against=["torch"], quantization=Quantization("mxfp8"), calls=2, warmup=1, sustain_s=0.0, **how)
    assert report.environment["dtype"] == "mxfp8"
    assert [row.name for row in report.rows[::2]] == ["mok torch", "mok torch, kept", "mok torch, bf16", "torch loop"]
    ours, kept, bf16, theirs = (row.relative_error for row in report.rows[::2])
    assert 0.03 < ours == kept < 0.1 and max(bf16, theirs) < 0.02
    assert set(report.rows[0].ratio_to) == {"mok torch, kept", "mok torch, bf16", "torch loop"}
    problem = make_problem("small", *layers["small"], "balanced", CPU, torch.bfloat16)
    problem.quantization = Quantization("mxfp8")
    contestant = Mok(problem, "torch")
    problem.quantization = None  # then bf16 is expected of it
    with pytest.raises(CheckFailed, match="from float64, allowed"):
        worst_error(problem, contestant, make_truth(problem), ours=True)


@pytest.mark.parametrize("name", ["mxfp8", "fp8_block"])
def test_a_wrong_8_bit_layer_of_small_weights_is_caught(name: str) -> None:
    """Outputs of 1e-6 would pass any absolute tolerance; gate and up exchanged must not."""
    problem = make_problem("small", LayerShape(128, 128, 4, 2), 24, "balanced", CPU, torch.bfloat16)
    for weight in (problem.gate_EIH, problem.up_EIH, problem.down_EHI):
        weight.mul_(1e-3)
    problem.quantization = Quantization(name)
    truth = make_truth(problem)
    assert worst_error(problem, Mok(problem, "torch"), truth, ours=True) < 0.1
    problem.gate_EIH, problem.up_EIH = problem.up_EIH, problem.gate_EIH
    exchanged = Mok(problem, "torch")
    problem.gate_EIH, problem.up_EIH = problem.up_EIH, problem.gate_EIH
    with pytest.raises(CheckFailed, match="from float64, allowed"):
        worst_error(problem, exchanged, truth, ours=True)


@pytest.mark.interop
@pytest.mark.parametrize("name", ["torchtitan", "scattermoe", "sonicmoe"])
def test_a_peer_that_is_installed_computes_the_same(name: str) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not importlib.util.find_spec(name) or (name != "torchtitan" and device == CPU):
        pytest.skip(f"{name} is not installed, or needs a GPU")
    problem = make_problem("small", LayerShape(256, 128, 4, 2), 300, "balanced", device, torch.bfloat16)
    assert worst_error(problem, peers.find(name)(problem), make_truth(problem), ours=False) < 0.02


@pytest.mark.parametrize("routing", ["balanced", "skewed", "one-hot"])
def test_routings_are_what_they_say(routing: str) -> None:
    made = make_problem("small", LayerShape(16, 16, 16, 2), 400, routing, CPU, torch.bfloat16)
    for inputs in made.sets:
        assert (inputs.ids_TK[:, 0] < inputs.ids_TK[:, 1]).all()
        counts = torch.bincount(inputs.ids_TK.view(-1), minlength=16)
        if routing == "one-hot":
            assert counts[:2].tolist() == [400, 400]
        elif routing == "skewed":
            assert counts[0] > 2.5 * counts.float().mean()
        else:
            assert counts.max() < 1.7 * counts.float().mean()


def test_the_command_reports_compares_and_refuses(mok: Run, tmp_path: Path) -> None:
    arguments = ("bench", "layer", "--shape", "toy", "--tokens", "16", "--calls", "2", "--device", "cpu")
    one = {"OMP_NUM_THREADS": "1"}  # waking a second thread for tiny products takes longest where others wait too
    first = mok(*arguments, "--json", "new.json", env=one)
    assert first.returncode == 0, first.stderr
    report = json.loads((tmp_path / "new.json").read_text())
    assert {"name", "median_ms", "fraction_of_dense", "ratio_to", "peak_bytes"} <= set(report["rows"][0])
    for row in report["rows"]:
        row["median_ms"] /= 1000
    (tmp_path / "old.json").write_text(json.dumps(report))
    slower = mok(*arguments, "--compare", "old.json", env=one)
    assert slower.returncode == 3 and "slower than the old report" in slower.stderr
    for row in report["rows"]:
        row["tokens"] = 32
    (tmp_path / "other.json").write_text(json.dumps(report))
    nothing = mok(*arguments, "--compare", "other.json", env=one)
    assert nothing.returncode == 3 and "nothing was compared" in nothing.stderr
    report["environment"]["dtype"] = "float32"
    (tmp_path / "other.json").write_text(json.dumps(report))
    unlike = mok(*arguments, "--compare", "other.json", env=one)
    assert unlike.returncode == 3 and "dtype 'float32' then, 'bfloat16' now" in unlike.stderr
    (tmp_path / "broken.json").write_text("{}")
    for wrong, named in (
        (("--shape", "nano"), "nano"),
        (("--against", "cutlass"), "cutlass"),
        (("--backend", "mega"), "mega"),
        (("--recompute", "some"), "some"),
        (("--compare", "broken.json"), "is no report"),
        (("--trace", "out.json"), "needs a CUDA device"),
    ):
        refused = mok(*arguments, *wrong, env=one)
        assert refused.returncode == 2 and named in refused.stderr
