"""Hugging Face families of MoE models: tensor names, config fields, and which recipes each can express.

Owns the way from a recipe to a `config.json` and from mok's tensor names to those of a family. Both spellings are written where
readers of transformers 4 and 5 differ. Knows nothing of files or torch. Read next: `mok/export.py`, and `mok/hf_config.py` for
the way back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mok.config import Recipe
from mok.errors import UsageError

__all__ = ["FAMILIES", "KEPT_FP32", "Family", "choose_family", "normalizes", "reasons", "shared_size", "tensor_shapes"]

KEPT_FP32 = ("e_score_correction_bias",)
"""Last parts of tensor names that are stored in fp32 whatever the export's dtype: rounding them changes who is chosen."""


@dataclass(frozen=True)
class Family:
    """One architecture of transformers.

    name: its model_type. architecture: its class. why_not(recipe): why it cannot express a recipe, empty if it can.
    fields(recipe): the fields of config.json that it does not share with the others.
    renamed: (mok's name, the family's name) for parts of tensor names that differ.
    """

    name: str
    architecture: str
    why_not: Callable[[Recipe], list[str]]
    fields: Callable[[Recipe], dict[str, Any]]
    renamed: tuple[tuple[str, str], ...] = ()

    def tensor_name(self, name: str) -> str:
        """The family's name of the tensor that mok calls `name`."""
        for ours, theirs in self.renamed:
            name = re.sub(rf"(?<=\.){re.escape(ours)}(?=\.)", theirs, name)
        return name

    def config(self, recipe: Recipe, vocab_size: int, end_id: int, dtype: str) -> dict[str, Any]:
        """The config.json of a model with `vocab_size` embedding rows, weights in `dtype` (bf16 or fp32)."""
        model, torch_dtype = recipe.model, {"bf16": "bfloat16", "fp32": "float32"}[dtype]
        return {
            "architectures": [self.architecture],
            "model_type": self.name,
            "vocab_size": vocab_size,
            "hidden_size": model.hidden_size,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_heads,
            "num_key_value_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
            "num_experts_per_tok": recipe.moe.top_k,
            "hidden_act": "silu",
            "rms_norm_eps": model.norm_eps,
            "rope_theta": model.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
            "max_position_embeddings": model.max_positions or recipe.train.sequence_length,
            "attention_dropout": 0.0,
            "tie_word_embeddings": model.tie_embeddings,
            "router_aux_loss_coef": recipe.moe.balance_loss,
            "output_router_logits": False,
            "bos_token_id": end_id,
            "eos_token_id": end_id,
            "torch_dtype": torch_dtype,
            "dtype": torch_dtype,
            "initializer_range": model.init_std,
            "use_cache": True,
        } | self.fields(recipe)


def _qwen3_moe_fields(recipe: Recipe) -> dict[str, Any]:
    return {
        "intermediate_size": recipe.moe.intermediate_size,  # of dense layers, which there are none of; readers want it
        "moe_intermediate_size": recipe.moe.intermediate_size,
        "num_experts": recipe.moe.num_experts,
        "num_local_experts": recipe.moe.num_experts,
        "norm_topk_prob": normalizes(recipe),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": recipe.model.num_layers,
    }


def _glm4_moe_fields(recipe: Recipe) -> dict[str, Any]:
    model, moe = recipe.model, recipe.moe
    return {
        "intermediate_size": model.dense_intermediate_size or moe.intermediate_size,
        "moe_intermediate_size": moe.intermediate_size,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": shared_size(recipe) // moe.intermediate_size,
        "first_k_dense_replace": model.num_dense_layers,
        "n_group": moe.num_groups,
        "topk_group": moe.top_groups,
        "norm_topk_prob": moe.normalize_weights,
        "routed_scaling_factor": moe.scaling_factor,
        "use_qk_norm": model.qk_norm == "head",
        "num_nextn_predict_layers": 0,
        "attention_bias": model.attention_bias,
        "partial_rotary_factor": model.rotary_fraction,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": model.rope_theta,
            "partial_rotary_factor": model.rotary_fraction,
        },
    }


def _mixtral_fields(recipe: Recipe) -> dict[str, Any]:
    return {
        "intermediate_size": recipe.moe.intermediate_size,
        "num_local_experts": recipe.moe.num_experts,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
    }


def _olmoe_fields(recipe: Recipe) -> dict[str, Any]:
    return {
        "intermediate_size": recipe.moe.intermediate_size,
        "num_experts": recipe.moe.num_experts,
        "num_local_experts": recipe.moe.num_experts,
        "norm_topk_prob": normalizes(recipe),
        "clip_qkv": None,
        "attention_bias": False,
    }


def normalizes(recipe: Recipe) -> bool:
    """Whether a token's weights sum to one: a softmax over the chosen experts does, as much as a division by their sum."""
    return recipe.moe.normalize_weights or recipe.moe.score_order == "after_top_k"


def shared_size(recipe: Recipe) -> int:
    """Width of all shared experts together."""
    return recipe.moe.num_shared_experts * (recipe.moe.shared_intermediate_size or recipe.moe.intermediate_size)


def reasons(*rules: tuple[bool, str]) -> list[str]:
    """What is said of the rules that do not hold."""
    return [reason for holds, reason in rules if not holds]


def _everywhere(recipe: Recipe) -> list[str]:
    moe = recipe.moe
    return reasons(
        (not moe.shared_gate, "moe.shared_gate: it has no gate on shared experts"),
        (moe.clamp == 0, "moe.clamp: its experts do not clamp"),
        (moe.force_routing == "none", "moe.force_routing: it always asks its router"),
    )


def _softmax_only(recipe: Recipe) -> list[str]:
    model, moe = recipe.model, recipe.moe
    return reasons(
        (moe.score == "softmax", "moe.score: its router takes a softmax"),
        (not moe.correction_bias, "moe.correction_bias: its router has none"),
        (moe.scaling_factor == 1, "moe.scaling_factor: its router has none"),
        (moe.num_groups == 1, "moe.num_groups: its router has no groups"),
        (moe.num_shared_experts == 0, "moe.num_shared_experts: it has none"),
        (model.num_dense_layers == 0, "model.num_dense_layers: every layer has experts"),
        (not model.attention_bias, "model.attention_bias: its queries, keys and values have none, or its output has one too"),
        (model.rotary_fraction == 1, "model.rotary_fraction: it rotates whole heads"),
    )


def _qwen3_moe_why_not(recipe: Recipe) -> list[str]:
    qk_norm = recipe.model.qk_norm == "head"
    return _everywhere(recipe) + _softmax_only(recipe) + reasons((qk_norm, 'model.qk_norm: it needs "head"'))


def _mixtral_why_not(recipe: Recipe) -> list[str]:
    return (
        _everywhere(recipe)
        + _softmax_only(recipe)
        + reasons(
            (recipe.model.qk_norm == "none", 'model.qk_norm: it needs "none"'),
            (normalizes(recipe), "moe.normalize_weights: its router always divides by the sum"),
        )
    )


def _olmoe_why_not(recipe: Recipe) -> list[str]:
    model = recipe.model
    return (
        _everywhere(recipe)
        + _softmax_only(recipe)
        + reasons(
            (model.qk_norm == "full", 'model.qk_norm: it needs "full"'),
            (model.head_dim * model.num_heads == model.hidden_size, "model.head_dim: it needs hidden_size / num_heads"),
        )
    )


def _glm4_moe_why_not(recipe: Recipe) -> list[str]:
    model, moe = recipe.model, recipe.moe
    shared = shared_size(recipe)
    return _everywhere(recipe) + reasons(
        (moe.score == "sigmoid", "moe.score: its router takes a sigmoid"),
        (moe.correction_bias, "moe.correction_bias: its router always has one (moe.bias_update_rate = 0 keeps it at zero)"),
        (shared > 0, "moe.num_shared_experts: it always has one"),
        (shared % moe.intermediate_size == 0, "moe.shared_intermediate_size: their width is a multiple of intermediate_size"),
        (moe.num_groups == 1 or moe.num_experts >= 2 * moe.num_groups, "moe.num_groups: a group needs two experts"),
        (model.qk_norm in ("head", "none"), 'model.qk_norm: it needs "head" or "none"'),
    )


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_moe_why_not, _qwen3_moe_fields),
        Family("glm4_moe", "Glm4MoeForCausalLM", _glm4_moe_why_not, _glm4_moe_fields),
        Family(
            "mixtral",
            "MixtralForCausalLM",
            _mixtral_why_not,
            _mixtral_fields,
            (("mlp", "block_sparse_moe"), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")),
        ),
        Family("olmoe", "OlmoeForCausalLM", _olmoe_why_not, _olmoe_fields),
    )
}
"""By model_type, in the order in which `choose_family` asks them."""


def choose_family(recipe: Recipe, name: str | None = None) -> Family:
    """The family called `name`, or the first that can express `recipe`. Raises UsageError with every reason if none can."""
    if name is not None and name not in FAMILIES:
        raise UsageError(f"--arch {name}: not an architecture that mok exports; use one of {', '.join(FAMILIES)}")
    asked = [FAMILIES[name]] if name else list(FAMILIES.values())
    refusals = {family.name: family.why_not(recipe) for family in asked}
    for family in asked:
        if not refusals[family.name]:
            return family
    listed = "\n".join(f"  {family}: {reason}" for family, found in refusals.items() for reason in found)
    raise UsageError(f"no Hugging Face architecture asked for can express this model; change the recipe, or --arch:\n{listed}")


def tensor_shapes(recipe: Recipe, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Every weight of the whole model, whatever rank holds it: mok's name -> shape, in the order of the model."""
    return dict(_tensors(recipe, vocab_size))


def _tensors(recipe: Recipe, vocab_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    model = recipe.model
    width = model.hidden_size
    yield "model.embed_tokens.weight", (vocab_size, width)
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (width,)
        yield from ((f"{prefix}self_attn.{name}", shape) for name, shape in _attention_tensors(recipe))
        yield prefix + "post_attention_layernorm.weight", (width,)
        if layer < model.num_dense_layers:
            yield from _swiglu_tensors(prefix + "mlp.", width, model.dense_intermediate_size)
        else:
            yield from ((f"{prefix}mlp.{name}", shape) for name, shape in _moe_tensors(recipe))
    yield "model.norm.weight", (width,)
    if not model.tie_embeddings:
        yield "lm_head.weight", (vocab_size, width)


def _attention_tensors(recipe: Recipe) -> Iterator[tuple[str, tuple[int, ...]]]:
    model = recipe.model
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        yield f"{name}.weight", (rows, model.hidden_size)
        if model.attention_bias:
            yield f"{name}.bias", (rows,)
    yield "o_proj.weight", (model.hidden_size, queries)
    if model.qk_norm != "none":
        full = model.qk_norm == "full"
        yield "q_norm.weight", (queries if full else model.head_dim,)
        yield "k_norm.weight", (keys if full else model.head_dim,)


def _moe_tensors(recipe: Recipe) -> Iterator[tuple[str, tuple[int, ...]]]:
    moe, width = recipe.moe, recipe.model.hidden_size
    yield "gate.weight", (moe.num_experts, width)
    if moe.correction_bias:
        yield "gate.e_score_correction_bias", (moe.num_experts,)
    for expert in range(moe.num_experts):
        yield from _swiglu_tensors(f"experts.{expert}.", width, moe.intermediate_size)
    if moe.num_shared_experts:
        yield from _swiglu_tensors("shared_experts.", width, shared_size(recipe))
    if moe.shared_gate:
        yield "shared_expert_gate.weight", (1, width)


def _swiglu_tensors(prefix: str, width: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield prefix + "gate_proj.weight", (inner, width)
    yield prefix + "up_proj.weight", (inner, width)
    yield prefix + "down_proj.weight", (width, inner)
