"""The order of a measurement: every pair by every method, then every all-to-all, each verified, within the budget.

Owns the `Backend` interface and the statistics. Knows nothing of CUDA; tests run it on made-up GPUs.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

from mok.topology.measure.plan import METHODS, ROUTINGS, Plan, busiest_bytes, rows_between
from mok.topology.measurement import Exchange, Transfer

__all__ = ["Backend", "Record", "exchanges", "run"]

Record = Transfer | Exchange


class Backend(Protocol):
    """What can be done with the GPUs of one process. `seed` names the random data of one transfer; "" means it arrived."""

    def why_not(self, method: str) -> str:
        """Why no pair can use `method` here, "" if it can be tried."""

    def capable(self, source: int, target: int) -> bool:
        """The driver says that each can reach the other's memory."""

    def transfer(self, method: str, source: int, target: int, num_bytes: int, seed: int) -> tuple[float, str]:
        """Move fresh random data once; seconds, and what is wrong with what arrived."""

    def latency(self, method: str, source: int, target: int) -> float:
        """Seconds of one small access."""

    def exchange(self, method: str, rows: list[list[int]], row_bytes: int, seed: int) -> tuple[float, str]:
        """One all-to-all of fresh random rows among all GPUs; seconds, and what is wrong with what arrived."""


def run(plan: Plan, backend: Backend, clock: Callable[[], float] = time.monotonic) -> Iterator[tuple[str, Record]]:
    """("begin", record) before each record and ("end", record) with its figures after it."""
    deadline = clock() + plan.budget_s
    late = f"the budget of {plan.budget_s:g} s was used up"
    for source, target in plan.pairs:
        for method in METHODS:
            transfer = Transfer(source, target, method, "not measured", num_bytes=plan.num_bytes)
            yield "begin", transfer
            if clock() >= deadline:
                yield "end", dataclasses.replace(transfer, detail=late)
            else:
                yield "end", _transfer(plan, backend, transfer)
    loads = not backend.why_not("load") and all(backend.capable(i, j) for i, j in plan.pairs)
    yield from exchanges(plan, "load" if loads else "copy", backend.exchange, lambda: late if clock() >= deadline else "")


def exchanges(
    plan: Plan,
    method: str,
    exchange: Callable[[str, list[list[int]], int, int], tuple[float, str]],
    stop: Callable[[], str] = lambda: "",
) -> Iterator[tuple[str, Exchange]]:
    """The events of every all-to-all of `plan`; `exchange` is as in `Backend`, `stop` says why no more is to be started."""
    for routing, tokens in zip(ROUTINGS, plan.tokens, strict=True):
        rows = rows_between(routing, plan.num_ranks, tokens * plan.top_k)
        blank = Exchange(
            ranks=tuple(range(plan.num_ranks)),
            routing=routing,
            method=method,
            tokens=tokens,
            hidden_size=plan.hidden_size,
            top_k=plan.top_k,
            verdict="not measured",
            busiest_bytes=busiest_bytes(rows, plan.row_bytes),
        )
        yield "begin", blank
        if reason := stop():
            yield "end", dataclasses.replace(blank, detail=reason)
        else:
            yield "end", _exchange(plan, blank, partial(exchange, method, rows, plan.row_bytes))


def _transfer(plan: Plan, backend: Backend, blank: Transfer) -> Transfer:
    if reason := backend.why_not(blank.method):
        return dataclasses.replace(blank, detail=reason)
    if blank.method != "copy" and not backend.capable(blank.source, blank.target):
        return dataclasses.replace(blank, verdict="not capable", detail="no peer access, says the driver")

    def move(seed: int) -> tuple[float, str]:
        return backend.transfer(blank.method, blank.source, blank.target, plan.num_bytes, seed)

    try:
        seconds, wrong = _repeat(move, plan.repeats)
        if wrong:
            return dataclasses.replace(blank, verdict="FAILED", detail=wrong)
        latency = backend.latency(blank.method, blank.source, blank.target)
    except RuntimeError as error:
        return dataclasses.replace(blank, verdict="FAILED", detail=f"raised: {str(error).splitlines()[0]}")
    speeds = [plan.num_bytes / one / 1e9 for one in seconds]
    return dataclasses.replace(
        blank,
        verdict="verified",
        repeats=len(seconds),
        gb_per_s=statistics.median(speeds),
        low_gb_per_s=min(speeds),
        high_gb_per_s=max(speeds),
        latency_us=latency * 1e6,
    )


def _exchange(plan: Plan, blank: Exchange, move: Callable[[int], tuple[float, str]]) -> Exchange:
    try:
        seconds, wrong = _repeat(move, plan.repeats)
    except RuntimeError as error:
        return dataclasses.replace(blank, verdict="FAILED", detail=f"raised: {str(error).splitlines()[0]}")
    if wrong:
        return dataclasses.replace(blank, verdict="FAILED", detail=wrong)
    times = [1e3 * one for one in seconds]
    return dataclasses.replace(
        blank,
        verdict="verified",
        repeats=len(times),
        median_ms=statistics.median(times),
        low_ms=min(times),
        high_ms=max(times),
    )


def _repeat(move: Callable[[int], tuple[float, str]], repeats: int) -> tuple[list[float], str]:
    """Times of `repeats` runs after one that is not timed; stops at the first whose data did not arrive."""
    times = []
    for seed in range(repeats + 1):
        seconds, wrong = move(seed)
        if wrong:
            return [], wrong
        times.append(seconds)
    return times[1:], ""
