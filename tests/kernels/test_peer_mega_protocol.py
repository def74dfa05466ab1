"""One launch of the megakernel on each of several ranks, with the real task tables, all programs alive at once.

A plain-Triton model of what runs beside each other: tiles walk the tables, movers pull rows from other ranks, return finished
rows and wait for their own (`mok/kernels/peer_mover.py`). Bodies do no arithmetic: they check that all they read has been
written, and note what they write. The order in which memory becomes visible is not modelled.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from mok.grid import CallGrid
from mok.kernels.tasks import (
    DH,
    DW_GATE_UP,
    DX,
    EXPERT,
    FIELDS,
    GATE_UP,
    HALF,
    KIND,
    ROW,
    ROW_BLOCK,
    SIGNAL0,
    SIGNAL1,
    WAIT0,
    WAIT0_TARGET,
    WAIT1,
    WAIT1_TARGET,
    N,
)
from mok.launch.peer import PeerPlan, plan_over_ranks
from mok.launch.plan import TaskOrder
from mok.shapes import WorkspaceShape
from tests.kernels.interpreter import Deadlock, interleaved
from tests.kernels.test_protocol import COLUMNS, note, wait_for, written
from tests.kernels.virtual_ranks import Lockstep, transports

K, EXPERTS, HIDDEN, WIDTH = 2, 4, 272, 272
WALKERS, MOVERS = 2, 2
EPOCH = 5


@triton.jit
def launch_all(
    tasks, num_tasks, sizes, counters, expert_start, expert_of_block, group_of_block, group_target, rank_of_row, place_of_row,
    route_of_row, row_of_route, slot_of_route, first, second, rows_in, x_in, returned, flags, faults, num_tokens, max_tasks,
    max_counters, max_blocks, max_routes, all_routes, num_experts, first_tiles, second_tiles, down_done, hasty,
    FORWARD: tl.constexpr, WALKERS: tl.constexpr, MOVERS: tl.constexpr, K: tl.constexpr, EPOCH: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program p is program p % (WALKERS + MOVERS) of rank p // (WALKERS + MOVERS). rows_in, x_in: rows there of each block, in
    one memory with what is written over them; returned: how often each route's row came back. hasty: rows go home without a
    wait for their group."""
    rank, me = tl.program_id(0) // (WALKERS + MOVERS), tl.program_id(0) % (WALKERS + MOVERS)
    tasks += rank * max_tasks * FIELDS
    counters += rank * max_counters
    expert_start += rank * (num_experts + 1)
    first += rank * max_blocks * COLUMNS
    second += rank * max_blocks * COLUMNS
    rows_in += rank * max_blocks
    x_in += rank * max_blocks
    blocks, rows = rank * max_blocks, rank * max_blocks * ROW_BLOCK
    num_rows = tl.load(sizes + rank)
    bad = 0
    if me < WALKERS:
        for i in range(me, tl.load(num_tasks + rank), WALKERS):
            task = tasks + i * FIELDS
            wait_for(counters + tl.load(task + WAIT0), tl.load(task + WAIT0_TARGET))
            wait_for(counters + tl.load(task + WAIT1), tl.load(task + WAIT1_TARGET))
            kind = tl.load(task + KIND)
            block = tl.load(task + ROW) // ROW_BLOCK
            if kind <= DX:
                tile = tl.load(task + N) // (128 if kind == GATE_UP else 256)
                for half in range(2 - tl.load(task + HALF)):
                    b = block + half
                    if (kind == GATE_UP) | (kind == DH):
                        bad += (tl.load(rows_in + b) != ROW_BLOCK).to(tl.int32)
                        note(first, b, tile)
                    else:
                        bad += 1 - written(first, b, first_tiles).to(tl.int32)
                        tl.store((rows_in if FORWARD else x_in) + b, 0)
                        note(second, b, tile)
                    for signal in range(2):
                        counter = tl.load(task + (SIGNAL0 if signal == 0 else SIGNAL1))
                        if counter >= 0:
                            tl.atomic_add(counters + counter, 1, sem="release")
            else:
                expert = tl.load(task + EXPERT)
                for b in range(tl.load(expert_start + expert) // ROW_BLOCK, tl.load(expert_start + expert + 1) // ROW_BLOCK):
                    bad += 1 - written(first, b, first_tiles).to(tl.int32)
                    bad += (tl.load((x_in if kind == DW_GATE_UP else rows_in) + b) != ROW_BLOCK).to(tl.int32)
                for _ in range(2):
                    tl.atomic_add(counters + tl.load(task + SIGNAL0), 1, sem="release")
    else:
        for bringing in range(1 if FORWARD else 2):
            for row in range(me - WALKERS, num_rows, MOVERS):
                route = tl.load(route_of_row + rows + row)
                start = tl.where(route >= 0, route, 0) // K * K
                is_first = route == route
                for k in range(K):
                    earlier = tl.load(row_of_route + rank * all_routes + start + k) >= 0
                    is_first = is_first & ((route < 0) | (start + k >= route) | (earlier == 0))
                if is_first:
                    for k in range(K):
                        twin = tl.load(row_of_route + rank * all_routes + start + k)
                        target = tl.where(route >= 0, twin, row if k == 0 else -1)
                        if target >= 0:
                            b = target // ROW_BLOCK
                            if bringing == 0:
                                tl.store(rows_in + b, tl.load(rows_in + b) + 1)
                                tl.atomic_add(counters + 1 + b, 1, sem="release")
                            else:
                                counter = counters + 1 + 3 * max_blocks + tl.load(expert_of_block + blocks + b)
                                wait_for(counter + 2 * num_experts, down_done)
                                bad += tl.load(second + b * COLUMNS)
                                tl.store(x_in + b, tl.load(x_in + b) + 1)
                                tl.atomic_add(counter + num_experts, 1, sem="release")
        for row in range(me - WALKERS, num_rows, MOVERS):
            if hasty == 0:
                for group in range(tl.load(group_of_block + blocks + row // ROW_BLOCK) + 1):
                    wait_for(counters + 1 + 2 * max_blocks + group, tl.load(group_target + blocks + group))
            owner = tl.load(rank_of_row + rows + row)
            if owner >= 0:
                place = owner * max_routes + tl.load(place_of_row + rows + row)
                bad += 1 - written(second, row // ROW_BLOCK, second_tiles).to(tl.int32)
                tl.store(returned + place, tl.load(returned + place) + 1)
                tl.atomic_xchg(flags + place, EPOCH, sem="release")
        for token in range(me - WALKERS, tl.load(num_tokens + rank), MOVERS):
            for k in range(K):
                route = rank * max_routes + token * K + k
                if tl.load(slot_of_route + route) >= 0:
                    wait_for(flags + route, EPOCH)
                    bad += (tl.load(returned + route) != 1).to(tl.int32)
    tl.store(faults + tl.program_id(0), bad)


def make_plans(monkeypatch: pytest.MonkeyPatch, tokens: list[int], order: TaskOrder) -> list[PeerPlan]:
    count = len(tokens)
    group = transports(WorkspaceShape(max(tokens), K, HIDDEN, WIDTH, count))
    generator = torch.Generator().manual_seed(3)
    ids = [torch.rand(number, EXPERTS, generator=generator).argsort(1)[:, :K].sort(1).values.int() for number in tokens]
    ids[0][1, 0] = -1

    def rank(r: int) -> PeerPlan:
        grid, backward = CallGrid(count, count, (0,), count, r), TaskOrder(order.group_size, 0)
        return plan_over_ranks(ids[r], EXPERTS, HIDDEN, WIDTH, order, backward, group[r], grid=grid, units=ROW_BLOCK.value)

    return Lockstep(monkeypatch, count).run(rank)


def run(
    plans: list[PeerPlan],
    forward: bool,
    seed: int,
    hasty: bool = False,
    tables: list[Tensor] | None = None,
    switches: int = 200_000,
) -> int:
    """How often something was read before it was there."""
    rows, count = [plan.rows for plan in plans], len(plans)
    blocks, experts, routes = rows[0].max_blocks, rows[0].num_experts, plans[0].transport.shape.tokens * K

    def numbers(*shape: int) -> Tensor:
        return torch.zeros(count, *shape, dtype=torch.int32)

    def padded(parts: list[Tensor], size: int) -> Tensor:
        table = numbers(size) - 1
        for line, part in zip(table, parts, strict=True):
            line[: part.numel()] = part
        return table

    tables = tables or [plan.forward_tasks if forward else plan.backward_tasks for plan in rows]  # type: ignore[misc]
    sizes = torch.stack([plan.sizes for plan in rows], 1)
    faults = torch.zeros(count * (WALKERS + MOVERS), dtype=torch.int32)
    with interleaved(seed, switches):
        launch_all[(count * (WALKERS + MOVERS),)](
            torch.stack(tables), sizes[1 if forward else 2].contiguous(), sizes[0].contiguous(), numbers(sum(rows[0].counters)),
            torch.stack([plan.expert_start for plan in rows]), torch.stack([plan.expert_of_block_B for plan in rows]),
            torch.stack([plan.group_of_block_B for plan in rows]), torch.stack([plan.group_target_G for plan in rows]),
            torch.stack([plan.rank_of_row_P for plan in plans]), torch.stack([plan.place_of_row_P for plan in plans]),
            torch.stack([plan.route_of_row_P for plan in rows]), torch.stack([plan.row_of_route_N for plan in rows]),
            padded([plan.own.row_of_route_N for plan in plans], routes), numbers(blocks, COLUMNS), numbers(blocks, COLUMNS),
            numbers(blocks), numbers(blocks), numbers(routes), numbers(routes), faults,
            torch.tensor([plan.own.num_tokens for plan in plans], dtype=torch.int32), len(tables[0]), sum(rows[0].counters),
            blocks, routes, rows[0].row_of_route_N.numel(), experts, -(-WIDTH // (128 if forward else 256)), -(-HIDDEN // 256),
            2 * -(-HIDDEN // 128) * -(-WIDTH // 256), int(hasty), FORWARD=forward, WALKERS=WALKERS, MOVERS=MOVERS, K=K,
            EPOCH=EPOCH, COLUMNS=COLUMNS,
        )  # fmt: skip
    return int(faults.sum())


@pytest.fixture(autouse=True)
def interpreted(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("programs are interleaved by the interpreter only")


@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
def test_nothing_is_read_before_it_is_there_on_any_rank(forward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = make_plans(monkeypatch, [5, 3], TaskOrder(1, 1))
    assert all(plan.own.num_tokens == tokens for plan, tokens in zip(plans, (5, 3), strict=True))
    for seed in range(2 if forward else 1):
        assert run(plans, forward, seed) == 0


def test_rows_that_go_home_unfinished_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = make_plans(monkeypatch, [3, 2], TaskOrder(1, 1))
    assert run(plans, True, 0, hasty=True)


def test_a_rank_whose_tiles_never_end_keeps_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has no limit on waiting: what would time out shows as programs that still wait."""
    plans = make_plans(monkeypatch, [3, 2], TaskOrder(1, 1))
    tables = [plan.rows.forward_tasks.clone() for plan in plans]
    tables[1][:, WAIT0_TARGET.value] += 1
    with pytest.raises(Deadlock, match="still wait"):
        run(plans, True, 0, tables=tables, switches=20_000)
