"""Importing, asking for help, pricing a run and exporting one leave the GPU alone: a context takes 500 MB of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.families import RECIPES, write_run

ROOT = Path(__file__).parents[2]
CODE = """
import sys, torch

def start(*arguments):
    raise SystemExit("CUDA was started")

torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
torch.cuda._lazy_init = start
from click.testing import CliRunner
import mok, mok.autograd, mok.layer
from mok_cli.main import cli
done = CliRunner().invoke(cli, sys.argv[1:])
if done.exception:
    raise done.exception
"""


@pytest.mark.parametrize(
    "words",
    [["--help"], ["train", "--help"], ["train", "toy", "--dry-run", "--world-size", "2"], ["export", "run", "--to", "model"]],
    ids=lambda words: words[0] + words[-1],
)
def test_cuda_is_not_started(words: list[str], tmp_path: Path) -> None:
    if words[0] == "export":
        write_run(tmp_path / "run", RECIPES["qwen3_moe"])
    done = subprocess.run(
        [sys.executable, "-c", CODE, *words], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
