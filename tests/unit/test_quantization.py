"""Layers with 8-bit operands: against the definition, against float64, and what may not change a bit of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mok
from mok.backends import choose
from mok.backends.interface import LayerShape, Options
from mok.backends.quantization import WeightCache, pack_rows, round_rows, unpack_rows
from mok.compiled import compiled_experts
from mok.errors import UsageError
from mok.grid import CallGrid
from mok.layer import moe_layer
from mok.quantization import FORMATS, Quantization
from mok.recipe import load
from tests.cases import Case, Inputs, make_inputs
from tests.tolerances import assert_same_bits, relative_error

CPU = torch.device("cpu")
EVERYTHING = [Quantization(name, weight_gradients=True, shared_experts=True) for name in FORMATS]
DISPATCHED = [Quantization(name, dispatch=True) for name in FORMATS]
LAYER = Case("experts", tokens=90, hidden=128, width=128, experts=3)


def small(quantization: Quantization, **more) -> Case:
    """A layer of the fewest blocks that tell their axes apart, and rows for one and a half groups: the reference is slow."""
    block = quantization.of_blocks.block
    return Case("small", tokens=48, hidden=2 * block if block < 64 else block, width=block, experts=2, top_k=1, **more)


def outputs(
    inputs: Inputs, quantization: Quantization | None, backend: str = "torch", grid: CallGrid | None = None, **more
) -> dict:
    """y and every gradient by name."""
    shared = None if inputs.shared_gate_up_JH is None else (inputs.shared_gate_up_JH, inputs.shared_down_HS)
    y, _ = moe_layer(
        inputs.x_TH,
        inputs.ids_TK,
        inputs.weights_TK,
        (inputs.gate_EIH, inputs.up_EIH, inputs.down_EHI),
        options=Options(quantization=quantization, **more),
        backend=backend,
        grid=grid or CallGrid(),
        shared=shared,
        shared_scale_T=inputs.shared_scale_T,
    )
    leaves = inputs.differentiable()
    return {"y": y.detach()} | dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), inputs.dy_TH), strict=True))


def unmasked(name: str, value: Tensor, inputs: Inputs) -> Tensor:
    return value.masked_fill(inputs.ids_TK < 0, 0) if name == "weights_TK" else value


def plant(inputs: Inputs, block: int) -> None:
    """Make it matter which values share a scale: with a power of two as scale it does only for values far below the largest.

    Of every block of H, column 0 of the weights and column 1 of x are large and meet zeros; likewise of I, column 0 of down.
    """
    with torch.no_grad():
        inputs.x_TH[:, ::block], inputs.dy_TH[:, 2::block] = 0, 0
        inputs.x_TH[:, 1::block] *= 2.0**14
        for weight in (inputs.gate_EIH, inputs.up_EIH):
            weight[:, :, ::block] *= 2.0**14
            weight[:, :, 1::block] = 0
            weight[:, ::block] = 0
        inputs.down_EHI[:, :, ::block] *= 2.0**14
        inputs.down_EHI[:, 2::block] *= 2.0**14  # meets zeros of dy
        inputs.x_TH[0] = 0  # a row without products
        inputs.dy_TH[0] *= 2.0**14  # in the group of the rows after it


def unplanted(name: str, value: Tensor, block: int) -> Tensor:
    """What is not made of the large values alone."""
    columns = {"y": 3, "x_TH": 3, "gate_EIH": 3, "up_EIH": 3, "down_EHI": 3}.get(name, 0)
    rows = {"gate_EIH": 1, "up_EIH": 1, "down_EHI": 3}.get(name, 0)
    if columns:
        value = value[..., torch.arange(value.shape[-1]) % block >= columns]
    if rows:
        value = value[..., torch.arange(value.shape[-2]) % block >= rows, :]
    return value


@pytest.mark.parametrize("quantization", EVERYTHING + DISPATCHED, ids=lambda q: q.format + "-dispatch" * q.dispatch)
@pytest.mark.parametrize("shared", [False, True])
def test_torch_computes_what_the_reference_defines(shared: bool, quantization: Quantization) -> None:
    """In fp32 the two differ by the order of sums alone, but for the few values that fall to another side of a rounding; an
    operand that is not rounded, or whose blocks go along the other axis, makes a difference of percents."""
    block = quantization.of_blocks.block
    case = small(quantization)
    if shared:
        case = small(quantization, shared=block, routing="masked")
    inputs = make_inputs(case, torch.float32)
    if not shared:
        plant(inputs, block)
    found, wanted = outputs(inputs, quantization), outputs(inputs, quantization, "reference")
    for name, value in found.items():
        pair = [unmasked(name, each, inputs) for each in (value, wanted[name])]
        if not shared:
            pair = [unplanted(name, each, block) for each in pair]
        error = relative_error(*pair)
        assert error < 2e-3, f"{name}: {error:.1e}"


@pytest.mark.parametrize("quantization", EVERYTHING, ids=lambda q: q.format)
def test_error_is_that_of_the_format(quantization: Quantization) -> None:
    """Against float64 without any rounding: in bf16 not above 1.1 times that of the definition in the same format."""
    inputs = make_inputs(small(quantization), torch.bfloat16)
    exact = outputs(inputs.to(torch.float64, torch.float64), None, "reference")
    found, wanted = outputs(inputs, quantization), outputs(inputs, quantization, "reference")
    for name, value in found.items():
        error, allowed = relative_error(value, exact[name]), relative_error(wanted[name], exact[name])
        assert 0.01 < error <= 1.1 * allowed, f"{name}: {error:.3f}, {allowed:.3f}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_on_the_way_are_the_rounded_ones_in_half_the_bytes(dtype: torch.dtype) -> None:
    x = torch.randn(37, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[3] = 0
    x[4, 7] = torch.nan
    packed = pack_rows(x, 32)
    assert packed.shape == (37, 256 + 8) and packed.dtype == torch.uint8
    found, wanted = unpack_rows(packed, 256, dtype), round_rows(x, 32)
    assert_same_bits("unpacked", found.nan_to_num(nan=7.0), wanted.nan_to_num(nan=7.0))
    assert found.isnan().sum() == 32 and not unpack_rows(torch.zeros_like(packed), 256, dtype).any()
    assert_same_bits("rounded again", round_rows(found, 32).nan_to_num(nan=7.0), wanted.nan_to_num(nan=7.0))


@pytest.mark.parametrize("quantization", EVERYTHING + DISPATCHED, ids=lambda q: q.format + "-dispatch" * q.dispatch)
def test_no_token_sees_its_neighbours(quantization: Quantization) -> None:
    inputs = make_inputs(LAYER, torch.bfloat16)
    together = outputs(inputs, quantization)
    few = Inputs(
        inputs.x_TH[7:40], inputs.weights_TK[7:40], inputs.gate_EIH, inputs.up_EIH, inputs.down_EHI, None, None, None,
        inputs.ids_TK[7:40], inputs.dy_TH[7:40],
    )  # fmt: skip
    alone = outputs(few, quantization)
    for name in ("y", "x_TH", "weights_TK"):
        assert_same_bits(name, alone[name], together[name][7:40])


@pytest.mark.parametrize("quantization", EVERYTHING, ids=lambda q: q.format)
def test_weight_gradients_depend_on_segments_not_on_calls(quantization: Quantization) -> None:
    """Two segments in one call, and in two calls that continue one gradient."""
    inputs = make_inputs(LAYER, torch.bfloat16)
    once = outputs(inputs, quantization, grid=CallGrid(2, 1, (0, 0)))
    weights = {name: getattr(inputs, name) for name in ("gate_EIH", "up_EIH", "down_EHI")}
    for weight in weights.values():
        weight.lane_grads, weight.lanes_started = torch.full((1, *weight.shape), torch.nan), [False]
    for rows in (slice(0, 45), slice(45, 90)):
        y, _ = moe_layer(
            inputs.x_TH[rows].detach(), inputs.ids_TK[rows], inputs.weights_TK[rows].detach(), tuple(weights.values()),
            options=Options(quantization=quantization), backend="torch", grid=CallGrid(),
        )  # fmt: skip
        y.backward(inputs.dy_TH[rows])
    for name, weight in weights.items():
        assert_same_bits(name, weight.lane_grads[0].to(weight.dtype), once[name])


@pytest.mark.parametrize("recompute", ["activations", "all"])
def test_recomputing_changes_no_bit(recompute: str) -> None:
    inputs = make_inputs(small(EVERYTHING[0], shared=32, routing="masked"), torch.bfloat16)
    kept, again = outputs(inputs, EVERYTHING[0]), outputs(inputs, EVERYTHING[0], recompute=recompute)
    for name, value in kept.items():
        assert_same_bits(name, unmasked(name, again[name], inputs), unmasked(name, value, inputs))


def test_kept_weights_are_those_of_the_last_change_that_was_told() -> None:
    layer = mok.MoE(128, 128, 4, 2, num_shared_experts=1, quantization=EVERYTHING[0])
    x = torch.randn(8, 128)
    before = layer(x)
    layer.cache_quantized_weights()
    assert_same_bits("first use", layer(x), before)
    with torch.no_grad():
        for weight in (layer.w_gate_up, layer.w_shared_gate_up):
            weight.mul_(1.5)
    assert_same_bits("still the old ones", layer(x), before)
    layer.weights_changed()
    after = layer(x)
    assert not torch.equal(after, before)
    layer.options.weight_cache.clear()
    fresh = WeightCache()
    assert fresh.get("a", lambda: 1) == fresh.get("a", lambda: 2) == 1
    assert_same_bits("quantised again", layer(x), after)


@pytest.mark.parametrize("quantization", EVERYTHING, ids=lambda q: q.format)
def test_the_router_knows_nothing_of_it(quantization: Quantization) -> None:
    """It chooses the same experts, with weights of the same bits, and its balancing bias stays fp32, where 0.001 two thousand
    times is 2; in bf16 it would stop at 0.5."""
    made = []
    for chosen in (None, quantization):
        torch.manual_seed(0)
        layer = mok.MoE(128, 128, 4, 2, correction_bias=True, quantization=chosen, dtype=torch.bfloat16)
        made.append(layer.to(torch.bfloat16))
    x = torch.randn(8, 128, dtype=torch.bfloat16)
    plain, rounded = (layer.router(x) for layer in made)
    assert torch.equal(plain.expert_ids_TK, rounded.expert_ids_TK)
    assert_same_bits("weights", plain.weights_TK, rounded.weights_TK)
    assert rounded.weights_TK.dtype == torch.float32
    router = made[1].router
    for _ in range(2000):
        router.update_bias(torch.tensor([9, 9, 9, 0]), 1e-3)
    assert router.correction_bias.dtype == torch.float32 and abs(router.correction_bias[3].item() - 2.0) < 1e-3


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_value_that_is_not_finite_comes_out_as_nan(bad: float) -> None:
    inputs = make_inputs(LAYER, torch.bfloat16)
    with torch.no_grad():
        inputs.down_EHI[1, 5, 7] = bad
    y = outputs(inputs, EVERYTHING[0])["y"]
    assert y[(inputs.ids_TK == 1).any(1), 5].isnan().all() and y[(inputs.ids_TK != 1).all(1)].isfinite().all()


def test_sizes_and_backends_that_cannot_are_refused_by_name() -> None:
    case = Case("narrow", hidden=96, width=64)
    with pytest.raises(UsageError, match=r"H = 96 is not a multiple of 128, the block of fp8_block; I = 64"):
        outputs(make_inputs(case, torch.float32), EVERYTHING[1])
    shape = LayerShape(128, 128, 4, 2)
    for backend in ("staged", "mega"):
        with pytest.raises(UsageError, match="cannot run here"):
            choose(backend, shape, torch.bfloat16, CPU, EVERYTHING[0])
    with pytest.raises(UsageError, match="quantization format 'fp4': must be one of mxfp8, fp8_block"):
        Quantization("fp4")
    inputs = make_inputs(small(EVERYTHING[0]), torch.float32)
    weights = (inputs.gate_EIH, inputs.up_EIH, inputs.down_EHI)
    with pytest.raises(UsageError, match="mxfp8 experts cannot be compiled"):
        compiled_experts(
            inputs.x_TH, inputs.ids_TK, inputs.weights_TK, weights, None, None,
            Options(quantization=EVERYTHING[0]), "torch", CallGrid(),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["train.dtype=fp8_block", "model.hidden_size=160"],
            "160 is not a multiple of 128, the block of fp8_block",
        ),
        (["train.dtype=mxfp8", "moe.intermediate_size=48"], "intermediate_size=48: 48 is not a multiple of 32"),
        (["moe.quantize_weight_gradients=true"], "is set but train.dtype = fp32 quantises nothing"),
    ],
)
def test_recipes_that_do_not_fit_a_format(overrides: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load("toy", overrides)
