"""A run's folder: what lies where, who may write into it, and what a resumed run finds there.

Owns the files of a run (docs/tour.md lists them) and the choice between a fresh start and a resume. Knows nothing of what is
trained. Read next: `mok/train/loop.py`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mok import checkpoint
from mok.config import Recipe
from mok.errors import RunError, UsageError
from mok.grid import Grid
from mok.recipe import dump_toml, keys

__all__ = ["Change", "RunFolder", "Start", "changed_keys", "find_checkpoint", "finite", "plan_start"]

HARMLESS = (
    "log.",
    "eval.",
    "sample.",
    "checkpoint.",
    "train.threads",
    "train.recompute",
    "train.cuda_graph",
    "moe.backend",
    "moe.transport",
    "moe.peer_rows",
    "moe.ep",
    "moe.recompute",
    "data.cache",
    "distributed.slices_per_call",
    "distributed.timeout_s",
    "model.init",
)
"""Keys, or sections, that change no bit of what is trained from here on."""

STRUCTURE = (
    "model.hidden_size",
    "model.num_layers",
    "model.num_heads",
    "model.num_kv_heads",
    "model.head_dim",
    "model.vocab_size",
    "model.num_dense_layers",
    "model.dense_intermediate_size",
    "model.qk_norm",
    "model.attention_bias",
    "model.tie_embeddings",
    "moe.num_experts",
    "moe.intermediate_size",
    "moe.num_shared_experts",
    "moe.shared_intermediate_size",
    "moe.shared_gate",
    "moe.correction_bias",
    "data.tokenizer",
    "train.dtype",
    "train.freeze",
    "optim.moment_dtype",
)
"""Keys that decide which tensors there are, or what they mean."""


@dataclass(frozen=True)
class Change:
    """A recipe key that differs between a checkpoint and the run that resumes it. kind: harmless, trajectory or structure."""

    key: str
    before: Any
    now: Any
    kind: str


def changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Compare two recipes as `Recipe.to_dict` gives them."""
    found = []
    for key in keys():
        section, _, leaf = key.rpartition(".")
        old, new = ((recipe.get(section, {}) if section else recipe).get(leaf) for recipe in (before, now))
        if old != new:
            kind = "structure" if key in STRUCTURE else "harmless" if key.startswith(HARMLESS) else "trajectory"
            found.append(Change(key, old, new, kind))
    return found


@dataclass(frozen=True)
class Start:
    """How a run begins. recipe: with the grid filled in. resumed: the checkpoint to go on from; changes: what differs there.
    origins: where each value of the recipe came from, for those who read it later; may be empty."""

    recipe: Recipe
    grid: Grid
    folder: RunFolder
    resumed: checkpoint.Checkpoint | None
    changes: list[Change]
    origins: Mapping[str, str] = field(default_factory=dict)


def find_checkpoint(path: Path) -> checkpoint.Checkpoint:
    """The checkpoint that a user names: a checkpoint folder, or a run folder (its newest). CheckpointError if there is none."""
    if (path / "checkpoints").is_dir() and (found := checkpoint.latest(path / "checkpoints")) is not None:
        return found
    return checkpoint.open_checkpoint(path)


def plan_start(
    recipe: Recipe,
    name: str,
    out: str | None,
    resume: str,
    allow_changes: bool,
    replicas: int,
    ep: int,
    origins: Mapping[str, str] | None = None,
) -> Start:
    """Decide where a run writes and what it goes on from; nothing is written.

    name: of the recipe, for the default folder. resume: "never", "auto" (the newest checkpoint in `out`, if there is one) or a
    path (`out` then defaults to that run's folder). replicas, ep: the launch, for what neither recipe nor checkpoint fixes.
    origins: of the recipe's values, as `mok.recipe.resolve` gives them.
    Raises UsageError for a folder that may not be used or changes that may not be made, CheckpointError for a bad checkpoint.
    """
    resumed = None
    if resume not in ("never", "auto"):
        resumed = find_checkpoint(Path(resume))
        folder = RunFolder(Path(out) if out else resumed.path.parent.parent)
        if resumed.path.parent.parent.resolve() != folder.path.resolve():
            folder.refuse_if_used()
        elif (newest := checkpoint.latest(folder.checkpoints)) is not None and newest.step > resumed.step:
            raise UsageError(
                f"--resume {resume}: its run has a later checkpoint, {newest.path.name}; choose another folder with --out"
            )
    else:
        folder = RunFolder(Path(out) if out else Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
        if resume == "auto":
            resumed = checkpoint.latest(folder.checkpoints)
        if resumed is None and not (resume == "auto" and folder.recipe_file.is_file()):
            folder.refuse_if_used()
    if resumed is None:
        grid = Grid.of(recipe, replicas, ep)
        filled = _with_grid(recipe, grid)
        return Start(filled, grid, folder, None, [], _with_launch(origins, recipe, filled))
    stored = resumed.manifest["recipe"]
    known = _with_stored_grid(recipe, stored["distributed"])
    grid = Grid.of(known, replicas, ep)
    filled = _with_grid(known, grid)
    changes = changed_keys(stored, filled.to_dict())
    _refuse_changes(changes, resumed, allow_changes)
    return Start(filled, grid, folder, resumed, changes, _with_launch(origins, recipe, filled))


def _with_launch(origins: Mapping[str, str] | None, written: Recipe, filled: Recipe) -> dict[str, str]:
    """`origins`, with the values that the recipe left to the run's first launch named as such."""
    found = dict(origins or {})
    if found:
        found |= {change.key: "first launch" for change in changed_keys(written.to_dict(), filled.to_dict())}
    return found


def _with_grid(recipe: Recipe, grid: Grid) -> Recipe:
    filled = replace(
        recipe.distributed,
        lanes=grid.lanes,
        slices=grid.slices,
        segment=grid.segment,
        slice_sequences=grid.slice_sequences,
    )
    return replace(recipe, distributed=filled)


def _with_stored_grid(recipe: Recipe, stored: Mapping[str, Any]) -> Recipe:
    """What the recipe leaves open was fixed by the run's first launch."""
    open_keys = ("lanes", "slices", "segment", "slice_sequences")
    known = {key: stored[key] for key in open_keys if getattr(recipe.distributed, key) == 0}
    return replace(recipe, distributed=replace(recipe.distributed, **known))


def _refuse_changes(changes: list[Change], resumed: checkpoint.Checkpoint, allowed: bool) -> None:
    refused = [change for change in changes if change.kind == "structure"]
    rest = [change for change in changes if change.kind == "trajectory" and not allowed]
    if refused or rest:
        lines = [f"  {change.key}: {change.before!r} -> {change.now!r} ({change.kind})" for change in refused + rest]
        advice = "start a new run" if refused else "give --allow-changes if that is meant, or start a new run"
        raise UsageError(f"{resumed.path}: was made by another recipe; {advice}\n" + "\n".join(lines))


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def recipe_file(self) -> Path:
        return self.path / "recipe.toml"

    @property
    def environment_file(self) -> Path:
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def log(self) -> Path:
        return self.path / "train.log"

    def refuse_if_used(self) -> None:
        """UsageError if there is something in the folder already, other than what a run leaves that failed before its first
        step: without data, say."""
        before_first_step = {self.recipe_file, self.environment_file, self.log}
        if self.path.is_file() or (self.path.is_dir() and not before_first_step.issuperset(self.path.iterdir())):
            raise UsageError(
                f"--out {self.path}: is not empty; choose another folder, or go on with the run in it by --resume auto"
            )

    def prepare(self, start: Start, environment: Mapping[str, Any]) -> None:
        """Make the folder, write what describes the run, and drop the lines of later steps that a killed run left.

        A run killed between a save and its metrics gets that line from the checkpoint. Raises RunError at once if the folder
        cannot be written; there is no silent second choice.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.recipe_file.write_text(dump_toml(start.recipe, start.origins), encoding="utf-8")
            self.environment_file.write_text(json.dumps(environment, indent=2) + "\n", encoding="utf-8")
            resumed = start.resumed
            step = resumed.step if resumed else 0
            _keep_until(self.samples, step)
            last = _keep_until(self.metrics, step)
            if resumed is not None and last < step:
                self.append(self.metrics, resumed.manifest["metrics"] | {"state_sha256": resumed.manifest["state_sha256"]})
        except OSError as error:
            raise RunError(
                f"{self.path}: cannot be written ({os.strerror(error.errno or 0)}); choose a folder that is writable with --out"
            ) from None

    def append(self, file: Path, record: Mapping[str, Any]) -> None:
        """Add one JSON object to a .jsonl file, as one write, NaN and infinity as null. Raises RunError where that fails."""
        line = json.dumps(finite(record), allow_nan=False)
        try:
            with file.open("a", encoding="utf-8") as stream:
                stream.write(line + "\n")
        except OSError as error:
            raise RunError(
                f"{file}: cannot be written ({os.strerror(error.errno or 0)}); make room or allow it, then go on from the last "
                "checkpoint by --resume auto"
            ) from None


def finite(record: Mapping[str, Any]) -> dict[str, Any]:
    """`record` with None in the place of NaN and infinity, which JSON does not know."""
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()}


def _keep_until(file: Path, step: int) -> int:
    """Rewrite a .jsonl file without lines of later steps and without a last line that was cut off; returns the last step."""
    if not file.is_file():
        return 0
    kept, last = [], 0
    for line in file.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError, KeyError):
            found = json.loads(line)["step"]
            if found <= step:
                kept.append(line + "\n")
                last = found
    beside = file.with_suffix(".unfinished")
    beside.write_text("".join(kept), encoding="utf-8")
    os.replace(beside, file)
    return last
