"""The kernels between the dense products against the plain functions of `mok/model`, which have tests of their own."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mok.config import ModelConfig, OptimConfig
from mok.gradients import Bank
from mok.launch import dense, optimizer
from mok.model.attention import Rotary
from mok.model.loss import IGNORED
from mok.model.norm import rms_norm_backward, rms_normed
from mok.train.optim import MOMENT_DTYPES, AdamW, ParameterGroup, _update_by_chunks, _update_in_one_pass
from tests.tolerances import assert_same_bits


def random(*shape: int, device: torch.device, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    found, expected = found.double(), expected.double()
    assert found.isfinite().all()
    assert (found - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("branch", ["branch", "alone"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "width", "slices"), [(6, 48, 2), (34, 16, 1), (1, 2048, 1)])
def test_rms_norm(rows: int, width: int, slices: int, dtype: torch.dtype, branch: str, device: torch.device) -> None:
    x, dy, back, dtotal = (random(rows, width, device=device, seed=seed, dtype=dtype) for seed in (0, 1, 3, 4))
    w = random(width, device=device, seed=2, dtype=dtype)
    expected_total = x + back if branch == "branch" else x.clone()
    total, y, rstd = dense.rms_norm(x, back if branch == "branch" else None, w, 1e-5)
    assert total.equal(expected_total)
    x = total
    normed, expected_rstd = rms_normed(x, 1e-5)
    close(rstd, expected_rstd.squeeze(1), 1e-6)
    close(y, w * normed, 1e-6 if dtype == torch.float32 else 1e-3)
    dx, dw_CH = dense.rms_norm_backward(dy, dtotal if branch == "branch" else None, x, rstd, w, slices)
    expected_dx, expected_dw = rms_norm_backward(dy, normed, expected_rstd, w, slices)
    if branch == "branch":
        expected_dx = expected_dx + dtotal
    close(dx, expected_dx, 1e-6 if dtype == torch.float32 else 5e-3)
    close(dw_CH, expected_dw, 1e-6 if dtype == torch.float32 else 1e-3)


@pytest.mark.parametrize("kind", ["none", "head", "full"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_norm_and_rotation_of_heads(kind: str, fraction: float, device: torch.device) -> None:
    config = ModelConfig(num_heads=3, num_kv_heads=1, head_dim=24, rotary_fraction=fraction)
    rotary = Rotary.of(5, config, device, torch.bfloat16)
    x = random(2, 5, 5, 24, device=device)
    widths = {"head": (24, 24), "full": (72, 24)}.get(kind)
    weights = [None, None] if widths is None else [random(n, device=device, seed=3 + i) for i, n in enumerate(widths)]
    y, dx = torch.full((2, 5, 4, 24), torch.nan, device=device).bfloat16(), torch.full_like(x, torch.nan)
    for part, weight in zip((dense.Heads(0, 3, kind), dense.Heads(3, 1, kind)), weights, strict=True):
        heads = slice(part.first, part.first + part.count)
        inside = x[:, :, heads].flatten(2) if kind == "full" else x[:, :, heads]
        normed, rstd = (inside, None) if weight is None else rms_normed(inside, 1e-5)
        alone = dataclasses.replace(rotary, cos_SXr=rotary.cos_SXr[:, heads], sin_SXr=rotary.sin_SXr[:, heads])
        expected = alone.rotate_((normed.clone() if weight is None else normed * weight).view(2, 5, part.count, 24))
        found_rstd = dense.norm_and_rotate(x, part, weight, rotary.cos_SXr, rotary.sin_SXr, 1e-5, y)
        close(y[:, :, heads], expected, 1e-3)

        dy = random(2, 5, part.count, 24, device=device, seed=7)
        found_dw = dense.norm_and_rotate_backward(
            dy, x, part, weight, rotary.cos_SXr, rotary.sin_SXr, found_rstd, dx, num_slices=2
        )
        back = alone.rotated_back([dy])
        if weight is None:
            assert found_dw is None and dx[:, :, heads].equal(back)
            continue
        back = back.flatten(2) if kind == "full" else back
        expected_dx, expected_dw = rms_norm_backward(*(x.flatten(0, 1) for x in (back, normed, rstd)), weight, 2)
        close(dx[:, :, heads], expected_dx.view(dx[:, :, heads].shape), 5e-3)
        close(found_dw, expected_dw.sum(1) if kind == "head" else expected_dw, 1e-3)
    assert dx[:, :, 4:].isnan().all(), "values are not these kernels' business"


def test_cross_entropy_and_its_gradient(device: torch.device) -> None:
    logits = random(5, 32, device=device, dtype=torch.float32) * 4
    logits[:, 27:] = torch.nan  # columns behind the vocabulary
    targets = torch.tensor([3, 0, IGNORED, 26, 7], device=device)
    leaf = logits[:, :27].double().requires_grad_()
    expected = F.cross_entropy(leaf, targets, ignore_index=IGNORED, reduction="none")
    expected.sum().mul(0.25).backward()
    close(dense.cross_entropy(logits, 27, targets, IGNORED, None), expected.detach(), 1e-6)
    assert logits[:, 27:].isnan().all(), "without a scale the logits stay"
    losses = dense.cross_entropy(logits, 27, targets, IGNORED, torch.tensor(0.25, dtype=torch.float64, device=device))
    close(losses, expected.detach(), 1e-6)
    assert losses[2] == 0
    close(logits[:, :27], leaf.grad, 1e-6)
    assert not logits[:, 27:].any() and not logits[2].any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_loss_over_what_is_not_finite_is_not_finite(bad: float, device: torch.device) -> None:
    logits = random(1, 16, device=device)
    logits[0, 5] = bad
    assert not dense.cross_entropy(logits, 16, torch.tensor([0], device=device), IGNORED, None).isfinite().any()


def test_square_sums(device: torch.device) -> None:
    values = random(40 * 256, device=device, dtype=torch.float32)
    close(optimizer.square_sums(values, 256), values.double().square().view(-1, 256).sum(1), 1e-6)


@pytest.mark.parametrize("moments", ["bf16", "fp32"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
def test_the_optimizer_has_the_bits_of_separate_operations(
    moments: str, weight_decay: float, weights: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a CPU torch.sqrt is MKL's, which rounds 0.7 % of the values the other way; a GPU's is exact.
    monkeypatch.setattr(torch, "sqrt", lambda x, out: out.copy_(x.double().sqrt()))

    def trained(place: torch.device, one_pass: bool) -> ParameterGroup:
        parameter = torch.nn.Parameter(random(3001, device=place, dtype=weights))
        grads = (random(3072, device=torch.device("cpu"), seed=1, dtype=torch.float32) ** 5).to(place)
        group = ParameterGroup.of(Bank([parameter]), grads, weight_decay, MOMENT_DTYPES[moments])
        optimizer = AdamW([group], OptimConfig())
        update = _update_in_one_pass if one_pass else _update_by_chunks
        for step in range(1, 4):
            factors, scale = (torch.tensor(x, dtype=torch.float64) for x in (optimizer.factors(step, lr=1e-3), 0.7))
            (numbers,) = optimizer._numbers(factors, scale)
            update(group, optimizer.config, numbers.to(place))
        if one_pass:
            (numbers,) = optimizer._numbers(factors, scale * torch.nan)
            update(group, optimizer.config, numbers.to(place))  # a step that must not be taken
        return group

    found, expected = trained(device, True), trained(torch.device("cpu"), False)
    for name in ("weights", "master", "exp_avg", "exp_avg_sq"):
        assert_same_bits(name, getattr(found, name).cpu(), getattr(expected, name))
    assert not found.master[:3001].equal(random(3001, device=device, dtype=weights).float())
