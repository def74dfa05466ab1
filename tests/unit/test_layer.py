"""`mok.moe` and `mok.MoE`: what users call, where gradients go, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import mok
from mok.backends.interface import Options
from mok.errors import UsageError
from mok.grid import CallGrid
from mok.layer import moe_layer
from tests.tolerances import assert_same_bits, relative_error


def arguments(tokens: int = 9, hidden: int = 32, width: int = 48, experts: int = 4, top_k: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k]
    return {
        "x_TH": normal(tokens, hidden),
        "expert_ids_TK": ids,
        "weights_TK": torch.rand(tokens, top_k, generator=generator),
        "w_gate_EIH": normal(experts, width, hidden),
        "w_up_EIH": normal(experts, width, hidden),
        "w_down_EHI": normal(experts, hidden, width),
    }


def test_layer_runs_and_every_parameter_gets_a_gradient() -> None:
    torch.manual_seed(0)
    layer = mok.MoE(32, 48, 8, 2, num_shared_experts=2, shared_intermediate_size=24, shared_gate=True)
    x = torch.randn(3, 7, 32, requires_grad=True)
    y = layer(x)
    y.square().sum().backward()
    assert y.shape == x.shape
    assert x.grad is not None
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("width", [48, 37])
@pytest.mark.parametrize("shared", [{}, {"num_shared_experts": 2, "shared_gate": True}])
def test_layer_in_fp32_against_float64(shared: dict[str, Any], width: int) -> None:
    """Through the router too: every gradient of the torch backend in fp32 against the reference in float64."""
    torch.manual_seed(1)
    layer = mok.MoE(32, width, 8, 2, backend="torch", **shared)
    exact = mok.MoE(32, width, 8, 2, backend="reference", dtype=torch.float64, **shared)
    exact.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    x = torch.randn(40, 32)
    grid = CallGrid(4, 2, (0, 0))
    results = []
    for module, dtype in ((layer, torch.float32), (exact, torch.float64)):
        leaf = x.to(dtype, copy=True).requires_grad_()
        y, stats = module.call(leaf, grid)
        (y.square().sum() + 0.1 * stats.balance_loss_C.sum() + 0.1 * stats.z_loss_C.sum()).backward()
        results.append({"y": y, "x": leaf.grad, **{name: p.grad for name, p in module.named_parameters()}})
    for name, value in results[0].items():
        assert relative_error(value, results[1][name]) < 2e-6, name


def test_ids_of_both_widths_and_any_layout_give_the_same() -> None:
    values = arguments(tokens=12)
    expected = mok.moe(**values)
    assert_same_bits("int32", mok.moe(**{**values, "expert_ids_TK": values["expert_ids_TK"].int()}), expected)
    transposed = {name: value.transpose(0, 1).contiguous().transpose(0, 1) for name, value in values.items()}
    assert_same_bits("transposed", mok.moe(**transposed), expected)
    wide = {name: torch.stack((value, value + 1), -1)[..., 0] for name, value in values.items()}
    assert_same_bits("every second", mok.moe(**wide), expected)
    batched = {name: values[name].view(4, 3, -1).transpose(0, 1) for name in ("x_TH", "expert_ids_TK", "weights_TK")}
    y = mok.moe(**{**values, **batched})
    assert_same_bits("batched", y.transpose(0, 1).reshape(12, -1), expected)


def test_gradients_do_not_depend_on_the_layout_of_inputs() -> None:
    found = []
    for transposed in (False, True):
        values = arguments(tokens=12)
        if transposed:
            values = {name: value.transpose(0, 1).contiguous().transpose(0, 1) for name, value in values.items()}
        leaves = [value.requires_grad_() for value in values.values() if value.is_floating_point()]
        y = mok.moe(**values)
        found.append(torch.autograd.grad(y, leaves, torch.ones_like(y).t().contiguous().t()))
    for one, two in zip(*found, strict=True):
        assert_same_bits("gradient", one, two)


@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32)])
def test_no_tokens(shape: tuple[int, ...]) -> None:
    layer = mok.MoE(32, 48, 8, 2, num_shared_experts=1)
    layer(torch.randn(3, 32))
    x = torch.zeros(shape, requires_grad=True)
    y, _ = layer.call(x.view(-1, 32))
    assert y.shape == (0, 32)
    y.sum().backward()
    assert torch.equal(layer.w_gate_up.grad, torch.zeros_like(layer.w_gate_up))
    assert torch.equal(layer.w_shared_down.grad, torch.zeros_like(layer.w_shared_down))


def test_main_grads_are_continued_in_fp32() -> None:
    torch.manual_seed(0)
    layer = mok.MoE(32, 48, 8, 2, num_shared_experts=1, dtype=torch.bfloat16)
    inputs = [torch.randn(20, 32, dtype=torch.bfloat16) for _ in range(2)]
    expected: dict[str, Tensor] = {}
    for x in inputs:
        layer.zero_grad()
        layer(x).sum().backward()
        for name, parameter in layer.named_parameters():
            expected[name] = expected.get(name, 0) + parameter.grad.float()
    layer.zero_grad()
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros(parameter.shape)
    for x in inputs:
        layer(x).sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is None, name
        assert relative_error(parameter.main_grad, expected[name]) < 5e-3, name  # .grad rounds each part to bf16


def test_a_main_grad_that_does_not_fit_is_refused() -> None:
    layer = mok.MoE(32, 48, 8, 2)
    layer.w_gate_up.main_grad = torch.zeros(layer.w_gate_up.shape)
    with pytest.raises(UsageError, match="some have a main_grad and some have none"):
        layer(torch.randn(4, 32)).sum().backward()
    layer.w_down.main_grad = torch.zeros(layer.w_down.shape, dtype=torch.bfloat16)
    with pytest.raises(UsageError, match=r"main_grad is torch\.bfloat16 .*: must be float32"):
        layer(torch.randn(4, 32)).sum().backward()


def test_frozen_experts_get_no_gradient() -> None:
    layer = mok.MoE(32, 48, 8, 2, num_shared_experts=1)
    layer.w_gate_up.requires_grad_(False)
    layer.w_down.requires_grad_(False)
    x = torch.randn(6, 32, requires_grad=True)
    layer(x).sum().backward()
    assert layer.w_gate_up.grad is None and layer.w_down.grad is None
    assert x.grad is not None and layer.router.weight.grad is not None and layer.w_shared_down.grad is not None


def test_misuse_of_saved_tensors_is_an_error() -> None:
    layer = mok.MoE(32, 48, 8, 2)
    y = layer(torch.randn(6, 32)).sum()
    with torch.no_grad():
        layer.w_down.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    y = layer(torch.randn(6, 32)).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


@pytest.mark.parametrize("recompute", ["none", "activations", "all"])
def test_under_checkpoint_and_with_recomputation_the_bits_are_the_same(recompute: str) -> None:
    torch.manual_seed(0)
    plain = mok.MoE(32, 48, 8, 2, num_shared_experts=1)
    other = mok.MoE(32, 48, 8, 2, num_shared_experts=1, recompute=recompute)
    other.load_state_dict(plain.state_dict())
    x = torch.randn(30, 32)
    gradients = []
    for layer, wrapped in ((plain, False), (other, False), (other, True)):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        y = checkpoint(layer, leaf, use_reentrant=False) if wrapped else layer(leaf)
        y.square().sum().backward()
        gradients.append([y, leaf.grad, *(p.grad.clone() for p in layer.parameters())])
    for found in gradients[1:]:
        for one, two in zip(gradients[0], found, strict=True):
            assert_same_bits(recompute, one, two)


def test_offsets_of_more_than_32_bits() -> None:
    """Experts 1.2e9 elements apart: the memory between them is never touched."""
    small = arguments(experts=3, hidden=16, width=16)
    stride = 1_200_000_000
    try:
        memory = torch.empty(2 * stride + 3 * 16 * 16, dtype=torch.float32)
    except RuntimeError:
        pytest.skip("this machine refuses to reserve 9.6 GB of address space")
    routed = []
    for index, name in enumerate(("w_gate_EIH", "w_up_EIH", "w_down_EHI")):
        view = memory.as_strided((3, 16, 16), (stride, 16, 1), index * 256)
        routed.append(view.copy_(small[name]))
    y, _ = moe_layer(
        small["x_TH"], small["expert_ids_TK"], small["weights_TK"], tuple(routed), options=Options(), backend="torch",
        grid=CallGrid(),
    )  # fmt: skip
    assert_same_bits("y", y, mok.moe(**small))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"expert_ids_TK": torch.zeros(9, 3, dtype=torch.int64)}, r"expert_ids \(9, 3\) and weights \(9, 2\)"),
    ({"expert_ids_TK": torch.zeros(9, 2)}, r"expert_ids are torch\.float32: must be torch\.int32 or torch\.int64"),
    ({"expert_ids_TK": torch.full((9, 2), 4)}, r"expert ids run from 4 to 4: must be -1 \(masked\) or 0 to 3"),
    ({"weights_TK": torch.zeros(9, 2, dtype=torch.int64)}, r"router weights are torch\.int64"),
    ({"w_down_EHI": torch.zeros(4, 48, 32)}, r"w_down \(4, 48, 32\): must be \[experts, H, I\] with H = 32"),
    ({"w_up_EIH": torch.zeros(4, 40, 32)}, r"w_up \(4, 40, 32\): must be \(4, 48, 32\)"),
    ({"w_gate_EIH": torch.zeros(4, 48, 32, dtype=torch.bfloat16)}, r"x is torch\.float32 and expert weight 0 torch\.bfloat16"),
    ({"w_gate_EIH": torch.zeros(4, 48, 32, device="meta")}, "x is on cpu and expert weight 0 on meta"),
    ({"clamp": -1.0}, r"clamp = -1\.0: must be 0"),
    ({"recompute": "some"}, "recompute = 'some': must be one of none, activations, all"),
    ({"backend": "fast"}, r"moe\.backend = 'fast': must be one of"),
    ({"grid": CallGrid(2, 2, (0,), 2, 0)}, "a call over 2 ranks needs a transport"),
    ({"grid": CallGrid(2, 1, (0, 0))}, "9 tokens do not fill 2 slices evenly"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED, ids=[message[:24] for _, message in REFUSED])
def test_arguments_that_do_not_fit_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        mok.moe(**{**arguments(), **changed})


# torch 2.13's own tracing of an autograd function instantiates it and is warned by torch.
TRACED = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@TRACED
def test_compiled_in_one_graph_the_bits_are_the_same() -> None:
    torch.manual_seed(0)
    layer = mok.MoE(32, 48, 8, 2, num_shared_experts=1, shared_gate=True)
    x = torch.randn(12, 32)
    results = []
    for module in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        y.square().sum().backward()
        results.append([y, leaf.grad, *(p.grad.clone() for p in layer.parameters())])
    for one, two in zip(*results, strict=True):
        assert_same_bits("compiled", two, one)


@TRACED
def test_compiling_refuses_main_grads() -> None:
    layer = mok.MoE(32, 48, 8, 2)
    layer.w_gate_up.main_grad = torch.zeros(layer.w_gate_up.shape)
    with pytest.raises(Exception, match=r"expert gradients go to \.grad"):
        torch.compile(layer, fullgraph=True, backend="aot_eager")(torch.randn(4, 32))


def test_the_compiled_operation_is_registered_soundly() -> None:
    values = arguments()
    routed = [values[name].requires_grad_() for name in ("w_gate_EIH", "w_up_EIH", "w_down_EHI")]
    x, ids, weights = values["x_TH"].requires_grad_(), values["expert_ids_TK"], values["weights_TK"].requires_grad_()
    torch.library.opcheck(torch.ops.mok.experts, (x, ids, weights, [], routed, [], 0.0, "torch", 1, [0]))
