"""`mok verify-determinism` as it is typed: equal where it must be, and a planted fault found, located and reported."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from mok import recipe as recipes
from mok.determinism.axes import verify_recipe
from mok.determinism.layer import verify_layer
from mok.errors import UsageError
from tests.distributed.launches import run, settings
from tests.distributed.processes import ForkingWorkshop

STEPS = ("--steps", "3")
GRADIENT = "grad:model.layers.1.mlp.experts.2.down_proj.weight"


def verify(mok, home: Path, *options: str, code: int = 0, recipe: bool = True) -> dict:
    words = ["verify-determinism", "toy", *settings(home)] if recipe else ["verify-determinism"]
    done = mok(*words, *options, "--json", "report.json", timeout=400)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    path = home / "report.json"
    return json.loads(path.read_text()) | {"printed": done.stdout}


def test_axes_that_can_run_are_equal_and_the_others_say_why(mok, tmp_path: Path) -> None:
    words = [word for axis in ("rerun", "jitter", "backend") for word in ("--axis", axis)]
    report = verify(mok, tmp_path, *STEPS, *words, "--trace", "--junit", "junit.xml", "--baseline", "golden.json")
    assert report["verdict"] == "equal"
    by_name = {axis["axis"]: axis for axis in report["axes"]}
    assert by_name["jitter"]["arms"] == ["reference", "random delays, ep 2"]
    for axis in ("rerun", "jitter"):
        assert by_name[axis]["status"] == "equal", by_name[axis]
        assert by_name[axis]["num_steps"] == 3 and by_name[axis]["num_tensors"] > 0 and by_name[axis]["num_bytes"] > 0
    assert by_name["backend"]["status"] == "not run" and "CUDA device" in by_name["backend"]["reason"]
    assert "model.layers.1[slice 3]" in (tmp_path / "golden.json").read_text(), "--trace records the output of every block"
    assert report["fingerprint"]["torch"] and len(report["state_sha256"]) == 64
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert (suite.get("failures"), suite.get("skipped")) == ("0", "2")


def test_what_is_no_baseline_is_refused_before_anything_runs(mok, tmp_path: Path) -> None:
    (tmp_path / "golden.json").write_text("[" * 100_000)
    done = mok("verify-determinism", "toy", *settings(tmp_path), *STEPS, "--baseline", "golden.json")
    assert done.returncode == 2 and "not a manifest" in done.stderr and "running" not in done.stdout + done.stderr


def test_a_flipped_bit_ends_the_command_with_3(mok, tmp_path: Path) -> None:
    report = verify(mok, tmp_path, *STEPS, "--inject", f"2:{GRADIENT}:101", code=3)
    found = report["axes"][0]["divergence"]
    assert (found["step"], found["phase"], found["tensor"], found["index"]) == (2, "reduce", GRADIENT, 3)
    values = [int(text, 16) for text in found["hex"]]
    assert values[0] ^ values[1] == 1 << 5
    assert (found["ulp"], found["differing"]) == (32, 1)
    assert "first divergence" in report["printed"] and GRADIENT in report["printed"]


@pytest.fixture
def shop(tmp_path: Path) -> ForkingWorkshop:
    return ForkingWorkshop(tmp_path / "arms", recipes.load("toy", settings(tmp_path)[1::2], steps=3))


def test_axes_of_one_process(shop: ForkingWorkshop) -> None:
    axes = ("resume", "threads", "accumulation", "alignment", "batch")
    report, _ = verify_recipe(shop, axes)
    assert [(axis.axis, axis.status) for axis in report.axes] == [(axis, "equal") for axis in axes], report.to_dict()


@pytest.mark.parametrize("dtype", ["fp8_block", "mxfp8"])
def test_8_bit_layers_too(dtype: str, tmp_path: Path) -> None:
    sizes = ("model.hidden_size", "moe.intermediate_size")
    words = [word for word in settings(tmp_path)[1::2] if word.partition("=")[0] not in sizes]
    words += [f"train.dtype={dtype}", *(f"{size}=128" for size in sizes)]
    axes = ("resume", "accumulation", "batch")
    report, _ = verify_recipe(ForkingWorkshop(tmp_path / "arms", recipes.load("toy", words, steps=3)), axes)
    assert [(axis.axis, axis.status) for axis in report.axes] == [(axis, "equal") for axis in axes], report.to_dict()


@pytest.mark.parametrize("kind", ["order", "clock"])
def test_parts_of_a_gradient_in_another_order_are_found(shop: ForkingWorkshop, kind: str) -> None:
    report, _ = verify_recipe(shop, ["rerun"], inject=kind)
    finding = report.axes[0].finding
    assert finding is not None and finding.difference is not None
    assert finding.divergence.key.phase == "reduce" and finding.difference.ulp


def test_a_flip_that_ends_the_run_early_is_a_divergence_too(shop: ForkingWorkshop) -> None:
    report, _ = verify_recipe(shop, ["rerun"], inject="2:model.norm.weight:30")
    finding = report.axes[0].finding
    assert finding is not None and finding.divergence.key.name == "model.norm.weight"
    assert "the run ended early" in finding.note or finding.difference is not None


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("9:lm_head.weight:0", "the run has 3 steps"),
        ("lm_head.weight:0", "must be STEP:TENSOR:BIT"),
        ("2:model.norm.weigth:0", "no such tensor; the nearest of its .* are model.norm.weight,"),
        ("2:model.norm.weight:99999999", "bits, counted from 0"),
    ],
)
def test_a_fault_that_cannot_be_planted_is_refused(shop: ForkingWorkshop, fault: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        verify_recipe(shop, ["rerun"], inject=fault)


@pytest.mark.parametrize("fault", ["order", "clock"])
def test_a_swap_that_no_sum_can_show_is_refused(tmp_path: Path, fault: str) -> None:
    words = [word for word in settings(tmp_path)[1::2] if not word.startswith("distributed.")]
    words += ["distributed.lanes=1", "distributed.slices=2"]
    shop = ForkingWorkshop(tmp_path / "arms", recipes.load("toy", words, steps=2))
    with pytest.raises(UsageError, match="nothing was planted"):
        verify_recipe(shop, ["rerun"], inject=fault)


def test_two_runs_are_compared_by_trace_then_by_checkpoint(mok, tmp_path: Path) -> None:
    options = ("--steps", "2", "--set", "log.trace=steps")
    run(tmp_path, tmp_path / "a", *options)
    run(tmp_path, tmp_path / "b", *options, "--nproc", "2")
    run(tmp_path, tmp_path / "c", *options, "--seed", "1")
    report = verify(mok, tmp_path, "--compare", "a", "b", recipe=False)
    assert [axis["status"] for axis in report["axes"]] == ["equal", "equal"]
    assert "world_size: 1 against 2" in report["notes"][0]
    report = verify(mok, tmp_path, "--compare", "a", "c", code=3, recipe=False)
    assert [axis["divergence"]["step"] for axis in report["axes"]] == [1, 2]
    assert report["axes"][1]["divergence"]["values"]
    done = mok("verify-determinism", "--compare", "a", "nowhere")
    assert done.returncode == 2 and "not a run folder" in done.stderr


def test_one_layer(mok, tmp_path: Path) -> None:
    report = verify(mok, tmp_path, "--target", "layer", "--runs", "3")
    assert report["verdict"] == "equal"
    assert {axis["axis"]: axis["status"] for axis in report["axes"]} == {
        "rerun": "equal",
        "threads": "equal",
        "batch": "equal",
        "alignment": "equal",
        "backend": "not run",
    }


def test_a_fault_in_one_layer(tmp_path: Path) -> None:
    recipe = recipes.load("toy", settings(tmp_path)[1::2])
    report = verify_layer(recipe, ["rerun"], device=torch.device("cpu"), runs=3, inject="2:grad:w_down:40")
    finding = report.axes[0].finding
    assert finding is not None and finding.difference is not None
    assert (finding.divergence.key.step, finding.divergence.key.name) == (2, "grad:w_down")
    assert (finding.difference.index, finding.difference.ulp) == (1, 256)
    with pytest.raises(UsageError, match="--target recipe"):
        verify_layer(recipe, ["rerun"], device=torch.device("cpu"), inject="clock")
