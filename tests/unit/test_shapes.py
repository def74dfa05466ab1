"""Sizes: published counts of well-known models, and hand-counted ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mok.recipe import load
from mok.shapes import (
    LAYER_SHAPES,
    LayerShape,
    activation_choices,
    active_parameters,
    checkpoint_bytes,
    exchange_bytes,
    flops_per_token,
    layer_shape,
    parameters,
    rank_bytes,
    vocabulary,
)

QWEN3_30B_A3B = "model: hidden_size=2048 num_layers=48 num_heads=32 num_kv_heads=4 head_dim=128 vocab_size=151936; \
moe: num_experts=128 top_k=8 intermediate_size=768"
OLMOE_1B_7B = "model: hidden_size=2048 num_layers=16 num_heads=16 num_kv_heads=16 head_dim=128 vocab_size=50304 qk_norm=full; \
moe: num_experts=64 top_k=8 intermediate_size=1024"
MIXTRAL_8X7B = "model: hidden_size=4096 num_layers=32 num_heads=32 num_kv_heads=8 head_dim=128 vocab_size=32000 qk_norm=none; \
moe: num_experts=8 top_k=2 intermediate_size=14336"


def overrides(text: str) -> list[str]:
    sections = (part.split(":") for part in text.split(";"))
    return [f"{section.strip()}.{setting}" for section, settings in sections for setting in settings.split()]


@pytest.mark.parametrize(
    ("model", "shape", "total_billions", "active_billions"),
    [
        (QWEN3_30B_A3B, "qwen3-30b-a3b", 30.5, 3.3),
        (OLMOE_1B_7B, "olmoe-1b-7b", 6.9, 1.3),
        (MIXTRAL_8X7B, "mixtral-8x7b", 46.7, 12.9),
    ],
)
def test_parameter_counts_are_the_published_ones(model, shape, total_billions, active_billions):
    recipe = load("toy", overrides(model))
    vocab_size = vocabulary(recipe)
    assert sum(parameters(recipe, vocab_size).values()) / 1e9 == pytest.approx(total_billions, abs=0.06)
    assert active_parameters(recipe, vocab_size) / 1e9 == pytest.approx(active_billions, abs=0.06)
    assert layer_shape(recipe) == LAYER_SHAPES[shape]


def test_shared_experts_dense_blocks_gates_and_ties_are_counted():
    sizes = "model.num_layers=2 model.num_dense_layers=1 model.dense_intermediate_size=32 model.tie_embeddings=true \
model.hidden_size=16 moe.intermediate_size=16 moe.num_shared_experts=2 moe.shared_intermediate_size=48 moe.shared_gate=true"
    counts = parameters(load("toy", sizes.split()), vocab_size=10)
    assert counts["embedding"] == 10 * 16
    assert counts["head"] == 0
    assert counts["dense"] == 3 * 16 * 32
    assert counts["experts"] == 8 * 3 * 16 * 16
    assert counts["shared experts"] == 3 * 16 * (2 * 48) + 16
    assert counts["router"] == 8 * 16


def test_flops_of_a_layer_are_two_per_weight_and_row():
    shape = LayerShape(hidden_size=16, intermediate_size=32, num_experts=4, top_k=2, shared_size=48)
    assert shape.flops(tokens=5) == 5 * (2 * 2 * 3 * 16 * 32 + 2 * 3 * 16 * 48)


def test_flops_per_token_count_each_product_once():
    recipe = load("toy", ["model.num_layers=1", "train.sequence_length=2"])
    matrices = 128 * (128 + 64 + 64) + 128 * 128 + 8 * 128 + 2 * 3 * 128 * 128 + 512 * 128
    # With two positions a token attends to one and a half on average: two products of two heads of 64.
    assert flops_per_token(recipe, 512) == 3 * (2 * matrices + 2 * 2 * 128 * 3 // 2)
    tied = load("toy", ["model.num_layers=1", "train.sequence_length=2", "model.tie_embeddings=true"])
    assert flops_per_token(tied, 512) == flops_per_token(recipe, 512)


def test_only_rows_for_other_ranks_are_exchanged():
    recipe = load("toy", ["train.dtype=bf16"])
    assert exchange_bytes(recipe, tokens=64, ep=1) == 0
    assert exchange_bytes(recipe, tokens=64, ep=4) == 64 * 2 * 3 // 4 * 128 * 2 * 4
    eight_bits = load("toy", ["train.dtype=mxfp8", "moe.quantize_dispatch=true"])
    assert exchange_bytes(eight_bits, tokens=64, ep=4) == 64 * 2 * 3 // 4 * 2 * (128 + 4 + 128 * 2)


def test_bytes_follow_the_dtypes_and_the_cells_of_the_grid():
    recipe = load("toy", ["train.dtype=bf16", "optim.moment_dtype=bf16"])
    total = sum(parameters(recipe, 512).values())
    experts = parameters(recipe, 512)["experts"]
    alone = rank_bytes(recipe, 512, ep=1, replicas=1, lanes=1, positions=1, tokens=0)
    assert alone == {
        "weights": 2 * total,
        "rounded weights": 0,
        "master weights": 4 * total,
        "moments": 4 * total,
        "gradients": 4 * total,
        "activations": 0,
        "peer workspace": 0,
        "exchange rows": 0,
    }
    for dtype, orientations in (("mxfp8", 2), ("fp8_block", 1)):
        quantized = load("toy", [f"train.dtype={dtype}", "optim.moment_dtype=bf16"])
        kept = rank_bytes(quantized, 512, ep=1, replicas=1, lanes=1, positions=1, tokens=0)
        assert kept == alone | {"rounded weights": 2 * orientations * experts}
    shared = rank_bytes(recipe, 512, ep=4, replicas=2, lanes=2, positions=3, tokens=0)
    assert shared["weights"] == 2 * (total - experts + experts // 4)
    assert shared["master weights"] == shared["moments"] == 4 * ((total - experts) // 8 + experts // 4 // 2)
    assert shared["gradients"] == 4 * (6 * (total - experts) + 2 * experts // 4)
    assert checkpoint_bytes(recipe, 512) == 10 * total
    assert rank_bytes(recipe, 512, ep=4, replicas=1, lanes=1, positions=1, tokens=100)["exchange rows"] == 2 * 100 * 2 * 128 * 2


def test_computing_more_again_keeps_less():
    recipe = load("small")
    kept = activation_choices(recipe, 16384, 8192)
    assert list(kept) == ["none", "activations", "all", "blocks"]
    assert sorted(kept.values(), reverse=True) == list(kept.values())
    for choice, size in kept.items():
        key = "train.recompute" if choice == "blocks" else "moe.recompute"
        chosen = load("small", [f"{key}={choice}"])
        assert rank_bytes(chosen, 16384, ep=1, replicas=1, lanes=1, positions=1, tokens=8192)["activations"] == size


def test_the_vocabulary_is_known_without_data(tmp_path: Path):
    assert vocabulary(load("toy", ["data.tokenizer=bpe:700"])) == 700
    assert vocabulary(load("toy", ["data.tokenizer=bpe:700", "model.vocab_size=1024"])) == 1024
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 4, "content": "<eod>"}]}))
    assert vocabulary(load("toy", [f"data.tokenizer={file}"])) == 5
