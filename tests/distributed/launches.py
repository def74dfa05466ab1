"""`mok train` of a tiny recipe as several ranks: started, watched, and found again by what they run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TINY = """
data.tokenizer=bytes data.validation_fraction=0.2 model.hidden_size=32 model.num_layers=2 model.head_dim=16
moe.num_experts=4 moe.intermediate_size=16 train.batch_size=16 train.sequence_length=16 eval.batches=1 sample.tokens=2
distributed.lanes=4 distributed.slices=4 log.every=1 train.threads=1
"""


def settings(home: Path) -> list[str]:
    """--set words for a tiny model on a text that is made under `home`."""
    text = home / "text"
    if not text.is_dir():
        text.mkdir()
        for number in range(20):
            (text / f"{number}.txt").write_text(f"Document {number}: " + "the quick brown fox, number after number. " * 8)
    entries = [*TINY.split(), f"data.path={text}", f"data.cache={home / 'cache'}"]
    return [word for entry in entries for word in ("--set", entry)]


def start(home: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    """Start `mok train` in the background; output and errors are read from its pipes."""
    command = [sys.executable, "-m", "mok_cli", "train", "toy", *settings(home), "--out", str(out), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(home: Path, out: Path, *options: str, code: int = 0, limit_s: float = 180.0) -> str:
    """Run to the end; returns what was printed to standard error."""
    process = start(home, out, *options)
    printed, errors = process.communicate(timeout=limit_s)
    assert process.returncode == code, printed + errors
    return errors


def metrics(out: Path) -> list[dict[str, Any]]:
    """One dict a step, without what depends on the clock or the machine."""
    lines = (out / "metrics.jsonl").read_text().splitlines() if (out / "metrics.jsonl").exists() else []
    found = [json.loads(line) for line in lines]
    return [{name: value for name, value in line.items() if not name.startswith("perf/")} for line in found]


def wait_for_step(process: subprocess.Popen[str], out: Path, step: int, limit_s: float = 120.0) -> None:
    deadline = time.monotonic() + limit_s
    while len(metrics(out)) < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"step {step} was not reached in {limit_s} s"
        time.sleep(0.02)


def pids_of_ranks(out: Path) -> dict[int, int]:
    """rank -> pid of the processes that train into `out`."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            variables = dict(item.split(b"=", 1) for item in (entry / "environ").read_bytes().split(b"\0") if b"=" in item)
        except OSError:
            continue
        if str(out).encode() in words and b"RANK" in variables:
            found[int(variables[b"RANK"])] = int(entry.name)
    return found
