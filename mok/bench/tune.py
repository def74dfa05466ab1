"""Finds the fastest settings of the expert kernels for a layer on the card at hand, and writes them down.

Owns the candidates, the rule of choice, and the row of the table that comes of it. Every candidate must give the bytes of the
first, whose result was compared with float64; one that cannot run, fails or has other bytes is refused, with its reason. The
clock is `mok/bench/layer.py`'s, the file format `mok/launch/tables.py`'s.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mok.bench.layer import Clock, Problem, call_of, make_problem, make_truth, worst_error
from mok.bench.peers.layer import Mok
from mok.errors import MokError, UsageError
from mok.launch.config import DeviceFacts, KernelConfig, device_facts, why_not
from mok.launch.plan import TaskOrder
from mok.launch.tables import Row, Table, choose_config, dump_table, read_table, table_name
from mok.shapes import LayerShape

__all__ = ["Trial", "TuneReport", "as_dict", "candidates", "fastest", "settings_text", "tune_layer", "write_row"]

GROUP_SIZES = (16, 8, 32)
PHASES = (0, 1, 32)
"""Groups per phase of the forward; 0 is all of them."""
SHARES = (0.5, 0.3, 0.7, 1.0)
"""Of the tokens, which the mover warps combine."""

REST_S = 0.2
"""Before each candidate, so that all meet the card in the same state."""

TIE = 1.01
"""A candidate must beat an earlier one by more than this factor: equal settings differ by as much from one time to the next."""


@dataclass(frozen=True)
class Trial:
    """One candidate. knob: which settings were varied. median_ms: of what that knob changes; None where it was refused."""

    knob: str
    settings: KernelConfig
    median_ms: float | None
    refused: str = ""


@dataclass(frozen=True)
class TuneReport:
    """All trials in order, and the row for the table."""

    trials: list[Trial]
    row: Row


def candidates(knob: str, base: KernelConfig) -> list[KernelConfig]:
    """What is tried for a knob, `base` first: every order of the forward or backward, or every share of the mover."""
    changes: list[dict[str, Any]]
    if knob == "mover_share":
        changes = [{knob: share} for share in SHARES]
    else:
        phases = PHASES if knob == "forward_order" else (0,)
        changes = [{knob: TaskOrder(size, phase)} for phase in phases for size in GROUP_SIZES]
    found = [replace(base, **change) for change in changes]
    return [base, *(config for config in found if config != base)]


KNOBS = {"forward_order": "forward", "mover_share": "forward", "backward_order": "forward+backward"}
"""In the order of trying -> what is timed. Each knob starts from the best of those before it."""


def fastest(trials: Iterable[Trial]) -> Trial:
    """The first of those that were not refused which no later one beats by more than `TIE`."""
    best: Trial | None = None
    for trial in trials:
        if trial.median_ms is None:
            continue
        if best is None or best.median_ms is None or trial.median_ms * TIE < best.median_ms:
            best = trial
    if best is None:
        raise UsageError("no candidate could run: " + "; ".join(sorted({trial.refused for trial in trials})))
    return best


def tune_layer(
    name: str,
    shape: LayerShape,
    tokens: int,
    device: torch.device,
    *,
    calls: int = 12,
    warmup: int = 4,
    report: Callable[[Trial], None] = lambda trial: None,
) -> TuneReport:
    """Try all candidates of all knobs on one layer with balanced routes, in bf16.

    Raises UsageError where the megakernel cannot run at all, CheckFailed where its result is wrong.
    """
    facts = device_facts(device)
    base = KernelConfig() if facts is None else choose_config(shape, facts, tokens)
    reasons = why_not(base, shape, facts)
    if facts is None or reasons:
        raise UsageError(f"mok bench tune: the megakernel cannot run here: {'; '.join(reasons)}")
    problem = make_problem(name, shape, tokens, "balanced", device, torch.bfloat16)
    clock = Clock(device, calls, warmup, REST_S)
    worst_error(problem, Mok(problem, "mega", base), make_truth(problem), ours=True)
    expected = results_of(problem, Mok(problem, "mega", base))
    trials: list[Trial] = []
    for knob, direction in KNOBS.items():
        tried: list[Trial] = []
        for config in candidates(knob, base):
            tried.append(try_settings(knob, config, problem, direction, clock, facts, expected))
            report(tried[-1])
        trials += tried
        base = fastest(tried).settings
    directions = ("forward", "forward+backward")
    mega = [median(clock, problem, Mok(problem, "mega", base), direction) for direction in directions]
    staged = [median(clock, problem, Mok(problem, "staged"), direction) for direction in directions]
    sizes = shape.hidden_size, shape.intermediate_size, shape.num_experts, shape.top_k
    return TuneReport(trials, Row(name, tokens, *sizes, (mega[0], mega[1]), base, (staged[0], staged[1])))


def try_settings(
    knob: str,
    config: KernelConfig,
    problem: Problem,
    direction: str,
    clock: Clock,
    facts: DeviceFacts,
    expected: list[Tensor],
) -> Trial:
    reasons = why_not(config, problem.shape, facts)
    if reasons:
        return Trial(knob, config, None, "; ".join(reasons))
    try:
        contestant = Mok(problem, "mega", config)
        found = results_of(problem, contestant)
        if not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(found, expected, strict=True)):
            return Trial(knob, config, None, "its results have other bytes than those of the first candidate")
        return Trial(knob, config, median(clock, problem, contestant, direction))
    except (RuntimeError, MokError) as error:
        return Trial(knob, config, None, f"failed: {str(error).splitlines()[0]}")


def results_of(problem: Problem, contestant: Mok) -> list[Tensor]:
    """Output and gradients of one call."""
    inputs = problem.sets[0]
    y_TH = contestant.forward(inputs.x_TH, inputs.ids_TK, inputs.weights_TK)
    return [y_TH.detach(), *(value.clone() for value in contestant.backward(y_TH, inputs.dy_TH).values())]


def median(clock: Clock, problem: Problem, contestant: Mok, direction: str) -> float:
    return round(statistics.median(clock.burst(call_of(contestant, problem, direction))), 4)


def write_row(path: Path, device_name: str, row: Row) -> None:
    """Put a row into the table at `path`, in place of one for the same layer and tokens; the file may be new.

    Raises UsageError for a file that is broken or was measured on another model of card.
    """
    rows: tuple[Row, ...] = ()
    if path.exists():
        table = read_table(path)
        if table_name(table.device) != table_name(device_name):
            raise UsageError(f"{path}: holds figures of {table.device}, this is {device_name}; name another file with --out")
        rows = tuple(other for other in table.rows if (other.name, other.tokens) != (row.name, row.tokens))
    kept = sorted((*rows, row), key=lambda each: (each.name, each.tokens))
    path.write_text(dump_table(Table(device_name, tuple(kept))), encoding="utf-8")


def settings_text(config: KernelConfig) -> str:
    """The knobs that are tuned, for people."""
    orders = config.forward_order, config.backward_order
    forward, backward = (f"{order.group_size}/{order.groups_per_phase or 'all'}" for order in orders)
    return f"forward {forward}, backward {backward}, mover {config.mover_share:g}"


def as_dict(report: TuneReport) -> dict[str, object]:
    return {"trials": [dataclasses.asdict(trial) for trial in report.trials], "row": dataclasses.asdict(report.row)}
