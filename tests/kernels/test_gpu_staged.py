"""The staged kernels as compiled code: bits against torch and the megakernel, edges, offsets. The same numbers against float64
are `test_staged.py`, which runs compiled where there is a GPU and interpreted elsewhere."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from mok.autograd import Plan, experts
from mok.backends import mega, staged
from mok.backends.interface import LayerShape, Options
from mok.grid import CallGrid
from mok.launch import staged as launch
from mok.launch.plan import TaskOrder, plan_on_device
from mok.schedule import build_schedule
from tests.cases import Case, make_inputs, random_ids
from tests.kernels.test_staged import backend_moe, compare, on, staged_moe
from tests.tolerances import assert_same_bits
from tests.unit.test_backends import gradients

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
LAYER = Case("layer", tokens=1000, hidden=2048, width=768, experts=16, top_k=4, weights="signed")
CONFIGS = (
    launch.StagedConfig(256, 64, 3), launch.StagedConfig(256, 64, 2), launch.StagedConfig(128, 64, 3),
    launch.StagedConfig(128, 32, 3), launch.StagedConfig(128, 16, 2, 4),
)  # fmt: skip


def everything(case: Case, options: Options, backend: ModuleType = staged) -> dict[str, Tensor]:
    """The output and every gradient of one call, by name."""
    inputs = on(CUDA, make_inputs(case, torch.bfloat16))
    y = backend_moe(backend, inputs, options)
    return {"y": y.detach(), **gradients(inputs, y)}


@pytest.mark.parametrize("shared", [0, 512])
@pytest.mark.parametrize("tokens", [1, 63, 1000, 4096])
def test_mega_gives_the_same_bits(tokens: int, shared: int) -> None:
    case = replace(LAYER, tokens=tokens, clamp=1.5, routing="masked", shared=shared)
    shape = LayerShape(case.hidden, case.width, case.experts, case.top_k, shared_size=shared)
    if reasons := mega.why_not(shape, torch.bfloat16, CUDA):
        pytest.skip(f"no megakernel here: {reasons}")
    megakernel = everything(case, Options(case.clamp), mega)
    for name, value in everything(case, Options(case.clamp)).items():
        assert_same_bits(name, value, megakernel[name])


def test_twenty_runs_give_one_result() -> None:
    first = everything(LAYER, Options())
    for _ in range(19):
        for name, value in everything(LAYER, Options()).items():
            assert_same_bits(name, value, first[name])


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_no_setting_changes_a_bit(config: launch.StagedConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = everything(LAYER, Options())
    gpu = launch.gpu_of(torch.device("cuda", 0))
    if config.shared_memory_bytes > gpu.shared_memory_bytes:
        pytest.skip(f"{config} needs more shared memory than {gpu}")
    monkeypatch.setattr(launch, "gpu_of", lambda device: replace(gpu, num_sms=7))
    for name, value in everything(LAYER, Options(kernel=config)).items():
        assert_same_bits(name, value, usual[name])


def test_recomputing_changes_no_bit() -> None:
    kept, computed = everything(LAYER, Options()), everything(LAYER, Options(recompute="all"))
    for name, value in kept.items():
        assert_same_bits(name, computed[name], value)


def test_a_row_depends_on_itself_alone() -> None:
    """A token's output and dx have the same bytes alone, and among others."""
    inputs = on(CUDA, make_inputs(LAYER, torch.bfloat16))
    y = staged_moe(inputs, Options())
    dx = torch.autograd.grad(y, inputs.x_TH, inputs.dy_TH)[0]
    for tokens in (1, 4, 16, 64, 257):
        part = slice(500, 500 + tokens)
        few = replace(
            inputs, x_TH=inputs.x_TH[part].detach().clone().requires_grad_(), weights_TK=inputs.weights_TK[part].detach(),
            ids_TK=inputs.ids_TK[part], dy_TH=inputs.dy_TH[part],
        )  # fmt: skip
        y_few = staged_moe(few, Options())
        assert_same_bits(f"y of {tokens}", y_few, y[part])
        assert_same_bits(f"dx of {tokens}", torch.autograd.grad(y_few, few.x_TH, few.dy_TH)[0], dx[part])


def test_products_have_the_bits_of_torch() -> None:
    """Each expert's gate and up rows are those of one torch.matmul, as cuBLAS adds on Hopper. Other GPUs may differ."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("cuBLAS's order of a sum is known for sm_90 only")
    # Enough rows for cuBLAS to leave the contraction whole.
    inputs = on(CUDA, make_inputs(replace(LAYER, tokens=16384), torch.bfloat16))
    shape = LayerShape(LAYER.hidden, LAYER.width, LAYER.experts, LAYER.top_k)
    schedule = staged.build_schedule(inputs.ids_TK, shape, CallGrid(), Options())
    weights = tuple(value.detach() for value in (inputs.gate_EIH, inputs.up_EIH, inputs.down_EHI))
    _, saved = staged.forward(
        inputs.x_TH.detach(), inputs.weights_TK.detach(), schedule, staged.ExpertWeights(*weights), Options()
    )
    plan = schedule.plan
    rows = plan.row_of_route_N.view(-1, LAYER.top_k).long()
    for e in range(LAYER.experts):
        token, slot = torch.where(inputs.ids_TK == e)
        for kept, weight in zip(saved.gate_up_2PI, weights[:2], strict=True):
            assert_same_bits(f"expert {e}", kept[rows[token, slot]], inputs.x_TH.detach()[token] @ weight[e].t())


@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_every_token_count(top_k: int) -> None:
    for tokens in range(1, 131):
        compare(Case(f"T={tokens}", tokens=tokens, hidden=48, width=80, top_k=top_k), CUDA, factor=2.0 if tokens > 8 else 8.0)


@pytest.mark.parametrize(
    "case",
    [
        Case("wide", tokens=700, hidden=7168, width=512, experts=4, top_k=2),
        Case("narrow", tokens=257, hidden=48, width=80, experts=5, top_k=5),
        Case("between-tiles", tokens=500, hidden=2880, width=720, experts=16, top_k=4, routing="half"),
        Case("clamped", tokens=300, hidden=4096, width=384, experts=6, top_k=3, routing="masked", clamp=1.5),
        Case("one-hot", tokens=900, hidden=2048, width=768, experts=16, top_k=8, routing="one-expert"),
        Case("shared", tokens=321, hidden=1024, width=256, experts=8, top_k=2, shared=1040),
    ],
    ids=lambda case: case.name,
)
def test_larger_layers(case: Case) -> None:
    compare(case, CUDA)


@pytest.mark.parametrize("tokens", [0, 1, 33, 70_000])
def test_any_number_of_tokens(tokens: int) -> None:
    """More tokens than a second grid axis could count, after none at all."""
    case = Case("many", tokens=tokens, hidden=64, width=64, experts=8, top_k=2)
    found = everything(case, Options())
    if tokens:
        compare(case, CUDA)
    else:
        assert found["y"].shape == (0, 64)
        assert all(not found[name].any() for name in ("gate_EIH", "up_EIH", "down_EHI"))


def test_offsets_of_a_large_layer() -> None:
    """The last expert lies more than 2^31 elements into its tensor; it alone has tokens."""
    experts_, hidden, width, tokens = 64, 4096, 14336, 48
    free, _ = torch.cuda.mem_get_info()
    if free < 40 * 2**30:
        pytest.skip(f"needs 40 GiB of GPU memory, {free / 2**30:.0f} are free")
    random = torch.Generator(CUDA).manual_seed(0)
    x = torch.randn(tokens, hidden, device=CUDA, dtype=torch.bfloat16, generator=random)
    weights = []
    for shape in ((width, hidden), (width, hidden), (hidden, width)):
        weight = torch.empty(experts_, *shape, device=CUDA, dtype=torch.bfloat16)
        weight[-1].normal_(0, shape[1] ** -0.5, generator=random)
        weights.append(weight)
    ids = torch.full((tokens, 1), experts_ - 1, device=CUDA, dtype=torch.int32)
    schedule = staged.build_schedule(ids, LayerShape(hidden, width, experts_, 1), CallGrid(), Options())
    router = torch.ones(tokens, 1, device=CUDA)
    y = experts(x, router, tuple(weights), Plan(staged, schedule, Options()))
    gate, up, down = (weight[-1].double() for weight in weights)
    wanted = (torch.nn.functional.silu(x.double() @ gate.t()) * (x.double() @ up.t())) @ down.t()
    assert (y.double() - wanted).norm() / wanted.norm() < 1e-2


@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(32768, 128, 8), (8192, 8, 2), (4096, 512, 10), (257, 64, 64)])
def test_plan_of_full_size_equals_the_schedule(tokens: int, num_experts: int, top_k: int) -> None:
    ids = random_ids(tokens, num_experts, top_k, torch.Generator().manual_seed(0))
    schedule = build_schedule(ids, num_experts, tile_rows=64)
    order = TaskOrder(8, 4)
    plans = [plan_on_device(ids.to(CUDA), num_experts, 2048, 768, order, order) for _ in range(3)]
    for plan in plans:
        assert plan.expert_start[:-1].tolist() == schedule.expert_start_E.tolist()
        assert torch.equal(plan.row_of_route_N.cpu().long(), schedule.row_of_route_N)
        assert torch.equal(plan.route_of_row_P[: schedule.num_rows].cpu().long(), schedule.route_of_row_P)
        assert torch.equal(plan.forward_tasks[: plan.sizes[1]], plans[0].forward_tasks[: plan.sizes[1]])
        assert torch.equal(plan.combine_token_T, plans[0].combine_token_T)
