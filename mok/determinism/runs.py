"""Compares two finished runs, started by whatever launcher: their traces first, then the checkpoints of the same steps.

Reads run folders only. Traces are there if the recipe asked for them (`log.trace`). Read next: `mok/determinism/report.py`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from mok import checkpoint
from mok.determinism.compare import Difference, compare_tensors
from mok.determinism.fingerprint import fingerprint_differences
from mok.determinism.report import AxisResult, Finding, Report, hint_for
from mok.determinism.trace import Divergence, Key, Trace, first_divergence, read_trace
from mok.errors import RunError, UsageError

__all__ = ["compare_runs"]


def compare_runs(left: Path, right: Path) -> Report:
    """Axes "trace" and "checkpoints" of a report on two run folders.

    The values behind a divergence come from the checkpoints of that step, if both have one. Raises UsageError for a folder
    without any and runs that have nothing in common, CheckpointError for damaged ones.
    """
    folders = (left, right)
    for folder in folders:
        if not (folder / "checkpoints").is_dir():
            raise UsageError(f"--compare {folder}: not a run folder (it has no checkpoints); give what mok train wrote")
    environments = [environment_of(folder) for folder in folders]
    report = Report("runs", [], environments[0])
    if differences := fingerprint_differences(*environments):
        report.notes.append(f"the environments differ: {'; '.join(differences)}")
    report.axes = [compare_traces(folders), compare_checkpoints(folders)]
    if all(axis.status == "not run" for axis in report.axes):
        reasons = "; ".join(axis.reason for axis in report.axes)
        raise UsageError(f"--compare {left} {right}: there is nothing to compare: {reasons}")
    return report


def environment_of(folder: Path) -> dict[str, Any]:
    from mok.determinism.axes import read_json

    path = folder / "environment.json"
    if not path.is_file():
        return {}
    try:
        return dict(read_json(path).items())
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise RunError(f"{path}: damaged ({error!r}); copy it again, or move it away") from error


def compare_traces(folders: tuple[Path, Path]) -> AxisResult:
    result = AxisResult("trace", "equal", arms=[str(folder) for folder in folders])
    started = time.perf_counter()
    traces = []
    for folder in folders:
        try:
            traces.append(read_trace(folder / "trace"))
        except FileNotFoundError:
            return AxisResult("trace", "not run", f"{folder} has no trace; train with --set log.trace=steps", result.arms)
    left, right = same_detail(*traces)
    result.compared(right)
    divergence = first_divergence(left, right)
    if divergence is not None:
        result.status = "diverged"
        difference = difference_at(folders, divergence.key)
        note = "" if difference else "no checkpoints of this step in both runs: values not known"
        result.finding = Finding(
            divergence, (result.arms[0], result.arms[1]), difference, hint=hint_for(divergence.key.phase), note=note
        )
    result.seconds = time.perf_counter() - started
    return result


def same_detail(left: Trace, right: Trace) -> tuple[Trace, Trace]:
    """Where only one of them recorded activations, those are left out of both."""

    def without_activations(trace: Trace) -> Trace:
        kept = {key: digest for key, digest in trace.records.items() if key.phase != "forward" or "loss" in key.name}
        return Trace(kept, trace.num_bytes)

    have = [len(without_activations(trace).records) < len(trace.records) for trace in (left, right)]
    return (left, right) if have[0] == have[1] else (without_activations(left), without_activations(right))


def compare_checkpoints(folders: tuple[Path, Path]) -> AxisResult:
    result = AxisResult("checkpoints", "equal", arms=[str(folder) for folder in folders])
    started = time.perf_counter()
    left, right = (checkpoints_of(folder) for folder in folders)
    common = sorted(left.keys() & right.keys())
    if not common:
        return AxisResult("checkpoints", "not run", "the runs have no checkpoint of the same step", result.arms)
    for step in common:
        mine, theirs = (found[step].manifest["tensors"] for found in (left, right))
        result.num_steps += 1
        for name in [*mine, *(name for name in theirs if name not in mine)]:
            result.num_tensors += 1
            if mine.get(name) == theirs.get(name):
                continue
            key = Key(step, "optimizer", name)
            digests = tuple(found.get(name, {}).get("sha256", "") for found in (mine, theirs))
            kind = "digest" if all(digests) else "missing"
            difference = difference_at(folders, key) if kind == "digest" else None
            divergence = Divergence(key, kind, (digests[0], digests[1]))
            result.status = "diverged"
            result.finding = Finding(divergence, (result.arms[0], result.arms[1]), difference, hint=hint_for("optimizer"))
            result.seconds = time.perf_counter() - started
            return result
    result.seconds = time.perf_counter() - started
    return result


def checkpoints_of(folder: Path) -> dict[int, checkpoint.Checkpoint]:
    saved = folder / "checkpoints"
    found = (checkpoint.open_checkpoint(saved / name) for name in checkpoint.published(saved))
    return {saved.step: saved for saved in found}


def difference_at(folders: tuple[Path, Path], key: Key) -> Difference | None:
    """Inside the tensor, if both runs have a checkpoint of that step that holds it."""
    tensors = []
    for folder in folders:
        saved = checkpoints_of(folder).get(key.step)
        if saved is None or key.name not in saved.manifest["tensors"]:
            return None
        tensors.append(checkpoint.read_tensor(saved, key.name))
    return compare_tensors(key.name, *tensors)
