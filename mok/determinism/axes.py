"""The axes of `mok verify-determinism`: ways to do the same work that must give the same bytes, each in fresh processes.

Owns what is changed on each axis, the one grid that all of them share, and the search for the values behind a divergence. Each
arm is a training run of its own (`mok/determinism/arm.py`), compared with one reference run by their traces.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mok.config import Recipe
from mok.determinism.compare import Difference, compare_tensors
from mok.determinism.faults import Flip, parse_injection
from mok.determinism.report import AxisResult, Finding, Report, hint_for
from mok.determinism.trace import Divergence, Key, Trace, first_divergence, read_trace
from mok.errors import RunError, UsageError
from mok.grid import Grid
from mok.recipe import dump_toml
from mok.shapes import layer_shape

if TYPE_CHECKING:
    import torch

__all__ = ["Arm", "Workshop", "check_arm", "read_json", "verify_recipe"]

MOST_RANKS = 4

KERNEL_SETTINGS: dict[str, dict[str, Any]] = {
    "mega, tile by tile, combined on the way": {
        "forward_order": {"group_size": 1, "groups_per_phase": 1},
        "backward_order": {"group_size": 1},
        "mover_share": 1.0,
    },
    "mega, long groups, short rings, few programs": {
        "forward_order": {"group_size": 64},
        "backward_order": {"group_size": 64},
        "mover_share": 0.0,
        "stages": 2,
        "pieces": 3,
        "programs": 24,
    },
}
"""Settings of the megakernel far from what tables choose: order of work, ring sizes, multiprocessors, the movers' share."""

ARM_LIMIT_S = 3600.0


@dataclass(frozen=True)
class Arm:
    """One way to do the work. changes: recipe keys, all of which leave the grid alone.

    kernel: settings of the megakernel that differ from `KernelConfig()`; the table's choice if there are none. kill_after: a
    step after whose record the run is killed (and then resumed); 0 for none. inject: see `mok.determinism.faults`; jitter,
    misalign: disturbances that must not show.
    """

    name: str
    nproc: int = 1
    changes: dict[str, Any] = field(default_factory=dict)
    kernel: dict[str, Any] = field(default_factory=dict)
    kill_after: int = 0
    inject: str = ""
    jitter: bool = False
    misalign: bool = False
    layer_check: str = ""

    @property
    def num_cores(self) -> int:
        """Cores that it keeps busy on a CPU. Threads without a core of their own wait for one another by spinning."""
        return max(self.nproc, self.changes.get("train.threads", 1))


def shared_grid(recipe: Recipe, most: int = MOST_RANKS) -> Recipe:
    """`recipe` with lanes and positions for up to `most` replicas and expert-parallel ranks, as far as its batch allows.

    What the recipe sets itself stays. More lanes or positions are other bits than fewer, but the same on every layout.
    """
    batch, distributed = recipe.train.batch_size, recipe.distributed
    sequences = max(distributed.slice_sequences, 1)
    lanes, slices = distributed.lanes, distributed.slices
    powers = [1 << n for n in range(most.bit_length())]
    if not slices:
        fits = [n for n in powers if recipe.moe.num_experts % n == 0 and batch % (max(lanes, 1) * n * sequences) == 0]
        slices = fits[-1]
    if not lanes:
        lanes = [n for n in powers if batch % (n * slices * sequences) == 0][-1]
    return dataclasses.replace(recipe, distributed=dataclasses.replace(distributed, lanes=lanes, slices=slices))


def arms_of(axis: str, recipe: Recipe, device: str, runs: int) -> tuple[list[Arm], str]:
    """The arms of an axis beside the reference, or none and the reason why."""
    makers: dict[str, Callable[[], tuple[list[Arm], str]]] = {
        "rerun": lambda: ([Arm(f"run {i + 1}") for i in range(1, runs)], ""),
        "resume": lambda: resume_arms(recipe),
        "threads": lambda: ([Arm(f"{n} threads", changes={"train.threads": n}) for n in (1, 2, 3)], ""),
        "ranks": lambda: rank_arms(recipe),
        "ep": lambda: expert_parallel_arms(recipe),
        "accumulation": lambda: accumulation_arms(recipe),
        "batch": lambda: ([Arm("rows alone and among others", layer_check="batch")], ""),
        "backend": lambda: backend_arms(recipe, device),
        "alignment": lambda: (
            [Arm("buffers 16 bytes off", misalign=True), Arm("odd data pointers", layer_check="alignment")],
            "",
        ),
        "jitter": lambda: jitter_arms(recipe),
    }
    return makers[axis]()


def resume_arms(recipe: Recipe) -> tuple[list[Arm], str]:
    """Killed at a step that nobody chose, with a few checkpoints behind it."""
    steps = recipe.train.steps
    if steps < 3:
        return [], "needs at least 3 steps"
    step = random.SystemRandom().randint(2, steps - 1)
    every = max(min(steps // 5, step - 1), 1)
    return [Arm(f"killed after step {step}, resumed", changes={"checkpoint.every": every}, kill_after=step)], ""


def rank_arms(recipe: Recipe) -> tuple[list[Arm], str]:
    lanes = recipe.distributed.lanes
    arms = [Arm(f"{n} ranks", n) for n in (2, 4) if lanes % n == 0]
    return arms, "" if arms else f"distributed.lanes = {lanes} allows no other number of replicas"


def expert_parallel_arms(recipe: Recipe) -> tuple[list[Arm], str]:
    lanes, slices = recipe.distributed.lanes, recipe.distributed.slices
    layouts = [(n, ep) for n, ep in ((2, 2), (4, 4), (4, 2)) if slices % ep == 0 and lanes % (n // ep) == 0]
    arms = [Arm(f"ep {ep} on {n} ranks", n, {"moe.ep": ep}) for n, ep in layouts]
    return arms, "" if arms else f"distributed.slices = {slices} allows no other size"


def accumulation_arms(recipe: Recipe) -> tuple[list[Arm], str]:
    """Every number of slices that one rank may take per call: whole segments that divide a lane."""
    grid = Grid.of(recipe)
    sizes = [n for n in range(1, grid.slices_per_lane + 1) if n % grid.segment == 0 and grid.slices_per_lane % n == 0]
    arms = [Arm(f"{n} slices a call", changes={"distributed.slices_per_call": n}) for n in sizes]
    return arms, "" if arms else "the grid allows one size of call only"


def jitter_arms(recipe: Recipe) -> tuple[list[Arm], str]:
    ep = 2 if recipe.distributed.slices % 2 == 0 else 1
    return [Arm(f"random delays, ep {ep}", ep, {"moe.ep": ep}, jitter=True)], ""


def backend_arms(recipe: Recipe, device: str) -> tuple[list[Arm], str]:
    """staged against mega, and mega with other settings, where both can run."""
    if device != "cuda":
        return [], "needs a CUDA device: staged and mega are GPU backends"
    import torch

    from mok.backends import BACKENDS, choose
    from mok.model.transformer import DTYPES

    arms = []
    for name in ("staged", "mega"):
        if name not in BACKENDS:
            return [], f"this version has no backend {name}"
        try:
            choose(name, layer_shape(recipe), DTYPES[recipe.train.dtype], torch.device("cuda"), recipe.quantization)
        except UsageError as error:
            return [], str(error)
        arms.append(Arm(name, changes={"moe.backend": name}))
    arms += [Arm(name, changes={"moe.backend": "mega"}, kernel=settings) for name, settings in KERNEL_SETTINGS.items()]
    return arms, ""


class ArmFailed(RunError):
    """An arm ended with an error. code: its exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Outcome:
    """What became of an arm: its folder, how long it took, and how it failed, if it did."""

    folder: Path
    seconds: float
    failed: ArmFailed | None = None


@dataclass
class Workshop:
    """Where the arms of one verification run.

    folder: an empty folder for them. device: "cpu" or "cuda". activations: record the output of every block too. say: told
    what is being run.
    """

    folder: Path
    recipe: Recipe
    device: str = "cpu"
    activations: bool = False
    say: Callable[[str], None] = lambda text: None

    def __post_init__(self) -> None:
        self.recipe = quick(shared_grid(self.recipe), self.device)

    def run(self, arm: Arm, place: str, expected: Path | None = None, keep: Key | None = None, until: int = 0) -> Path:
        """Run `arm` in a folder of its own and return that folder.

        expected: folder of an arm; the first tensor that is not as there is kept. keep: this tensor is kept. until: last step
        that is run; 0 for all. Raises ArmFailed with the arm's last words.
        """
        self.say(f"{place.rpartition('-')[0] or 'start'}: {arm.name}")
        folder = self.folder / place
        folder.mkdir(parents=True)
        recipe = folder / "recipe.toml"
        recipe.write_text(dump_toml(self.recipe), encoding="utf-8")
        spec = {
            "arm": dataclasses.asdict(arm),
            "recipe": str(recipe),
            "folder": str(folder),
            "device": self.device,
            "activations": self.activations,
            "expected": str(expected) if expected else None,
            "keep": dataclasses.astuple(keep) if keep else None,
            "until": until,
        }
        (folder / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
        if arm.kill_after:
            self._start_and_kill(folder, arm.kill_after)
        code = self.wait(self.start(folder))
        if code:
            raise ArmFailed(f"{arm.name}: {last_words(folder)}", code)
        return folder

    def run_all(self, arms: Sequence[tuple[str, Arm]], expected: Path) -> dict[str, Outcome]:
        """Run (place, arm) pairs, on a CPU as many side by side as there are cores for."""

        def run(place: str, arm: Arm) -> Outcome:
            started = time.perf_counter()
            try:
                folder, failed = self.run(arm, place, expected), None
            except ArmFailed as error:
                folder, failed = self.folder / place, error
            return Outcome(folder, time.perf_counter() - started, failed)

        outcomes: dict[str, Outcome] = {}
        for cores in sorted({arm.num_cores for _, arm in arms}):
            chosen = [(place, arm) for place, arm in arms if arm.num_cores == cores]
            at_once = max((os.cpu_count() or 1) // cores, 1) if self.device == "cpu" else 1
            with ThreadPoolExecutor(at_once) as pool:
                results = pool.map(lambda pair: run(*pair), chosen)
                outcomes |= dict(zip((place for place, _ in chosen), results, strict=True))
        return outcomes

    def start(self, folder: Path) -> subprocess.Popen[bytes]:
        """A fresh process for the spec in `folder`, leader of its own process group."""
        with (folder / "output.txt").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "mok.determinism.arm", str(folder / "spec.json")],
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def wait(self, process: subprocess.Popen[bytes]) -> int:
        """The exit code of an arm, which is killed if it takes longer than `ARM_LIMIT_S`."""
        try:
            return process.wait(ARM_LIMIT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _start_and_kill(self, folder: Path, step: int) -> None:
        """SIGKILL the arm's process group as soon as its trace shows `step`."""
        process = self.start(folder)
        traces = folder / "trace"
        while process.poll() is None:
            lines = [path.read_bytes().count(b"\n") for path in traces.glob("rank_*.jsonl")]
            if lines and min(lines) >= step:
                break
            time.sleep(0.01)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def last_words(folder: Path) -> str:
    """The first line that says what went wrong, else the last line, of an arm's output."""
    text = (folder / "output.txt").read_text(encoding="utf-8", errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    error = next((line for line in lines if line.startswith("Error: ")), lines[-1] if lines else "no output")
    return error.removeprefix("Error: ")


def verify_recipe(shop: Workshop, axes: Sequence[str], *, runs: int = 2, inject: str = "") -> tuple[Report, Trace]:
    """Run the recipe of `shop` on each of `axes`, and compare every step of every arm with one reference run.

    runs: of the axis rerun. inject: see `parse_injection`; planted in the last arm of each axis. Returns the report and the
    trace of the reference.
    """
    recipe = shop.recipe
    flip_or_kind = parse_injection(inject) if inject else ""
    if isinstance(flip_or_kind, Flip) and flip_or_kind.step > recipe.train.steps:
        raise UsageError(f"--inject {inject}: the run has {recipe.train.steps} steps; use --steps, or an earlier step")
    reference = shop.run(Arm("reference"), "reference")
    trace = read_trace(reference / "trace")
    report = Report(
        "recipe", [], read_json(reference / "fingerprint.json"), read_json(reference / "result.json")["state_sha256"]
    )
    plan = {axis: arms_of(axis, recipe, shop.device, runs) for axis in axes}
    if inject:
        for arms, _ in plan.values():
            arms[-1:] = [dataclasses.replace(arm, inject=inject) for arm in arms[-1:]]
    outcomes = shop.run_all([(f"{axis}-{i}", arm) for axis, (arms, _) in plan.items() for i, arm in enumerate(arms)], reference)
    for axis, (arms, reason) in plan.items():
        result = AxisResult(axis, "equal" if arms else "not run", reason)
        result.arms = ["reference", *(arm.name for arm in arms)] * bool(arms)
        for i, arm in enumerate(arms):
            outcome = outcomes[f"{axis}-{i}"]
            result.seconds += outcome.seconds
            if result.finding is None:
                result.finding = check_arm(shop, arm, outcome, trace, result)
        if result.finding:
            result.status = "diverged"
        report.axes.append(result)
    return report, trace


def quick(recipe: Recipe, device: str) -> Recipe:
    """`recipe` with as little as possible of what changes no bit of the state: evaluation, samples, lines, threads."""
    changes: dict[str, Any] = {
        "eval": dataclasses.replace(recipe.eval, every=0, batches=1),
        "sample": dataclasses.replace(recipe.sample, every=0, tokens=1),
        "log": dataclasses.replace(recipe.log, every=recipe.train.steps),
    }
    if device == "cpu":
        # Arms run side by side, one per core.
        changes["train"] = dataclasses.replace(recipe.train, threads=1)
    return dataclasses.replace(recipe, **changes)


def check_arm(shop: Workshop, arm: Arm, outcome: Outcome, trace: Trace, result: AxisResult) -> Finding | None:
    """Count what was compared in `result`, and look into the first divergence if there is one.

    Raises UsageError where the arm was refused, RunError where it failed without any divergence.
    """
    folder, failed = outcome.folder, outcome.failed
    if failed is not None and "--inject" in str(failed):
        raise UsageError(str(failed).removeprefix(f"{arm.name}: "))
    if arm.layer_check:
        if failed is not None:
            raise failed
        found = read_json(folder / "result.json")
        result.num_tensors, result.num_bytes = result.num_tensors + found["num_tensors"], result.num_bytes + found["num_bytes"]
        return layer_finding(found, arm) if found["divergence"] else None
    note = f"the run ended early: {failed}" if failed is not None else ""
    try:
        other = read_trace(folder / "trace")
    except FileNotFoundError:
        raise RunError(note or f"{arm.name}: left no trace") from None
    result.compared(other)
    divergence = first_divergence(trace, other)
    if divergence is None:
        if failed is not None:
            raise failed
        return None
    return look_into(shop, divergence, arm, folder, trace, note)


def look_into(shop: Workshop, divergence: Divergence, arm: Arm, folder: Path, trace: Trace, note: str) -> Finding:
    """The values of both sides: the arm kept its own, the reference is run again up to that step."""
    key = divergence.key
    kept = kept_tensors(folder)
    difference: Difference | None = None
    if divergence.kind != "missing":
        again = shop.run(Arm("reference again"), f"{folder.name}-values", keep=key, until=key.step)
        ours = next((tensor for at, tensor in kept_tensors(again) if at == key), None)
        if read_trace(again / "trace").records.get(key) != trace.records.get(key):
            note = f"{note} the reference did not repeat either: its values are those of a further run".strip()
        for at, theirs in kept:
            if at == key and ours is not None and difference is None:
                difference = compare_tensors(key.name, ours, theirs)
    return Finding(divergence, ("reference", arm.name), difference, hint=hint_for(key.phase), note=note)


def kept_tensors(folder: Path) -> list[tuple[Key, torch.Tensor]]:
    """What the ranks of an arm kept, in rank order."""
    from safetensors import safe_open

    found = []
    for path in sorted((folder / "kept").glob("rank_*.safetensors")):
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            found.append((Key(int(metadata["step"]), metadata["phase"], metadata["name"]), file.get_tensor("tensor")))
    return found


def layer_finding(found: dict[str, Any], arm: Arm) -> Finding:
    """The divergence that a check of the layer alone wrote down."""
    key = Key(1, found["divergence"]["phase"], found["divergence"]["tensor"])
    difference = Difference(**{**found["divergence"]["difference"]})
    return Finding(Divergence(key, "digest", ("", "")), ("reference", arm.name), difference, hint=hint_for(key.phase))


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
