"""Small runs inside the test's process: a text, a recipe of one second, and what a run left behind."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from mok.grid import Layout
from mok.recipe import load
from mok.train.loop import Run
from mok.train.ranks import OneRank
from mok.train.run_folder import plan_start

TEXT = "".join(f"def f{i}(x):\n    return x * {i} + {i * i % 97}\n\n\n" for i in range(400))

SMALL = [
    "data.tokenizer=bytes",
    "data.validation_fraction=0.1",
    "model.hidden_size=32",
    "model.num_layers=1",
    "model.head_dim=16",
    "moe.num_experts=4",
    "moe.intermediate_size=32",
    "train.batch_size=4",
    "train.sequence_length=32",
    "eval.batches=2",
    "sample.tokens=4",
    "log.every=5",
]
RECIPE = Path(__file__).parent / "small.toml"


def arguments(folder: Path, *overrides: str) -> list[str]:
    """What `--set` would be given: the small recipe on a text in `folder`; later overrides win."""
    text = folder / "text.py"
    if not text.exists():
        text.write_text(TEXT)
    given = [*SMALL, f"data.path={text}", f"data.cache={folder / 'cache'}", *overrides]
    return [f"{key}={value}" for key, value in dict(item.split("=", 1) for item in given).items()]


def make_run(
    folder: Path, *overrides: str, out: str = "run", steps: int = 6, resume: str = "never", allow: bool = False
) -> tuple[Run, io.StringIO]:
    """A run that is ready to train, and where its lines will be."""
    recipe = load(str(RECIPE), [*arguments(folder, *overrides), f"train.steps={steps}"])
    start = plan_start(recipe, "small", str(folder / out), resume, allow, 1, 1)
    lines = io.StringIO()
    return Run(start, OneRank(Layout(start.grid)), torch.device("cpu"), Console(file=lines, soft_wrap=True)), lines


def train(folder: Path, *overrides: str, **how: Any) -> list[dict[str, Any]]:
    """Run to the end; returns its metrics."""
    run, _ = make_run(folder, *overrides, **how)
    run.train()
    return metrics_of(folder / how.get("out", "run"))


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def timeless(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics without what depends on the clock and the process."""
    return [{name: value for name, value in line.items() if not name.startswith("perf/")} for line in metrics]


class At:
    """An observer that does something when a step begins."""

    def __init__(self, step: int, action: Callable[[], object]) -> None:
        self.step, self.action = step, action

    can_be_recorded = False

    def begin(self, step: int) -> None:
        if step == self.step:
            self.action()

    def call(self, *_: object) -> None: ...

    recorded = losses = reduced = updated = end = call
