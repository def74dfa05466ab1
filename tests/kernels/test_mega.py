"""The megakernel on the GPU it is for: numbers, bits, edges, misuse. On other machines only its choice of settings runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

import mok
from mok.autograd import Plan, experts
from mok.backends.interface import LayerShape, Options
from mok.errors import RunError
from mok.grid import CallGrid
from mok.launch.config import DeviceFacts, KernelConfig, device_facts, why_not
from mok.launch.mega import row_box
from mok.launch.plan import TaskOrder
from mok.launch.status import check_status, forget_status, status_word
from mok.launch.tables import choose_config
from mok.quantization import Quantization
from tests.cases import CASES, Case, Inputs, make_inputs
from tests.gpu import no_waiting
from tests.tolerances import assert_no_worse, assert_same_bits

H200 = DeviceFacts("NVIDIA H200", (9, 0), 132, 232448)

LARGE = (
    Case("olmoe-like", tokens=1000, hidden=2048, width=256, experts=8, top_k=4, weights="signed"),
    Case("deepseek-like", tokens=700, hidden=7168, width=512, experts=4, top_k=2),
    Case("narrow", tokens=257, hidden=48, width=80, experts=5, top_k=5),
    Case("between-tiles", tokens=500, hidden=2880, width=720, experts=16, top_k=4, routing="half"),
    Case("masked-clamped", tokens=300, hidden=4096, width=384, experts=6, top_k=3, routing="masked", clamp=1.5),
    Case("ten-of-many", tokens=64, hidden=1024, width=512, experts=64, top_k=10, weights="tiny"),
    Case("shared-too", tokens=333, hidden=512, width=256, experts=8, top_k=2, shared=384),
    Case("wide-shared", tokens=1030, hidden=7168, width=256, experts=6, top_k=3, shared=2064, clamp=2.0),
    Case("one-hot", tokens=900, hidden=2048, width=768, experts=16, top_k=8, routing="one-expert"),
)
"""Sizes at which errors average out: the bar is 1.1 times plain torch's error."""

# Few elements near a small clamp: whether one of them passes decides the error of the whole. LARGE has a clamped case.
SMALL = tuple(c for c in CASES if not (c.hidden % 16 or c.width % 16 or c.shared % 16) and c.name != "clamped")


# ---------------------------------------------------------------------------------------------------------------------
# Choice of settings: pure functions


def test_settings_fit_the_device_or_are_refused() -> None:
    shape = LayerShape(7168, 2048, 256, 8)
    config = choose_config(shape, H200)
    assert why_not(config, shape, H200) == []
    small = replace(H200, shared_bytes=101376)
    fitted = choose_config(shape, small)
    assert fitted.shared_bytes <= KernelConfig(stages=2, pieces=3).shared_bytes
    assert any("shared memory" in reason for reason in why_not(fitted, shape, small))


@pytest.mark.parametrize(
    ("config", "shape", "device", "named"),
    [
        (KernelConfig(), LayerShape(1025, 64, 8, 2), H200, "hidden_size = 1025"),
        (KernelConfig(), LayerShape(64, 37, 8, 2), H200, "intermediate_size = 37"),
        (KernelConfig(), LayerShape(64, 64, 1024, 2), H200, "num_experts = 1024"),
        (
            KernelConfig(),
            LayerShape(64, 64, 8, 2),
            replace(H200, capability=(10, 0)),
            "sm_100; its bodies for that are compiled but have not run",
        ),
        (KernelConfig(), LayerShape(64, 64, 8, 2), None, "CUDA device"),
        (KernelConfig(programs=133), LayerShape(64, 64, 8, 2), H200, "133 programs"),
        (KernelConfig(stages=1), LayerShape(64, 64, 8, 2), H200, "stages = 1"),
        (KernelConfig(mover_share=1.5), LayerShape(64, 64, 8, 2), H200, "mover_share = 1.5"),
    ],
)
def test_every_requirement_is_named(config: KernelConfig, shape: LayerShape, device: DeviceFacts | None, named: str) -> None:
    reasons = why_not(config, shape, device)
    assert len(reasons) == 1 and named in reasons[0]


def test_nearest_measured_row_is_taken() -> None:
    assert choose_config(LayerShape(2048, 1024, 64, 8), H200).forward_order == TaskOrder(16, 1)
    assert choose_config(LayerShape(4096, 14336, 8, 2), H200).forward_order.groups_per_phase == 0
    assert choose_config(LayerShape(6144, 2048, 256, 8), replace(H200, name="NVIDIA H100 80GB HBM3")) == choose_config(
        LayerShape(7168, 2048, 256, 8), H200
    )


@pytest.mark.parametrize("hidden", [16, 48, 64, 1024, 2048, 2880, 4096, 4112, 7168])
def test_boxes_cover_a_row_once(hidden: int) -> None:
    box = row_box(hidden)
    assert box.part * box.parts == hidden
    assert (box.pieces - 1) * box.box_parts < box.parts <= box.pieces * box.box_parts
    assert 128 <= box.part * box.box_parts * 2 <= 8192 and box.box_parts <= 256
    assert 64 % box.rows == 0 and box.units_per_block == 64 // box.rows * box.pieces


# ---------------------------------------------------------------------------------------------------------------------
# On the GPU


@pytest.fixture
def hopper() -> torch.device:
    device = torch.device("cuda", torch.cuda.current_device())
    facts = device_facts(device)
    if facts is None or facts.capability != (9, 0):
        pytest.skip(f"the megakernel runs on sm_90, this is {facts}")
    forget_status(device)  # of a test that failed
    poison(device)
    return device


def poison(device: torch.device) -> None:
    """Fill the memory that the next buffers will be taken from with NaN."""
    blocks = [torch.full((size,), torch.nan, device=device) for size in (1 << 8, 1 << 12, 1 << 16, 1 << 20, 1 << 27)]
    del blocks


def on(inputs: Inputs, device: torch.device) -> Inputs:
    moved = {name: value.detach().to(device).requires_grad_() for name, value in inputs.differentiable().items()}
    return replace(inputs, **moved, ids_TK=inputs.ids_TK.to(device), dy_TH=inputs.dy_TH.to(device))


def run(
    inputs: Inputs,
    clamp: float = 0.0,
    recompute: str = "none",
    config: KernelConfig | None = None,
    backend: str = "mega",
    quantization: Quantization | None = None,
) -> dict[str, Tensor]:
    """Output and every gradient by name; expert gradients in fp32, through main_grad of NaN that is written over."""
    leaves = inputs.differentiable()
    width, hidden = inputs.gate_EIH.shape[1:]
    shared = () if inputs.shared_gate_up_JH is None else (leaves["shared_gate_up_JH"], leaves["shared_down_HS"])
    shape = LayerShape(
        hidden, width, inputs.gate_EIH.shape[0], inputs.ids_TK.shape[1], shared_size=shared[1].shape[1] if shared else 0
    )
    options = Options(clamp, recompute, kernel=config, quantization=quantization)
    plan = Plan.of(backend, shape, inputs.ids_TK, options, CallGrid(), torch.bfloat16)
    routed = tuple(leaves[name] for name in ("gate_EIH", "up_EIH", "down_EHI"))
    for weight in routed:
        weight.lane_grads = torch.full((1, *weight.shape), torch.nan, device=weight.device)
        weight.lanes_started = [False]
    y = experts(leaves["x_TH"], leaves["weights_TK"], routed, plan, shared or None, inputs.shared_scale_T)
    others = [name for name in leaves if name not in ("gate_EIH", "up_EIH", "down_EHI")]
    gradients = torch.autograd.grad(y, [leaves[name] for name in others], inputs.dy_TH)
    check_status(y.device)
    found = {"y": y.detach()} | dict(zip(others, gradients, strict=True))
    return found | {name: leaves[name].lane_grads[0] for name in ("gate_EIH", "up_EIH", "down_EHI")}


def plain(inputs: Inputs, clamp: float, wide: torch.dtype) -> dict[str, Tensor]:
    """Expert by expert under autograd; rows of experts are summed, and expert gradients kept, in `wide`."""
    leaves = inputs.differentiable()
    x = leaves["x_TH"]
    y = torch.zeros(x.shape, dtype=wide, device=x.device)
    for e in range(inputs.gate_EIH.shape[0]):
        token, slot = torch.where(inputs.ids_TK == e)
        gate, up = x[token] @ leaves["gate_EIH"][e].t(), x[token] @ leaves["up_EIH"][e].t()
        if clamp:
            gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
        rows = (torch.nn.functional.silu(gate) * up) @ leaves["down_EHI"][e].t()
        y = y.index_add(0, token, rows.to(wide) * leaves["weights_TK"][token, slot].unsqueeze(1))
    if inputs.shared_gate_up_JH is not None:
        gate, up = (x @ leaves["shared_gate_up_JH"].t()).chunk(2, dim=1)
        if clamp:
            gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
        rows = (torch.nn.functional.silu(gate) * up) @ leaves["shared_down_HS"].t()
        y = y + rows.to(wide) * leaves["shared_scale_T"].unsqueeze(1)
    y = y.to(x.dtype)
    found = torch.autograd.grad(y, list(leaves.values()), inputs.dy_TH.to(x.dtype), allow_unused=True)
    zeros = (torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves.values(), found, strict=True))
    return {"y": y.detach()} | dict(zip(leaves, zeros, strict=True))


def assert_right(case: Case, device: torch.device, factor: float) -> None:
    inputs = on(make_inputs(case, torch.bfloat16), device)
    exact = plain(inputs.to(torch.float64, torch.float64), case.clamp, torch.float64)
    allowed = plain(inputs.to(torch.bfloat16, torch.float32), case.clamp, torch.float32)
    found = run(inputs, case.clamp)
    for name, value in found.items():
        assert_no_worse(f"{case.name} {name}", value, exact[name], allowed[name], factor)


def assert_all_same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    for name, value in first.items():
        assert_same_bits(name, value, second[name])


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_no_further_from_float64_than_plain_torch(case: Case, hopper: torch.device) -> None:
    assert_right(case, hopper, 1.1)


@pytest.mark.gpu
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_small_cases(case: Case, hopper: torch.device) -> None:
    assert_right(case, hopper, 1.5)


@pytest.mark.gpu
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_every_number_of_tokens(top_k: int, hopper: torch.device) -> None:
    """Rows do not depend on the batch, so each batch must have the bits of the longest one's first rows."""
    longest = on(make_inputs(Case("longest", tokens=130, hidden=48, width=48, top_k=top_k), torch.bfloat16), hopper)
    whole = run(longest)
    for tokens in (*range(1, 18), 31, 33, 63, 64, 65, 99, 127, 128, 129):
        leaves = {name: getattr(longest, name)[:tokens].detach().requires_grad_() for name in ("x_TH", "weights_TK")}
        part = run(replace(longest, **leaves, ids_TK=longest.ids_TK[:tokens], dy_TH=longest.dy_TH[:tokens]))
        for name in ("y", "x_TH", "weights_TK"):
            assert_same_bits(f"{tokens} tokens: {name}", part[name], whole[name][:tokens])


@pytest.mark.gpu
def test_a_token_has_the_same_bits_in_any_company(hopper: torch.device) -> None:
    inputs = on(make_inputs(Case("company", tokens=257, hidden=256, width=128), torch.bfloat16), hopper)
    whole = run(inputs)
    for rows in ([200], [3, 200, 7], list(range(256, 192, -1))):
        pick = torch.tensor(rows, device=hopper)
        leaves = {name: getattr(inputs, name)[pick].detach().requires_grad_() for name in ("x_TH", "weights_TK")}
        part = run(replace(inputs, **leaves, ids_TK=inputs.ids_TK[pick], dy_TH=inputs.dy_TH[pick]))
        for name in ("y", "x_TH", "weights_TK"):
            assert_same_bits(name, part[name], whole[name][pick])


@pytest.mark.gpu
def test_repeats_and_settings_change_no_bit(hopper: torch.device) -> None:
    case = Case("repeat", tokens=3000, hidden=2048, width=256, experts=32, top_k=8)
    inputs = on(make_inputs(case, torch.bfloat16), hopper)
    first = run(inputs)
    for _ in range(20):
        poison(hopper)
        assert_all_same_bits(first, run(inputs))
    for config in (
        KernelConfig(TaskOrder(1, 1), TaskOrder(1), mover_share=0.0),
        KernelConfig(TaskOrder(4, 3), TaskOrder(2), mover_share=1.0, programs=100),
        KernelConfig(TaskOrder(16, 0), TaskOrder(32), mover_share=0.3, stages=2, programs=7, pieces=3),
    ):
        assert_all_same_bits(first, run(inputs, config=config))
    assert_all_same_bits(first, run(inputs, recompute="activations"))
    assert_all_same_bits(first, run(inputs, recompute="all"))


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["none", "all"])
@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_same_bits_as_staged(case: Case, recompute: str, hopper: torch.device) -> None:
    inputs = on(make_inputs(case, torch.bfloat16), hopper)
    staged = run(inputs, case.clamp, recompute, backend="staged")
    poison(hopper)
    assert_all_same_bits(run(inputs, case.clamp, recompute), staged)


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["none", "activations"])
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 129, 700])
def test_shared_experts_without_a_scale_have_the_bits_of_staged(tokens: int, recompute: str, hopper: torch.device) -> None:
    inputs = on(make_inputs(Case("unscaled", tokens=tokens, hidden=2048, width=64, shared=400), torch.bfloat16), hopper)
    inputs = replace(inputs, shared_scale_T=None)
    staged = run(inputs, backend="staged")
    for config in (None, KernelConfig(TaskOrder(1, 1), TaskOrder(1), mover_share=1.0, programs=9)):
        poison(hopper)
        assert_all_same_bits(run(inputs, recompute=recompute, config=config), staged)


@pytest.mark.gpu
def test_weight_gradients_continue_their_chain(hopper: torch.device) -> None:
    """Two calls carried through the fp32 main gradient have the bits of one call over the same rows in the same order."""
    inputs = on(make_inputs(Case("carried", tokens=512, hidden=256, width=128, experts=1, top_k=1), torch.bfloat16), hopper)
    whole = run(inputs)
    weights = [getattr(inputs, name).detach().requires_grad_() for name in ("gate_EIH", "up_EIH", "down_EHI")]
    for weight in weights:
        weight.lane_grads = torch.full((1, *weight.shape), torch.nan, device=hopper)
        weight.lanes_started = [False]
    for rows in (slice(0, 208), slice(208, 512)):
        x, w = (getattr(inputs, name)[rows].detach().requires_grad_() for name in ("x_TH", "weights_TK"))
        mok.moe(x, inputs.ids_TK[rows], w, *weights, backend="mega").backward(inputs.dy_TH[rows])
    for name, weight in zip(("gate_EIH", "up_EIH", "down_EHI"), weights, strict=True):
        assert_same_bits(name, weight.lane_grads[0], whole[name])


@pytest.mark.gpu
def test_experts_without_rows_keep_what_they_had(hopper: torch.device) -> None:
    inputs = on(make_inputs(Case("idle", tokens=64, hidden=64, width=64, routing="half"), torch.bfloat16), hopper)
    first = run(inputs)
    for name in ("gate_EIH", "up_EIH", "down_EHI"):
        assert first[name][4:].abs().max() == 0
        weight = getattr(inputs, name)
        weight.main_grad = torch.randn(weight.shape, device=hopper)
        del weight.lane_grads, weight.lanes_started
    before = {name: getattr(inputs, name).main_grad.clone() for name in ("gate_EIH", "up_EIH", "down_EHI")}
    leaves = inputs.differentiable()
    mok.moe(
        inputs.x_TH, inputs.ids_TK, inputs.weights_TK, *(leaves[name] for name in before), backend="mega"
    ).backward(inputs.dy_TH)  # fmt: skip
    for name, was in before.items():
        assert_same_bits(name, leaves[name].main_grad[4:], was[4:])
        assert not torch.equal(leaves[name].main_grad[:4], was[:4])


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_frozen_experts_get_no_gradient(recompute: str, hopper: torch.device) -> None:
    inputs = on(make_inputs(Case("frozen", tokens=64, hidden=64, width=64), torch.bfloat16), hopper)
    wanted = run(inputs)
    weights = [getattr(inputs, name).detach() for name in ("gate_EIH", "up_EIH", "down_EHI")]
    y = mok.moe(inputs.x_TH, inputs.ids_TK, inputs.weights_TK, *weights, backend="mega", recompute=recompute)
    dx, dweights = torch.autograd.grad(y, [inputs.x_TH, inputs.weights_TK], inputs.dy_TH)
    assert_all_same_bits({"x_TH": dx, "weights_TK": dweights}, wanted)


@pytest.mark.gpu
def test_second_backward_and_changed_inputs_are_errors(hopper: torch.device) -> None:
    inputs = on(make_inputs(Case("misuse", tokens=64, hidden=64, width=64), torch.bfloat16), hopper)
    weights = [getattr(inputs, name) for name in ("gate_EIH", "up_EIH", "down_EHI")]

    def call() -> Tensor:
        return mok.moe(inputs.x_TH, inputs.ids_TK, inputs.weights_TK, *weights, backend="mega")

    y = call()
    y.backward(inputs.dy_TH, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(inputs.dy_TH)
    y = call()
    with torch.no_grad():
        weights[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(inputs.dy_TH)


@pytest.mark.gpu
def test_checkpointed_layer_has_the_same_bits(hopper: torch.device) -> None:
    inputs = on(make_inputs(Case("checkpoint", tokens=100, hidden=64, width=64), torch.bfloat16), hopper)
    leaves = inputs.differentiable()

    def call(x: Tensor, w: Tensor, *weights: Tensor) -> Tensor:
        return mok.moe(x, inputs.ids_TK, w, *weights, backend="mega")

    direct = torch.autograd.grad(call(*leaves.values()), list(leaves.values()), inputs.dy_TH)
    again = torch.utils.checkpoint.checkpoint(call, *leaves.values(), use_reentrant=False)
    for name, one, two in zip(leaves, direct, torch.autograd.grad(again, list(leaves.values()), inputs.dy_TH), strict=True):
        assert_same_bits(name, one, two)


@pytest.mark.gpu
def test_forward_and_backward_in_a_cuda_graph(hopper: torch.device) -> None:
    """Captured once, replayed on other inputs: nothing reads a size on the host."""
    case = Case("graph", tokens=200, hidden=128, width=64)
    inputs = on(make_inputs(case, torch.bfloat16), hopper)
    leaves = inputs.differentiable()

    def step(call: Inputs) -> list[Tensor]:
        x, *others = call.differentiable().values()
        y = mok.moe(x, call.ids_TK, *others, backend="mega")
        return [y, *torch.autograd.grad(y, [x, *others], call.dy_TH)]

    step(inputs.to(torch.bfloat16, torch.float32))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(inputs)
    other = on(make_inputs(replace(case, routing="masked"), torch.bfloat16, seed=1), hopper)
    with torch.no_grad():
        for name, leaf in leaves.items():
            leaf.copy_(getattr(other, name))
        inputs.ids_TK.copy_(other.ids_TK)
        inputs.dy_TH.copy_(other.dy_TH)
    graph.replay()
    torch.cuda.synchronize()
    replayed = [value.clone() for value in captured]
    for index, (one, two) in enumerate(zip(replayed, step(other), strict=True)):
        assert_same_bits(f"output {index}", one, two)
    check_status(hopper)


@pytest.mark.gpu
def test_offsets_beyond_32_bits(hopper: torch.device) -> None:
    """Only the last of 64 experts of 4096 x 14336 is used: its elements start past 2^31."""
    x = torch.randn(48, 4096, device=hopper, dtype=torch.bfloat16)
    ids = torch.full((48, 1), 63, device=hopper, dtype=torch.int32)
    weights = torch.ones(48, 1, device=hopper)
    gate, up = (torch.empty(64, 14336, 4096, device=hopper, dtype=torch.bfloat16) for _ in range(2))
    down = torch.empty(64, 4096, 14336, device=hopper, dtype=torch.bfloat16)
    for weight in (gate, up, down):
        weight[:63] = torch.nan
        weight[63].normal_(std=0.01)
    y = mok.moe(x, ids, weights, gate, up, down, backend="mega")
    alone = mok.moe(x, torch.zeros_like(ids), weights, gate[63:], up[63:], down[63:], backend="mega")
    assert_same_bits("y", y, alone)
    assert torch.isfinite(y).all()


@pytest.mark.gpu
def test_many_tokens_of_a_narrow_layer(hopper: torch.device) -> None:
    """More units than any grid dimension but x could count."""
    inputs = on(make_inputs(Case("many", tokens=70000, hidden=64, width=32, experts=4, top_k=1), torch.bfloat16), hopper)
    whole = run(inputs)
    last = {name: getattr(inputs, name)[-100:].detach().requires_grad_() for name in ("x_TH", "weights_TK")}
    part = run(replace(inputs, **last, ids_TK=inputs.ids_TK[-100:], dy_TH=inputs.dy_TH[-100:]))
    for name in ("y", "x_TH", "weights_TK"):
        assert_same_bits(name, part[name], whole[name][-100:])


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["mega", "staged"])
def test_ids_out_of_range_are_an_error_of_a_later_call(backend: str, hopper: torch.device) -> None:
    """Nobody waits: the call itself takes the route as masked, and the next one after the device got there raises."""
    inputs = on(make_inputs(Case("bad-ids", tokens=64, hidden=64, width=64), torch.bfloat16), hopper)
    leaves = inputs.differentiable()
    names = ("weights_TK", "gate_EIH", "up_EIH", "down_EHI")

    def call(ids_TK: Tensor) -> Tensor:
        return mok.moe(leaves["x_TH"], ids_TK, *(leaves[name] for name in names), backend=backend)

    masked, wrong = inputs.ids_TK.clone(), inputs.ids_TK.clone()
    masked[3, 0], wrong[3, 0] = -1, inputs.gate_EIH.shape[0]
    expected = call(masked)
    with no_waiting():
        found = call(wrong)
    torch.cuda.synchronize()
    assert_same_bits("y", found, expected)
    with pytest.raises(RunError, match="expert ids out of range"):
        call(masked)
    call(wrong)
    with pytest.raises(RunError, match="expert ids out of range"):
        mok.check_status()
    mok.check_status()
    torch.cuda.synchronize()
    assert_same_bits("y", call(masked), expected)


@pytest.mark.gpu
def test_a_launch_that_gives_up_is_an_error(hopper: torch.device) -> None:
    status_word(hopper).fill_(1)
    with pytest.raises(RunError, match="waited too long"):
        check_status(hopper)
    check_status(hopper)
