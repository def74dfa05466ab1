"""The row kernels and the planner's, one at a time, on the examples of their docstrings."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mok.kernels import plan, rows


def numbers(device: torch.device, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_dispatch_rows(device: torch.device) -> None:
    x = torch.arange(1.0, 49.0, device=device).view(3, 16).bfloat16()
    x_rows = torch.full((5, 16), torch.nan, dtype=torch.bfloat16, device=device)
    route_of_row = numbers(device, 5, -1, 0, -1, -1)
    rows.dispatch_rows[(2,)](x, x_rows, route_of_row, numbers(device, 3), 16, x.stride(0), K=2, ROWS=4, COLUMNS=16)
    assert x_rows[0].equal(x[2]) and x_rows[2].equal(x[0])
    assert not x_rows[1].any()
    assert x_rows[3:].isnan().all()


def combine(
    device: torch.device, y_rows: Tensor, row_of_route: Tensor, weights: Tensor, shared: Tensor, scale: Tensor
) -> Tensor:
    out = torch.full((len(scale), y_rows.shape[1]), torch.nan, dtype=torch.bfloat16, device=device)
    rows.combine_rows[(len(scale), 1)](
        y_rows, row_of_route, weights, shared, scale, out, out.shape[1], out.stride(0), K=row_of_route.numel() // len(scale),
        WEIGHTED=True, SHARED=True, SCALED=True, COLUMNS=16, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def test_combine_rows_in_slot_order_products_rounded_apart(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    y_rows = torch.randn(4, 16, generator=generator).bfloat16().to(device)
    weights, scale = torch.randn(2, 3, generator=generator).to(device), torch.randn(2, generator=generator).to(device)
    shared = torch.randn(2, 16, generator=generator).bfloat16().to(device)
    row_of_route = numbers(device, 2, 0, -1, 3, -1, 1)
    y_rows_with_nan = torch.cat((y_rows, torch.full_like(y_rows[:1], torch.nan)))
    out = combine(device, y_rows_with_nan, row_of_route, weights, shared, scale)
    for token in range(2):
        total = torch.zeros(16, device=device)
        for slot in range(3):
            row = int(row_of_route[token * 3 + slot])
            if row >= 0:
                total = total + weights[token, slot] * y_rows[row].float()
        total = total + scale[token] * shared[token].float()
        assert out[token].equal(total.bfloat16())


def test_masked_routes_add_nothing_whatever_their_weight(device: torch.device) -> None:
    y_rows = torch.full((1, 16), torch.nan, dtype=torch.bfloat16, device=device)
    weights = torch.full((1, 2), torch.nan, device=device)
    shared = torch.zeros(1, 16, dtype=torch.bfloat16, device=device)
    out = combine(device, y_rows, numbers(device, -1, -1), weights, shared, torch.ones(1, device=device))
    assert not out.any()


def test_sum_partials_in_order(device: torch.device) -> None:
    partial = torch.tensor([[1e8, 1.0, -1e8], [1e8, -1e8, 1.0], [torch.nan] * 3], device=device)
    found = torch.full((3,), torch.nan, device=device)
    rows.sum_partials[(1,)](partial, numbers(device, 1, -1, 0), found, 3, 3, WIDTH=128, enable_fp_fusion=False)
    assert found.tolist() == [1.0, 0.0, 0.0]


def test_place_experts(device: torch.device) -> None:
    before = torch.zeros(2, 32, dtype=torch.int32, device=device)
    before[1, :3] = numbers(device, 3, 0, 70)
    counts, inside, start = (torch.empty(size, dtype=torch.int32, device=device) for size in (3, 32, 4))
    plan.place_experts[(1,)](before, counts, inside, start, 3, 1, 1, 1, BINS=32)
    assert start.tolist() == [0, 64, 64, 192]
    assert counts.tolist() == [3, 0, 70]


def test_place_routes(device: torch.device) -> None:
    experts = numbers(device, 1, 0, 1, -1)
    before, inside = (torch.zeros(lines, 32, dtype=torch.int32, device=device) for lines in (2, 1))
    row_of_route, route_of_row = numbers(device, 9, 9, 9, 9), torch.full((128,), -1, dtype=torch.int32, device=device)
    plan.place_routes[(1,)](
        experts, before, inside, numbers(device, 0, 64, 128), row_of_route, route_of_row, 4, 1, 1, 2, RUN=128, BINS=32
    )  # fmt: skip
    assert row_of_route.tolist() == [64, 0, 65, -1]
    assert route_of_row[[0, 64, 65]].tolist() == [1, 0, 2]
    assert (route_of_row >= 0).sum() == 3


def test_order_tokens(device: torch.device) -> None:
    bins = numbers(device, 2, 0, 2)
    before = torch.zeros(2, 32, dtype=torch.int32, device=device)
    before[1, :3] = numbers(device, 1, 0, 2)
    tokens, groups = numbers(device, 9, 9, 9), numbers(device, 9, 9, 9)
    plan.order_tokens[(1,)](bins, before, numbers(device, 0, 3), tokens, groups, 3, 1, 32, 1, RUN=128, BINS=32)
    assert tokens.tolist() == [1, 0, 2]
    assert groups.tolist() == [0, 2, 2]


@pytest.mark.parametrize("weight", [0.0, -0.0, -1.5, 1e-30])
def test_any_weight_is_taken_as_it_is(weight: float, device: torch.device) -> None:
    y_rows = torch.full((1, 16), 3.0, dtype=torch.bfloat16, device=device)
    shared = torch.zeros(1, 16, dtype=torch.bfloat16, device=device)
    weights = torch.full((1, 1), weight, device=device)
    out = combine(device, y_rows, numbers(device, 0), weights, shared, torch.zeros(1, device=device))
    assert out.equal((torch.zeros(1, 16, device=device) + weights * 3.0).bfloat16())
