"""SIGKILLs at random moments, resumed each time: the run ends with the bytes of one left alone.

Each life of the run is a process of its own, forked from a server that has imported everything, so that most of its time is
spent where a kill can hurt: opening the data, loading a checkpoint, training, saving, writing metrics and samples.
"""

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
import torch

from tests.distributed.processes import FORKSERVER
from tests.train.runs import make_run, metrics_of, timeless, train

KILLS = 500
STEPS = 800
EVERY = ("checkpoint.every=1", "sample.every=7", "eval.every=11", "log.every=1", "checkpoint.keep_last=2")

pytestmark = pytest.mark.soak


def live(folder: str, lines: str) -> None:
    """Go on with the run in `folder`; what it says goes to the file `lines`, line by line."""
    torch.set_num_threads(1)
    with open(lines, "w", buffering=1) as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
        run, _ = make_run(Path(folder), *EVERY, out="killed", steps=STEPS, resume="auto")
        run.console.file = stream
        run.say(f"at step {run.state.step}")
        run.train()


def announced(text: str) -> int:
    """The last step whose checkpoint the run said it had saved."""
    return max((int(step) for step in re.findall(r"^saved .*step_(\d+)$", text, re.MULTILINE)), default=0)


def test_many_kills(tmp_path: Path) -> None:
    straight = train(tmp_path, *EVERY, out="straight", steps=STEPS)
    chance = random.Random(0)
    kills = saved = before_training = 0
    while True:
        lines = tmp_path / "lines"
        lines.write_text("")
        life = FORKSERVER.Process(target=live, args=(str(tmp_path), str(lines)))
        life.start()
        assert life.pid is not None
        # By what it has said (0: before anything), and then at any moment of what follows.
        wanted = chance.choice((0, 1, 2, 3, 4, 6, 8, 10))
        while life.exitcode is None and len(lines.read_text().splitlines()) < wanted:
            life.join(0.002)
        life.join(chance.random() * 0.1)
        if life.exitcode is None:
            os.kill(life.pid, signal.SIGKILL)
        life.join()
        text = lines.read_text()
        if match := re.search(r"^at step (\d+)$", text, re.MULTILINE):
            assert int(match[1]) >= saved, "a checkpoint that was announced is gone"
        else:
            before_training += 1
        saved = max(saved, announced(text))
        if life.exitcode == 0:
            break
        assert life.exitcode == -signal.SIGKILL, text
        kills += 1
        if kills % 50 == 0:
            print(f"\n{time.strftime('%H:%M:%S')} {kills} kills, {before_training} before training, step {saved}", flush=True)
    print(f"\n{kills} kills over {STEPS} steps, {before_training} of them before the first step of their process")
    assert kills >= KILLS
    assert timeless(metrics_of(tmp_path / "killed")) == timeless(straight)
    assert (tmp_path / "killed/samples.jsonl").read_bytes() == (tmp_path / "straight/samples.jsonl").read_bytes()
    assert not list((tmp_path / "killed/checkpoints").glob(".unfinished*"))


def test_the_toy_recipe_is_killed_fifty_times(tmp_path: Path) -> None:
    """The shipped recipe as users start it, at full size, with a checkpoint every five steps."""
    settings = "checkpoint.every=5", "checkpoint.keep_last=2", "log.every=1", "train.threads=1"
    how = [word for setting in settings for word in ("--set", setting)]

    def start(out: str, *resume: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "mok_cli", "train", "toy", "--out", str(tmp_path / out), *how, *resume]
        with open(tmp_path / "said", "wb") as said:
            return subprocess.Popen(words, stdout=said, stderr=subprocess.STDOUT)

    def has_stepped() -> bool:
        return re.search(rb"^\d+/800 loss", (tmp_path / "said").read_bytes(), re.MULTILINE) is not None

    assert start("straight").wait() == 0
    chance = random.Random(0)
    kills = early = 0
    while kills < 50:
        life = start("killed", "--resume", "auto")
        if chance.random() < 0.2:
            time.sleep(chance.random() * 8)
        else:
            while not has_stepped() and life.poll() is None:
                time.sleep(0.02)
            time.sleep(chance.random() * 3)
        assert life.poll() is None, (tmp_path / "said").read_text()
        life.kill()
        life.wait()
        kills += 1
        early += not has_stepped()
        print(f"{time.strftime('%H:%M:%S')} kill {kills}, {early} before a step", flush=True)
    assert start("killed", "--resume", "auto").wait() == 0
    straight, killed = (metrics_of(tmp_path / out) for out in ("straight", "killed"))
    print(f"state_sha256 {straight[-1]['state_sha256']} and {killed[-1]['state_sha256']}")
    assert timeless(killed) == timeless(straight)
    assert (tmp_path / "killed/samples.jsonl").read_bytes() == (tmp_path / "straight/samples.jsonl").read_bytes()
