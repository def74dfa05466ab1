"""One arm of a verification, in a process of its own: `python -m mok.determinism.arm SPEC.json`.

Trains a recipe as `mok train` would, with a recorder attached and what its spec asks to be disturbed; leaves traces, the
tensor that diverged, the digest of the final state and the environment in its folder. Started by `mok/determinism/axes.py`,
which says what is in a spec.
"""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import save_file

from mok import recipe as recipes
from mok.config import Recipe
from mok.determinism.axes import Arm
from mok.determinism.faults import Flip, flip_bit, jitter, misalign, parse_injection, swap_order
from mok.determinism.fingerprint import fingerprint
from mok.determinism.layer import LAYER_CHECKS
from mok.determinism.observe import StepObserver
from mok.determinism.trace import Key, Recorder, Trace, read_trace
from mok.errors import MokError, UsageError
from mok.gradients import Bank
from mok.grid import Layout, split_ranks
from mok.train.loop import Run
from mok.train.processes import launch, launched_ranks, met
from mok.train.run_folder import plan_start
from mok.train.state import TrainState

__all__ = ["guarded", "main"]

JITTER_S = 0.02
JITTER_SHARE = 0.02
"""One tensor in fifty waits for up to 20 ms: a tenth of a second in a step of the toy, more than all its exchanges take."""


class EnoughError(Exception):
    """The last step that was asked for is done."""


class Keeper:
    """Saves one tensor of this rank: the one asked for, or the first that is not as expected."""

    def __init__(self, path: Path, expected: Trace | None, wanted: Key | None) -> None:
        self._path, self._expected, self._wanted = path, expected, wanted
        self._done = False

    def __call__(self, key: Key, tensor: torch.Tensor, digest: str) -> None:
        if self._done:
            return
        if key == self._wanted or (self._expected is not None and self._expected.records.get(key) != digest):
            self._done = True
            self._path.parent.mkdir(exist_ok=True)
            place = {"step": str(key.step), "phase": key.phase, "name": key.name}
            save_file({"tensor": tensor.detach().cpu().contiguous().clone()}, self._path, place)


class Flipper:
    """Flips the bit of a Flip in one process: the rank that is the only one, or the first, to have the tensor, or that speaks
    for it."""

    def __init__(self, flip: Flip, layout: Layout, state: TrainState) -> None:
        self._flip, self._layout, self._state = flip, layout, state
        self._names: set[str] = set()
        self.done = False

    def __call__(self, key: Key, tensor: torch.Tensor) -> None:
        if key.step == self._flip.step:
            self._names.add(key.name)
        if (key.step, key.name) != (self._flip.step, self._flip.name) or self.done:
            return
        place = self._state.places.get(key.name)
        if place is None or place.sharded is None:
            if not self._is_first(key.name):
                return
        elif place.is_shared:
            # What is recorded was put together from several ranks; the bit must also change where it is kept.
            bit = self._flip.bit - 8 * place.kept.element_size() * place.first
            if 0 <= bit < 8 * place.kept.element_size() * place.kept.numel():
                flip_bit(place.kept, bit)
        flip_bit(tensor, self._flip.bit)
        self.done = True

    def not_found(self) -> str:
        """What to tell where nothing was flipped."""
        names = sorted(self._names)
        near = get_close_matches(self._flip.name, names, 4, 0.5) or names[:4]
        return f"step {self._flip.step} has no such tensor; the nearest of its {len(names)} are {', '.join(near)}"

    def _is_first(self, name: str) -> bool:
        if "[slice " in name:
            return True
        return self._layout.rank == 0 or (".experts." in name and self._layout.replica == 0)


def main(path: str) -> int:
    """Run the arm that the spec at `path` describes; returns the exit code."""
    spec = json.loads(Path(path).read_text(encoding="utf-8"))
    arm = Arm(**spec["arm"])
    if arm.nproc > 1 and launched_ranks() is None:
        return launch("mok.determinism.arm", [path], arm.nproc)
    folder = Path(spec["folder"])
    recipe = recipes.load(spec["recipe"], [f"{key}={value}" for key, value in arm.changes.items()])
    if arm.layer_check:
        write_json(folder / "result.json", layer_check(arm, recipe, torch.device(spec["device"])))
    else:
        train(spec, arm, recipe, folder)
    return 0


def train(spec: dict[str, Any], arm: Arm, recipe: Recipe, folder: Path) -> None:
    if arm.misalign:
        misalign(Bank)
    replicas, ep = split_ranks(recipe, arm.nproc)
    planned = plan_start(recipe, "arm", str(folder / "run"), "auto", False, replicas, ep)
    with met(planned, replicas, ep, spec["device"]) as (start, ranks, device):
        layout = ranks.layout
        run = Run(start, ranks, device, Console(file=io.StringIO()))
        if arm.kernel:
            set_kernel(run.state, arm.kernel)
        fault = parse_injection(arm.inject) if arm.inject else ""
        flipper = Flipper(fault, layout, run.state) if isinstance(fault, Flip) else None
        has_swapped = (
            swap_order(fault == "clock", lambda: run.state.step >= recipe.train.steps // 2)
            if isinstance(fault, str) and fault
            else None
        )
        expected = read_trace(Path(spec["expected"]) / "trace") if spec["expected"] else None
        wanted = Key(*spec["keep"]) if spec["keep"] else None
        watchers: list[Callable[[Key, torch.Tensor], None]] = [flipper] if flipper else []
        if arm.jitter:
            watchers.append(jitter(JITTER_S, JITTER_SHARE))
        checks = []
        if expected is not None or wanted is not None:
            checks.append(Keeper(folder / "kept" / f"rank_{layout.rank:05d}.safetensors", expected, wanted))
        traces = folder / "trace"
        traces.mkdir(exist_ok=True)
        with (traces / f"rank_{layout.rank:05d}.jsonl").open("a", encoding="utf-8") as sink:
            recorder = Recorder(sink, rank=layout.rank, activations=spec["activations"], watchers=watchers, checks=checks)
            # An arm that is compared with another needs no evaluation and no checkpoint after its last step.
            last = spec["until"] or (recipe.train.steps if spec["expected"] else 0)
            run.observer = UntilObserver(recorder, run.state.model, last)
            metrics: dict[str, Any] = {}
            try:
                metrics = run.train()
            except EnoughError:
                if spec["until"]:
                    return
            finally:
                recorder.end()  # of a step that a fault ended early
        if flipper is not None and not any(ranks.gather(flipper.done)):
            raise UsageError(f"--inject {arm.inject}: {flipper.not_found()}")
        if has_swapped is not None and not any(ranks.gather(has_swapped())):
            raise UsageError(
                f"--inject {arm.inject}: nothing was planted: too few sums of this run have three parts or more, whose order "
                "can change; use --set distributed.lanes=4, --set distributed.slices=4 or more --steps"
            )
        if layout.rank == 0 and metrics:
            write_json(folder / "fingerprint.json", fingerprint(device=device.type, kernels=run.kernels()))
            write_json(folder / "result.json", {"state_sha256": metrics["state_sha256"]})


def set_kernel(state: TrainState, settings: dict[str, Any]) -> None:
    """Let the expert layers run with these fields of `KernelConfig`."""
    from mok.launch.tables import config_of

    for layer in state.model.moe_layers:
        layer.options = dataclasses.replace(layer.options, kernel=config_of(settings))


class UntilObserver(StepObserver):
    """Ends the run after step `until`; 0 for never."""

    def __init__(self, recorder: Recorder, model: Any, until: int) -> None:
        super().__init__(recorder, model)
        self._until = until
        self._now = 0

    def begin(self, step: int) -> None:
        self._now = step
        super().begin(step)

    def end(self, report: Any) -> None:
        super().end(report)
        if self._now == self._until:
            raise EnoughError


def layer_check(arm: Arm, recipe: Recipe, device: torch.device) -> dict[str, Any]:
    found = LAYER_CHECKS[arm.layer_check](recipe, device)
    divergence = None
    if found.divergence is not None:
        phase, name, difference = found.divergence
        divergence = {"phase": phase, "tensor": name, "difference": dataclasses.asdict(difference)}
    return {"num_tensors": found.num_tensors, "num_bytes": found.num_bytes, "divergence": divergence}


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def guarded(path: str) -> int:
    """`main`, with an error of mok's own as one line and its exit code."""
    try:
        return main(path)
    except MokError as error:
        print(f"Error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(guarded(sys.argv[1]))
