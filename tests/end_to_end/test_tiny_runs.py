"""Tiny runs: the seed decides the bits and nothing else does, and the run folder holds what was announced."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mok_cli.dry_run import RUN_FILES

ROOT = Path(__file__).parents[2]
TINY = """
data.tokenizer=bytes data.validation_fraction=0.2 model.hidden_size=16 model.num_layers=1 model.head_dim=16
moe.num_experts=4 moe.intermediate_size=16 train.batch_size=2 train.sequence_length=16 eval.batches=1 sample.tokens=2
distributed.lanes=0 distributed.slices=0
"""


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Train a tiny model for 5 steps in a process of its own: train(*options) -> (state_sha256, resolved recipe)."""
    home = tmp_path_factory.mktemp("seeds")
    text = home / "text"
    text.mkdir()
    for number in range(20):
        (text / f"{number}.txt").write_text(f"Document {number}: " + "the quick brown fox, number after number. " * 8)
    settings = [*TINY.split(), f"data.path={text}", f"data.cache={home / 'cache'}"]

    def run(*options: str, before: str = "") -> tuple[str, str]:
        out = home / f"run-{len(list(home.iterdir()))}"
        arguments = ["train", "toy", "--steps", "5", "--device", "cpu", "--out", str(out), *options]
        arguments += [part for setting in settings for part in ("--set", setting)]
        code = f"{before}\nfrom mok_cli.main import main\nmain({arguments!r})"
        result = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
        )
        assert result.returncode == 0, result.stderr
        assert {path.name for path in out.iterdir()} == {*RUN_FILES, "checkpoints"}
        last = (out / "metrics.jsonl").read_text().splitlines()[-1]
        return json.loads(last)["state_sha256"], (out / "recipe.toml").read_text()

    return run


def test_seed_zero_is_a_seed_and_the_default_one(train):
    zero, recipe = train("--seed", "0")
    assert "seed = 0  # --seed" in recipe.splitlines()

    draws = "import numpy, random, torch; numpy.random.rand(); random.random(); torch.rand(3)"
    assert train("--set", "seed=0", before=draws)[0] == zero

    default, recipe = train()
    assert default == zero
    assert any(line.startswith("seed = 0  # ") for line in recipe.splitlines())

    assert train("--seed", "1")[0] != zero


def test_the_toy_recipe_runs_as_it_is_shipped(mok, tmp_path):
    a_part_of_the_library = f"data.path={Path(json.__file__).parent}"
    arguments = ["--set", a_part_of_the_library, "--set", f"data.cache={tmp_path / 'cache'}", "--set", "sample.tokens=2"]
    result = mok("train", "toy", "--steps", "2", "--out", "run", *arguments)
    assert result.returncode == 0, result.stderr
    first, second = ((json.loads(line)) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert second["train/loss"] < first["train/loss"]
    assert "\r" not in result.stdout
    assert "\x1b" not in result.stdout
