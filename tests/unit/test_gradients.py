from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from mok import gradients
from mok.gradients import Bank, GradStore, halving_tree
from mok.grid import Grid, Layout

GRID = Grid(lanes=4, slices=4, segment=2, slice_sequences=1, num_slices=32)
TOKENS, ROWS, COLUMNS = 16, 32, 16


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


class Meeting:
    """Ranks as threads of one process that meet to exchange parts."""

    def __init__(self, replicas: int, ep: int) -> None:
        self.replicas, self.ep = replicas, ep
        self.barrier = threading.Barrier(replicas * ep)
        self.parts: dict[int, Tensor] = {}


class Member:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank = meeting, rank

    def _meet(self, part: Tensor, ranks: list[int]) -> Tensor:
        self.meeting.parts[self.rank] = part.clone()
        self.meeting.barrier.wait()
        total = halving_tree(torch.stack([self.meeting.parts[rank] for rank in ranks]))
        self.meeting.barrier.wait()
        return total.chunk(len(ranks), -1)[ranks.index(self.rank)].contiguous()

    def over_positions(self, parts_LN: Tensor) -> Tensor:
        first = self.rank // self.meeting.ep * self.meeting.ep
        return self._meet(parts_LN, list(range(first, first + self.meeting.ep)))

    def over_lanes(self, part_N: Tensor) -> Tensor:
        member = self.rank % self.meeting.ep
        return self._meet(part_N, [replica * self.meeting.ep + member for replica in range(self.meeting.replicas)])


def step(replicas: int, ep: int, slices_per_call: int, dtype: torch.dtype) -> list[bytes]:
    """Bits of the gradients, put together from the shards of all ranks: a weight by products, a vector by terms; and, for each
    member, an expert by its lane buffers."""
    generator = torch.Generator().manual_seed(0)
    dy = torch.randn(32, TOKENS, ROWS, generator=generator).to(dtype)
    x = torch.randn(32, TOKENS, COLUMNS, generator=generator).to(dtype)
    vectors = torch.randn(32, ROWS, generator=generator)
    meeting = Meeting(replicas, ep)
    dense: dict[int, Tensor] = {}
    expert_shards: dict[int, Tensor] = {}

    def run(rank: int) -> None:
        weight, vector, expert = (nn.Parameter(torch.zeros(shape)) for shape in ((ROWS, COLUMNS), (ROWS,), (2, 16)))
        layout = Layout(GRID, replicas, ep, rank)
        calls = layout.calls(slices_per_call)
        banks = [Bank([weight, vector], layout), Bank([expert], layout, experts=True)]
        store = GradStore(banks, layout, calls)
        for _ in range(2):
            store.begin_step()
            for call in calls:
                store.begin_call(call)
                mine = list(call.slices)
                weight.grad_sink.product(dy[mine].view(-1, ROWS), x[mine].view(-1, COLUMNS))
                vector.grad_sink.add(vectors[mine])
            lanes = torch.stack([torch.full_like(expert, 0.1 + lane) for lane in layout.lanes])
            if len(calls) == 1 and len(lanes) > 1:
                halving_tree(lanes, expert.lane_sum)
            else:
                expert.lane_grads.copy_(lanes)
            store.finish(Member(meeting, rank) if replicas * ep > 1 else None)
        dense[layout.dense_shard], expert_shards[rank] = (
            grads[bank.shard] for bank, grads in zip(banks, store.grads, strict=True)
        )

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(replicas * ep)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bank = Bank([nn.Parameter(torch.zeros(shape)) for shape in ((ROWS, COLUMNS), (ROWS,))])
    views = bank.views(torch.cat([dense[shard] for shard in range(replicas * ep)])[: bank.numel])
    members = [torch.cat([expert_shards[replica * ep + r] for replica in range(replicas)]) for r in range(ep)]
    assert all(bits(member[:32]) == bits(members[0][:32]) for member in members)
    return [bits(view) for view in views] + [bits(members[0][:32])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_layout_and_no_number_of_calls_shows_in_the_bits(dtype: torch.dtype) -> None:
    expected = step(1, 1, 0, dtype)
    for replicas, ep, slices_per_call in [
        (1, 1, 2),
        (1, 1, 4),
        (1, 2, 0),
        (1, 2, 1),
        (2, 1, 2),
        (2, 2, 1),
        (4, 4, 1),
        (4, 1, 0),
    ]:
        assert step(replicas, ep, slices_per_call, dtype) == expected, (replicas, ep, slices_per_call)


@pytest.mark.parametrize(("replicas", "ep"), [(1, 1), (1, 2), (2, 1)])
def test_whether_terms_wait_for_one_another_does_not_show(monkeypatch: pytest.MonkeyPatch, replicas: int, ep: int) -> None:
    expected = step(replicas, ep, 0, torch.float32)
    monkeypatch.setattr(gradients, "WAITING_ELEMENTS", 0)
    assert step(replicas, ep, 0, torch.float32) == expected


def test_one_slice_goes_straight_into_the_main_gradient() -> None:
    weight = nn.Parameter(torch.zeros(ROWS, COLUMNS))
    layout = Layout(Grid(1, 1, 1, 1, 1))
    store = GradStore([Bank([weight])], layout, layout.calls())
    dy, x = torch.randn(TOKENS, ROWS), torch.randn(TOKENS, COLUMNS)
    weight.grad_sink.product(dy, x)
    assert store._scratch.numel() == 0
    expected = dy.double().t() @ x.double()
    assert (weight.main_grad - expected).norm() < 1e-6 * expected.norm()


def test_a_shared_matrix_adds_its_two_uses_after_their_trees() -> None:
    weight = nn.Parameter(torch.zeros(16, 16))
    grid = Grid(1, 1, 1, 1, 2)
    results = []
    for slices_per_call in (0, 1):
        layout = Layout(grid)
        calls = layout.calls(slices_per_call)
        store = GradStore([Bank([weight])], layout, calls, embedding=weight)
        for call in calls:
            store.begin_call(call)
            weight.grad_sink.add(torch.stack([torch.full((16, 16), 1e8 + i) for i in call.slices]))
            weight.embedding_sink.add(torch.stack([torch.full((16, 16), 1.3 + i) for i in call.slices]))
        store.finish()
        results.append(bits(weight.main_grad))
    assert results[0] == results[1]


def test_halving_tree_order() -> None:
    terms = torch.randn(5, 100, generator=torch.Generator().manual_seed(1))
    a, b, c, d, e = terms.clone()
    assert bits(halving_tree(terms)) == bits(((a + d) + c) + (b + e))
