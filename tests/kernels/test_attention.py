"""The backward of causal attention against autograd through float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mok.config import ModelConfig
from mok.launch.attention import Blocks, attention_backward
from mok.model.attention import Rotary, _HeadsOnGpu
from mok.train.device import prepare_device
from tests.tolerances import assert_same_bits

SMALL = Blocks(kv=(16, 32, 4, 2), q=(32, 16, 4, 2), kept=(64, 16, 4, 2))
KEPT_BYTES = {"computed twice": 0, "one key head at a time": 64 * 64 * 2 * 4, "all at once": 1 << 20}


def exact(qk: Tensor, v: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """(out [B, S, A, D], lse [B, A, S]) in float64."""
    group = num_heads // v.shape[2]
    q, k, v = qk[:, :, :num_heads], qk[:, :, num_heads:].repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bsad,btad->bast", q, k) * qk.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("bast,btad->bsad", scores.softmax(-1), v), scores.logsumexp(-1)


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # torch's notice on the first product of the backward's thread
@pytest.mark.parametrize("kept", KEPT_BYTES)
@pytest.mark.parametrize(("length", "heads", "kv"), [(64, 2, 2), (50, 4, 1), (7, 1, 1)])
def test_against_float64(length: int, heads: int, kv: int, kept: str, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(length)
    qk, all_heads, dout = (
        torch.randn(2, length, count, 16, generator=generator).to(device, torch.bfloat16)
        for count in (heads + kv, heads + 2 * kv, heads)
    )
    wide_qk, wide_v = qk.double().requires_grad_(), all_heads[:, :, heads + kv :].double().requires_grad_()
    out, lse = exact(wide_qk, wide_v, heads)
    expected = torch.autograd.grad(out, (wide_qk, wide_v), dout.double())
    dqk, dheads = torch.full_like(qk, torch.nan), torch.full_like(all_heads, torch.nan)
    arrived = out.detach().bfloat16().contiguous(), lse.detach().float().contiguous()
    attention_backward(dout, qk, all_heads, *arrived, dqk, dheads, SMALL, KEPT_BYTES[kept])
    for found, truth in zip((dqk, dheads[:, :, heads + kv :]), expected, strict=True):
        error = (found.double() - truth).norm() / truth.norm()
        assert error < 1e-2, error
    assert dheads[:, :, : heads + kv].isnan().all(), "queries and keys before the norms are not this kernel's business"


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "length"), [(2, 2048), (3, 1000)])
def test_keeping_ds_changes_no_bit(batch: int, length: int) -> None:
    device, heads, dim = torch.device("cuda"), 16, 128
    generator = torch.Generator().manual_seed(0)
    qk, all_heads, dout, out = (
        torch.randn(batch, length, count, dim, generator=generator).to(device, torch.bfloat16)
        for count in (2 * heads, 3 * heads, heads, heads)
    )
    lse = torch.full((batch, heads, length), 9.0, device=device)
    found = []
    for kept in (0, None, 1 << 28, 1 << 31):
        dqk, dheads = torch.full_like(qk, torch.nan), torch.zeros_like(all_heads)
        attention_backward(dout, qk, all_heads, out, lse, dqk, dheads, kept_bytes=kept)
        found.append((dqk, dheads))
    for dqk, dheads in found[1:]:
        assert_same_bits("dqk", dqk, found[0][0])
        assert_same_bits("dheads", dheads, found[0][1])


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 96])
@pytest.mark.parametrize(("length", "heads", "kv"), [(1000, 4, 4), (512, 8, 2)])
def test_attention_of_a_layer_on_a_gpu(length: int, heads: int, kv: int, dim: int) -> None:
    """Forward and backward as training calls them, whatever kernels the GPU gets: close to float64, and twice the same bits."""
    device = torch.device("cuda")
    prepare_device(device)
    config = ModelConfig(hidden_size=64, num_heads=heads, num_kv_heads=kv, head_dim=dim)
    rotary = Rotary.of(length, config, device, torch.bfloat16)
    still = Rotary(torch.ones_like(rotary.cos_SXr), torch.zeros_like(rotary.sin_SXr))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, length, heads + 2 * kv, dim, generator=generator).to(device, torch.bfloat16).requires_grad_()
    dout = torch.randn(2, length, heads, dim, generator=generator).to(device, torch.bfloat16)
    results = []
    for _ in range(2):
        out = _HeadsOnGpu.apply(x, None, None, "none", heads, 1e-6, still)
        results.append((out.detach(), torch.autograd.grad(out, x, dout)[0]))
    wide = x.detach().double().requires_grad_()
    truth, _ = exact(wide[:, :, : heads + kv], wide[:, :, heads + kv :], heads)
    expected = truth.detach(), torch.autograd.grad(truth, wide, dout.double())[0]
    for name, first, second, right in zip(("out", "gradient"), *results, expected, strict=True):
        assert_same_bits(name, first, second)
        assert (first.double() - right).norm() <= 1e-2 * right.norm(), name
