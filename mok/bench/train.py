"""Training steps per second, ours beside others' on the same shapes, weights and tokens.

Each contestant lives in a process of its own, so that memory can be told apart. On a CPU they take turns of a few steps, so
that a slow minute of the machine hits all; a GPU has room for one at a time, so there they follow one another. Losses and
gradient norms of a contestant's first steps are compared with mok's before it is timed. Knows nothing of the command line.
Read next: `mok/bench/peers/hf.py`.
"""

from __future__ import annotations

import dataclasses
import gc
import io
import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
from torch import Tensor

from mok import shapes
from mok.config import DistributedConfig, Recipe
from mok.determinism.digest import Digester
from mok.determinism.fingerprint import fingerprint
from mok.determinism.observe import StepObserver
from mok.determinism.trace import Recorder
from mok.errors import CheckFailed, UsageError
from mok.grid import Grid, Layout
from mok.model.transformer import DTYPES
from mok.train.batches import Batches
from mok.train.device import prepare_device
from mok.train.memory import keep_freed_memory, old_objects_stay
from mok.train.ranks import OneRank
from mok.train.state import TrainState
from mok.train.step import StepGraph, can_record, train_step

__all__ = ["Contestant", "GivenBatches", "Row", "TrainReport", "bench_train", "random_tokens"]

CHECK_STEPS = 3
TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2}
"""Relative difference of loss or gradient norm that a peer may show in the first steps; fp32 on both sides gives about 1e-6. In
bf16 a near-tie between two experts goes either way, and a peer that steps bf16 weights without a master copy loses digits."""


class Contestant(Protocol):
    """A model with its optimizer."""

    def step(self, inputs_BS: Tensor, targets_BS: Tensor) -> tuple[float, float]:
        """One training step; returns the loss and the gradient norm before clipping."""

    def tensors(self) -> dict[str, Tensor]:
        """The weights, to see whether a second run gives the same bits."""


@dataclass
class Row:
    """One line of a report; None where something was not measured. fraction_of_dense: of the rate of a large square matrix
    product of the model's dtype on this machine, measured in the same run."""

    name: str
    median_ms: float
    spread_ms: float
    tokens_per_s: float
    tflops: float
    fraction_of_dense: float
    peak_bytes: int
    bitwise_repeatable: bool
    relative_error: float | None
    ratio_to: dict[str, float] = field(default_factory=dict)


@dataclass
class TrainReport:
    """rows: ours first. environment: of the processes that were timed."""

    rows: list[Row]
    environment: dict[str, Any]


class _Mok:
    def __init__(self, recipe: Recipe, vocab_size: int, device: torch.device) -> None:
        keep_freed_memory()
        prepare_device(device)
        grid = Grid.of(recipe)
        self._state = TrainState(recipe, vocab_size, OneRank(Layout(grid)), device)
        self._batches = GivenBatches(grid)
        self._graph: StepGraph | None = None
        self._observer: StepObserver | None = None
        if recipe.log.trace != "none":
            recorder = Recorder(io.StringIO(), activations=recipe.log.trace == "activations")
            self._observer = StepObserver(recorder, self._state.model)

    def step(self, inputs_BS: Tensor, targets_BS: Tensor) -> tuple[float, float]:
        self._batches.inputs, self._batches.targets = inputs_BS, targets_BS
        report = train_step(self._state, self._batches, self._observer, self._graph)
        if self._graph is None and self._state.recipe.train.cuda_graph and can_record(self._state, self._observer):
            self._graph = StepGraph()  # as a run does after its first step
        return report.loss, report.grad_norm

    def tensors(self) -> dict[str, Tensor]:
        return dict(self._state.model.named_tensors())


class GivenBatches(Batches):
    """Batches that are handed in: the slices of a step in order."""

    inputs: Tensor
    targets: Tensor

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def of(self, first_sample: int, call: Any) -> tuple[Tensor, Tensor]:
        rows = [i * self.grid.slice_sequences + j for i in call.slices for j in range(self.grid.slice_sequences)]
        return self.inputs[rows], self.targets[rows]


def random_tokens(recipe: Recipe, vocab_size: int) -> Tensor:
    """[4, B, S + 1]: the ids of four steps, always the same."""
    shape = (4, recipe.train.batch_size, recipe.train.sequence_length + 1)
    return torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(0))


def bench_train(
    recipe: Recipe,
    against: list[str],
    *,
    vocab_size: int,
    rounds: int,
    steps: int,
    check: bool,
    device: torch.device,
    digests: bool = False,
) -> TrainReport:
    """Time `rounds` turns of `steps` steps of mok on `recipe`'s grid, of mok with one slice a step, and of each peer.

    digests: also of mok while it takes the digests that `mok verify-determinism` compares.
    Raises UsageError for a peer that is not known or installed, CheckFailed where a peer computes something else.
    """
    unknown = [name for name in against if name != "hf"]
    if unknown:
        raise UsageError(f"--against {unknown[0]}: mok bench train knows hf")
    lineup = [("mok", "mok", recipe)]
    if Grid.of(recipe).num_slices > 1:
        lineup.append(("mok, one slice", "mok", dataclasses.replace(recipe, distributed=DistributedConfig())))
    if digests:
        lineup.append(("mok, digests", "mok", dataclasses.replace(recipe, log=dataclasses.replace(recipe.log, trace="steps"))))
    lineup += [(name, name, recipe) for name in against]
    measured = _Measurement(recipe, vocab_size, rounds, steps, check)
    if device.type == "cpu":
        with ExitStack() as lives:
            measured.take([(name, lives.enter_context(_life(kind, r, vocab_size, device))) for name, kind, r in lineup])
    else:
        for name, kind, chosen in lineup:
            with _life(kind, chosen, vocab_size, device) as pipe:
                measured.take([(name, pipe)])
    return measured.report()


@contextmanager
def _life(kind: str, recipe: Recipe, vocab_size: int, device: torch.device) -> Iterator[Connection]:
    """The process of a contestant, as the pipe that asks it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, kind, recipe, vocab_size, device), daemon=True)
    before = os.environ["MKL_CBWR"]
    if kind != "mok":  # a peer computes as it would without mok, which asks MKL for bits that do not depend on threads
        os.environ["MKL_CBWR"] = "OFF"
    process.start()
    os.environ["MKL_CBWR"] = before
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.terminate()
        process.join()


@dataclass
class _Measurement:
    """What contestants answered; those that are taken together take turns."""

    recipe: Recipe
    vocab_size: int
    rounds: int
    steps: int
    check: bool
    starts: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    dense_flops: float = 0.0

    def take(self, contestants: list[tuple[str, Connection]]) -> None:
        for name, pipe in contestants:
            self.starts[name] = _ask(name, pipe, "check")
            self.errors[name] = self._difference(name)
        if "mok" in dict(contestants):
            self.dense_flops = _ask("mok", contestants[0][1], "dense")
            self.environment = _ask("mok", contestants[0][1], "environment")
        for turn in range(self.rounds + 1):
            for name, pipe in contestants:
                seconds = _ask(name, pipe, self.steps)
                if turn:  # the first turn warms up
                    self.times.setdefault(name, []).extend(seconds)
        for name, pipe in contestants:
            self.peaks[name] = _ask(name, pipe, "peak")

    def _difference(self, name: str) -> float:
        pairs = zip(self.starts[name]["values"], self.starts["mok"]["values"], strict=True)
        error = max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs)
        if self.check and not error <= TOLERANCES[self.recipe.train.dtype]:
            raise CheckFailed(f"{name}: losses and gradient norms differ by {error:.1e} from mok's; it was not timed")
        return error

    def report(self) -> TrainReport:
        tokens = self.recipe.train.batch_size * self.recipe.train.sequence_length
        flops = shapes.flops_per_token(self.recipe, self.vocab_size) * tokens
        rows = []
        for name, seconds in self.times.items():
            median = statistics.median(seconds)
            quarters = statistics.quantiles(seconds, n=4)
            rows.append(
                Row(
                    name=name,
                    median_ms=median * 1e3,
                    spread_ms=(quarters[2] - quarters[0]) * 1e3,
                    tokens_per_s=tokens / median,
                    tflops=flops / median / 1e12,
                    fraction_of_dense=flops / median / self.dense_flops,
                    peak_bytes=self.peaks[name],
                    bitwise_repeatable=self.starts[name]["repeatable"],
                    relative_error=self.errors[name] if name != "mok" else None,
                )
            )
        for row in rows:
            row.ratio_to = {other.name: other.median_ms / row.median_ms for other in rows if other is not row}
        facts = {"turns": self.rounds, "steps_per_turn": self.steps, "dense_tflops": self.dense_flops / 1e12}
        return TrainReport(rows, self.environment | facts)


def _dense_flops(dtype: torch.dtype, device: torch.device) -> float:
    """Operations per second of a square matrix product that is large for the device."""
    size = 1024 if device.type == "cpu" else 8192
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    seconds = []
    for _ in range(12):
        started = time.perf_counter()
        torch.mm(a, b)
        _wait(device)
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / statistics.median(seconds[2:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _ask(name: str, pipe: Connection, question: str | int) -> Any:
    pipe.send(question)
    try:
        answer = pipe.recv()
    except EOFError:
        raise CheckFailed(f"{name}: its process ended") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _serve(pipe: Connection, kind: str, recipe: Recipe, vocab_size: int, device: torch.device) -> None:
    """The life of a contestant: answer questions until the pipe closes."""
    tokens = random_tokens(recipe, vocab_size).to(device)

    def make() -> Contestant:
        if kind == "mok":
            return _Mok(recipe, vocab_size, device)
        from mok.bench.peers.hf import HfContestant

        return HfContestant(recipe, vocab_size, device)

    def run(contestant: Contestant, count: int) -> tuple[list[float], list[float]]:
        values: list[float] = []
        seconds: list[float] = []
        with old_objects_stay() if kind == "mok" else nullcontext():  # as in a run of mok
            for index in range(count):
                batch = tokens[index % len(tokens)]
                started = time.perf_counter()
                values += contestant.step(batch[:, :-1], batch[:, 1:])
                _wait(device)
                seconds.append(time.perf_counter() - started)
        return values, seconds

    contestant: Contestant | None = None
    while True:
        try:
            question = pipe.recv()
        except EOFError:
            return
        try:
            if question == "check":
                digests = set()
                for _ in range(2):
                    contestant = None  # a GPU may have no room for two
                    gc.collect()
                    contestant = make()
                    values, _ = run(contestant, CHECK_STEPS)
                    digests.add(_digest(contestant.tensors()))
                pipe.send({"values": values, "repeatable": len(digests) == 1})
            elif question == "dense":
                pipe.send(_dense_flops(DTYPES[recipe.train.dtype], device))
            elif question == "environment":
                pipe.send(fingerprint())
            elif question == "peak":
                pipe.send(_peak_bytes(device))
            else:
                assert contestant is not None
                pipe.send(run(contestant, question)[1])
        except Exception as error:
            pipe.send(error)


def _digest(tensors: dict[str, Tensor]) -> str:
    digester = Digester()
    digester.add(tensors)
    return str(sorted(digester.finish().items()))
