"""The same bytes: again, killed and resumed, with other threads, in other calls, recomputed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.train.runs import RECIPE, arguments, metrics_of, timeless, train

ROOT = Path(__file__).parents[2]


def test_killed_at_step_ten_and_resumed_is_the_straight_run(tmp_path: Path) -> None:
    every = ["checkpoint.every=5", "sample.every=4", "eval.every=6"]
    straight = train(tmp_path, *every, out="straight", steps=20)
    words = [word for item in arguments(tmp_path, *every) for word in ("--set", item)]
    command = [
        sys.executable,
        "-m",
        "mok_cli",
        "train",
        str(RECIPE),
        *words,
        "--steps",
        "20",
        "--out",
        str(tmp_path / "killed"),
    ]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("saved") and "step_000010" in line:
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert process.returncode == -signal.SIGKILL
    assert metrics_of(tmp_path / "killed")[-1]["step"] < 20
    resumed = train(tmp_path, *every, out="killed", steps=20, resume="auto")
    assert len(resumed) == 20
    assert timeless(resumed) == timeless(straight)
    assert straight[-1]["state_sha256"]
    assert (tmp_path / "killed/samples.jsonl").read_bytes() == (tmp_path / "straight/samples.jsonl").read_bytes()


def test_a_run_twice_is_the_same_and_another_seed_is_not(tmp_path: Path) -> None:
    digests = [
        train(tmp_path, "seed=0", out="a")[-1],
        train(tmp_path, "seed=0", out="b")[-1],
        train(tmp_path, "seed=1", out="c")[-1],
    ]
    assert timeless(digests[:1]) == timeless(digests[1:2])
    assert digests[0]["state_sha256"] != digests[2]["state_sha256"]


WIDE = ["model.hidden_size=64", "moe.intermediate_size=96", "train.batch_size=8", "train.sequence_length=128"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "mxfp8"])
def test_the_number_of_threads_does_not_show(tmp_path: Path, dtype: str) -> None:
    """On products whose sums run over 1024 tokens, and on more elements than one thread takes by itself."""
    before = torch.get_num_threads()
    try:
        digests = set()
        for threads in (1, 2, 3):
            run = train(tmp_path, *WIDE, f"train.dtype={dtype}", f"train.threads={threads}", out=f"t{threads}", steps=3)
            digests.add(run[-1]["state_sha256"])
    finally:
        torch.set_num_threads(before)
    assert len(digests) == 1


GRID = ["train.batch_size=16", "distributed.lanes=2", "distributed.slices=2", "distributed.slice_sequences=1"]


QUANTIZED = ["train.dtype=mxfp8", "moe.quantize_weight_gradients=true", "moe.quantize_shared_experts=true"]


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["model.tie_embeddings=true", "train.dtype=bf16", "moe.num_shared_experts=1"],
        [*QUANTIZED, "moe.num_shared_experts=1"],
    ],
    ids=str,
)
def test_calls_segments_and_recomputation_do_not_show(tmp_path: Path, more: list[str]) -> None:
    ways = {
        "at once": [],
        "two calls a lane": ["distributed.slices_per_call=4"],
        "smallest calls": ["distributed.slices_per_call=2"],
        "blocks recomputed": ["train.recompute=blocks"],
        "experts recomputed": ["moe.recompute=all", "distributed.slices_per_call=4"],
    }
    found = {way: timeless(train(tmp_path, *GRID, *more, *overrides, out=way, steps=3)) for way, overrides in ways.items()}
    assert all(metrics == found["at once"] for metrics in found.values())


def test_the_grid_of_the_recipe_does_show(tmp_path: Path) -> None:
    """Otherwise the tests above could not fail."""
    assert train(tmp_path, *GRID, out="a")[-1]["state_sha256"] != train(tmp_path, GRID[0], out="b")[-1]["state_sha256"]


def test_a_resume_goes_on_in_the_data_where_the_run_stopped(tmp_path: Path) -> None:
    """Stopped inside the second and the third epoch, in a folder of its own; ids as the loader gives them."""
    from tests.train.runs import make_run

    long = ["train.sequence_length=256", "train.batch_size=8"]
    first, _ = make_run(tmp_path, *long, "checkpoint.every=1", "checkpoint.keep_last=0", out="a", steps=16)
    per_epoch = first.batches.loader.num_sequences
    seen: list[int] = []
    real = first.batches.loader.sequence
    first.batches.loader.sequence = lambda index: (seen.append(index), real(index))[1]
    first.train()
    assert seen == list(range(16 * 8)) and 2 * per_epoch < len(seen)
    for step in (per_epoch // 8 + 1, 2 * per_epoch // 8 + 1):
        again, _ = make_run(tmp_path, *long, out=f"b{step}", steps=16, resume=str(tmp_path / f"a/checkpoints/step_{step:06d}"))
        assert again.state.samples == 8 * step
        assert again.train()["state_sha256"] == metrics_of(tmp_path / "a")[-1]["state_sha256"]
