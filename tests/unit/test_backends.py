"""Every backend and every gradient against float64, on the shapes of `tests/cases.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from mok.autograd import Plan, experts
from mok.backends import choose
from mok.backends.interface import LayerShape, Options
from mok.errors import UsageError
from mok.schedule import build_schedule
from tests.cases import CASES, Case, Inputs, make_inputs
from tests.tolerances import assert_no_worse, relative_error

FACTOR = {torch.float32: 4.0, torch.bfloat16: 1.5}
"""Allowed error over plain torch's. Few rows of fp32 go another way through MKL, with blocked sums that lose less than one
chain: 2.4 times less at a width of 1025."""


def plain_moe(inputs: Inputs, clamp: float) -> Tensor:
    """Expert by expert under autograd, the way people write it first; sums of experts in fp32."""
    x = inputs.x_TH
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = torch.zeros(x.shape, dtype=wide)

    def mlp(rows: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        g, u = linear(rows, gate), linear(rows, up)
        if clamp:
            g, u = g.clamp(max=clamp), u.clamp(-clamp, clamp)
        return linear(silu(g) * u, down)

    for e in range(inputs.gate_EIH.shape[0]):
        token, slot = torch.where(inputs.ids_TK == e)
        rows = mlp(x[token], inputs.gate_EIH[e], inputs.up_EIH[e], inputs.down_EHI[e])
        y = y.index_add(0, token, rows.to(wide) * inputs.weights_TK[token, slot].unsqueeze(1))
    if inputs.shared_gate_up_JH is not None:
        gate, up = inputs.shared_gate_up_JH.chunk(2)
        y = y + mlp(x, gate, up, inputs.shared_down_HS).to(wide) * inputs.shared_scale_T.unsqueeze(1)
    return y.to(x.dtype)


def mok_moe(inputs: Inputs, backend: str, options: Options) -> Tensor:
    width, hidden = inputs.gate_EIH.shape[1:]
    shape = LayerShape(hidden, width, inputs.gate_EIH.shape[0], inputs.ids_TK.shape[1])
    module, _ = choose(backend, shape, inputs.x_TH.dtype, inputs.x_TH.device)
    schedule = build_schedule(inputs.ids_TK, shape.num_experts)
    shared = None if inputs.shared_gate_up_JH is None else (inputs.shared_gate_up_JH, inputs.shared_down_HS)
    weights = (inputs.gate_EIH, inputs.up_EIH, inputs.down_EHI)
    return experts(inputs.x_TH, inputs.weights_TK, weights, Plan(module, schedule, options), shared, inputs.shared_scale_T)


def gradients(inputs: Inputs, y: Tensor) -> dict[str, Tensor]:
    leaves = inputs.differentiable()
    return dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), inputs.dy_TH), strict=True))


def compare(case: Case, dtype: torch.dtype, backend: str, recompute: str = "none", factor: float = 0.0) -> None:
    factor = factor or FACTOR[dtype]
    inputs = make_inputs(case, dtype)
    exact, plain = inputs.to(torch.float64, torch.float64), inputs.to(dtype, torch.float32)
    y = mok_moe(inputs, backend, Options(case.clamp, recompute))
    y_exact, y_plain = plain_moe(exact, case.clamp), plain_moe(plain, case.clamp)
    assert_no_worse(f"{case.name} y", y, y_exact, y_plain, factor)
    wanted, allowed = gradients(exact, y_exact), gradients(plain, y_plain)
    for name, gradient in gradients(inputs, y).items():
        assert_no_worse(f"{case.name} d{name}", gradient, wanted[name], allowed[name], factor)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """New memory is full of NaN, and operations that torch knows to be nondeterministic raise."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.usefixtures("poisoned")
def test_torch_backend(case: Case, dtype: torch.dtype) -> None:
    compare(case, dtype, "torch")


@pytest.mark.parametrize("recompute", ["activations", "all"])
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name in ("masked", "odd-widths", "clamped", "shared")], ids=lambda c: c.name
)
@pytest.mark.usefixtures("poisoned")
def test_torch_backend_recomputes(case: Case, recompute: str) -> None:
    compare(case, torch.float32, "torch", recompute)
    compare(case, torch.bfloat16, "torch", recompute)


@pytest.mark.parametrize("case", [c for c in CASES if c.tokens < 100 and c.hidden < 100], ids=lambda case: case.name)
def test_reference_backend_is_the_derivative(case: Case) -> None:
    inputs = make_inputs(case, torch.float64).to(torch.float64, torch.float64)
    plain = inputs.to(torch.float64, torch.float64)
    y, y_plain = mok_moe(inputs, "reference", Options(case.clamp)), plain_moe(plain, case.clamp)
    assert relative_error(y, y_plain) < 1e-14
    wanted = gradients(plain, y_plain)
    for name, gradient in gradients(inputs, y).items():
        assert relative_error(gradient, wanted[name]) < 1e-13, name


@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_every_token_count(top_k: int) -> None:
    for tokens in range(1, 131):
        case = Case(f"T={tokens}", tokens=tokens, hidden=24, width=16, top_k=top_k)
        # One token gives one router-weight gradient, and a single sum may cancel: nothing averages the two errors.
        compare(case, torch.float32, "torch", factor=4.0 if tokens > 16 else 16.0)


def test_experts_without_tokens_get_zero_gradients_from_dirty_memory() -> None:
    inputs = make_inputs(Case("all", tokens=32, top_k=8), torch.float32)
    gradients(inputs, mok_moe(inputs, "torch", Options()))
    inputs.ids_TK = torch.tensor([[0], [1], [2], [3]], dtype=torch.int32)
    few = Inputs(
        inputs.x_TH[:4], inputs.weights_TK[:4, :1], inputs.gate_EIH, inputs.up_EIH, inputs.down_EHI, None, None, None,
        inputs.ids_TK, inputs.dy_TH[:4],
    )  # fmt: skip
    found = gradients(few, mok_moe(few, "torch", Options()))
    for name in ("gate_EIH", "up_EIH", "down_EHI"):
        assert torch.equal(found[name][4:], torch.zeros_like(found[name][4:])), name
        assert found[name][:4].abs().sum() > 0


def test_a_token_that_is_not_finite_reaches_no_expert_but_its_own() -> None:
    """Padding rows hold nobody's values, not even times zero."""
    inputs = make_inputs(Case("infinite", tokens=12, top_k=1), torch.float32)
    inputs.ids_TK = (torch.arange(12, dtype=torch.int32) % 3).unsqueeze(1)
    with torch.no_grad():
        inputs.x_TH[0], inputs.dy_TH[0] = torch.inf, torch.nan
    found = gradients(inputs, y := mok_moe(inputs, "torch", Options()))
    assert not y[0].isfinite().any() and y[1:].isfinite().all()
    for name in ("gate_EIH", "up_EIH", "down_EHI"):
        assert not found[name][0].isfinite().all() and found[name][1:].isfinite().all(), name
    assert found["x_TH"][1:].isfinite().all() and found["weights_TK"][1:].isfinite().all()


def test_swapped_gate_and_up_are_noticed_on_small_values() -> None:
    case = Case("small", scale=1e-3)
    inputs = make_inputs(case, torch.float32)
    exact = plain_moe(inputs.to(torch.float64, torch.float64), 0.0)
    plain = plain_moe(inputs, 0.0)
    inputs.gate_EIH, inputs.up_EIH = inputs.up_EIH, inputs.gate_EIH
    wrong = mok_moe(inputs, "torch", Options())
    assert torch.allclose(wrong.double(), exact, atol=1e-6)  # what an absolute tolerance would say
    with pytest.raises(AssertionError, match="relative error"):
        assert_no_worse("y", wrong, exact, plain, FACTOR[torch.float32])


def test_named_backend_that_cannot_run_says_why() -> None:
    with pytest.raises(UsageError, match=r"moe\.backend = torch cannot run here: dtype torch\.float64"):
        choose("torch", LayerShape(16, 16, 2, 1), torch.float64, torch.device("cpu"))
    with pytest.raises(UsageError, match=r"moe\.backend = 'cuda': must be one of auto, reference, torch"):
        choose("cuda", LayerShape(16, 16, 2, 1), torch.float32, torch.device("cpu"))
    backend, notice = choose("auto", LayerShape(16, 16, 2, 1), torch.float32, torch.device("cpu"))
    assert backend.__name__ == "mok.backends.torch" and not (notice or "").startswith("error")
