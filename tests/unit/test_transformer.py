"""The whole decoder: equal logits to transformers, gradients of every parameter against float64, names and initial weights."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from mok.config import ModelConfig, MoEConfig, Recipe, TrainConfig
from mok.model.loss import head_loss_and_gradient
from mok.model.transformer import Decoder, initial_values

MODEL = ModelConfig(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16)
RECIPE = Recipe(model=MODEL, moe=MoEConfig(num_experts=4, top_k=2, intermediate_size=48, z_loss=0.1))
VOCABULARY = 90


def decoder(recipe: Recipe, dtype: torch.dtype = torch.float32, std: float = 0.1) -> Decoder:
    model = Decoder(recipe, VOCABULARY, dtype=dtype)
    for tensor, value in initial_values(model, seed=1, std=std):
        tensor.of(tensor.owner.detach()).copy_(value)
    return model


def ids(batch: int = 4, length: int = 32) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.interop
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_logits_equal_those_of_transformers(kv_heads: int) -> None:
    transformers = pytest.importorskip("transformers")
    recipe = dataclasses.replace(RECIPE, model=dataclasses.replace(MODEL, num_kv_heads=kv_heads))
    ours = decoder(recipe)
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        experts_implementation="eager",
    )
    theirs = transformers.Qwen3MoeForCausalLM(config).eval()
    state = dict(ours.named_tensors())
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([state.pop(f"{prefix}{expert}.{part}_proj.weight") for expert in range(4)])
            for part in ("gate", "up", "down")
        )
        state[prefix + "gate_up_proj"], state[prefix + "down_proj"] = torch.cat([gate, up], 1), down
    theirs.load_state_dict(state, strict=True)
    with torch.no_grad():
        assert torch.equal(ours.logits(ids()), theirs(ids()).logits)


VARIANTS: dict[str, dict] = {
    "plain": {},
    "tied": {"model": dataclasses.replace(MODEL, tie_embeddings=True)},
    "first block dense": {"model": dataclasses.replace(MODEL, num_dense_layers=1, dense_intermediate_size=80)},
    "whole-width norms, bias": {"model": dataclasses.replace(MODEL, qk_norm="full", attention_bias=True)},
    "shared experts": {"moe": dataclasses.replace(RECIPE.moe, num_shared_experts=2, shared_gate=True)},
    "recomputed": {"train": TrainConfig(recompute="blocks")},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient_of_every_parameter_against_float64(variant: str) -> None:
    recipe = dataclasses.replace(RECIPE, **VARIANTS[variant])

    def gradients(dtype: torch.dtype) -> dict[str, Tensor]:
        backend = "torch" if dtype == torch.float32 else "reference"
        model = decoder(dataclasses.replace(recipe, moe=dataclasses.replace(recipe.moe, backend=backend)), dtype)
        hidden, stats = model(ids())
        targets = ids().roll(-1, 1).view(-1)
        _, dhidden, dhead = head_loss_and_gradient(hidden.detach(), model.w_head, VOCABULARY, targets, torch.tensor(1 / 128))
        auxiliary = sum(0.3 * layer.balance_loss_C.sum() + 0.1 * layer.z_loss_C.sum() for layer in stats)
        torch.autograd.backward([hidden, auxiliary], [dhidden, torch.ones_like(auxiliary)])
        if model.w_head.grad is None:
            model.w_head.grad = torch.zeros_like(model.w_head)
        model.w_head.grad += dhead
        return {tensor.name: tensor.of(tensor.owner.grad) for tensor in model.logical_tensors()}

    expected, found = gradients(torch.float64), gradients(torch.float32)
    assert expected.keys() == found.keys()
    for name, gradient in found.items():
        error = (gradient.double() - expected[name]).norm() / expected[name].norm()
        assert expected[name].norm() > 0 and error < 1e-5, f"{name}: {error}"


def test_initial_weights_depend_on_seed_and_name_alone() -> None:
    def values(recipe: Recipe, seed: int) -> dict[str, Tensor]:
        return {tensor.name: value for tensor, value in initial_values(Decoder(recipe, 90, dtype=torch.float32), seed, 0.02)}

    small, deep = values(RECIPE, 0), values(dataclasses.replace(RECIPE, model=dataclasses.replace(MODEL, num_layers=3)), 0)
    assert all(torch.equal(deep[name], value) for name, value in small.items())
    other = values(RECIPE, 1)
    matrices = [name for name, value in small.items() if value.dim() == 2]
    assert not any(torch.equal(other[name], small[name]) for name in matrices)
    assert len({value.sum().item() for name, value in small.items() if "experts" in name}) == 2 * 4 * 3
    assert 0.019 < small["model.embed_tokens.weight"].std() < 0.021


def test_every_parameter_is_named_once_and_completely() -> None:
    for change in VARIANTS.values():
        model = decoder(dataclasses.replace(RECIPE, **change))
        named = dict(model.named_tensors())
        padding = -VOCABULARY % 16 * 64 * (1 if model.w_head is model.w_embedding else 2)
        assert sum(tensor.numel() for tensor in named.values()) + padding == sum(p.numel() for p in model.parameters())
        assert len({tensor.data_ptr() for tensor in named.values()}) == len(named)
