"""The outcome of a verification: one result per axis, as plain data, as JUnit XML, and as a manifest to compare with later.

Prints nothing; `mok_cli/verify_determinism.py` shows it. Read next: `mok/determinism/axes.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from mok.determinism.compare import Difference
from mok.determinism.fingerprint import fingerprint_differences
from mok.determinism.trace import Divergence, Trace, checked_key, first_divergence
from mok.errors import CheckFailed, UsageError

__all__ = ["AxisResult", "Finding", "Report", "add_baseline", "baseline_of", "check_baseline", "hint_for", "read_baseline"]

MANIFEST_VERSION = 1

PHASE_HINTS = {
    "data": "batch or random state: the data order or a generator; nothing has been computed yet",
    "router": "router: logits, ties in top-k, or the counts per expert",
    "forward": "forward: matrix products, attention, norms, combine or a reduction of the loss",
    "backward": "backward: gradient of a layer on this rank, before ranks exchange anything",
    "reduce": "reduce: order in which parts of a gradient are added, over slices, lanes or ranks",
    "optimizer": "optimizer: element-wise update, cast to the weights' dtype, or the exchange of updated weights",
}


def hint_for(phase: str) -> str:
    """Where to look first, for a divergence in this phase."""
    return PHASE_HINTS[phase]


@dataclass(frozen=True)
class Finding:
    """A divergence, with what is known about it.

    arms: the two runs. difference: inside the tensor, None where its values could not be had (`note` says why).
    operation, cause: the first operation that made unequal outputs of equal inputs, if one was searched for and found.
    """

    divergence: Divergence
    arms: tuple[str, str]
    difference: Difference | None = None
    operation: str = ""
    cause: str = ""
    hint: str = ""
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        key = self.divergence.key
        found: dict[str, Any] = {
            "arms": list(self.arms),
            "step": key.step,
            "phase": key.phase,
            "tensor": key.name,
            "kind": self.divergence.kind,
            "operation": self.operation,
            "cause": self.cause,
            "hint": self.hint,
            "note": self.note,
        }
        if self.difference is not None:
            found |= {
                "index": self.difference.index,
                "coordinates": list(self.difference.coordinates),
                "values": list(self.difference.values),
                "hex": list(self.difference.hex_values),
                "ulp": self.difference.ulp,
                "differing": self.difference.num_differing,
                "elements": self.difference.num_elements,
                "max_difference": self.difference.max_difference,
            }
        return found

    def __str__(self) -> str:
        lines = [f"{self.arms[1]} against {self.arms[0]}: {self.divergence}"]
        if self.difference is not None:
            lines.append(self.difference.what)
        if self.operation:
            lines.append(f"first operation with equal inputs and unequal outputs: {self.operation} {self.cause}".rstrip())
        lines += [text for text in (self.hint, self.note) if text]
        return "\n".join(lines)


@dataclass
class AxisResult:
    """One axis. status: "equal", "diverged" or "not run" (then `reason` says why). arms: what was run, the reference first."""

    axis: str
    status: str
    reason: str = ""
    arms: list[str] = field(default_factory=list)
    num_tensors: int = 0
    num_steps: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    finding: Finding | None = None

    def compared(self, trace: Trace) -> None:
        """Count what a comparison with `trace` covered."""
        self.num_tensors += len(trace.records)
        self.num_steps += trace.num_steps
        self.num_bytes += trace.num_bytes


@dataclass
class Report:
    """All axes of one verification. target: "recipe", "layer", "step" or "runs"."""

    target: str
    axes: list[AxisResult]
    fingerprint: dict[str, Any]
    state_sha256: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def diverged(self) -> list[AxisResult]:
        return [axis for axis in self.axes if axis.status == "diverged"]

    def raise_for_divergence(self) -> None:
        """CheckFailed that tells the first divergence of each axis that has one."""
        if self.diverged:
            raise CheckFailed("\n".join(f"{axis.axis}: {axis.finding}" for axis in self.diverged))

    def to_dict(self) -> dict[str, Any]:
        axes = []
        for axis in self.axes:
            plain = {name: value for name, value in vars(axis).items() if name != "finding"}
            axes.append(plain | {"divergence": axis.finding.to_dict() if axis.finding else None})
        return {
            "target": self.target,
            "verdict": "diverged" if self.diverged else "equal" if any(a.status == "equal" for a in self.axes) else "not run",
            "state_sha256": self.state_sha256,
            "axes": axes,
            "fingerprint": self.fingerprint,
            "notes": self.notes,
        }

    def write_junit(self, path: Path) -> None:
        """One test case per axis: failure for a divergence, skipped for an axis that was not run."""
        suite = ElementTree.Element(
            "testsuite",
            name="mok verify-determinism",
            tests=str(len(self.axes)),
            failures=str(len(self.diverged)),
            skipped=str(sum(axis.status == "not run" for axis in self.axes)),
            time=f"{sum(axis.seconds for axis in self.axes):.3f}",
        )
        for axis in self.axes:
            case = ElementTree.SubElement(suite, "testcase", classname=self.target, name=axis.axis, time=f"{axis.seconds:.3f}")
            if axis.status == "diverged":
                failure = ElementTree.SubElement(case, "failure", message=str(axis.finding).splitlines()[0])
                failure.text = str(axis.finding)
            elif axis.status == "not run":
                ElementTree.SubElement(case, "skipped", message=axis.reason)
        ElementTree.ElementTree(suite).write(path, encoding="utf-8", xml_declaration=True)


def baseline_of(trace: Trace, fingerprint: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest of a run: what it was, where, and the digest of every tensor."""
    return {
        "manifest_version": MANIFEST_VERSION,
        "fingerprint": dict(fingerprint),
        "recipe": dict(recipe),
        "records": [[*asdict(key).values(), trace.records[key]] for key in trace.in_order()],
    }


def add_baseline(report: Report, path: Path, trace: Trace, recipe: Mapping[str, Any], *, force: bool) -> None:
    """Axis "baseline" for `report`: `trace` against the manifest at `path`, or the manifest written there if there is none."""
    started = time.perf_counter()
    if not path.exists():
        path.write_text(json.dumps(baseline_of(trace, report.fingerprint, recipe)), encoding="utf-8")
        report.axes.append(AxisResult("baseline", "not run", f"{path} did not exist and was written"))
        return
    known, differences = check_baseline(path, report.fingerprint, recipe, force=force)
    result = AxisResult("baseline", "equal", "; ".join(differences), [str(path), "reference"])
    result.compared(trace)
    if divergence := first_divergence(known, trace):
        note = "a manifest holds digests, not values"
        result.status = "diverged"
        result.finding = Finding(divergence, (str(path), "reference"), hint=hint_for(divergence.key.phase), note=note)
    result.seconds = time.perf_counter() - started
    report.axes.append(result)


def check_baseline(
    path: Path, fingerprint: Mapping[str, Any], recipe: Mapping[str, Any], *, force: bool
) -> tuple[Trace, list[str]]:
    """The trace kept in a manifest, and how its environment differs (empty, unless `force`).

    Raises UsageError as `read_baseline` does, and if it was made in another environment and not `force`.
    """
    trace, theirs = read_baseline(path, recipe)
    differences = fingerprint_differences(theirs, fingerprint)
    if differences and not force:
        modes = theirs.get("mode"), fingerprint.get("mode")
        what = "different execution mode, not comparable bitwise" if modes[0] != modes[1] else "made in another environment"
        raise UsageError(f"--baseline {path}: {what} ({'; '.join(differences)}); --force compares anyway")
    return trace, differences


def read_baseline(path: Path, recipe: Mapping[str, Any]) -> tuple[Trace, dict[str, Any]]:
    """The trace and the environment kept in a manifest. Raises UsageError if the file is none, or is of another recipe."""
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version, records = manifest["manifest_version"], manifest["records"]
        trace = Trace({checked_key(step, phase, name): digest for step, phase, name, digest in records})
        theirs, their_recipe = dict(manifest["fingerprint"]), dict(manifest["recipe"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(
            f"--baseline {path}: not a manifest of mok verify-determinism ({error!r}); write one by naming a new file"
        ) from None
    if version != MANIFEST_VERSION:
        raise UsageError(f"--baseline {path}: manifest version {version}, this mok writes {MANIFEST_VERSION}; write it again")
    if changed := fingerprint_differences(their_recipe, dict(recipe)):
        raise UsageError(f"--baseline {path}: made from another recipe ({'; '.join(changed)}); use the same recipe and steps")
    return trace, theirs
