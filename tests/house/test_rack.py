"""Every command of docs/rack.sbatch: its options exist, and what needs no GPU is run for 72 ranks."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from mok_cli.main import cli
from tests.house.test_docs import check_command_line

ROOT = Path(__file__).parents[2]
SCRIPT = (ROOT / "docs" / "rack.sbatch").read_text(encoding="utf-8")
SNAPSHOT = ROOT / "tests" / "fixtures" / "topology" / "gb200-nvl72.json"


def commands() -> list[str]:
    """The lines that start mok, from that word on."""
    return re.findall(r"^on_(?:first_host python -m|every_gpu) mok_cli (.*)$", SCRIPT, re.MULTILINE)


def test_the_job_gates_verifies_measures_and_trains() -> None:
    assert [command.split()[0] for command in commands()] == ["probe-topology", "verify-determinism", "bench", "bench", "train"]
    hosts, gpus = (int(re.search(rf"--{name}=(\d+)", SCRIPT)[1]) for name in ("nodes", "gpus-per-node"))
    assert hosts * gpus == 72 and f"--nnodes={hosts} --nproc-per-node={gpus}" in SCRIPT


@pytest.mark.parametrize("command", commands(), ids=lambda command: command.split()[0])
def test_its_options_exist(command: str) -> None:
    check_command_line(f"mok {command.replace('$RUN', 'runs/rack')}")


def test_its_tests_exist() -> None:
    for path in re.findall(r"\btests/\S+", SCRIPT):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("command", commands(), ids=lambda command: command.split()[0])
def test_it_runs_as_far_as_it_can_without_gpus(command: str) -> None:
    words = shlex.split(command.replace("$RUN", "runs/rack"))
    if words[0] == "train":
        words = [*words[: words.index("--resume")], "--dry-run", "--world-size", "72"]
        expected = ("72 positions", "2 on a rank", "peer workspace")
    elif words[0] == "probe-topology":
        words = [*words[: words.index("--save")], "--from", str(SNAPSHOT)]
        words.remove("--measure")
        expected = ("72 ranks", "transport peer")
    else:
        words = [*words, "--help"]
        expected = ("Usage",)
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    for text in expected:
        assert text in done.output, done.output
