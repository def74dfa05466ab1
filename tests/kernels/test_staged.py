"""The staged backend against float64, every gradient by name: interpreted here, compiled where there is a GPU."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from mok.autograd import Plan, experts
from mok.backends import choose, staged
from mok.backends import torch as torch_backend
from mok.backends.interface import LayerShape, Options
from mok.backends.quantization import round_rows
from mok.errors import UsageError
from mok.grid import CallGrid
from mok.launch import staged as launch
from mok.quantization import Quantization
from mok.schedule import Schedule, build_schedule
from tests.cases import CASES, Case, Inputs, make_inputs
from tests.tolerances import assert_no_worse, assert_same_bits, relative_error
from tests.unit.test_backends import gradients, plain_moe

CPU = torch.device("cpu")
RECOMPUTED = ("masked", "clamped", "shared")


@pytest.fixture(autouse=True)
def gpu(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU a small Hopper is pretended, so that programs share the tasks of every launch."""
    if device.type == "cpu":
        monkeypatch.setattr(launch, "gpu_of", lambda device: launch.Gpu(90, 3, 232448))


def fit(case: Case, device: torch.device) -> Case:
    """A clamp that bf16 can hold, so that plain torch's bf16 clamp opens the same gates; and fewer experts for the interpreter,
    which needs a second for some twenty tiles."""
    case = replace(case, clamp=0.0625 if case.clamp else 0.0)
    return case if device.type == "cuda" else replace(case, experts=min(case.experts, 4), top_k=min(case.top_k, 4))


def on(device: torch.device, inputs: Inputs) -> Inputs:
    """The same call with its leaves on `device`."""
    moved = {name: value.detach().to(device).requires_grad_() for name, value in inputs.differentiable().items()}
    return replace(inputs, **moved, ids_TK=inputs.ids_TK.to(device), dy_TH=inputs.dy_TH.to(device))


def backend_moe(backend: ModuleType, inputs: Inputs, options: Options) -> Tensor:
    width, hidden = inputs.gate_EIH.shape[1:]
    shared = None if inputs.shared_gate_up_JH is None else (inputs.shared_gate_up_JH, inputs.shared_down_HS)
    shared_size = shared[1].shape[1] if shared else 0
    shape = LayerShape(hidden, width, inputs.gate_EIH.shape[0], inputs.ids_TK.shape[1], shared_size=shared_size)
    plan = backend.build_schedule if hasattr(backend, "build_schedule") else plan_on_host
    schedule = plan(inputs.ids_TK, shape, CallGrid(), options)
    weights = (inputs.gate_EIH, inputs.up_EIH, inputs.down_EHI)
    return experts(inputs.x_TH, inputs.weights_TK, weights, Plan(backend, schedule, options), shared, inputs.shared_scale_T)


def plan_on_host(ids_TK: Tensor, shape: LayerShape, grid: CallGrid, options: Options) -> Schedule:
    return build_schedule(ids_TK, shape.num_experts, grid)


def staged_moe(inputs: Inputs, options: Options) -> Tensor:
    return backend_moe(staged, inputs, options)


def compare(case: Case, device: torch.device, recompute: str = "none", factor: float = 0.0) -> None:
    factor = factor or (1.1 if case.tokens > 8 else 2.0)  # of single rows nothing averages the two errors
    inputs = make_inputs(case, torch.bfloat16)
    exact, plain = inputs.to(torch.float64, torch.float64), inputs.to(torch.bfloat16, torch.float32)
    inputs = on(device, inputs) if device.type == "cuda" else inputs
    y = staged_moe(inputs, Options(case.clamp, recompute))
    y_exact, y_plain = plain_moe(exact, case.clamp), plain_moe(plain, case.clamp)
    assert_no_worse(f"{case.name} y", y.cpu(), y_exact, y_plain, factor)
    wanted, allowed = gradients(exact, y_exact), gradients(plain, y_plain)
    for name, gradient in gradients(inputs, y).items():
        assert_no_worse(f"{case.name} d{name}", gradient.cpu(), wanted[name], allowed[name], factor)


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.hidden % 16 == 0 and case.width % 16 == 0] + [Case("no-token-shared", tokens=0, shared=48)],
    ids=lambda case: case.name,
)
def test_no_worse_than_plain_torch(case: Case, device: torch.device) -> None:
    case = fit(case, device)
    compare(case, device, "all" if case.name in RECOMPUTED else "none")


@pytest.mark.parametrize(
    ("quantization", "case"),
    [
        (Quantization("fp8_block"), Case("coded", tokens=37, hidden=256, width=384, experts=3, top_k=2, routing="masked")),
        (Quantization("fp8_block"), Case("bf16-shared", tokens=9, hidden=128, width=128, experts=2, top_k=2, shared=48)),
        (
            Quantization("fp8_block", shared_experts=True, dispatch=True),
            Case("coded-shared", tokens=9, hidden=128, width=128, experts=2, top_k=2, shared=256),
        ),
        (Quantization("mxfp8"), Case("groups", tokens=37, hidden=288, width=160, experts=3, top_k=2, routing="masked")),
        (
            Quantization("mxfp8", shared_experts=True, dispatch=True),
            Case("shared-groups", tokens=5, hidden=64, width=32, experts=2, top_k=2, shared=32),
        ),
    ],
    ids=lambda case: getattr(case, "name", case.format if isinstance(case, Quantization) else case),
)
def test_8_bit_operands_no_worse_than_their_emulation(quantization: Quantization, case: Case, device: torch.device) -> None:
    if quantization.format == "mxfp8" and device.type == "cuda" and torch.cuda.get_device_capability()[0] != 10:
        pytest.skip("scaled products are Blackwell's")
    inputs = make_inputs(case, torch.bfloat16)
    exact, plain = inputs.to(torch.float64, torch.float64), inputs.to(torch.bfloat16, torch.float32)
    options = Options(quantization=quantization, recompute="all" if case.shared else "none")
    y_exact, y_plain = plain_moe(exact, 0.0), backend_moe(torch_backend, plain, options)
    wanted, allowed = gradients(exact, y_exact), gradients(plain, y_plain)
    inputs = on(device, inputs) if device.type == "cuda" else inputs
    y = staged_moe(inputs, options)
    assert_no_worse("y", y.cpu(), y_exact, y_plain, 1.1)
    for name, gradient in gradients(inputs, y).items():
        assert_no_worse(f"d{name}", gradient.cpu(), wanted[name], allowed[name], 1.1)


def test_shared_experts_and_dispatch_in_8_bits(device: torch.device) -> None:
    """Rows of x and dy are rounded for the routed experts alone, their weight gradients included."""
    inputs = on(
        device, make_inputs(Case("sent", tokens=9, hidden=128, width=128, experts=2, top_k=2, shared=128), torch.bfloat16)
    )

    def run(inputs: Inputs, **switches: bool) -> dict[str, Tensor]:
        y = staged_moe(inputs, Options(quantization=Quantization("fp8_block", **switches)))
        return {"y": y.detach()} | gradients(inputs, y)

    plain, shared, sent = run(inputs), run(inputs, shared_experts=True), run(inputs, dispatch=True)
    assert not torch.equal(shared["y"], plain["y"]) and not torch.equal(shared["x_TH"], plain["x_TH"])
    rounded = {name: round_rows(getattr(inputs, name).detach(), 128) for name in ("x_TH", "dy_TH")}
    wanted = run(replace(inputs, dy_TH=rounded["dy_TH"], x_TH=rounded["x_TH"].requires_grad_()))
    for name in ("gate_EIH", "up_EIH", "down_EHI", "weights_TK"):
        assert_same_bits(name, sent[name], wanted[name])
        assert_same_bits(name, shared[name], plain[name])
        assert name == "weights_TK" or not torch.equal(sent[name], plain[name])
    for name in ("y", "x_TH", "shared_gate_up_JH", "shared_down_HS", "shared_scale_T"):
        assert_same_bits(name, sent[name], plain[name])


@pytest.mark.parametrize(
    ("quantization", "ranks", "reason"),
    [
        (Quantization("fp8_block", dispatch=True), 2, "quantize_dispatch over 2 ranks"),
        (Quantization("fp8_block", weight_gradients=True), 1, "quantize_weight_gradients"),
        (Quantization("mxfp8"), 1, "in blocks of 128"),
        (Quantization("fp8_block", dispatch=True, shared_experts=True), 1, ""),
    ],
)
def test_8_bit_operands_that_it_cannot_take(quantization: Quantization, ranks: int, reason: str) -> None:
    shape = LayerShape(128, 128, 8, 2, ranks=ranks, shared_size=128)
    reasons = "; ".join(staged.why_not(shape, torch.bfloat16, CPU, quantization))
    assert reason in reasons and ("quantize" in reasons) == ("quantize" in reason)


def test_second_backward_is_refused(device: torch.device) -> None:
    """The first one has overwritten what was kept."""
    inputs = make_inputs(fit(Case("twice", tokens=5), device), torch.bfloat16)
    inputs = on(device, inputs)
    y = staged_moe(inputs, Options())
    y.backward(inputs.dy_TH, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(inputs.dy_TH)


def test_main_gradients_are_continued(device: torch.device) -> None:
    """Two calls through `main_grad` add up, and an expert without rows keeps its bytes."""
    case = fit(Case("carried", tokens=21, top_k=1, experts=4, routing="half"), device)
    inputs = on(device, make_inputs(case, torch.bfloat16))
    weights = {name: getattr(inputs, name) for name in ("gate_EIH", "up_EIH", "down_EHI")}
    once = dict(zip(weights, torch.autograd.grad(staged_moe(inputs, Options()), weights.values(), inputs.dy_TH), strict=True))
    for weight in weights.values():
        weight.main_grad = torch.full(weight.shape, 0.5, device=device)
    staged_moe(inputs, Options()).backward(inputs.dy_TH)
    for name, weight in weights.items():
        assert weight.grad is None
        assert relative_error(weight.main_grad - 0.5, once[name]) < 4e-3, name
        assert_same_bits(name, weight.main_grad[2:], torch.full_like(weight.main_grad[2:], 0.5))


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        (LayerShape(1025, 48, 8, 2), torch.bfloat16, "hidden size 1025: must be a multiple of 16"),
        (LayerShape(64, 37, 8, 2), torch.bfloat16, "intermediate size 37"),
        (LayerShape(64, 48, 8, 2, shared_size=8), torch.bfloat16, "shared intermediate size 8"),
        (LayerShape(64, 48, 8, 2), torch.float32, "torch.float32"),
        (LayerShape(64, 48, 8, 2), torch.bfloat16, "device cpu: needs a CUDA device"),
    ],
)
def test_says_why_it_cannot_run(shape: LayerShape, dtype: torch.dtype, reason: str) -> None:
    assert any(reason in found for found in staged.why_not(shape, dtype, CPU))


def test_named_backend_without_a_gpu_says_so() -> None:
    with pytest.raises(UsageError, match=r"moe\.backend = staged cannot run here: device cpu: needs a CUDA device"):
        choose("staged", LayerShape(64, 48, 8, 2), torch.bfloat16, CPU)


def test_configuration_fits_the_device() -> None:
    """Fewer columns, then fewer stages and shorter steps; the same answer every time; never more than there is."""
    for limit in (49152, 65536, 101376, 166912, 232448):
        gpu = launch.Gpu(90, 132, limit)
        config = launch.choose_config(gpu)
        assert config.shared_memory_bytes <= limit
        assert config == launch.choose_config(gpu)
    assert launch.choose_config(launch.Gpu(90, 132, 232448)) == launch.StagedConfig(256, 64, 3)
    with pytest.raises(UsageError, match="16384 bytes of shared memory"):
        launch.choose_config(launch.Gpu(90, 132, 16384))
