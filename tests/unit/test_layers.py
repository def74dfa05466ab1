"""Dense layers against float64 autograd of the plain formulas, and rows that depend on nothing but themselves."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mok.config import ModelConfig
from mok.model.attention import Attention, Rotary
from mok.model.linear import embedding, linear
from mok.model.loss import IGNORED, head_loss, head_loss_and_gradient
from mok.model.norm import add_and_norm
from tests.tolerances import assert_same_bits

CONFIG = ModelConfig(hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=16)


def relative_error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def plain_rotation(x_BSAD: Tensor, config: ModelConfig) -> Tensor:
    rotated = int(config.head_dim * config.rotary_fraction)
    half = rotated // 2
    frequency = config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(x_BSAD.shape[1], dtype=torch.float64)[:, None, None] * frequency
    a, b, rest = x_BSAD[..., :half], x_BSAD[..., half:rotated], x_BSAD[..., rotated:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest], -1)


def plain_attention(layer: Attention, x_TH: Tensor, batch: int) -> Tensor:
    """Softmax attention written out, with ordinary autograd."""
    config = layer.config
    heads = x_TH @ layer.w_qkv.t()
    if layer.b_qkv is not None:
        heads = heads + layer.b_qkv
    heads = heads.view(batch, -1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
    q, k, v = heads.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], 2)
    if config.qk_norm == "head":
        q, k = plain_norm(q, layer.w_q_norm, config.norm_eps), plain_norm(k, layer.w_k_norm, config.norm_eps)
    if config.qk_norm == "full":
        q = plain_norm(q.flatten(2), layer.w_q_norm, config.norm_eps).view_as(q)
        k = plain_norm(k.flatten(2), layer.w_k_norm, config.norm_eps).view_as(k)
    q, k = plain_rotation(q, config), plain_rotation(k, config)
    groups = config.num_heads // config.num_kv_heads
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    scores = torch.einsum("bsad,btad->bast", q, k) / config.head_dim**0.5
    later = torch.ones(scores.shape[-2:]).triu(1).bool()
    attended = torch.einsum("bast,btad->bsad", scores.masked_fill(later, float("-inf")).softmax(-1), v)
    return attended.reshape(x_TH.shape[0], -1) @ layer.w_o.t()


@pytest.mark.parametrize(
    "change",
    [{}, {"qk_norm": "full"}, {"qk_norm": "none"}, {"attention_bias": True}, {"rotary_fraction": 0.5}, {"num_kv_heads": 4}],
    ids=str,
)
def test_attention_and_every_gradient_against_float64(change: dict) -> None:
    config = dataclasses.replace(CONFIG, **change)
    layer = Attention(config, dtype=torch.float64)
    for seed, parameter in enumerate(layer.parameters()):
        parameter.data = randn(*parameter.shape, seed=seed) * (0.3 if parameter.dim() == 2 else 1.0)
    x, dy = randn(48, 32, seed=90), randn(48, 32, seed=91)
    expected_x = x.clone().requires_grad_()
    expected = plain_attention(layer, expected_x, 3)
    expected_grads = torch.autograd.grad(expected, [expected_x, *layer.parameters()], dy)

    single = Attention(config)
    single.load_state_dict(layer.state_dict())
    found_x = x.float().requires_grad_()
    found = single(found_x, 3, Rotary.of(16, config, torch.device("cpu"), torch.float32))
    found_grads = torch.autograd.grad(found, [found_x, *single.parameters()], dy.float())
    assert relative_error(found, expected) < 2e-6
    for name, a, b in zip(["x", *dict(layer.named_parameters())], found_grads, expected_grads, strict=True):
        assert relative_error(a, b) < 4e-6, name


def test_norm_linear_and_embedding_gradients_against_float64() -> None:
    x, weight, table = randn(24, 32), randn(32, seed=1), randn(48, 32, seed=2)
    matrix, bias, dy = randn(16, 32, seed=3), randn(16, seed=4), randn(24, 16, seed=5)
    ids = torch.arange(24) * 7 % 12

    def run(dtype: torch.dtype, plain: bool) -> list[Tensor]:
        leaves = [leaf.to(dtype).requires_grad_() for leaf in (x, weight, table, matrix, bias)]
        a, w, t, m, b = leaves
        if plain:
            total = a + t[ids]
            y = F.linear(plain_norm(total, w, 1e-6), m, b) + total[:, :16]
        else:
            total, normed = add_and_norm(a, embedding(ids, t), w, 1e-6)
            y = linear(normed, m, b) + total[:, :16]
        return [y, *torch.autograd.grad(y, leaves, dy.to(dtype))]

    for found, expected in zip(run(torch.float32, False), run(torch.float64, True), strict=True):
        assert relative_error(found, expected) < 2e-6


def test_head_loss_and_gradients_against_float64() -> None:
    hidden, weight = randn(40, 32), randn(48, 32, seed=1)
    targets = torch.arange(40) * 11 % 41
    targets[::5] = IGNORED
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = F.cross_entropy(h @ w[:41].t(), targets, ignore_index=IGNORED, reduction="none")
    dh, dw = torch.autograd.grad(0.125 * expected.sum(), [h, w])

    single = nn.Parameter(weight.float())
    losses, dhidden, dweight = head_loss_and_gradient(hidden.float(), single, 41, targets, torch.tensor(0.125))
    assert dweight is not None
    assert relative_error(losses, expected) < 1e-6
    assert relative_error(dhidden, dh) < 2e-6
    assert relative_error(dweight, dw) < 2e-6
    assert not dweight[41:].any()
    assert torch.equal(head_loss(hidden.float(), single, 41, targets), losses)


def test_a_batch_without_any_target_has_loss_and_gradients_of_zero() -> None:
    weight = nn.Parameter(torch.randn(16, 16))
    losses, dhidden, dweight = head_loss_and_gradient(
        torch.randn(32, 16), weight, 16, torch.full((32,), IGNORED), torch.tensor(0.5)
    )
    assert not losses.any() and not dhidden.any() and dweight is not None and not dweight.any()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_does_not_depend_on_its_neighbours_nor_on_threads(threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        layer = Attention(CONFIG)
        torch.nn.init.normal_(layer.w_qkv, std=0.3), torch.nn.init.normal_(layer.w_o, std=0.3)
        x, w = torch.randn(9 * 16, 32), torch.randn(48, 32)
        rotary = Rotary.of(16, CONFIG, torch.device("cpu"), torch.float32)
        together = layer(x, 9, rotary), linear(x, w)
        torch.set_num_threads(threads)
        for i in range(9):
            part = slice(16 * i, 16 * i + 16)
            assert torch.equal(layer(x[part], 1, rotary), together[0][part])
        for tokens in (1, 2, 7, 16, 33):
            assert torch.equal(linear(x[5 : 5 + tokens], w), together[1][5 : 5 + tokens])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_gradient_of_a_row_depends_on_neither(threads: int) -> None:
    layer = Attention(CONFIG)
    torch.nn.init.normal_(layer.w_qkv, std=0.3), torch.nn.init.normal_(layer.w_o, std=0.3)
    rotary = Rotary.of(16, CONFIG, torch.device("cpu"), torch.float32)
    x, dy, w = torch.randn(99 * 16, 32), torch.randn(99 * 16, 32), torch.rand(32) + 0.5

    def gradients(part: slice) -> tuple[Tensor, Tensor]:
        leaf = x[part].clone().requires_grad_()
        total, normed = add_and_norm(leaf, None, w, 1e-6)
        through_attention = layer(leaf, len(leaf) // 16, rotary)
        return tuple(torch.autograd.grad(y, leaf, dy[part])[0] for y in (normed + total, through_attention))

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = gradients(slice(None))
        torch.set_num_threads(threads)
        for first, last in ((0, 1), (1, 3), (7, 40), (0, 99)):
            part = slice(16 * first, 16 * last)
            for name, alone, whole in zip(("norm", "attention"), gradients(part), together, strict=True):
                assert_same_bits(f"{name}, sequences {first} to {last}", alone, whole[part])
    finally:
        torch.set_num_threads(before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_a_slice_has_the_same_bits_in_longer_calls(dtype: torch.dtype) -> None:
    """Sizes for which one product over all rows has other bits, at least in fp32 on an H200."""
    x, w = torch.randn(8 * 512, 768, device="cuda", dtype=dtype), torch.randn(1280, 768, device="cuda", dtype=dtype)
    targets, scale = (
        torch.zeros(8 * 512, device="cuda", dtype=torch.int64),
        torch.tensor(0.5, device="cuda", dtype=torch.float64),
    )
    together = linear(x, w, slices=8)
    losses, dhidden, _ = head_loss_and_gradient(x, w, 1280, targets, scale, 8)
    for i in range(8):
        part = slice(512 * i, 512 * i + 512)
        assert torch.equal(linear(x[part], w), together[part])
        alone = head_loss_and_gradient(x[part], w, 1280, targets[part], scale)
        assert torch.equal(alone[0], losses[part]) and torch.equal(alone[1], dhidden[part])
