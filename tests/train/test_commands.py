"""`mok train`, `mok sample`, `mok eval` and `mok bench train` as they are typed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.train.runs import RECIPE, arguments

Mok = Callable[..., subprocess.CompletedProcess[str]]


def typed(folder: Path, *overrides: str) -> list[str]:
    return [str(RECIPE), *(word for item in arguments(folder, *overrides) for word in ("--set", item))]


def test_train_sample_and_eval(mok: Mok, tmp_path: Path) -> None:
    done = mok("train", *typed(tmp_path), "--steps", "3", "--out", "run", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["out"] == "run" and report["metrics"]["step"] == 3 and report["schema_version"]
    assert "3/3 loss" in done.stderr and "\r" not in done.stderr and "\x1b" not in done.stderr
    sample = mok("sample", "run", "--prompt", "def ", "--tokens", "5", "--seed", "1")
    assert sample.returncode == 0 and sample.stdout.startswith("def ")
    evaluation = mok("eval", "run", "--batches", "0", "--json")
    assert evaluation.returncode == 0 and json.loads(evaluation.stdout)["val/bits_per_byte"] > 0
    again = mok("train", *typed(tmp_path), "--steps", "3", "--out", "run")
    assert again.returncode == 2 and "is not empty" in again.stderr and "Traceback" not in again.stderr
    finished = mok("train", *typed(tmp_path), "--steps", "3", "--out", "run", "--resume", "auto")
    assert finished.returncode == 0 and "is finished" in finished.stdout


def test_mistakes_end_with_one_sentence_and_their_code(mok: Mok, tmp_path: Path) -> None:
    for words, code, text in (
        (
            ["train", *typed(tmp_path, "optim.lr=1e30", "optim.clip_norm=0", "optim.warmup_steps=0"), "--out", "a"],
            1,
            "not finite",
        ),
        (["train", *typed(tmp_path, "data.path=nowhere"), "--out", "b"], 1, "nowhere"),
        (["train", *typed(tmp_path), "--device", "cuda", "--out", "c"], 2, "--device cuda"),
        (["train", *typed(tmp_path), "--world-size", "2"], 2, "--dry-run"),
        (["sample", "nowhere"], 2, "nowhere"),
    ):
        failed = mok(*words)
        assert failed.returncode == code, (words, failed.stderr)
        assert text in failed.stderr and "Traceback" not in failed.stderr
