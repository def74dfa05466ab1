"""What kernels noted of their time, as a Chrome trace."""

from __future__ import annotations

from typing import Any

import pytest

from mok.bench.trace import TracedLaunch, chrome_trace
from mok.kernels import tasks


def record(kind: int, expert: int, row: int) -> list[int]:
    found = [0] * tasks.FIELDS.value
    found[tasks.KIND.value], found[tasks.EXPERT.value], found[tasks.ROW.value] = kind, expert, row
    return found


def launch(begin: int) -> TracedLaunch:
    """Three tasks of two programs, the last skipped; the first mover returns rows, the other has none."""
    records = [record(tasks.GATE_UP.value, 0, 0), record(tasks.DOWN.value, 0, 64), record(tasks.DW_DOWN.value, 1, 0)]
    times = [[begin + 1000 * i + 100 * n for n in range(4)] for i in range(2)] + [[0] * 4]
    moves = [[begin, begin + 50, begin + 900, begin + 950], [begin + 10, begin + 20, 0, begin + 30]]
    return TracedLaunch("forward", records, times, moves)


def spans(trace: dict[str, Any], process: str, thread: str) -> list[tuple[str, float, float]]:
    events = [event for event in trace["traceEvents"] if (event["pid"], event["tid"]) == (process, thread)]
    return [(event["name"], event["ts"], event["dur"]) for event in events]


def test_tasks_and_movers_of_two_ranks_on_one_clock() -> None:
    trace = chrome_trace({"rank 0": [launch(5000)], "rank 1": [launch(7000)]})
    assert spans(trace, "rank 0 forward", "000 loads") == [("gate_up wait", 0.0, 0.1)]
    assert spans(trace, "rank 0 forward", "000 tiles") == [("gate_up multiply", 0.1, 0.1), ("gate_up store", 0.2, 0.1)]
    expected = [("bring rows", 2.0, 0.05), ("return rows", 2.05, 0.85), ("sum tokens", 2.9, 0.05)]
    for (name, start, length), (found, ts, duration) in zip(expected, spans(trace, "rank 1 forward", "000 mover"), strict=True):
        assert name == found and (ts, duration) == pytest.approx((start, length))
    assert [name for name, _, _ in spans(trace, "rank 1 forward", "001 mover")] == ["bring rows", "sum tokens"]
    assert not [event for event in trace["traceEvents"] if event["name"].startswith("dw_down")], "a skipped task has no time"


def test_ranks_with_clocks_of_their_own_begin_together() -> None:
    trace = chrome_trace({"rank 0": [launch(5000)], "rank 1": [launch(7000)]}, one_clock=False)
    assert spans(trace, "rank 0 forward", "000 mover") == spans(trace, "rank 1 forward", "000 mover")
