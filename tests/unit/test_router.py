"""The router against formulas, published values, finite differences, and the routers of transformers."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from mok.errors import NonFiniteError, UsageError
from mok.grid import CallGrid
from mok.model.moe import MoE
from mok.model.router import Router, Routes, Routing, _three_parts, route, router_linear
from tests.tolerances import assert_same_bits, relative_error

INFINITY = float("inf")


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize(
    ("routing", "bias", "padding"),
    [
        (Routing(3), False, False),
        (Routing(3, normalize_weights=False, scaling_factor=1.7), False, True),
        (Routing(3, score_order="after_top_k"), False, False),
        (Routing(3, score="sigmoid", num_groups=2, scaling_factor=1.7), True, False),
        (Routing(1, score="sigmoid", normalize_weights=False), True, True),
        (Routing(8), False, False),
    ],
)
def test_backward_is_the_derivative_of_weights_and_losses(routing: Routing, bias: bool, padding: bool) -> None:
    logits = normal(12, 8, dtype=torch.float64).requires_grad_()
    bias_E = normal(8, seed=1, dtype=torch.float64) * 0.1 if bias else None
    valid_T = normal(12, seed=2) > -0.5 if padding else None

    def outputs(logits_TE: Tensor) -> tuple[Tensor, ...]:
        routes = route(logits_TE, routing, bias_E, num_slices=3, valid_T=valid_T)
        return routes.weights_TK, routes.balance_loss_C, routes.z_loss_C

    torch.autograd.gradcheck(outputs, (logits,))


@pytest.mark.parametrize(
    ("routing", "expected"),
    [
        (Routing(2, normalize_weights=False), (0.644, 0.237)),
        (Routing(2), (0.731, 0.269)),
        (Routing(2, score_order="after_top_k"), (0.731, 0.269)),
    ],
)
def test_conventions_for_the_weights(routing: Routing, expected: tuple[float, float]) -> None:
    routes = route(torch.tensor([[2.0, 1.0, 0.0, -1.0]]), routing)
    assert routes.expert_ids_TK.tolist() == [[0, 1]]
    assert routes.weights_TK[0].tolist() == pytest.approx(expected, abs=5e-4)


def test_ties_go_to_the_lowest_id() -> None:
    layer = Router(16, 8, Routing(2))
    torch.nn.init.zeros_(layer.weight)
    assert layer(normal(3, 16)).expert_ids_TK.tolist() == [[0, 1]] * 3
    logits = torch.full((5, 384), -3.0, dtype=torch.bfloat16)
    logits[:, [7, 100, 300]] = 2.0
    logits[:, [50, 9, 380]] = 1.0  # one of these is the fourth
    assert route(logits.float(), Routing(4)).expert_ids_TK.tolist() == [[7, 9, 100, 300]] * 5
    assert route(torch.zeros(1, 6), Routing(6)).expert_ids_TK.tolist() == [[0, 1, 2, 3, 4, 5]]


def test_slots_are_in_order_of_expert_and_keep_their_weights() -> None:
    routes = route(torch.tensor([[0.0, 3.0, 1.0, 2.0]]), Routing(3, normalize_weights=False))
    assert routes.expert_ids_TK.tolist() == [[1, 2, 3]]
    first, second, third = routes.weights_TK[0].tolist()
    assert first > third > second


def test_weights_are_normalised_by_a_sum_in_descending_order() -> None:
    scores = normal(500, 16).softmax(1)
    top = scores.sort(1, descending=True).values[:, :8]
    routes = route(normal(500, 16), Routing(8))
    descending = (top / top.sum(1, keepdim=True)).sort(1).values
    assert_same_bits("weights", routes.weights_TK.sort(1).values, descending)
    by_id = scores.gather(1, routes.expert_ids_TK.long())
    assert not torch.equal(routes.weights_TK, by_id / by_id.sum(1, keepdim=True))


def test_groups_keep_tokens_within_the_best_of_them() -> None:
    # Group 0 has the best expert, group 1 the best pair.
    logits = torch.tensor([[3.0, -3.0, 2.0, 2.0]])
    assert route(logits, Routing(2, score="sigmoid", num_groups=2, top_groups=1)).expert_ids_TK.tolist() == [[2, 3]]
    assert route(logits, Routing(2, score="sigmoid")).expert_ids_TK.tolist() == [[0, 2]]


def test_correction_bias_chooses_and_does_not_weigh() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0]])
    bias = torch.tensor([0.0, 0.0, 5.0])
    routes = route(logits, Routing(1, score="sigmoid", normalize_weights=False), bias)
    assert routes.expert_ids_TK.item() == 2
    assert routes.weights_TK.item() == pytest.approx(1 / (1 + math.e))


@pytest.mark.parametrize("bad", [[0.0, math.nan, 3.0, 1.0], [0.0, 1.0, 3.0, INFINITY], [0.0, 1.0, 3.0, -INFINITY]])
def test_logits_that_are_not_finite_are_an_error(bad: list[float]) -> None:
    layer = Router(4, 4, Routing(2), layer=5)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(4))
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0], bad, [0.0, 0.0, 0.0, 0.0]])
    with pytest.raises(NonFiniteError, match="router of layer 5: 1 of 3 rows"):
        layer(x)


def test_where_the_host_does_not_wait_bad_rows_are_counted_and_go_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Router(4, 4, Routing(2), layer=5)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(4))
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.0, math.nan, 0.0, 1.0]])
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # takes the way of a GPU
    for _ in range(2):
        routes = layer(x)
    assert routes.expert_ids_TK.tolist() == [[2, 3], [-1, -1]]
    assert routes.weights_TK.isfinite().all() and routes.weights_TK[1].tolist() == [0.0, 0.0]
    with pytest.raises(NonFiniteError, match="router of layer 5: 2 rows"):
        layer.raise_for_bad_rows()
    layer.raise_for_bad_rows()


def loss_gradient(layer: Router, x: Tensor, balance: float, z: float = 0.0, grid: CallGrid | None = None) -> Tensor:
    layer.weight.grad = None
    routes = layer(x, grid)
    (routes.weights_TK.sum() + balance * routes.balance_loss_C.mean() + z * routes.z_loss_C.mean()).backward()
    assert layer.weight.grad is not None
    return layer.weight.grad


def test_balance_loss_reaches_the_router_in_proportion_to_its_coefficient() -> None:
    torch.manual_seed(0)
    layer, x = Router(16, 8, Routing(2, normalize_weights=False)), normal(32, 16)
    none, once, twice = (loss_gradient(layer, x, c) for c in (0.0, 0.01, 0.02))
    assert (once - none).norm() > 1e-6
    assert relative_error(twice - none, 2 * (once - none)) < 1e-3  # differences of nearly equal fp32 numbers


def test_losses_do_not_grow_with_the_number_of_slices() -> None:
    """One slice of eight sequences, four slices of two in one call, or four calls: the z-loss is one mean. The balance loss is
    taken per slice, so it is not the same function; its mean over slices is."""
    layer, x = Router(16, 8, Routing(2)), normal(64, 16)
    whole = loss_gradient(layer, x, 0.0, 0.1)
    assert relative_error(loss_gradient(layer, x, 0.0, 0.1, CallGrid(4, 4, (0,))), whole) < 1e-6
    calls = [loss_gradient(layer, part, 0.0, 0.1) for part in x.chunk(4)]
    weights = [loss_gradient(layer, part, 0.0, 0.0) for part in x.chunk(4)]
    z_only = sum(c - w for c, w in zip(calls, weights, strict=True)) / 4
    assert relative_error(z_only, whole - loss_gradient(layer, x, 0.0, 0.0)) < 1e-4
    in_one_call = layer(x, CallGrid(4, 4, (0,)))
    parts = [layer(part) for part in x.chunk(4)]
    assert_same_bits("z-loss", in_one_call.z_loss_C, torch.cat([part.z_loss_C for part in parts]))
    assert_same_bits("balance loss", in_one_call.balance_loss_C, torch.cat([part.balance_loss_C for part in parts]))


def test_padding_changes_nothing() -> None:
    layer, tokens = MoE(16, 16, 8, 2), normal(2, 4, 16)
    results = []
    for length in (4, 16):
        x = torch.zeros(2, length, 16)
        x[:, :4] = tokens
        x[:, 4:] = 7.0
        valid = (torch.arange(length) < 4).expand(2, -1).reshape(-1)
        layer.zero_grad()
        y, stats = layer.call(x.view(-1, 16), valid_T=valid)
        (0.01 * stats.balance_loss_C.sum() + 0.1 * stats.z_loss_C.sum() + y.sum()).backward()
        assert torch.equal(y.view(2, length, 16)[:, 4:], torch.zeros(2, length - 4, 16))
        results.append((stats.balance_loss_C.item(), stats.z_loss_C.item(), stats.counts_CE.tolist(), layer.router.weight.grad))
    (balance, z, counts, gradient), padded = results
    assert counts == padded[2] and sum(counts[0]) == 16
    assert padded[:2] == pytest.approx((balance, z), rel=1e-6)
    assert relative_error(padded[3], gradient) < 1e-6


def test_balance_loss_is_one_if_balanced_and_two_if_collapsed() -> None:
    uniform = torch.zeros(8, 4)
    spread = route(uniform, Routing(2, force_routing="balanced"))
    assert spread.balance_loss_C.item() == pytest.approx(1.0)
    collapsed = torch.tensor([[0.0, 0.0, -100.0, -100.0]]).expand(8, -1)
    assert route(collapsed, Routing(2)).balance_loss_C.item() == pytest.approx(2.0)
    assert route(uniform, Routing(2)).z_loss_C.item() == pytest.approx(math.log(4) ** 2)


def test_forced_routing() -> None:
    def counts(kind: str) -> list[int]:
        ids = route(normal(400, 8), Routing(2, force_routing=kind)).expert_ids_TK
        assert all(first < second for first, second in ids.tolist())
        return torch.bincount(ids.view(-1), minlength=8).tolist()

    assert counts("balanced") == [100] * 8
    assert counts("one-hot") == [400, 400, 0, 0, 0, 0, 0, 0]
    skewed = counts("skewed")
    assert skewed[0] > 2 * skewed[3] > 2 * skewed[7] > 0
    assert counts("skewed") == skewed


def test_bias_moves_once_per_step_by_its_rate() -> None:
    router = Router(16, 4, Routing(1, score="sigmoid"), correction_bias=True)
    x = normal(64, 16)
    in_one = router(x).expert_ids_TK
    in_four = torch.cat([router(part).expert_ids_TK for part in x.chunk(4)])
    assert torch.equal(in_one, in_four)
    assert torch.equal(router.correction_bias, torch.zeros(4))  # a forward, evaluation or recomputation moves nothing
    router.update_bias(torch.tensor([10, 30, 20, 20]), 0.001)
    assert router.correction_bias.tolist() == pytest.approx([0.001, -0.001, 0.0, 0.0])


def test_bias_stays_fp32_through_casts_and_thousands_of_updates() -> None:
    layer = MoE(16, 16, 8, 2, score="sigmoid", correction_bias=True).to(torch.bfloat16)
    bias = layer.router.correction_bias
    assert bias.dtype == torch.float32 and layer.router.weight.dtype == torch.bfloat16
    counts = torch.full((8,), 10)
    counts[3] = 0
    for _ in range(2000):
        layer.router.update_bias(counts, 0.001)
    assert layer.router.correction_bias[3].item() == pytest.approx(2.0, abs=1e-3)
    other = MoE(16, 16, 8, 2, score="sigmoid", correction_bias=True, dtype=torch.bfloat16)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.router.correction_bias, layer.router.correction_bias)
    routes = layer.router(normal(5, 16).to(torch.bfloat16))
    assert routes.weights_TK.dtype == torch.float32


def test_a_token_does_not_see_the_others() -> None:
    layer, x = Router(48, 10, Routing(6)), normal(300, 48)
    together = layer(x)
    for rows in (slice(0, 1), slice(17, 20), slice(33, 300)):
        alone = layer(x[rows])
        assert_same_bits("ids", alone.expert_ids_TK, together.expert_ids_TK[rows])
        assert_same_bits("weights", alone.weights_TK, together.weights_TK[rows])


def test_refusals() -> None:
    with pytest.raises(UsageError, match=r"moe\.score = 'tanh': must be one of softmax, sigmoid"):
        Routing(2, score="tanh")
    with pytest.raises(UsageError, match="after_top_k is for softmax only"):
        Routing(2, score="sigmoid", score_order="after_top_k")
    with pytest.raises(UsageError, match=r"moe\.top_k = 5: must be 1 to moe\.num_experts = 4"):
        Router(16, 4, Routing(5))
    with pytest.raises(UsageError, match="groups must share 8 experts"):
        Router(16, 8, Routing(3, num_groups=4, top_groups=1))


def sorted_by_id(weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    order = ids.argsort(1)
    return ids.gather(1, order).to(torch.int32), weights.gather(1, order)


def compare_with_transformers(theirs: torch.nn.Module, routing: Routing, width: int) -> Routes:
    with torch.no_grad():
        theirs.weight.copy_(normal(*theirs.weight.shape, seed=3) * 0.2)
        x = normal(256, width)
        _, weights, ids = theirs(x)
        ours = Router(width, theirs.weight.shape[0], routing)
        ours.weight.copy_(theirs.weight)
        routes = ours(x)
    expected_ids, expected_weights = sorted_by_id(weights, ids)
    assert_same_bits("ids", routes.expert_ids_TK, expected_ids)
    assert_same_bits("weights", routes.weights_TK, expected_weights)
    return routes


@pytest.mark.interop
@pytest.mark.parametrize("experts", [8, 64])
@pytest.mark.parametrize("top_k", [2, 8])
def test_same_bits_as_the_softmax_routers_of_transformers(experts: int, top_k: int) -> None:
    pytest.importorskip("transformers")
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
    from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    sizes = {"num_experts_per_tok": top_k, "num_experts": experts, "num_local_experts": experts, "hidden_size": 64}
    for normalise in (True, False):
        config = SimpleNamespace(**sizes, norm_topk_prob=normalise, router_jitter_noise=0.0)
        routing = Routing(top_k, normalize_weights=normalise)
        compare_with_transformers(Qwen3MoeTopKRouter(config), routing, 64)
        compare_with_transformers(OlmoeTopKRouter(config), routing, 64)
    compare_with_transformers(MixtralTopKRouter(config), Routing(top_k), 64)


@pytest.mark.interop
@pytest.mark.parametrize("groups", [1, 4])
def test_same_bits_as_the_sigmoid_router_of_transformers(groups: int) -> None:
    """With two slots the sum for the normalisation has one order only; theirs is not defined for more (`sorted=False`)."""
    pytest.importorskip("transformers")
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

    config = SimpleNamespace(
        num_experts_per_tok=2, num_local_experts=16, hidden_size=64, routed_scaling_factor=2.5, n_group=groups,
        topk_group=max(1, groups // 2), norm_topk_prob=True,
    )  # fmt: skip
    routing = Routing(
        2, score="sigmoid", scaling_factor=2.5, num_groups=groups, top_groups=config.topk_group
    )  # fmt: skip
    theirs = Glm4MoeTopkRouter(config)
    with torch.no_grad():
        theirs.weight.copy_(normal(16, 64, seed=3) * 0.2)
        theirs.e_score_correction_bias.copy_(normal(16, seed=4) * 0.05)
        x = normal(256, 64)
        logits, weights, ids = theirs(x)
        routes = route(logits, routing, theirs.e_score_correction_bias)
    expected_ids, expected_weights = sorted_by_id(weights, ids)
    assert_same_bits("ids", routes.expert_ids_TK, expected_ids)
    # Their sigmoid and 1 / (1 + exp(-x)) differ in the last place of some scores.
    torch.testing.assert_close(routes.weights_TK, expected_weights, rtol=3e-7, atol=0)


def test_three_parts_have_all_bits() -> None:
    values = normal(50, 16) * torch.logspace(-20, 20, 50).unsqueeze(1)
    parts = _three_parts(values)
    assert parts.dtype == torch.bfloat16 and parts.shape == (50, 48)
    assert_same_bits("sum", parts.double().view(50, 3, 16).sum(1).float(), values)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [16, 1000])
def test_products_on_tensor_cores_have_the_error_of_fp32(tokens: int) -> None:
    x, w, dy = normal(tokens, 64).bfloat16(), normal(32, 64).bfloat16(), normal(tokens, 32)
    leaves = [value.cuda().requires_grad_() for value in (x, w)]
    y = router_linear(*leaves)
    dx, dw = torch.autograd.grad(y, leaves, dy.cuda())
    assert relative_error(y.cpu(), x.double() @ w.double().t()) < 1e-6
    assert relative_error(dx.cpu(), dy.double() @ w.double()) < 4e-3
    assert relative_error(dw.cpu(), dy.double().t() @ x.double()) < 4e-3
