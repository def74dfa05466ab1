"""What a run computed, step by step, as digests: written by each rank, merged over ranks, searched for the first divergence.

A training step calls `Recorder.see(phase, name, tensor)` at the places that `PHASES` lists; a run without a recorder has none
of these calls. A name says what a tensor is in the whole run, never where it was computed: a slice by its place in the step,
a weight by its Hugging Face name. So traces of one recipe on different layouts hold the same names, and one tensor recorded
by several ranks must have one digest. Read next: `mok/determinism/compare.py` and `mok/determinism/axes.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

from mok.determinism.digest import Digester
from mok.errors import RunError

__all__ = ["PHASES", "Divergence", "Key", "Recorder", "Trace", "checked_key", "first_divergence", "read_trace"]

PHASES = ("data", "router", "forward", "backward", "reduce", "optimizer")
"""In the order of a step. data: token ids, targets, random state. router: expert ids, counts. forward: activations, loss.
backward: gradients before ranks exchange them (library call only). reduce: gradients, their norm. optimizer: weights, state."""

CONFLICT = "ranks disagree"


@dataclass(frozen=True)
class Key:
    """One tensor at one moment: step counts from 1, phase is one of `PHASES`."""

    step: int
    phase: str
    name: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.phase}, {self.name}"


@dataclass
class Trace:
    """Digests of one run over all its ranks; `records` keeps the order in which tensors were seen."""

    records: dict[Key, str] = field(default_factory=dict)
    num_bytes: int = 0

    @property
    def num_steps(self) -> int:
        return len({key.step for key in self.records})

    def add(self, key: Key, digest: str) -> None:
        """A second rank's digest of the same tensor must agree; where it does not, the trace keeps `CONFLICT`."""
        known = self.records.setdefault(key, digest)
        if known != digest:
            self.records[key] = CONFLICT

    def in_order(self) -> list[Key]:
        """Step by step and phase by phase, within a phase as seen."""
        order = {phase: i for i, phase in enumerate(PHASES)}
        return sorted(self.records, key=lambda key: (key.step, order[key.phase]))


@dataclass(frozen=True)
class Divergence:
    """The first tensor that two traces do not share. kind: "digest", "missing" (in one of them) or "ranks" (of one run)."""

    key: Key
    kind: str
    digests: tuple[str, str]

    def __str__(self) -> str:
        reasons = {"digest": "the bytes differ", "missing": "only one run has it", "ranks": "ranks of one run disagree"}
        return f"{self.key}: {reasons[self.kind]}"


def first_divergence(left: Trace, right: Trace) -> Divergence | None:
    """The earliest difference in the order of `left`; a step that only one of them reached is a difference too."""
    merged = Trace(dict.fromkeys([*left.records, *right.records], ""))
    for key in merged.in_order():
        digests = left.records.get(key, ""), right.records.get(key, "")
        if CONFLICT in digests:
            return Divergence(key, "ranks", digests)
        if "" in digests:
            return Divergence(key, "missing", digests)
        if digests[0] != digests[1]:
            return Divergence(key, "digest", digests)
    return None


class Recorder:
    """Records one rank's tensors. Costs one digest per tensor; nothing on a GPU is waited for before the end of a step.

    sink: text file that gets one JSON line per step; None to keep everything in `trace` instead.
    watchers: called as watcher(key, tensor) before the digest is taken. One may change the tensor in place: that is how a
        fault is planted where it is also recorded.
    checks: called as check(key, tensor, digest) afterwards; with one, a GPU is waited for at every call.
    activations: whether `see` is wanted for the output of every block, see `wants_activations`.
    """

    def __init__(
        self,
        sink: IO[str] | None = None,
        *,
        rank: int = 0,
        activations: bool = False,
        watchers: Iterable[Callable[[Key, torch.Tensor], None]] = (),
        checks: Iterable[Callable[[Key, torch.Tensor, str], None]] = (),
    ) -> None:
        self.trace = Trace()
        self.wants_activations = activations
        self._sink, self._rank, self._watchers, self._checks = sink, rank, tuple(watchers), tuple(checks)
        self._digesters = {phase: Digester() for phase in PHASES}
        self._open = False
        self.step = 0

    @property
    def can_be_recorded(self) -> bool:
        """Whether `see` may be called while a CUDA graph is recorded, whose replays then see the same tensors again."""
        return not self._watchers and not self._checks

    def begin(self, step: int) -> None:
        """The tensors that follow, and those that a graph of the step replays, belong to `step`."""
        self.step, self._open = step, True

    def recorded(self) -> None:
        """A graph that calls `see` is recorded; to be called before its first replay."""
        for digester in self._digesters.values():
            digester.recorded()

    def see(self, phase: str, name: str, tensor: torch.Tensor) -> None:
        """Record what `tensor` holds now."""
        self.see_all(phase, {name: tensor})

    @torch.no_grad()
    def see_all(self, phase: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Record what each of `tensors` holds now, on a GPU in one launch."""
        if phase not in PHASES:
            raise ValueError(f"phase {phase!r}: must be one of {', '.join(PHASES)}")
        if self._watchers:
            for name, tensor in tensors.items():
                for watcher in self._watchers:
                    watcher(Key(self.step, phase, name), tensor)
        self._digesters[phase].add(tensors)
        if self._checks:
            digests = self._digesters[phase].known()
            for name, tensor in tensors.items():
                for check in self._checks:
                    check(Key(self.step, phase, name), tensor, digests[name])

    def end(self) -> None:
        """Close the step, if one is open: collect its digests and keep or write them, if anything was seen."""
        if not self._open:
            return
        self._open = False
        num_bytes = sum(digester.num_bytes for digester in self._digesters.values())
        by_phase = {phase: found for phase, digester in self._digesters.items() if (found := digester.finish())}
        if not by_phase:
            return
        if self._sink is not None:
            line = {"step": self.step, "rank": self._rank, "bytes": num_bytes, "digests": by_phase}
            self._sink.write(json.dumps(line) + "\n")
            self._sink.flush()
            return
        self.trace.num_bytes += num_bytes
        for phase, digests in by_phase.items():
            for name, digest in digests.items():
                self.trace.add(Key(self.step, phase, name), digest)


def read_trace(folder: Path) -> Trace:
    """All `rank_*.jsonl` files of a trace folder, merged. Of a step written twice (a kill between), the later counts.

    Raises FileNotFoundError if there are none, RunError for a damaged one. A last line cut off by a kill is dropped.
    """
    paths = sorted(folder.glob("rank_*.jsonl"))
    if not paths:
        raise FileNotFoundError(f"{folder}: no trace files rank_*.jsonl")
    trace = Trace()
    for path in paths:
        try:
            if not path.is_file():
                raise ValueError("not a file")
            latest = {line["step"]: line for line in lines_of(path)}
            for line in latest.values():
                trace.num_bytes += line["bytes"]
                for phase, digests in line["digests"].items():
                    for name, digest in digests.items():
                        trace.add(checked_key(line["step"], phase, name), digest)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RunError(f"{path}: damaged ({error!r}); copy it again, or move it away") from error
    return trace


def checked_key(step: Any, phase: Any, name: Any) -> Key:
    """The key of a record in a file. ValueError where it cannot be one."""
    if type(step) is not int or phase not in PHASES or not isinstance(name, str):
        raise ValueError(f"step {step!r}, phase {phase!r}, name {name!r}")
    return Key(step, phase, name)


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)
