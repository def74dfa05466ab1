"""What must not change a bit of the torch backend: threads, company in the batch, the cut into calls, other lanes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import mok
from mok.backends import torch as torch_backend
from mok.backends.interface import ExpertWeights, Options
from mok.errors import MokError
from mok.gradients import GradBuffers
from mok.grid import CallGrid
from mok.schedule import build_schedule
from tests.cases import Case, Inputs, make_inputs
from tests.tolerances import assert_same_bits

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(inputs: Inputs, rows: slice, grid: CallGrid, buffers: GradBuffers) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dweights of the tokens in `rows`, as one call; the weight gradients are continued in `buffers`."""
    schedule = build_schedule(inputs.ids_TK[rows], inputs.gate_EIH.shape[0], grid)
    weights = ExpertWeights(inputs.gate_EIH, inputs.up_EIH, inputs.down_EHI)
    with torch.no_grad():
        y, saved = torch_backend.forward(inputs.x_TH[rows], inputs.weights_TK[rows], schedule, weights, Options())
        found = torch_backend.backward(inputs.dy_TH[rows], saved, buffers)
    return y, found.dx_TH, found.dweights_TK


def buffers_for(inputs: Inputs, lanes: int, started: bool = False) -> GradBuffers:
    shapes = (inputs.gate_EIH.shape, inputs.up_EIH.shape, inputs.down_EHI.shape)
    return GradBuffers(*(torch.full((lanes, *shape), torch.nan) for shape in shapes), (started,) * lanes)


def check_buffers(first: GradBuffers, second: GradBuffers) -> None:
    for name in ("gate", "up", "down"):
        assert_same_bits(name, getattr(first, name), getattr(second, name))


@DTYPES
@pytest.mark.usefixtures("threads")
def test_threads(dtype: torch.dtype) -> None:
    inputs = make_inputs(Case("threads", tokens=700, hidden=64, width=80, top_k=3), dtype)
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        buffers = buffers_for(inputs, 1)
        results.append((*run(inputs, slice(None), CallGrid(), buffers), buffers.gate, buffers.up, buffers.down))
    for other in results[1:]:
        for name, one, two in zip(("y", "dx", "dweights", "gate", "up", "down"), results[0], other, strict=True):
            assert_same_bits(name, one, two)


@DTYPES
def test_a_token_does_not_see_the_others(dtype: torch.dtype) -> None:
    inputs = make_inputs(Case("company", tokens=97, hidden=48, width=304, top_k=2), dtype)
    together = run(inputs, slice(None), CallGrid(), buffers_for(inputs, 1))
    for rows in (slice(0, 1), slice(40, 43), slice(13, 97)):
        alone = run(inputs, rows, CallGrid(), buffers_for(inputs, 1))
        for name, one, many in zip(("y", "dx", "dweights"), alone, together, strict=True):
            assert_same_bits(f"{name} of {rows}", one, many[rows])


@DTYPES
def test_a_token_does_not_see_the_others_in_shared_experts(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = mok.MoE(48, 32, 8, 2, num_shared_experts=1, shared_intermediate_size=304, shared_gate=True, dtype=dtype)
    x, dy = torch.randn(2, 97, 48).to(dtype)

    def results(rows: slice) -> tuple[Tensor, Tensor]:
        leaf = x[rows].clone().requires_grad_()
        y = layer(leaf)
        return y, torch.autograd.grad(y, leaf, dy[rows])[0]

    together = results(slice(None))
    for rows in (slice(0, 1), slice(40, 43), slice(13, 97)):
        for name, one, many in zip(("y", "dx"), results(rows), together, strict=True):
            assert_same_bits(f"{name} of {rows}", one, many[rows])


@DTYPES
@pytest.mark.parametrize("routing", ["uniform", "masked", "half"])
def test_a_lane_in_one_call_or_several(dtype: torch.dtype, routing: str) -> None:
    """12 slices in 6 segments on 2 lanes: all in one call, or lane by lane in one or three calls each."""
    inputs = make_inputs(Case("calls", tokens=60, hidden=32, width=48, routing=routing), dtype)
    whole = buffers_for(inputs, 2)
    y, dx, dweights = run(inputs, slice(None), CallGrid(12, 2, (0, 0, 0, 1, 1, 1)), whole)
    for calls in (1, 3):
        parts = buffers_for(inputs, 2)
        for lane in range(2):
            own = GradBuffers(*(getattr(parts, name)[lane : lane + 1] for name in ("gate", "up", "down")), (False,))
            for call in range(calls):
                start = lane * 30 + call * (30 // calls)
                rows = slice(start, start + 30 // calls)
                grid = CallGrid(6 // calls, 2, (0,) * (3 // calls))
                part = run(inputs, rows, grid, GradBuffers(own.gate, own.up, own.down, (call > 0,)))
                for name, one, many in zip(("y", "dx", "dweights"), part, (y, dx, dweights), strict=True):
                    assert_same_bits(name, one, many[rows])
        check_buffers(parts, whole)


@DTYPES
@pytest.mark.parametrize("routing", ["uniform", "half"])
def test_terms_in_memory_of_their_own(dtype: torch.dtype, routing: str) -> None:
    """Buffers that nobody else holds get the bits of those that the backend must fill, with widths that are padded too."""
    inputs = make_inputs(Case("fresh", tokens=60, hidden=40, width=56, routing=routing), dtype)
    filled, fresh = buffers_for(inputs, 3), dataclasses.replace(buffers_for(inputs, 3), fresh=True)
    before = fresh.down
    for buffers in (filled, fresh):
        run(inputs, slice(None), CallGrid(6, 2, (0, 1, 2)), buffers)
    assert fresh.down is not before
    check_buffers(filled, fresh)


def test_segments_are_terms_of_their_own() -> None:
    """The bits of a weight gradient do depend on the segments: they are numbers of the recipe."""
    inputs = make_inputs(Case("segments", tokens=60), torch.float32)
    one, two = buffers_for(inputs, 1), buffers_for(inputs, 1)
    run(inputs, slice(None), CallGrid(2, 2, (0,)), one)
    run(inputs, slice(None), CallGrid(2, 1, (0, 0)), two)
    assert not torch.equal(one.down, two.down)
    torch.testing.assert_close(one.down, two.down)


@DTYPES
def test_weights_at_odd_addresses(dtype: torch.dtype) -> None:
    inputs = make_inputs(Case("address"), dtype)
    expected = run(inputs, slice(None), CallGrid(), buffers_for(inputs, 1))
    for name in ("x_TH", "gate_EIH", "down_EHI", "dy_TH"):
        value = getattr(inputs, name).detach()
        moved = torch.empty(value.numel() + 1, dtype=dtype)[1:].view(value.shape)
        setattr(inputs, name, moved.copy_(value))
    for name, one, two in zip(
        ("y", "dx", "dweights"), run(inputs, slice(None), CallGrid(), buffers_for(inputs, 1)), expected, strict=True
    ):
        assert_same_bits(name, one, two)


def test_gate_and_up_side_by_side_or_apart() -> None:
    torch.manual_seed(0)
    w_gate_up, w_down = torch.randn(4, 2, 16, 32), torch.randn(4, 32, 16)
    x, ids = torch.randn(9, 32), torch.randint(4, (9, 2))
    weights = torch.rand(9, 2)
    together = mok.moe(x, ids, weights, *w_gate_up.unbind(1), w_down)
    apart = mok.moe(x, ids, weights, w_gate_up[:, 0].clone(), w_gate_up[:, 1].clone(), w_down)
    assert_same_bits("y", together, apart)


def test_a_cpu_whose_products_depend_on_their_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.mm

    def by_size(a: Tensor, b: Tensor) -> Tensor:
        return real(a, b) * (1 + 2**-20 * (a.shape[0] == 16))

    torch_backend.check_gemm_rows.cache_clear()
    monkeypatch.setattr(torch, "mm", by_size)
    with pytest.raises(MokError, match=r"matrix products of torch\.float32 on this CPU"):
        torch_backend.check_gemm_rows(torch.float32)
    monkeypatch.undo()
    torch_backend.check_gemm_rows(torch.float32)
