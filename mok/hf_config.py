"""What a Hugging Face config.json says in the keys of a recipe, and where a given recipe says something else.

Owns the reading of configs of the families in `mok/hf_layout.py`, in both spellings, and the refusal of models with parts that
no recipe has. Knows nothing of weights. Read next: `mok/hf_import.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mok.config import Recipe
from mok.errors import UsageError
from mok.hf_layout import FAMILIES, Family, normalizes, reasons, shared_size
from mok.recipe import keys

__all__ = ["family_of_config", "recipe_differences", "recipe_values"]


def family_of_config(config: Mapping[str, Any]) -> Family:
    """The family that a config.json belongs to. Raises UsageError if mok does not know it."""
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise UsageError(f'config.json: model_type = "{name}" cannot be read; mok reads {", ".join(FAMILIES)}')
    return FAMILIES[name]


def recipe_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe keys, `model.hidden_size` and so on, that a config.json fixes: everything the weights' meaning depends on.

    Raises UsageError where the model has something that no recipe can express, such as a sliding window or scaled rotation, and
    for a config without the fields that every model of its family has.
    """
    try:
        values = _recipe_values(config)
        for key, value in values.items():
            default = keys()[key].default
            kinds = (int, float) if isinstance(default, float) else type(default)
            if not isinstance(value, kinds) or isinstance(value, bool) != isinstance(default, bool):
                raise ValueError(f"{key} would be {value!r}")
        return values
    except (KeyError, TypeError, AttributeError, ValueError, ZeroDivisionError) as error:
        raise UsageError(f"config.json: a field is missing or of another type ({error!r}); copy it again") from error


def _recipe_values(config: Mapping[str, Any]) -> dict[str, Any]:
    family = family_of_config(config)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    _refuse_unknown_parts(config, rope)
    heads = config["num_attention_heads"]
    values: dict[str, Any] = {
        "model.hidden_size": config["hidden_size"],
        "model.num_layers": config["num_hidden_layers"],
        "model.num_heads": heads,
        "model.num_kv_heads": config.get("num_key_value_heads") or heads,
        "model.head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "model.vocab_size": config["vocab_size"],
        "model.norm_eps": config.get("rms_norm_eps", 1e-5),
        "model.rope_theta": float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        "model.tie_embeddings": config.get("tie_word_embeddings", False),
        "model.attention_bias": config.get("attention_bias", False),
        "model.qk_norm": "head",
        "model.num_dense_layers": 0,
        "model.rotary_fraction": 1.0,
        "moe.top_k": config["num_experts_per_tok"],
        "moe.intermediate_size": config.get("moe_intermediate_size") or config["intermediate_size"],
        "moe.num_experts": config.get("num_local_experts") or config.get("num_experts") or config["n_routed_experts"],
        "moe.score": "softmax",
        "moe.normalize_weights": config.get("norm_topk_prob", False),
        "moe.scaling_factor": 1.0,
        "moe.correction_bias": False,
        "moe.num_groups": 1,
        "moe.top_groups": 1,
        "moe.num_shared_experts": 0,
        "moe.shared_gate": False,
        "moe.clamp": 0.0,
    }
    if family.name == "mixtral":
        values |= {"model.qk_norm": "none", "moe.normalize_weights": True}
    if family.name == "olmoe":
        values |= {"model.qk_norm": "full", "moe.intermediate_size": config["intermediate_size"]}
    if family.name == "glm4_moe":
        values |= {
            "model.qk_norm": "head" if config.get("use_qk_norm", False) else "none",
            "model.num_dense_layers": config["first_k_dense_replace"],
            "model.rotary_fraction": rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.5)),
            "moe.score": "sigmoid",
            "moe.normalize_weights": config.get("norm_topk_prob", True),
            "moe.scaling_factor": config.get("routed_scaling_factor", 1.0),
            "moe.correction_bias": True,
            "moe.num_groups": config.get("n_group", 1),
            "moe.top_groups": config.get("topk_group", 1),
            "moe.num_shared_experts": config.get("n_shared_experts", 1),
        }
        if config["first_k_dense_replace"]:
            values["model.dense_intermediate_size"] = config["intermediate_size"]
    return values


def _refuse_unknown_parts(config: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    extra = reasons(
        (rope_type == "default", f"rotary embedding of type {rope_type}"),
        (not (config.get("use_sliding_window", True) and config.get("sliding_window")), "a sliding attention window"),
        (config.get("hidden_act", "silu") == "silu", f"activation {config.get('hidden_act')}"),
        (config.get("clip_qkv") is None, "clip_qkv"),
        (
            not config.get("mlp_only_layers") and config.get("decoder_sparse_step", 1) == 1,
            "dense layers between the MoE layers",
        ),
        (config.get("model_type") == "glm4_moe" or not config.get("attention_bias"), "a bias in the attention output"),
        (config.get("quantization_config") is None, "quantized weights"),
    )
    if extra:
        raise UsageError(f"config.json: this model has {', '.join(extra)}, which no recipe can express; use another checkpoint")


def recipe_differences(recipe: Recipe, config: Mapping[str, Any]) -> list[str]:
    """`--set KEY=VALUE` for each key of `recipe` that says something else than a config.json."""
    plain = recipe.to_dict()
    differences = []
    for key, wanted in recipe_values(config).items():
        section, name = key.split(".")
        if not _same(key, plain[section][name], wanted, recipe):
            differences.append(f"--set {key}={str(wanted).lower() if isinstance(wanted, bool) else wanted}")
    return differences


def _same(key: str, found: Any, wanted: Any, recipe: Recipe) -> bool:
    if key == "moe.normalize_weights" and recipe.moe.score == "softmax":
        return normalizes(recipe) == wanted
    if key == "moe.num_shared_experts":
        return shared_size(recipe) == wanted * recipe.moe.intermediate_size
    if key == "model.vocab_size" and found == 0:  # the tokenizer decides; the shapes of the weights are checked
        return True
    if isinstance(wanted, float):
        return math.isclose(found, wanted, rel_tol=1e-12)
    return bool(found == wanted)
