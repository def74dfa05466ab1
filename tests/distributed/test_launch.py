"""`mok train` on several ranks as it is typed: the bytes of one rank, on whatever layout it goes on; and how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mok import checkpoint
from tests.distributed.launches import ROOT, metrics, pids_of_ranks, run, settings, start, wait_for_step

ONE_STEP = ("--max-minutes", "0.000001")  # the time is up after the first step, which is saved


def test_four_ranks_then_one_then_two_give_the_bytes_of_one(tmp_path: Path) -> None:
    """One step with `--nproc 4`, one alone, the rest under torchrun, where `moe.ep = "auto"` finds the two CPUs of one host."""
    straight, moved = tmp_path / "straight", tmp_path / "moved"
    run(tmp_path, straight, "--steps", "3")
    options = ("--steps", "3", "--resume", "auto")
    run(tmp_path, moved, *options, "--nproc", "4", "--set", "moe.ep=2", *ONE_STEP)
    assert len(metrics(moved)) == 1
    run(tmp_path, moved, *options, *ONE_STEP)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "mok_cli"]
    command += ["train", "toy", *settings(tmp_path), "--out", str(moved), *options, "--set", "moe.ep=auto"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert "ep = 2" in (moved / "recipe.toml").read_text()
    expected, found = metrics(straight), metrics(moved)
    assert [line["step"] for line in found] == [1, 2, 3]
    assert [line["train/loss"] for line in found] == [line["train/loss"] for line in expected]
    assert found[-1] == expected[-1], "the last line carries state_sha256"


@pytest.mark.parametrize(("number", "nproc"), [(signal.SIGKILL, 4), (signal.SIGSTOP, 2)])
def test_a_lost_or_stalled_rank_ends_the_run_on_all_ranks(tmp_path: Path, number: signal.Signals, nproc: int) -> None:
    out, timeout_s = tmp_path / "run", 10.0
    words = ("--steps", "100000", "--nproc", str(nproc), "--set", "checkpoint.every=1")
    process = start(tmp_path, out, *words, "--set", f"distributed.timeout_s={timeout_s}")
    wait_for_step(process, out, 2)
    os.kill(pids_of_ranks(out)[1], number)
    struck = time.monotonic()
    _, errors = process.communicate(timeout=120)
    assert process.returncode not in (0, 130), errors
    first = next(line for line in errors.splitlines() if line.startswith("Error: "))
    word = "was lost" if number == signal.SIGKILL else "stalled"
    assert re.search(rf"rank 1 {word} at step \d+, stage \w+", first), errors
    # Half a minute on top of the limit for a machine that runs other tests too.
    assert time.monotonic() - struck < timeout_s + 30.0
    assert not pids_of_ranks(out), "a rank is left"
    saved = checkpoint.latest(out / "checkpoints")
    assert saved is not None and saved.step >= 1
    tensors = {name: checkpoint.read_tensor(saved, name) for name in saved.manifest["tensors"]}
    assert checkpoint.state_sha256(checkpoint.tensor_checksums(tensors)) == saved.manifest["state_sha256"]


def test_ctrl_c_on_one_rank_under_torchrun_saves_once_and_ends_every_rank_with_130(tmp_path: Path) -> None:
    """torchrun reports the exit codes of its ranks; its own is 1 whatever they are."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "mok_cli"]
    command += ["train", "toy", *settings(tmp_path), "--out", str(out), "--steps", "100000", "--set", "checkpoint.every=0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for_step(process, out, 2)
    os.kill(pids_of_ranks(out)[1], signal.SIGINT)
    printed, errors = process.communicate(timeout=60)
    step = metrics(out)[-1]["step"]
    assert f"Error: stopped by SIGINT after step {step}, which is saved" in errors
    assert [path.name for path in sorted((out / "checkpoints").iterdir())] == ["latest", f"step_{step:06d}"]
    assert printed.count("saved ") == 1 and not pids_of_ranks(out)
    assert len(re.findall(r"exitcode +: 130 ", errors)) == 2, errors


def test_sigterm_saves_once_and_ends_every_rank_with_130(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(tmp_path, out, "--steps", "100000", "--nproc", "2", "--set", "checkpoint.every=0")
    wait_for_step(process, out, 2)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert not pids_of_ranks(out)
    step = metrics(out)[-1]["step"]
    assert [path.name for path in sorted((out / "checkpoints").iterdir())] == ["latest", f"step_{step:06d}"]
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--nproc", "3", "--set", "moe.ep=2"), "must be a multiple of 2"),
        (("--nproc", "3"), "launch with 1, 2, 4 replicas"),
        (("--nproc", "4", "--set", "distributed.segment=3"), "does not divide distributed.slices = 4"),
        (("--set", "moe.ep=3"), "cannot share moe.num_experts = 4"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_before_any_rank_starts(tmp_path: Path, options, text: str) -> None:
    errors = run(tmp_path, tmp_path / "run", *options, code=2)
    assert text in errors
    assert errors.count("Error") == 1
    assert not (tmp_path / "run").exists()
