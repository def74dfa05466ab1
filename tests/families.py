"""Tiny models of every Hugging Face family that mok exports, as recipes and as run folders with random weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from mok.config import ModelConfig, MoEConfig, Recipe, TrainConfig
from mok.data import Tokenizer
from mok.dcp import save
from mok.hf_layout import KEPT_FP32, tensor_shapes
from mok.recipe import dump_toml

VOCAB = 272

SIZES = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "vocab_size": VOCAB}
EXPERTS = {"num_experts": 4, "top_k": 2, "intermediate_size": 32}

RECIPES = {
    "qwen3_moe": Recipe(model=ModelConfig(**SIZES), moe=MoEConfig(**EXPERTS)),
    "glm4_moe": Recipe(
        model=ModelConfig(**SIZES | {"num_layers": 3}, num_dense_layers=1, dense_intermediate_size=48, rotary_fraction=0.5),
        moe=MoEConfig(**EXPERTS, score="sigmoid", correction_bias=True, num_shared_experts=1, scaling_factor=1.5),
    ),
    "mixtral": Recipe(model=ModelConfig(**SIZES, qk_norm="none", rope_theta=1e6), moe=MoEConfig(**EXPERTS)),
    "olmoe": Recipe(model=ModelConfig(**SIZES, qk_norm="full"), moe=MoEConfig(**EXPERTS, normalize_weights=False)),
}


def random_weights(recipe: Recipe, seed: int = 0) -> dict[str, Tensor]:
    """fp32 weights by mok's names, norms around 1 and matrices of unit gain, so that logits are of order 1."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in tensor_shapes(recipe, VOCAB).items():
        noise = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.1 * noise if "norm" in name else noise * (0.1 if len(shape) == 1 else shape[-1] ** -0.5)
    return weights


def write_run(folder: Path, recipe: Recipe, weights: Mapping[str, Tensor] | None = None) -> Path:
    """A run folder as `mok train` leaves it, as far as an export looks at it; bf16 recipes have fp32 master weights."""
    folder.mkdir(parents=True)
    tensors = dict(random_weights(recipe) if weights is None else weights)
    if recipe.train.dtype == "bf16":
        masters = {f"master:{name}": tensor for name, tensor in tensors.items() if not name.endswith(KEPT_FP32)}
        rounded = {name: t if name.endswith(KEPT_FP32) else t.bfloat16() for name, t in tensors.items()}
        tensors = rounded | masters
    tensors |= {f"exp_avg:{name}": torch.zeros_like(tensor) for name, tensor in list(tensors.items())[:2]}
    save(folder / "checkpoints", 7, tensors, {"recipe": recipe.to_dict()}, keep_last=0)
    (folder / "recipe.toml").write_text(dump_toml(recipe))
    Tokenizer.of_bytes().save(folder)
    return folder


def in_bf16(recipe: Recipe) -> Recipe:
    """The same recipe, trained in bf16."""
    return Recipe(model=recipe.model, moe=recipe.moe, train=TrainConfig(dtype="bf16"))


def changed(recipe: Recipe, **keys: object) -> Recipe:
    """`recipe` with "section.key" replaced, dots written as two underscores."""
    for key, value in keys.items():
        section, name = key.split("__")
        part = dataclasses.replace(getattr(recipe, section), **{name: value})
        recipe = dataclasses.replace(recipe, **{section: part})
    return recipe
