"""What must hold of every task table, whatever the routing: tiles, waits, counters, order."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mok.kernels import tasks
from mok.reference import task_table
from mok.reference.task_table import DH, DOWN, DW_DOWN, DW_GATE_UP, DX, GATE_UP, Task, ceil_div

SIZES = st.sampled_from([16, 64, 128, 144, 256, 272, 512])
UNITS = 3


@st.composite
def layers(draw: st.DrawFn) -> dict[str, object]:
    """expert starts, widths and order of a layer; blocks of 64 rows per expert."""
    blocks = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
    starts = [0]
    for count in blocks:
        starts.append(starts[-1] + 64 * count)
    return {
        "expert_start": starts,
        "hidden_size": draw(SIZES),
        "intermediate_size": draw(SIZES),
        "group_size": draw(st.integers(1, 4)),
        "groups_per_phase": draw(st.integers(0, 3)),
        "units": UNITS,
        "num_blocks_max": starts[-1] // 64 + draw(st.integers(0, 2)),
    }


def both(layer: dict[str, object]) -> list[list[Task]]:
    backward = {name: value for name, value in layer.items() if name != "groups_per_phase"}
    return [task_table.forward_tasks(**layer), task_table.backward_tasks(**backward, combine_group_size=layer["group_size"])]


def covered(task: Task) -> list[tuple[int, ...]]:
    """The 64-row pieces of output that a task writes, as (kind, part, expert, first row, first column)."""
    rows = [task.m] if task.kind in (DW_DOWN, DW_GATE_UP) else [task.row + 64 * half for half in range(2 - task.half)]
    return [(task.kind, task.part, task.expert, row, task.n) for row in rows]


@given(layers())
@settings(max_examples=60, deadline=None)
def test_every_tile_is_written_once(layer: dict[str, object]) -> None:
    starts, hidden, inner = layer["expert_start"], layer["hidden_size"], layer["intermediate_size"]
    written = Counter(piece for listed in both(layer) for task in listed for piece in covered(task))
    wanted = {
        (kind, 0, expert, row, column)
        for kind, width, tile in ((GATE_UP, inner, 128), (DOWN, hidden, 256), (DH, inner, 256), (DX, hidden, 256))
        for expert in range(len(starts) - 1)
        for row in range(starts[expert], starts[expert + 1], 64)
        for column in range(0, width, tile)
    } | {
        (kind, part, expert, row, column)
        for kind, parts, height, width in ((DW_DOWN, 1, hidden, inner), (DW_GATE_UP, 2, inner, hidden))
        for part in range(parts)
        for expert in range(len(starts) - 1)
        for row in range(0, height, 128)
        for column in range(0, width, 256)
    }
    assert set(written) == wanted
    assert set(written.values()) <= {1}


@given(layers())
@settings(max_examples=60, deadline=None)
def test_every_wait_is_met_by_earlier_tasks(layer: dict[str, object]) -> None:
    """With all rows delivered, walking the list meets each wait when its tile comes, and no counter overshoots."""
    starts = layer["expert_start"]
    blocks_max, num_experts = layer["num_blocks_max"], len(starts) - 1
    forward, backward = both(layer)
    for listed in (forward, backward):
        counters: Counter[int] = Counter({1 + block: UNITS for block in range(starts[-1] // 64)})
        if listed is backward:
            for expert in range(num_experts):
                counters[1 + 3 * blocks_max + num_experts + expert] = UNITS * (starts[expert + 1] - starts[expert]) // 64
        for task in listed:
            assert counters[task.wait0] >= task.wait0_target
            assert counters[task.wait1] >= task.wait1_target
            for signal in (task.signal0, task.signal1):
                if signal >= 0:
                    counters[signal] += 2 - task.half
        for task in listed:  # a producer of what was waited for comes before the wait, so the target is all that ever arrives
            if task.wait0_target:
                assert counters[task.wait0] == task.wait0_target
        columns = ceil_div(layer["hidden_size"], 256)
        assert counters[task_table.TOTAL] == starts[-1] // 64 * columns
        targets = task_table.group_targets(starts, layer["group_size"], layer["hidden_size"])
        assert [counters[1 + 2 * blocks_max + group] for group in range(len(targets))] == targets


def nameless(listed: list[Task]) -> list[Task]:
    """Without the group that a DOWN or DX task signals, which is a name for the order itself."""
    return [replace(task, signal0=0 if task.kind in (DOWN, DX) else task.signal0) for task in listed]


@given(layers(), st.integers(1, 4), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_order_only_permutes(layer: dict[str, object], group_size: int, groups_per_phase: int) -> None:
    other = {**layer, "group_size": group_size, "groups_per_phase": groups_per_phase}
    for listed, again in zip(both(layer), both(other), strict=True):
        assert Counter(nameless(listed)) == Counter(nameless(again))


def test_example_of_phases() -> None:
    """Three experts of one m-tile each, one group a phase: A0 A1 B0 A2 B1 B2."""
    listed = task_table.forward_tasks([0, 128, 256, 384], 256, 128, group_size=1, groups_per_phase=1, units=1, num_blocks_max=6)
    assert [(task.kind, task.expert) for task in listed] == [
        (GATE_UP, 0), (GATE_UP, 1), (DOWN, 0), (GATE_UP, 2), (DOWN, 1), (DOWN, 2)
    ]  # fmt: skip


@pytest.mark.parametrize("field", ["wait0_target", "signal0"])
def test_columns_are_the_fields(field: str) -> None:
    """A record's columns are those that the kernels read."""
    task = replace(Task(0, 0, 0, 0, 0, 0, 0), **{field: 77})
    assert task_table.table([task])[0, getattr(tasks, field.upper()).value] == 77
