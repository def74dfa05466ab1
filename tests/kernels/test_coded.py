"""The expert layer on 8-bit operands on the GPU it is for: numbers, bits, edges, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import mok
from mok.errors import UsageError
from mok.kernels.quantize import quantize_weights
from mok.kernels.rows import dispatch_scales
from mok.launch.config import KernelConfig
from mok.launch.plan import TaskOrder
from mok.launch.quantize import quantize, quantize_weight
from mok.quantization import Quantization
from mok.reference import quantization as definition
from tests.cases import Case, make_inputs
from tests.kernels.test_mega import assert_all_same_bits, hopper, on, plain, poison, run
from tests.kernels.test_quantize import matrix
from tests.tolerances import assert_no_worse, assert_same_bits

__all__ = ["hopper"]  # a fixture

FP8 = Quantization("fp8_block")

CODED = (
    Case("olmoe-like", tokens=1000, hidden=2048, width=256, experts=8, top_k=4, weights="signed"),
    Case("deepseek-like", tokens=700, hidden=7168, width=512, experts=4, top_k=2),
    Case("odd-blocks", tokens=257, hidden=384, width=640, experts=5, top_k=5),
    Case("one-block", tokens=130, hidden=128, width=128, experts=4, top_k=2),
    Case("half", tokens=500, hidden=2944, width=768, experts=16, top_k=4, routing="half"),
    Case("masked-clamped", tokens=300, hidden=4096, width=384, experts=6, top_k=3, routing="masked", clamp=1.5),
    Case("ten-of-many", tokens=64, hidden=1024, width=512, experts=64, top_k=10, weights="tiny"),
    Case("one-hot", tokens=900, hidden=2048, width=768, experts=16, top_k=8, routing="one-expert"),
)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CODED, ids=lambda case: case.name)
def test_same_bits_as_staged(case: Case, hopper: torch.device) -> None:
    """Staged quantises every operand by the kernel that is equal to the definition; the megakernel on the way."""
    inputs = on(make_inputs(case, torch.bfloat16), hopper)
    mega = run(inputs, case.clamp, quantization=FP8)
    assert_all_same_bits(mega, run(inputs, case.clamp, backend="staged", quantization=FP8))
    assert any(
        not torch.equal(value, other) for value, other in zip(mega.values(), run(inputs, case.clamp).values(), strict=True)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("case", CODED, ids=lambda case: case.name)
def test_no_further_from_float64_than_the_emulation(case: Case, hopper: torch.device) -> None:
    inputs = on(make_inputs(case, torch.bfloat16), hopper)
    exact = plain(inputs.to(torch.float64, torch.float64), case.clamp, torch.float64)
    emulated = run(inputs, case.clamp, backend="torch", quantization=FP8)
    for name, value in run(inputs, case.clamp, quantization=FP8).items():
        assert_no_worse(f"{case.name} {name}", value, exact[name], emulated[name], 1.1)


@pytest.mark.gpu
def test_dispatch_in_8_bits_has_the_bits_of_staged(hopper: torch.device) -> None:
    inputs = on(make_inputs(Case("sent", tokens=300, hidden=512, width=256, experts=8, top_k=4), torch.bfloat16), hopper)
    sent = Quantization("fp8_block", dispatch=True)
    found = run(inputs, quantization=sent)
    assert_all_same_bits(found, run(inputs, backend="staged", quantization=sent))
    assert not torch.equal(found["gate_EIH"], run(inputs, quantization=FP8)["gate_EIH"])


@pytest.mark.gpu
def test_repeats_and_settings_change_no_bit(hopper: torch.device) -> None:
    case = Case("repeat", tokens=3000, hidden=2048, width=256, experts=32, top_k=8)
    inputs = on(make_inputs(case, torch.bfloat16), hopper)
    first = run(inputs, quantization=FP8)
    for _ in range(10):
        poison(hopper)
        assert_all_same_bits(first, run(inputs, quantization=FP8))
    for config in (
        KernelConfig(TaskOrder(1, 1), TaskOrder(1), mover_share=0.0),
        KernelConfig(TaskOrder(4, 3), TaskOrder(2), mover_share=1.0, programs=100),
        KernelConfig(TaskOrder(16, 0), TaskOrder(32), mover_share=0.3, stages=2, programs=7, pieces=3),
    ):
        assert_all_same_bits(first, run(inputs, config=config, quantization=FP8))
    for recompute in ("activations", "all"):
        assert_all_same_bits(first, run(inputs, recompute=recompute, quantization=FP8))
        assert_all_same_bits(first, run(inputs, recompute=recompute, backend="staged", quantization=FP8))


@pytest.mark.gpu
def test_a_token_has_the_same_bits_in_any_company(hopper: torch.device) -> None:
    inputs = on(make_inputs(Case("company", tokens=257, hidden=256, width=128), torch.bfloat16), hopper)
    whole = run(inputs, quantization=FP8)
    for rows in ([200], [3, 200, 7], list(range(256, 192, -1))):
        pick = torch.tensor(rows, device=hopper)
        leaves = {name: getattr(inputs, name)[pick].detach().requires_grad_() for name in ("x_TH", "weights_TK")}
        part = run(replace(inputs, **leaves, ids_TK=inputs.ids_TK[pick], dy_TH=inputs.dy_TH[pick]), quantization=FP8)
        for name in ("y", "x_TH", "weights_TK"):
            assert_same_bits(name, part[name], whole[name][pick])


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["mega", "staged"])
def test_frozen_experts_get_no_gradient(backend: str, hopper: torch.device) -> None:
    inputs = on(make_inputs(Case("frozen", tokens=64, hidden=256, width=128), torch.bfloat16), hopper)
    wanted = run(inputs, quantization=FP8)
    weights = [getattr(inputs, name).detach() for name in ("gate_EIH", "up_EIH", "down_EHI")]
    y = mok.moe(inputs.x_TH, inputs.ids_TK, inputs.weights_TK, *weights, backend=backend, quantization=FP8)
    dx, dweights = torch.autograd.grad(y, [inputs.x_TH, inputs.weights_TK], inputs.dy_TH)
    assert_all_same_bits({"x_TH": dx, "weights_TK": dweights}, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["mega", "staged"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_infinity_reach_the_result(bad: float, backend: str, hopper: torch.device) -> None:
    """A bad value makes its token bad, and nobody else; a bad weight every token of its expert."""
    inputs = on(make_inputs(Case("bad", tokens=100, hidden=256, width=256, experts=4, top_k=1), torch.bfloat16), hopper)
    good = run(inputs, backend=backend, quantization=FP8)
    with torch.no_grad():
        inputs.x_TH[17, 5] = bad
    found = run(inputs, backend=backend, quantization=FP8)
    others = torch.arange(100, device=hopper) != 17
    assert found["y"][17].isnan().all()
    assert_same_bits("others", found["y"][others], good["y"][others])
    with torch.no_grad():
        inputs.x_TH[17, 5] = 1.0
        inputs.gate_EIH[2, 3, 4] = bad
    found = run(inputs, backend=backend, quantization=FP8)
    of_expert = inputs.ids_TK[:, 0] == 2
    assert found["y"][of_expert].isnan().all() and found["y"][~of_expert].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["mega", "staged"])
def test_largest_and_smallest_values(backend: str, hopper: torch.device) -> None:
    """Scales at both ends of their range: where the product of two would leave fp32, the result is not finite, or zero."""
    inputs = on(make_inputs(Case("range", tokens=64, hidden=128, width=128, experts=2, top_k=1), torch.bfloat16), hopper)
    with torch.no_grad():
        inputs.x_TH.fill_(1e38)
        inputs.gate_EIH.fill_(1e38)
    assert not run(inputs, backend=backend, quantization=FP8)["y"].isfinite().any()
    with torch.no_grad():
        inputs.x_TH.fill_(1e-38)
        inputs.gate_EIH.fill_(1e-38)
    assert run(inputs, backend=backend, quantization=FP8)["y"].abs().max() == 0


@pytest.mark.parametrize("kind", ["bits", "nasty", "narrow", "bad"])
def test_weights_in_both_orientations(kind: str, device: torch.device) -> None:
    w = matrix(256, 384, 7, "bits" if kind == "bad" else kind, torch.bfloat16).reshape(1, 256, 384)
    if kind == "bad":
        w[0, 3, 4], w[0, 200, 130], w[0, 0, 383] = torch.nan, torch.inf, -torch.nan
    found = quantize_weight(w.to(device), 128)
    for i in range(2):
        for j in range(3):
            block = slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128)
            codes, scale = definition.quantize_block(w[0][block])
            assert_same_bits("codes", found.codes[0].view(torch.uint8).cpu()[block], codes)
            assert_same_bits("transposed", found.transposed[0].view(torch.uint8).cpu().t()[block], codes)
            assert found.scales[0, i, j] == found.scales_transposed[0, j, i] == scale


def test_examples_of_the_docstrings(device: torch.device) -> None:
    w = torch.tensor([[448.0, -0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0] * 4, [0.0] * 4], device=device)
    codes, transposed = (torch.empty(4, 4, dtype=torch.uint8, device=device) for _ in range(2))
    scales, scales_transposed = (torch.empty(1, dtype=torch.uint8, device=device) for _ in range(2))
    quantize_weights[(1, 1, 1)](w, codes, transposed, scales, scales_transposed, 4, 4, 16, 4, BLOCK=4)
    assert codes.tolist() == [[0x7E, 0x80, 0, 0], [0x38, 0, 0, 0], [0] * 4, [0] * 4]
    assert transposed.tolist() == [[0x7E, 0x38, 0, 0], [0x80, 0, 0, 0], [0] * 4, [0] * 4]
    assert scales.tolist() == scales_transposed.tolist() == [127]
    routes = torch.tensor([5, -1, 0, 7], dtype=torch.int32, device=device)
    of_tokens = torch.tensor([[100], [101], [102], [103]], dtype=torch.uint8, device=device)
    of_rows = torch.full((1, 4), 9, dtype=torch.uint8, device=device)
    sizes = torch.tensor([3], dtype=torch.int32, device=device)
    dispatch_scales[(1, 1)](of_tokens, of_rows, routes, sizes, 1, 4, 2, ROWS=4, BLOCKS=1)
    assert of_rows.tolist() == [[102, 0, 100, 9]]


def test_stacked_weights_with_gaps(device: torch.device) -> None:
    """Gate and up as views of one parameter."""
    both = torch.randn(3, 2, 128, 256).to(torch.bfloat16).to(device)
    for part in both.unbind(1):
        found, wanted = quantize_weight(part, 128), quantize_weight(part.contiguous(), 128)
        for one, other in zip(found, wanted, strict=True):
            assert_same_bits("part", one, other)


@pytest.mark.gpu
def test_every_bf16_value_is_rounded_as_defined(hopper: torch.device) -> None:
    """The conversion instruction that the megakernel uses on h, through a layer: silu(448) is 448, so h is 448 times x."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = values[values.isfinite() & (values.abs() < 2.0**60)]
    values = torch.cat((values, values.new_zeros(-len(values) % 128))).view(-1, 128).to(hopper)
    tokens = values.shape[0]
    eye = torch.eye(128, dtype=torch.bfloat16, device=hopper).unsqueeze(0)
    # silu(448) * up is 448 * up exactly; up comes out as the codes of x say.
    x = torch.cat((values, torch.full_like(values, 448.0)), dim=1)
    up, gate = torch.cat((eye, torch.zeros_like(eye)), dim=2), torch.cat((torch.zeros_like(eye), eye), dim=2)
    down = torch.cat((eye, eye), dim=1)
    ids = torch.zeros(tokens, 1, dtype=torch.int32, device=hopper)
    weights = torch.ones(tokens, 1, device=hopper)
    found = mok.moe(x, ids, weights, gate, up, down, backend="mega", quantization=FP8)
    codes = quantize(values, 128, along_columns=False).rows.dequantized(torch.bfloat16)
    h = (codes.float() * 448.0).to(torch.bfloat16)
    wanted = quantize(h, 128, along_columns=False).rows.dequantized(torch.bfloat16)
    assert torch.equal(found[:, :128], wanted) and torch.equal(found[:, 128:], wanted)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("quantization", "shared", "named"),
    [
        (Quantization("mxfp8"), 0, "mxfp8"),
        (Quantization("fp8_block", weight_gradients=True), 0, "quantize_weight_gradients"),
        (FP8, 128, "shared experts beside 8-bit"),
    ],
)
def test_what_it_cannot_do_is_refused(quantization: Quantization, shared: int, named: str, hopper: torch.device) -> None:
    case = Case("refused", tokens=16, hidden=256, width=128, shared=shared)
    inputs: Tensor = on(make_inputs(case, torch.bfloat16), hopper)
    with pytest.raises(UsageError, match=named):
        run(inputs, quantization=quantization)
