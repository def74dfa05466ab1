"""The megakernel's protocol with the real task table, every program alive at once and interleaved at random.

A plain-Triton model of the loop, next task -> wait -> body -> signal, beside movers that bring rows and combine them. Bodies
do no arithmetic: they check that everything a tile reads has been written, and note what they wrote, and over what. What the
hardware adds, the order in which memory becomes visible, is not modelled.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from mok.kernels.tasks import (
    DH,
    DW_GATE_UP,
    DX,
    EXPERT,
    FIELDS,
    GATE_UP,
    HALF,
    KIND,
    PART,
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
from mok.launch.plan import DevicePlan, TaskOrder, plan_on_device, shared_counters
from tests.cases import random_ids
from tests.kernels.interpreter import Deadlock, interleaved

TOKENS, TOP_K, EXPERTS, HIDDEN, WIDTH = 90, 2, 3, 272, 272
WALKERS, MOVERS, UNITS = 3, 2, 2
COLUMNS = 4
"""Of the tables of what was written: tiles of one row of blocks, at most."""


@triton.jit
def wait_for(counter, target):
    while tl.atomic_add(counter, 0, sem="acquire") < target:
        pass


@triton.jit
def written(table, block, tiles):
    """Whether the first `tiles` tiles of a block's line have each been written once."""
    columns = tl.arange(0, COLUMNS_)
    counts = tl.load(table + block * COLUMNS_ + columns, mask=columns < tiles, other=1)
    return (tl.min(counts, axis=0) == 1) & (tl.max(counts, axis=0) == 1)


@triton.jit
def note(table, block, tile):
    place = table + block * COLUMNS_ + tile
    tl.store(place, tl.load(place) + 1)


COLUMNS_ = tl.constexpr(COLUMNS)


@triton.jit
def walk(
    tasks, num_tasks, counters, expert_start, expert_of_block, first, second, rows_in, x_in, again, again_in, shared_again,
    shared_first, shared_second, faults, row_of_route, token_order, group_of_token, group_target, num_tokens, num_blocks,
    max_blocks, num_experts, gate_up_tiles, first_tiles, second_tiles, down_done, shared_counter,
    FORWARD: tl.constexpr, AGAIN: tl.constexpr, SHARED: tl.constexpr, WALKERS: tl.constexpr, MOVERS: tl.constexpr,
    UNITS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Programs 0..WALKERS-1 walk tasks, the rest move rows. `first`, `second`: tiles of the first and second kind written of
    each block, `again`: of gate and up; `shared_...` the same of shared experts. rows_in, x_in, again_in: blocks delivered, in
    one memory with what comes after them: whoever writes that takes them away. faults[program] counts reads of what was not
    there."""
    me = tl.program_id(0)
    bad = 0
    if me < WALKERS:
        for i in range(me, num_tasks, WALKERS):
            task = tasks + i * FIELDS
            wait_for(counters + tl.load(task + WAIT0), tl.load(task + WAIT0_TARGET))
            wait_for(counters + tl.load(task + WAIT1), tl.load(task + WAIT1_TARGET))
            kind = tl.load(task + KIND)
            shared = tl.load(task + PART) != 0
            block = tl.load(task + ROW) // ROW_BLOCK
            halves = 2 - tl.load(task + HALF)
            if kind <= DX:
                tile = tl.load(task + N) // (128 if kind == GATE_UP else 256)
                for half in range(halves):
                    b = block + half
                    if shared:
                        if not FORWARD and kind == GATE_UP:
                            note(shared_again, b, tile)
                        elif (kind == GATE_UP) | (kind == DH):
                            if AGAIN and not FORWARD:
                                bad += 1 - written(shared_again, b, gate_up_tiles).to(tl.int32)
                            note(shared_first, b, tile)
                        else:
                            bad += 1 - written(shared_first, b, first_tiles).to(tl.int32)
                            note(shared_second, b, tile)
                    elif not FORWARD and kind == GATE_UP:
                        bad += 1 - written(again_in, b, 1).to(tl.int32)
                        note(again, b, tile)
                    elif (kind == GATE_UP) | (kind == DH):
                        bad += 1 - written(rows_in, b, 1).to(tl.int32)
                        if AGAIN and not FORWARD:
                            bad += 1 - written(again, b, gate_up_tiles).to(tl.int32)
                        note(first, b, tile)
                    else:
                        bad += 1 - written(first, b, first_tiles).to(tl.int32)
                        tl.store((rows_in if FORWARD else x_in) + b * COLUMNS_, 0)
                        note(second, b, tile)
                    for signal in range(2):
                        counter = tl.load(task + (SIGNAL0 if signal == 0 else SIGNAL1))
                        if counter >= 0:
                            tl.atomic_add(counters + counter, 1, sem="release")
            else:
                expert = tl.load(task + EXPERT)
                for b in range(tl.load(expert_start + expert) // ROW_BLOCK, tl.load(expert_start + expert + 1) // ROW_BLOCK):
                    bad += 1 - written(first, b, first_tiles).to(tl.int32)
                    bad += 1 - written(x_in if kind == DW_GATE_UP else rows_in, b, 1).to(tl.int32)
                for _ in range(2):  # one store warp for each half
                    tl.atomic_add(counters + tl.load(task + SIGNAL0), 1, sem="release")
    else:
        of_experts = counters + 1 + 3 * max_blocks
        if AGAIN and not FORWARD:
            for b in range(me - WALKERS, num_blocks, MOVERS):
                note(again_in, b, 0)
                for _ in range(UNITS):
                    tl.atomic_add(of_experts + 5 * num_experts + b, 1, sem="release")
        for b in range(me - WALKERS, num_blocks, MOVERS):
            if AGAIN and not FORWARD:
                expert = tl.load(expert_of_block + b)
                blocks = (tl.load(expert_start + expert + 1) - tl.load(expert_start + expert)) // ROW_BLOCK
                wait_for(of_experts + 4 * num_experts + expert, blocks * gate_up_tiles)
                tl.store(again_in + b * COLUMNS_, 0)
            note(rows_in, b, 0)
            for _ in range(UNITS):
                tl.atomic_add(counters + 1 + b, 1, sem="release")
        if not FORWARD:
            for b in range(me - WALKERS, num_blocks, MOVERS):
                counter = of_experts + tl.load(expert_of_block + b)
                wait_for(counter + 2 * num_experts, down_done)
                tl.store(rows_in + b * COLUMNS_, 0)
                bad += tl.load(second + b * COLUMNS_)
                note(x_in, b, 0)
                for _ in range(UNITS):
                    tl.atomic_add(counter + num_experts, 1, sem="release")
        if SHARED:
            shared_blocks = (num_tokens + ROW_BLOCK - 1) // ROW_BLOCK
            wait_for(counters + shared_counter, shared_blocks * second_tiles)
            for b in range(shared_blocks):
                bad += 1 - written(shared_second, b, second_tiles).to(tl.int32)
        for i in range(me - WALKERS, num_tokens, MOVERS):
            for group in range(tl.load(group_of_token + i) + 1):
                wait_for(counters + 1 + 2 * max_blocks + group, tl.load(group_target + group))
            for k in range(K):
                row = tl.load(row_of_route + tl.load(token_order + i) * K + k)
                if row >= 0:
                    bad += 1 - written(second, row // ROW_BLOCK, second_tiles).to(tl.int32)
    tl.store(faults + me, bad)


class Outcome(NamedTuple):
    faults: int
    counters: Tensor
    second: Tensor


def make_plan(order: TaskOrder, *, again: bool = False, shared_size: int = 0) -> DevicePlan:
    backward_order = TaskOrder(order.group_size)
    ids = random_ids(TOKENS, EXPERTS, TOP_K, torch.Generator().manual_seed(0))
    ids[3, 0] = -1
    return plan_on_device(ids, EXPERTS, HIDDEN, WIDTH, order, backward_order, units=UNITS, again=again, shared_size=shared_size)


def run(plan: DevicePlan, forward: bool, seed: int, tasks: Tensor | None = None, max_switches: int = 30_000) -> Outcome:
    def table() -> Tensor:
        return torch.zeros(plan.max_blocks, COLUMNS, dtype=torch.int32)

    rows, num_forward, num_backward, *_ = plan.sizes.tolist()
    counters = torch.zeros(plan.counters[0 if forward else 1], dtype=torch.int32)
    faults = torch.zeros(WALKERS + MOVERS, dtype=torch.int32)
    first, second = table(), table()
    listed = tasks if tasks is not None else (plan.forward_tasks if forward else plan.backward_tasks)
    with interleaved(seed, max_switches):
        walk[(WALKERS + MOVERS,)](
            listed, num_forward if forward else num_backward, counters, plan.expert_start, plan.expert_of_block_B, first,
            second, *(table() for _ in range(7)), faults, plan.row_of_route_N, plan.combine_token_T, plan.combine_group_T,
            plan.group_target_G, TOKENS, rows // 64, plan.max_blocks, EXPERTS, -(-WIDTH // 128),
            -(-WIDTH // (128 if forward else 256)), -(-HIDDEN // 256), 2 * -(-HIDDEN // 128) * -(-WIDTH // 256),
            shared_counters(plan.max_blocks, EXPERTS)[0 if forward else 1],
            FORWARD=forward, AGAIN=plan.again, SHARED=plan.shared_size > 0, WALKERS=WALKERS, MOVERS=MOVERS, UNITS=UNITS,
            K=TOP_K,
        )  # fmt: skip
    return Outcome(int(faults.sum()), counters, second)


@pytest.fixture(autouse=True)
def interpreted(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("programs are interleaved by the interpreter only")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("order", [TaskOrder(1, 1), TaskOrder(2, 0)], ids=str)
@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
def test_nothing_is_read_before_it_is_written(forward: bool, order: TaskOrder, seed: int) -> None:
    assert_nothing_read_too_early(make_plan(order), forward, seed)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
def test_shared_experts_and_what_is_computed_again_follow_the_protocol(forward: bool, seed: int) -> None:
    assert_nothing_read_too_early(make_plan(TaskOrder(2, 0), again=True, shared_size=WIDTH), forward, seed)


def assert_nothing_read_too_early(plan: DevicePlan, forward: bool, seed: int) -> None:
    found = run(plan, forward, seed)
    blocks, columns = int(plan.sizes[0]) // 64, -(-HIDDEN // 256)
    assert found.faults == 0
    assert found.counters[0] == blocks * columns
    assert (found.second[:blocks, :columns] == 1).all()
    groups = int(plan.sizes[3])
    reached = found.counters[1 + 2 * plan.max_blocks :][:groups]
    assert reached.tolist() == plan.group_target_G[:groups].tolist()


def test_a_wait_that_is_too_short_is_noticed() -> None:
    """DOWN tiles that do not wait for the last gate_up tile read what is not there, in some interleaving."""
    plan = make_plan(TaskOrder(2, 0))
    tasks = plan.forward_tasks.clone()
    is_down = (tasks[:, KIND.value] == 1) & (torch.arange(len(tasks)) < plan.sizes[1])
    tasks[is_down, WAIT0_TARGET.value] -= 2
    assert any(run(plan, True, seed, tasks).faults for seed in range(3))


def test_rows_that_are_written_over_too_early_are_noticed() -> None:
    """DX tiles that do not come after the weight gradients put dx where x has yet to go."""
    plan = make_plan(TaskOrder(2, 0))
    tasks = plan.backward_tasks[: int(plan.sizes[2])].clone()
    kinds = tasks[:, KIND.value]
    tasks[kinds == DX.value, WAIT1_TARGET.value] = 0
    early = torch.cat([tasks[kinds == DH.value], tasks[kinds == DX.value], tasks[kinds > DX.value]])
    assert run(plan, False, 0, early).faults > 0


def test_a_list_that_is_out_of_order_is_a_deadlock() -> None:
    """Tasks that wait for later ones of the same program never end; here they end in an error."""
    plan = make_plan(TaskOrder(2, 0))
    tasks = plan.forward_tasks.clone()
    count = int(plan.sizes[1])
    tasks[:count] = tasks[:count].flip(0)
    with pytest.raises(Deadlock, match="still wait"):
        run(plan, True, 0, tasks, max_switches=3_000)


@pytest.mark.parametrize("shared", [False, True], ids=["routed", "shared"])
def test_pre_activations_that_are_read_too_early_are_noticed(shared: bool) -> None:
    """DH of shared experts must wait for their GATE_UP; that of routed ones comes after dy, which their GATE_UP lets in."""
    plan = make_plan(TaskOrder(2, 0), again=True, shared_size=WIDTH)
    assert plan.backward_tasks is not None
    tasks = plan.backward_tasks[: int(plan.sizes[2])].clone()
    is_dh = tasks[:, KIND.value] == DH.value
    if shared:
        is_dh &= tasks[:, PART.value] == 1
        early = torch.cat([tasks[is_dh], tasks[~is_dh]])
        early[: int(is_dh.sum()), WAIT0_TARGET.value] = 0
        assert any(run(plan, False, seed, early).faults for seed in range(3))
    else:
        again = (tasks[:, KIND.value] == GATE_UP.value) & (tasks[:, PART.value] == 0)
        tasks[again, SIGNAL1.value] = tasks[again, SIGNAL0.value]
        assert any(run(plan, False, seed, tasks).faults for seed in range(3))
