"""Training steps per second, ours beside others' on the same shapes, weights and tokens.

Each contestant lives in a process of its own, so that memory can be told apart, and they take turns of a few steps, so that a
slow minute of the machine hits all. Losses and gradient norms of the first steps are compared before anything is timed.
Knows nothing of the command line. Read next: `mok/bench/peers/hf.py`.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import resource
import statistics
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
from torch import Tensor

from mok import shapes
from mok.checkpoint import state_sha256, tensor_checksums
from mok.config import DistributedConfig, Recipe
from mok.determinism.fingerprint import fingerprint
from mok.errors import CheckFailed, UsageError
from mok.grid import Grid, Layout
from mok.model.transformer import DTYPES
from mok.train.batches import Batches
from mok.train.memory import keep_freed_memory
from mok.train.ranks import OneRank
from mok.train.state import TrainState
from mok.train.step import train_step

__all__ = ["Contestant", "Row", "TrainReport", "bench_train"]

CHECK_STEPS = 3
TOLERANCE = 1e-4
"""Relative difference of loss or gradient norm that a peer may show in the first steps; fp32 on both sides gives about 1e-6."""


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
        grid = Grid.of(recipe)
        self._state = TrainState(recipe, vocab_size, OneRank(Layout(grid)), device)
        self._batches = _Given(grid)

    def step(self, inputs_BS: Tensor, targets_BS: Tensor) -> tuple[float, float]:
        self._batches.inputs, self._batches.targets = inputs_BS, targets_BS
        report = train_step(self._state, self._batches)
        return report.loss, report.grad_norm

    def tensors(self) -> dict[str, Tensor]:
        return self._state.tensors()


class _Given(Batches):
    """Batches that are handed in: the slices of a step in order."""

    inputs: Tensor
    targets: Tensor

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def of(self, first_sample: int, call: Any) -> tuple[Tensor, Tensor]:
        rows = [i * self.grid.slice_sequences + j for i in call.slices for j in range(self.grid.slice_sequences)]
        return self.inputs[rows], self.targets[rows]


def bench_train(recipe: Recipe, against: list[str], *, vocab_size: int, rounds: int, steps: int, check: bool) -> TrainReport:
    """Time `rounds` turns of `steps` steps of mok on `recipe`'s grid, of mok with one slice a step, and of each peer.

    Raises UsageError for a peer that is not known or installed, CheckFailed where a peer computes something else.
    """
    unknown = [name for name in against if name != "hf"]
    if unknown:
        raise UsageError(f"--against {unknown[0]}: mok bench train knows hf")
    one_slice = dataclasses.replace(recipe, distributed=DistributedConfig())
    lineup = [("mok", "mok", recipe), ("mok, one slice", "mok", one_slice), *((name, name, recipe) for name in against)]
    context = multiprocessing.get_context("spawn")
    workers: list[tuple[str, Connection, Any]] = []
    try:
        for name, kind, chosen in lineup:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, kind, chosen, vocab_size), daemon=True)
            process.start()
            workers.append((name, ours, process))
        return _measure(recipe, vocab_size, workers, rounds, steps, check)
    finally:
        for _, pipe, process in workers:
            pipe.close()
            process.terminate()
            process.join()


def _measure(
    recipe: Recipe, vocab_size: int, workers: list[tuple[str, Connection, Any]], rounds: int, steps: int, check: bool
) -> TrainReport:
    starts = {name: _ask(name, pipe, "check") for name, pipe, _ in workers}
    reference = starts["mok"]["values"]
    errors = {}
    for name, found in starts.items():
        pairs = zip(found["values"], reference, strict=True)
        errors[name] = max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs)
        if check and not errors[name] <= TOLERANCE:
            raise CheckFailed(f"{name}: losses and gradient norms differ by {errors[name]:.1e} from mok's; nothing was timed")
    dense_flops = _ask("mok", workers[0][1], "dense")
    times: dict[str, list[float]] = {name: [] for name, _, _ in workers}
    for turn in range(rounds + 1):
        for name, pipe, _ in workers:
            seconds = _ask(name, pipe, steps)
            if turn:  # the first turn warms up
                times[name] += seconds
    tokens = recipe.train.batch_size * recipe.train.sequence_length
    flops = shapes.flops_per_token(recipe, vocab_size) * tokens
    rows = []
    for name, pipe, _ in workers:
        median = statistics.median(times[name])
        quarters = statistics.quantiles(times[name], n=4)
        rows.append(
            Row(
                name=name,
                median_ms=median * 1e3,
                spread_ms=(quarters[2] - quarters[0]) * 1e3,
                tokens_per_s=tokens / median,
                tflops=flops / median / 1e12,
                fraction_of_dense=flops / median / dense_flops,
                peak_bytes=_ask(name, pipe, "peak"),
                bitwise_repeatable=starts[name]["repeatable"],
                relative_error=errors[name] if name != "mok" else None,
            )
        )
    for row in rows:
        row.ratio_to = {other.name: other.median_ms / row.median_ms for other in rows if other is not row}
    return TrainReport(rows, fingerprint(turns=rounds, steps_per_turn=steps))


def _dense_flops(dtype: torch.dtype, size: int = 1024) -> float:
    """Operations per second of a square matrix product."""
    a, b = torch.randn(2, size, size).to(dtype)
    seconds = []
    for _ in range(12):
        started = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / statistics.median(seconds[2:])


def _ask(name: str, pipe: Connection, question: str | int) -> Any:
    pipe.send(question)
    try:
        answer = pipe.recv()
    except EOFError:
        raise CheckFailed(f"{name}: its process ended") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _serve(pipe: Connection, kind: str, recipe: Recipe, vocab_size: int) -> None:
    """The life of a contestant: answer questions until the pipe closes."""
    device = torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    shape = (4, recipe.train.batch_size, recipe.train.sequence_length + 1)
    tokens = torch.randint(0, vocab_size, shape, generator=generator)

    def make() -> Contestant:
        if kind == "mok":
            return _Mok(recipe, vocab_size, device)
        from mok.bench.peers.hf import HfContestant

        return HfContestant(recipe, vocab_size, device)

    def run(contestant: Contestant, count: int) -> tuple[list[float], list[float]]:
        values: list[float] = []
        seconds: list[float] = []
        for index in range(count):
            batch = tokens[index % len(tokens)]
            started = time.perf_counter()
            values += contestant.step(batch[:, :-1], batch[:, 1:])
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
                    contestant = make()
                    values, _ = run(contestant, CHECK_STEPS)
                    digests.add(state_sha256(tensor_checksums(contestant.tensors())))
                pipe.send({"values": values, "repeatable": len(digests) == 1})
            elif question == "dense":
                pipe.send(_dense_flops(DTYPES[recipe.train.dtype]))
            elif question == "peak":
                pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
            else:
                assert contestant is not None
                pipe.send(run(contestant, question)[1])
        except Exception as error:
            pipe.send(error)
