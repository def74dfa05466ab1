"""A run's folder: what lies where, who may write into it, and what a resumed run finds there.

Owns the files of a run (docs/tour.md lists them) and the choice between a fresh start and a resume. Knows nothing of what is
trained. Read next: `mok/train/loop.py`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from mok import checkpoint
from mok.config import Recipe
from mok.errors import CheckpointError, RunError, UsageError
from mok.grid import Grid
from mok.recipe import dump_toml, keys

__all__ = ["Change", "RunFolder", "Start", "changed_keys", "find_checkpoint", "finite", "plan_start", "refuse_odd_file"]

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

FIXED_BY_LAUNCH = ("lanes", "slices", "segment", "slice_sequences")
"""Keys of `distributed` that a run's first launch fills in where the recipe leaves them open (0)."""


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


def _run_of(saved: checkpoint.Checkpoint) -> Path | None:
    """The run folder that a checkpoint lies in, relative where it is below the working directory; None if it lies elsewhere."""
    place = saved.path.resolve().parent
    if place.name != "checkpoints":
        return None
    here = Path.cwd()
    return place.parent.relative_to(here) if place.is_relative_to(here) and place.parent != here else place.parent


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
    for option, value in (("--out", out), ("--resume", resume)):
        if value == "":
            raise UsageError(f"{option}: is empty; name a folder, or leave the option out")
    if resume not in ("never", "auto"):
        resumed = find_checkpoint(Path(resume))
        home = _run_of(resumed)
        target = home if out is None else Path(out)
        if target is None:
            raise UsageError(f"--resume {resume}: not in the folder of a run; say with --out where to go on")
        folder = RunFolder(target)
        if home is None or home.resolve() != folder.path.resolve():
            folder.refuse_if_used()
            if resumed.step >= recipe.train.steps:
                raise UsageError(
                    f"--resume {resume}: is at step {resumed.step} of train.steps = {recipe.train.steps}, so there is nothing "
                    f"to do in {folder.path}; ask for more --steps"
                )
        elif checkpoint.step_of(newest := checkpoint.published(folder.checkpoints)[-1]) > resumed.step:
            raise UsageError(
                f"--resume {resume}: its run has a later checkpoint, {newest}; choose another folder with --out, or move that "
                "checkpoint away"
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
    stored = _stored_recipe(resumed)
    known = _with_stored_grid(recipe, stored["distributed"])
    grid = Grid.of(known, replicas, ep)
    filled = _with_grid(known, grid)
    changes = changed_keys(stored, filled.to_dict())
    _refuse_changes(changes, resumed, allow_changes)
    return Start(filled, grid, folder, resumed, changes, _with_launch(origins, recipe, filled))


def _stored_recipe(saved: checkpoint.Checkpoint) -> dict[str, Any]:
    """The recipe of a checkpoint, as `Recipe.to_dict` gives it. Raises CheckpointError where a section or a size is no such."""
    stored = saved.fact("recipe", dict)
    sections = {section for key in keys() if (section := key.rpartition(".")[0])}
    odd = [name for name in sorted(sections) if not isinstance(stored.get(name), dict)]
    odd += [] if odd else [name for name in FIXED_BY_LAUNCH if not isinstance(stored["distributed"].get(name), int)]
    if odd:
        raise CheckpointError(f"{saved.path}: its recipe has no sound {', '.join(odd)}; use another checkpoint of the run")
    return stored


def _with_launch(origins: Mapping[str, str] | None, written: Recipe, filled: Recipe) -> dict[str, str]:
    """`origins`, with the values that the recipe left to the run's first launch named as such."""
    found = dict(origins or {})
    if found:
        found |= {change.key: "first launch" for change in changed_keys(written.to_dict(), filled.to_dict())}
    return found


def _with_grid(recipe: Recipe, grid: Grid) -> Recipe:
    fixed = {key: getattr(grid, key) for key in FIXED_BY_LAUNCH}
    return replace(recipe, distributed=replace(recipe.distributed, **fixed))


def _with_stored_grid(recipe: Recipe, stored: Mapping[str, Any]) -> Recipe:
    """What the recipe leaves open was fixed by the run's first launch."""
    known = {key: stored[key] for key in FIXED_BY_LAUNCH if getattr(recipe.distributed, key) == 0}
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

    @property
    def lock(self) -> Path:
        return self.path / ".lock"

    def trace(self, rank: int) -> Path:
        """The digests of one rank."""
        return self.path / "trace" / f"rank_{rank:05d}.jsonl"

    def refuse_if_used(self) -> None:
        """UsageError if there is something in the folder already, other than what a run leaves that failed before its first
        step: without data, say."""
        before_first_step = {self.recipe_file, self.environment_file, self.log, self.lock}
        if self.path.is_file() or (self.path.is_dir() and not before_first_step.issuperset(self.path.iterdir())):
            raise UsageError(
                f"--out {self.path}: is not empty; choose another folder, or go on with the run in it by --resume auto"
            )

    def claim(self) -> int:
        """Make the folder and keep other processes from training into it until the descriptor that this gives is closed.

        Raises RunError if another process has it, or if the folder cannot be written.
        """
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            self._refuse_odd_files()
            descriptor = os.open(self.lock, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    return descriptor  # a file system without locks
                holder = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
                os.close(descriptor)
                raise RunError(
                    f"{self.path}: {holder} is training into this folder; wait for it, or choose another --out"
                ) from None
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {os.uname().nodename}\n".encode())
            return descriptor

    def _refuse_odd_files(self) -> None:
        """RunError where a folder, a pipe or the like has the place of a file that a run writes."""
        own = ("tokenizer.json", "tokenizer_config.json", "checkpoints/latest")
        files = [self.recipe_file, self.environment_file, self.metrics, self.samples, self.log, self.lock]
        for file in [*files, *(self.path / name for name in own)]:
            refuse_odd_file(file)
        if self.checkpoints.exists() and not self.checkpoints.is_dir():
            raise RunError(f"{self.checkpoints}: is no folder; move it away, or choose another --out")

    def prepare(self, start: Start, environment: Mapping[str, Any]) -> list[str]:
        """Write what describes the run, and drop the lines of later steps that a killed run left; returns what to tell about.

        A run killed between a save and its metrics gets that line from the checkpoint. Raises RunError at once if the folder
        cannot be written; there is no silent second choice.
        """
        with self._writing():
            self.recipe_file.write_text(dump_toml(start.recipe, start.origins), encoding="utf-8")
            self.environment_file.write_text(json.dumps(environment, indent=2) + "\n", encoding="utf-8")
            resumed = start.resumed
            step = resumed.step if resumed else 0
            told = [_keep_until(file, step) for file in (self.samples, self.metrics)]
            if resumed is not None and told[1].last < step:
                digest = resumed.fact("state_sha256", str)
                self.append(self.metrics, resumed.fact("metrics", dict) | {"state_sha256": digest})
        return [notice for found in told for notice in found.notices]

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
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


def refuse_odd_file(file: Path) -> None:
    """RunError where what `file` names is there and no file: opening a pipe would wait for ever."""
    if file.exists() and not file.is_file():
        raise RunError(f"{file}: is a folder, a pipe or the like, not a file; move it away, or choose another --out")


class _Kept(NamedTuple):
    """Of a .jsonl file: the last step in it, and what to tell about it."""

    last: int
    notices: list[str]


def _keep_until(file: Path, step: int) -> _Kept:
    """Rewrite a .jsonl file without lines of later steps, lines that are damaged, and a last line that was cut off."""
    if not file.is_file():
        return _Kept(0, [])
    kept, last, num_damaged = [], 0, 0
    *whole, rest = file.read_bytes().split(b"\n")
    for line in [*whole, rest]:
        try:
            found = json.loads(line)["step"]
            if type(found) is not int:
                raise ValueError(f"step is {found!r}")
        except (ValueError, KeyError, TypeError, RecursionError):
            num_damaged += line is not rest
            continue
        if found <= step:
            kept.append(line + b"\n")
            last = found
    beside = file.with_suffix(".unfinished")
    beside.write_bytes(b"".join(kept))
    os.replace(beside, file)
    return _Kept(last, [f"{file}: {num_damaged} damaged lines were left out"] if num_damaged else [])
