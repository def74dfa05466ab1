"""Names and configs of the Hugging Face families, and which recipe each can express."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mok.errors import UsageError
from mok.hf_config import recipe_differences, recipe_values
from mok.hf_layout import FAMILIES, choose_family, tensor_shapes
from mok.recipe import load, shipped
from mok.shapes import parameters
from mok_cli.dry_run import price
from tests.families import RECIPES, VOCAB, changed


@pytest.mark.parametrize("name", RECIPES)
def test_each_family_is_found_from_the_recipe(name):
    assert choose_family(RECIPES[name]).name == name
    assert choose_family(RECIPES[name], name).name == name


@pytest.mark.parametrize("name", RECIPES)
def test_config_and_recipe_say_the_same(name):
    config = json.loads(json.dumps(FAMILIES[name].config(RECIPES[name], VOCAB, 256, "bf16")))
    assert recipe_differences(RECIPES[name], config) == []
    for key, value in recipe_values(config).items():
        section, field = key.split(".")
        assert getattr(getattr(RECIPES[name], section), field) == value, key


@given(
    name=st.sampled_from(sorted(RECIPES)),
    normalize=st.booleans(),
    tied=st.booleans(),
    theta=st.floats(1.0, 1e7),
    eps=st.floats(1e-9, 1e-3),
    heads=st.sampled_from([(4, 4, 16), (4, 1, 16), (2, 2, 32)]),
)
def test_every_choice_survives_the_way_out_and_back(name, normalize, tied, theta, eps, heads):
    recipe = changed(
        RECIPES[name],
        moe__normalize_weights=normalize or name == "mixtral",
        model__tie_embeddings=tied,
        model__rope_theta=theta,
        model__norm_eps=eps,
        model__num_heads=heads[0],
        model__num_kv_heads=heads[1],
        model__head_dim=heads[2],
    )
    config = json.loads(json.dumps(FAMILIES[name].config(recipe, VOCAB, 256, "fp32")))
    assert FAMILIES[name].why_not(recipe) == []
    assert recipe_differences(recipe, config) == []


def test_both_spellings_are_written():
    config = FAMILIES["qwen3_moe"].config(RECIPES["qwen3_moe"], VOCAB, 256, "bf16")
    assert config["num_experts"] == config["num_local_experts"] == 4
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    config = FAMILIES["glm4_moe"].config(RECIPES["glm4_moe"], VOCAB, 256, "bf16")
    assert config["partial_rotary_factor"] == config["rope_parameters"]["partial_rotary_factor"] == 0.5
    assert config["num_nextn_predict_layers"] == 0


REFUSED = [
    ("qwen3_moe", {"moe__num_shared_experts": 1}, "moe.num_shared_experts"),
    ("qwen3_moe", {"moe__score": "sigmoid"}, "moe.score"),
    ("qwen3_moe", {"moe__clamp": 7.0}, "moe.clamp"),
    ("qwen3_moe", {"model__attention_bias": True}, "model.attention_bias"),
    ("qwen3_moe", {"model__num_dense_layers": 1, "model__dense_intermediate_size": 32}, "model.num_dense_layers"),
    ("qwen3_moe", {"moe__correction_bias": True}, "moe.correction_bias"),
    ("qwen3_moe", {"moe__scaling_factor": 2.0}, "moe.scaling_factor"),
    ("qwen3_moe", {"moe__force_routing": "balanced"}, "moe.force_routing"),
    ("mixtral", {"moe__normalize_weights": False}, "moe.normalize_weights"),
    ("mixtral", {"model__qk_norm": "full"}, "model.qk_norm"),
    ("olmoe", {"model__head_dim": 32}, "model.head_dim"),
    ("glm4_moe", {"moe__correction_bias": False}, "moe.correction_bias"),
    ("glm4_moe", {"moe__num_shared_experts": 0}, "moe.num_shared_experts"),
    ("glm4_moe", {"moe__shared_intermediate_size": 48}, "moe.shared_intermediate_size"),
    ("glm4_moe", {"moe__shared_gate": True}, "moe.shared_gate"),
    ("glm4_moe", {"moe__num_groups": 4, "moe__top_groups": 2}, "moe.num_groups"),
]


@pytest.mark.parametrize(("name", "keys", "blamed"), REFUSED)
def test_what_a_family_cannot_express_is_refused_with_the_key(name, keys, blamed):
    with pytest.raises(UsageError, match=re.escape(f"{name}: {blamed}:")):
        choose_family(changed(RECIPES[name], **keys), name)


def test_a_model_that_nobody_can_express_lists_the_reasons_of_all():
    with pytest.raises(UsageError) as refusal:
        choose_family(changed(RECIPES["qwen3_moe"], moe__clamp=7.0))
    assert all(f"{name}: moe.clamp" in str(refusal.value) for name in FAMILIES)
    with pytest.raises(UsageError, match="--arch llama"):
        choose_family(RECIPES["qwen3_moe"], "llama")


def test_both_conventions_of_normalising_are_one_to_a_reader():
    after = changed(RECIPES["qwen3_moe"], moe__score_order="after_top_k", moe__normalize_weights=False)
    config = FAMILIES["qwen3_moe"].config(after, VOCAB, 256, "fp32")
    assert config["norm_topk_prob"] is True
    assert recipe_differences(after, config) == []
    plain = changed(RECIPES["qwen3_moe"], moe__normalize_weights=False)
    assert FAMILIES["qwen3_moe"].config(plain, VOCAB, 256, "fp32")["norm_topk_prob"] is False
    assert recipe_differences(plain, config) == ["--set moe.normalize_weights=true"]


@pytest.mark.parametrize("name", RECIPES)
def test_tensors_are_all_parameters(name):
    shapes = tensor_shapes(RECIPES[name], VOCAB)
    biases = sum(shape[0] for tensor, shape in shapes.items() if tensor.endswith("e_score_correction_bias"))
    elements = sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes.values())
    assert elements - biases == sum(parameters(RECIPES[name], VOCAB).values())


def test_mixtral_has_its_own_names():
    rename = FAMILIES["mixtral"].tensor_name
    assert rename("model.layers.3.mlp.experts.12.gate_proj.weight") == "model.layers.3.block_sparse_moe.experts.12.w1.weight"
    assert rename("model.layers.3.mlp.experts.12.up_proj.weight") == "model.layers.3.block_sparse_moe.experts.12.w3.weight"
    assert rename("model.layers.3.mlp.experts.12.down_proj.weight") == "model.layers.3.block_sparse_moe.experts.12.w2.weight"
    assert rename("model.layers.3.mlp.gate.weight") == "model.layers.3.block_sparse_moe.gate.weight"
    assert rename("model.layers.3.self_attn.q_proj.weight") == "model.layers.3.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}, "rotary embedding of type yarn"),
        ("sliding_window", 4096, "sliding attention window"),
        ("hidden_act", "gelu", "activation gelu"),
        ("mlp_only_layers", [1], "dense layers between"),
        ("quantization_config", {"bits": 4}, "quantized weights"),
        ("model_type", "llama", "llama"),
    ],
)
def test_models_with_parts_that_no_recipe_has_are_refused(field, value, named):
    config = FAMILIES["qwen3_moe"].config(RECIPES["qwen3_moe"], VOCAB, 256, "bf16") | {"use_sliding_window": True, field: value}
    with pytest.raises(UsageError, match=named):
        recipe_values(config)


@pytest.mark.parametrize(("field", "value"), [("hidden_size", None), ("num_attention_heads", 0), ("rope_parameters", 3)])
def test_a_config_that_lacks_a_field_is_refused(field, value):
    config = FAMILIES["mixtral"].config(RECIPES["mixtral"], VOCAB, 256, "bf16") | {"head_dim": None, field: value}
    with pytest.raises(UsageError, match=r"config\.json: a field is missing or of another type"):
        recipe_values(config)
    del config[field], config["num_local_experts"]
    with pytest.raises(UsageError, match=r"config\.json"):
        recipe_values(config)


PUBLISHED = {
    "olmoe-1b-7b": {
        "model_type": "olmoe",
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "sliding_window": None,
    },
    "qwen3-235b-a22b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
    },
    "glm-4.5-air": {
        "model_type": "glm4_moe",
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "use_qk_norm": False,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000,
        "num_nextn_predict_layers": 1,
    },
}
"""What the config.json files published with these models say, as far as a recipe says it too."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipes_of_published_models_are_those_models(name):
    recipe = load(name)
    assert recipe_differences(recipe, PUBLISHED[name]) == []
    assert choose_family(recipe).name == PUBLISHED[name]["model_type"]


@pytest.mark.parametrize("name", [*PUBLISHED, "deepseek-v3-class", "kimi-k2-class"])
def test_full_size_recipes_state_the_memory_that_they_take(name):
    text = shipped()[name].read_text()
    ranks = int(re.search(r"# Ranks: (\d+)", text)[1])
    stated = int(re.search(r"# Memory: (\d+) GiB per rank", text)[1])
    priced = sum(price(load(name), ranks).rank_bytes.values()) / 2**30
    assert abs(stated - priced) < 1.0
    assert choose_family(load(name)).name in FAMILIES
