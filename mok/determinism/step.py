"""`verify_step`: whether any PyTorch training step gives the same bytes again, and on other numbers of CPU threads.

For code that is not a mok recipe: everything happens in this process, on modules that a function of the user's builds anew
for each run. Read next: `mok/determinism/axes.py`, which does the same for recipes in fresh processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from mok.determinism.compare import Difference, compare_tensors
from mok.determinism.faults import Flip, flip_bit
from mok.determinism.fingerprint import fingerprint, prepare_cuda
from mok.determinism.operations import OperationTrace, first_operation
from mok.determinism.report import AxisResult, Finding, Report, hint_for
from mok.determinism.trace import Key, Recorder, Trace, first_divergence
from mok.errors import UsageError

__all__ = ["DEFAULT_RUNS", "Subject", "verify_step"]

DEFAULT_RUNS = 30
"""A fault that shows in one run of n goes unseen in r runs with probability (1 - 1/n)^r: 36 % for n = r = 30."""

Outputs = torch.Tensor | Mapping[str, torch.Tensor] | None
Step = Callable[[int], Outputs]


@dataclass(frozen=True)
class Subject:
    """What is verified: `step(i)`, i from 1, runs one training step of `module` and may return its loss or other tensors."""

    module: nn.Module
    step: Step


@dataclass
class Run:
    """One run of all steps. kept: the tensor asked for, where it was seen."""

    trace: Trace
    operations: list = field(default_factory=list)
    kept: torch.Tensor | None = None


def verify_step(
    build: Callable[[], tuple[nn.Module, Step]],
    *,
    steps: int = 2,
    runs: int = DEFAULT_RUNS,
    threads: Sequence[int] = (1, 2),
    activations: bool = True,
    seed: int = 0,
    against: Callable[[], tuple[nn.Module, Step]] | None = None,
    fault: Flip | None = None,
) -> Report:
    """Run the same steps `runs` times, then once with each number of CPU threads, and compare every byte.

    build: makes a fresh (module, step), called after `torch.manual_seed(seed)`; step(i), i from 1, does a whole training
        step and may return a tensor or a dict of tensors. Recorded in each step: the random state at its start, module
        outputs (`activations`), what step returns, and afterwards each gradient (`main_grad` too), weight and buffer.
    against: a second way to do the same work, such as a compiled module, compared once (axis "against").
    fault: a bit to flip in the last of the runs, to see that it is found.
    Returns a Report with the axes "rerun", "threads" and, if asked for, "against". Raises UsageError if CUDA has started
    without a fixed cuBLAS workspace, ValueError for fewer than 2 runs.
    """
    if runs < 2:
        raise ValueError(f"runs = {runs}: one run has nothing to be compared with; use at least 2")
    prepare_cuda()

    def run(make: Callable[[], tuple[nn.Module, Step]] = build, num_threads: int | None = None, **options: Any) -> Run:
        with cpu_threads(num_threads):
            return run_once(make, steps, seed, activations, **options)

    reference = run()
    modes = [mode_of(make) for make in (build, against) if make is not None]
    report = Report("step", [], fingerprint(compiled=modes[0] == "compiled"))

    axis = AxisResult("rerun", "equal", arms=[f"run {i + 1}" for i in range(runs)])
    started = time.perf_counter()
    for i in range(1, runs):
        again = partial(run, fault=fault) if i == runs - 1 else run
        other = again(expected=reference.trace)
        axis.compared(other.trace)
        axis.finding = finding_of(reference, other, run, again, ("run 1", f"run {i + 1}"))
        if axis.finding:
            break
    report.axes.append(close(axis, started))

    axis = AxisResult("threads", "equal", arms=[f"{torch.get_num_threads()} threads"])
    started = time.perf_counter()
    if report.axes[0].status == "diverged":
        axis.status, axis.reason = "not run", "the step does not repeat on one number of threads"
    elif not (others := [number for number in threads if number != torch.get_num_threads()]):
        axis.status, axis.reason = "not run", "no other number of threads was asked for"
    else:
        for number in others:
            axis.arms.append(f"{number} threads")

            on_others = partial(run, num_threads=number)
            other = on_others(expected=reference.trace)
            axis.compared(other.trace)
            axis.finding = finding_of(reference, other, run, on_others, (axis.arms[0], axis.arms[-1]))
            if axis.finding:
                break
    report.axes.append(close(axis, started))

    if against is not None:
        axis = AxisResult("against", "equal", arms=["build", "against"])
        started = time.perf_counter()

        second = partial(run, against)
        other = second(expected=reference.trace)
        axis.compared(other.trace)
        axis.finding = finding_of(reference, other, run, second, ("build", "against"))
        close(axis, started)
        if axis.finding and modes[0] != modes[1]:
            gap = axis.finding.difference.max_difference if axis.finding.difference else float("nan")
            axis.reason = (
                f"different execution mode ({modes[0]} against {modes[1]}), not comparable bitwise; "
                f"largest difference {gap:.3g} in {axis.finding.divergence.key}"
            )
        report.axes.append(axis)
    unseen = (1 - 1 / runs) ** (runs - 1)
    report.notes.append(f"{runs} runs: a fault that shows in one run of {runs} is missed with probability {unseen:.0%}")
    return report


def run_once(
    build: Callable[[], tuple[nn.Module, Step]],
    steps: int,
    seed: int,
    activations: bool,
    expected: Trace | None = None,
    keep: Key | None = None,
    operations_of: int | None = None,
    fault: Flip | None = None,
) -> Run:
    """expected: keep the first tensor that is not as in this trace. keep: keep this one. operations_of: note operations of
    this step, the last one that is run."""
    found = Run(Trace())

    def plant(key: Key, tensor: torch.Tensor) -> None:
        if fault is not None and (key.step, key.name) == (fault.step, fault.name):
            flip_bit(tensor, fault.bit)

    def check(key: Key, tensor: torch.Tensor, digest: str) -> None:
        if found.kept is not None:
            return
        if key == keep or (expected is not None and expected.records.get(key) != digest):
            found.kept = tensor.detach().clone()

    checks = [] if keep is None and expected is None else [check]
    recorder = Recorder(activations=activations, watchers=[] if fault is None else [plant], checks=checks)
    torch.manual_seed(seed)
    module, step = build()
    hooks = activation_hooks(module, recorder) if activations else []
    for i in range(1, steps + 1):
        recorder.begin(i)
        recorder.see("data", "random state", torch.get_rng_state())
        if i == operations_of:
            with OperationTrace() as operations:
                step(i)
            found.operations = operations.operations
            break
        record_outputs(recorder, step(i))
        record_module(recorder, module)
        recorder.end()
    for hook in hooks:
        hook.remove()
    found.trace = recorder.trace
    if (
        fault is not None
        and operations_of is None
        and not any((key.step, key.name) == (fault.step, fault.name) for key in found.trace.records)
    ):
        names = dict.fromkeys(key.name for key in found.trace.records)
        raise UsageError(f"no tensor {fault.name} in step {fault.step}; there are {', '.join(names)}")
    return found


def finding_of(
    reference: Run, other: Run, run: Callable[..., Run], other_run: Callable[..., Run], arms: tuple[str, str]
) -> Finding | None:
    """Look closer at a divergence: values from another run of the reference, the operation from one more run of each."""
    divergence = first_divergence(reference.trace, other.trace)
    if divergence is None:
        return None
    key = divergence.key
    difference: Difference | None = None
    note = ""
    if divergence.kind == "digest":
        again = run(keep=key)
        if again.kept is not None and other.kept is not None:
            difference = compare_tensors(key.name, again.kept, other.kept)
            if again.trace.records.get(key) != reference.trace.records[key]:
                note = "the reference did not repeat either: its values are those of a further run"
    traced = [one(operations_of=key.step).operations for one in (run, other_run)]
    first = first_operation(*traced)
    return Finding(
        divergence,
        arms,
        difference,
        operation=f"{first[0].name} (number {first[2] + 1} of step {key.step})" if first else "",
        cause=f"{first[1].name}: {first[1].advice}" if first and first[1] else "",
        hint=hint_for(key.phase),
        note=note or ("" if first else "no operation differed when the step was run again: a rare or a planted fault"),
    )


def record_outputs(recorder: Recorder, outputs: Outputs) -> None:
    named = {"loss": outputs} if isinstance(outputs, torch.Tensor) else outputs or {}
    for name, tensor in named.items():
        recorder.see("forward", name, tensor)


def record_module(recorder: Recorder, module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            recorder.see("backward", f"grad:{name}", parameter.grad)
        if (main_grad := getattr(parameter, "main_grad", None)) is not None:
            recorder.see("backward", f"main_grad:{name}", main_grad)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        recorder.see("optimizer", name, tensor)


def activation_hooks(module: nn.Module, recorder: Recorder) -> list:
    """Record what each submodule returns, its calls of a step numbered from 1."""
    calls: dict[tuple[int, str], int] = {}

    def hook_of(name: str) -> Callable[[nn.Module, tuple, object], None]:
        @torch.compiler.disable
        def hook(_: nn.Module, __: tuple, output: object) -> None:
            tensors = output if isinstance(output, tuple | list) else (output,)
            for i, tensor in enumerate(tensors):
                if isinstance(tensor, torch.Tensor):
                    label = f"{name or 'module'}" + (f"[{i}]" if len(tensors) > 1 else "")
                    place = recorder.step, label
                    calls[place] = calls.get(place, 0) + 1
                    recorder.see("forward", f"{label} call {calls[place]}", tensor)

        return hook

    return [child.register_forward_hook(hook_of(name)) for name, child in module.named_modules()]


def mode_of(build: Callable[[], tuple[nn.Module, Step]]) -> str:
    """ "compiled" if any module that `build` makes went through torch.compile, else "eager"."""
    module, _ = build()
    names = {type(child).__name__ for child in module.modules()}
    compiled = "OptimizedModule" in names or any(getattr(child, "_compiled_call_impl", None) for child in module.modules())
    return "compiled" if compiled else "eager"


def close(axis: AxisResult, started: float) -> AxisResult:
    axis.seconds = time.perf_counter() - started
    axis.status = "diverged" if axis.finding else axis.status
    return axis


@contextmanager
def cpu_threads(number: int | None) -> Iterator[None]:
    """PyTorch's CPU threads set to `number` (None: as they are) and back."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
