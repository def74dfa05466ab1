"""The patched interpreter itself: right bfloat16, and programs that wait for one another."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.interpreter import Deadlock, interleaved


@triton.jit
def round_and_multiply(a, b, rounded, product, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(rounded + i, tl.load(a + i).to(tl.bfloat16))
    rows, columns = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    square = tl.load(b + rows * 16 + columns)
    tl.store(product + rows * 16 + columns, tl.dot(square, square))


@triton.jit
def add_bf16(x):
    tl.store(x, tl.load(x) + tl.load(x))


@triton.jit
def pass_on(counters, order, NUM: tl.constexpr):
    """Program p waits for program p + 1; the last one starts."""
    me = tl.program_id(0)
    if me + 1 < NUM:
        while tl.atomic_add(counters + me + 1, 0) == 0:
            pass
    place = tl.atomic_add(counters + NUM, 1)
    tl.store(order + place, me)
    tl.atomic_add(counters + me, 1)


@triton.jit
def wait_for_nobody(counter):
    while tl.atomic_add(counter, 0) == 0:
        pass


@pytest.fixture(autouse=True)
def interpreted(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("there is a GPU: kernels are not interpreted")


def test_bf16_is_rounded_to_nearest_even_and_multiplied() -> None:
    a = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    a[:3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    b = torch.randn(16, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    rounded, product = torch.empty(4096, dtype=torch.bfloat16), torch.empty(16, 16)
    round_and_multiply[(1,)](a, b, rounded, product, N=4096)
    wanted = a.bfloat16()
    assert rounded[2].isnan()
    assert rounded[:2].equal(wanted[:2]) and rounded[3:].equal(wanted[3:])
    assert torch.allclose(product, b.float() @ b.float(), rtol=1e-5, atol=1e-5)


def test_arithmetic_on_bf16_is_refused() -> None:
    """The interpreter would add bit patterns."""
    with pytest.raises(TypeError, match=r"convert to tl\.float32 first"):
        add_bf16[(1,)](torch.ones(1, dtype=torch.bfloat16))


@pytest.mark.parametrize("seed", range(4))
def test_programs_may_wait_for_later_ones(seed: int) -> None:
    counters, order = torch.zeros(9, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    with interleaved(seed):
        pass_on[(8,)](counters, order, NUM=8)
    assert order.tolist() == list(range(7, -1, -1))


def test_a_wait_without_end_is_an_error() -> None:
    with interleaved(0, max_switches=100), pytest.raises(Deadlock, match="2 of 2 programs"):
        wait_for_nobody[(2,)](torch.zeros(1, dtype=torch.int32))
