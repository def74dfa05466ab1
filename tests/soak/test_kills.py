"""SIGKILL at random moments, fifty times and more, resumed each time: the run ends with the bytes of one left alone."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.train.runs import RECIPE, arguments, metrics_of, timeless, train

ROOT = Path(__file__).parents[2]
STEPS = 400
EVERY = ["checkpoint.every=1", "sample.every=7", "eval.every=11", "log.every=1"]

pytestmark = pytest.mark.soak


def test_fifty_kills(tmp_path: Path) -> None:
    straight = train(tmp_path, *EVERY, out="straight", steps=STEPS)
    words = [word for item in arguments(tmp_path, *EVERY) for word in ("--set", item)]
    command = [sys.executable, "-m", "mok_cli", "train", str(RECIPE), *words, f"--steps={STEPS}"]
    command += ["--out", str(tmp_path / "killed"), "--resume", "auto"]
    chance = random.Random(0)
    kills, announced = 0, 0
    while True:
        with (tmp_path / "errors").open("w") as errors:
            process = subprocess.Popen(
                command,
                cwd=tmp_path,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert process.stdout is not None
        lines_left = chance.randrange(1, 24)
        for line in process.stdout:
            if match := re.match(r"resumed .*step_(\d+)", line):
                assert int(match[1]) >= announced, "a checkpoint that was announced is gone"
            if match := re.match(r"saved .*step_(\d+)", line):
                announced = int(match[1])
            lines_left -= 1
            if lines_left == 0:
                time.sleep(chance.random() * 0.05)
                process.send_signal(signal.SIGKILL)
        process.stdout.close()
        code = process.wait()
        if code == 0:
            break
        assert code == -signal.SIGKILL, (tmp_path / "errors").read_text()
        kills += 1
    assert kills >= 50
    assert timeless(metrics_of(tmp_path / "killed")) == timeless(straight)
    assert (tmp_path / "killed/samples.jsonl").read_bytes() == (tmp_path / "straight/samples.jsonl").read_bytes()
    assert not list((tmp_path / "killed/checkpoints").glob(".unfinished*"))
