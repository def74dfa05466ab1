"""The peer-memory protocol with the programs of all ranks alive at once and interleaved at random.

Every rank's kernels of several calls are one program here, which goes through them in stream order and lets other ranks run
at each atomic. Rows hold (call, rank, token), so that a stale or misrouted one cannot look right. What the hardware adds, the
order in which memory becomes visible, is not modelled.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from mok.grid import CallGrid
from mok.kernels import peer as kernels
from mok.launch.peer import PeerPlan, plan_over_ranks
from mok.launch.plan import TaskOrder
from mok.launch.status import explain
from mok.shapes import WorkspaceShape
from mok.transport.peer import PeerTransport
from tests.kernels.interpreter import interleaved
from tests.kernels.virtual_ranks import Lockstep, transports

K, H, CALLS = 2, 16, 3


@triton.jit
def fill(bases, rank, offset, num_tokens, call, H: tl.constexpr):
    """What a rank has to offer in one call: rows of 16 call + 4 rank + token."""
    for token in range(num_tokens):
        target = kernels.values(bases, rank, offset) + token * H + tl.arange(0, H)
        tl.store(target, (tl.zeros((H,), tl.float32) + (16 * call + 4 * rank + token)).to(tl.bfloat16))


@triton.jit
def ranks(
    bases, epochs, given_up, status, num_tokens, num_rows, rank_of_row, place_of_row, route_of_row, row_of_route, slot_of_route,
    rank_of_route, rows, faults, x_at, returned_at, flags_at, max_rows, max_routes, all_routes, limit_ns, broken, stopped,
    R: tl.constexpr, RANKS: tl.constexpr, K: tl.constexpr, H: tl.constexpr, CALLS: tl.constexpr, ROUTES: tl.constexpr,
):  # fmt: skip
    """Program r is rank r. broken: 1 leaves the meeting out, 2 the wait for rows. stopped: the rank that ends after a call."""
    r = tl.program_id(0)
    tokens = tl.load(num_tokens + r)
    mine = rows + r * max_rows * H
    plan = r * max_rows
    bad = 0
    for call in range(1, CALLS + 1):
        if (r != stopped) | (call == 1):
            fill(bases, r, x_at, tokens, call, H)
            if broken == 1:
                tl.store(epochs + r, call)
            else:
                kernels.meet(bases, epochs + r, given_up + r, status + r, r, R, limit_ns, RANKS)
            for row in range(tl.load(num_rows + r)):
                tl.atomic_add(faults + r, 0)  # another rank may run
                kernels.pull_row(
                    bases, x_at, mine, rank_of_row + plan, place_of_row + plan, route_of_row + plan,
                    row_of_route + r * all_routes, row, H, K, H,
                )  # fmt: skip
            for row in range(tl.load(num_rows + r)):
                source = tl.load(rank_of_row + plan + row)
                seen = tl.load(mine + row * H + H - 1).to(tl.float32)
                if source >= 0:
                    bad += (seen != 16 * call + 4 * source + tl.load(place_of_row + plan + row) // K).to(tl.int32)
                else:
                    bad += (seen != 0).to(tl.int32)
                kernels.return_row(
                    bases, epochs + r, mine, mine, rank_of_row + plan, place_of_row + plan, row, H, returned_at, flags_at, 0,
                    0, H,
                )  # fmt: skip
            if broken != 2:
                kernels.await_routes(
                    bases, epochs + r, given_up + r, status + r, slot_of_route + r * max_routes, rank_of_route + r * max_routes,
                    r, 0, max_routes, flags_at, limit_ns, ROUTES,
                )  # fmt: skip
            for n in range(max_routes):
                if tl.load(slot_of_route + r * max_routes + n) >= 0:
                    back = tl.load(kernels.values(bases, r, returned_at) + n * H + H - 1).to(tl.float32)
                    bad += (back != 16 * call + 4 * r + n // K).to(tl.int32)
    tl.store(faults + r, bad)


def make_plans(monkeypatch: pytest.MonkeyPatch, tokens: list[int], experts: int) -> tuple[list[PeerTransport], list[PeerPlan]]:
    count = len(tokens)
    group = transports(WorkspaceShape(max(tokens), K, H, 16, count), timeout_s=3.0)
    ids = []
    for rank, number in enumerate(tokens):
        generator = torch.Generator().manual_seed(rank)
        ids.append(torch.stack([torch.randperm(experts, generator=generator)[:K].sort().values for _ in range(number)]).int())
    ids[0][0, 1] = -1

    def rank(r: int) -> PeerPlan:
        grid = CallGrid(count, count, (0,), count, r)
        return plan_over_ranks(ids[r], experts, H, 16, TaskOrder(), None, group[r], grid=grid)

    return group, Lockstep(monkeypatch, count).run(rank)


def run(
    group: list[PeerTransport], plans: list[PeerPlan], seed: int, broken: int = 0, stopped: int = -1
) -> tuple[list[int], list]:
    """(faults, status) of each rank."""
    shape, count = group[0].shape, len(group)
    routes = shape.tokens * shape.top_k

    def table(parts: list[torch.Tensor], size: int) -> torch.Tensor:
        padded = torch.full((count, size), -1, dtype=torch.int32)
        for line, part in zip(padded, parts, strict=True):
            line[: part.numel()] = part.flatten()
        return padded

    for transport in group:
        for name in ("flags", "row_flags"):
            start, size = shape.regions()[name]
            transport.buffer[start : start + size] = 0
    max_rows = plans[0].rows.max_rows
    counters = torch.zeros(4, count, dtype=torch.int32)
    with interleaved(seed, 400_000):
        ranks[(count,)](
            group[0].bases, counters[0], counters[1], counters[2],
            torch.tensor([plan.own.num_tokens for plan in plans], dtype=torch.int32),
            torch.cat([plan.rows.sizes[:1] for plan in plans]),
            table([plan.rank_of_row_P for plan in plans], max_rows),
            table([plan.place_of_row_P for plan in plans], max_rows),
            table([plan.rows.route_of_row_P for plan in plans], max_rows),
            table([plan.rows.row_of_route_N for plan in plans], routes * count),
            table([plan.own.row_of_route_N for plan in plans], routes),
            table([plan.rank_of_route_N for plan in plans], routes),
            torch.full((count, max_rows, H), torch.nan).bfloat16(), counters[3], group[0].start["x"],
            group[0].start["returned"], group[0].start["row_flags"], max_rows, routes, routes * count, group[0].limit_ns,
            broken, stopped, R=count, RANKS=1 << (count - 1).bit_length(), K=K, H=H, CALLS=CALLS,
            ROUTES=1 << (routes - 1).bit_length(),
        )  # fmt: skip
    return counters[3].tolist(), counters[2].tolist()


@pytest.fixture(autouse=True)
def interpreted(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("programs are interleaved by the interpreter only")


def test_no_row_is_stale_or_lost_in_any_interleaving(monkeypatch: pytest.MonkeyPatch) -> None:
    group, plans = make_plans(monkeypatch, [3, 1, 2], 3)
    for seed in range(2):
        assert run(group, plans, seed) == ([0, 0, 0], [0, 0, 0])


def test_a_missing_meeting_or_wait_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with half of the protocol left out: rows of another call, or none, are seen in some interleaving."""
    group, plans = make_plans(monkeypatch, [3, 2], 2)
    for broken in (1, 2):
        assert any(sum(run(group, plans, seed, broken)[0]) for seed in range(3)), broken


def test_who_is_awaited_in_vain_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 stops after the first call. The others give up in time, say for whom, and wait no second time."""
    group, plans = make_plans(monkeypatch, [2, 2, 1], 3)
    _, status = run(group, plans, 0, stopped=1)
    assert status[1] == 0
    for word in (status[0], status[2]):
        assert "rank 1 of the expert group was awaited at stage dispatch" in explain(word)
