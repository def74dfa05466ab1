"""Hugging Face folders that are read, and the damaged or hostile ones that are not."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mok.errors import CheckpointError, MokError, UsageError
from mok.export import export, open_run
from mok.hf_import import HfWeights
from mok.safetensors_files import INDEX, SafetensorsFolder, listed
from tests.families import RECIPES, VOCAB, changed, random_weights, write_run

RECIPE = RECIPES["qwen3_moe"]


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """An export of the tiny Qwen3-MoE in several shards, without mok's own checksums."""
    export(open_run(write_run(tmp_path / "run", RECIPE)), tmp_path / "model", max_shard_bytes=100_000)
    (tmp_path / "model" / "mok_export.json").unlink()
    return tmp_path / "model"


def rewrite_index(folder: Path, **weight_map: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= {name.replace("__", "."): file for name, file in weight_map.items()}
    (folder / INDEX).write_text(json.dumps(index))


def shard_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def read_all(folder: Path) -> None:
    weights = HfWeights(folder, RECIPE)
    for name, expected in random_weights(RECIPE).items():
        assert torch.equal(weights.read(name), expected), name


@pytest.mark.parametrize("original_format", [True, False])
@pytest.mark.parametrize("name", RECIPES)
def test_what_transformers_saves_is_read(tmp_path, name, original_format):
    transformers = pytest.importorskip("transformers")
    export(open_run(write_run(tmp_path / "run", RECIPES[name])), tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model.save_pretrained(tmp_path / "theirs", save_original_format=original_format, max_shard_size="200KB")
    names = SafetensorsFolder(tmp_path / "theirs").shapes
    assert any(".experts.gate_up_proj" in name for name in names) != original_format
    weights = HfWeights(tmp_path / "theirs", RECIPES[name])
    for tensor, expected in random_weights(RECIPES[name]).items():
        assert torch.equal(weights.read(tensor), expected), tensor


def test_a_single_file_and_shards_are_read(sharded):
    read_all(sharded)
    tensors = {name: tensor for file in sharded.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for file in [*sharded.glob("*.safetensors"), sharded / INDEX]:
        file.unlink()
    save_file(tensors, sharded / "model.safetensors", metadata={"format": "pt"})
    read_all(sharded)


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path):
    recipe = changed(RECIPE, model__tie_embeddings=True)
    export(open_run(write_run(tmp_path / "run", recipe)), tmp_path / "model")
    (tmp_path / "model" / "mok_export.json").unlink()
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    HfWeights(tmp_path / "model", recipe)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, file)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: differs from model\.embed_tokens\.weight"):
        HfWeights(tmp_path / "model", recipe)


def test_prediction_layers_are_left_out_with_a_notice(tmp_path):
    recipe = RECIPES["glm4_moe"]
    export(open_run(write_run(tmp_path / "run", recipe)), tmp_path / "model")
    folder = tmp_path / "model"
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {**load_file(folder / "model.safetensors"), "model.layers.3.eh_proj.weight": torch.ones(2)},
        folder / "model.safetensors",
    )
    assert HfWeights(folder, recipe).notices == ["1 tensors of multi-token prediction layers left out"]


# Everything is accounted for


def test_missing_left_over_and_differing_tensors_are_all_listed(sharded):
    file = shard_of(sharded, "model.layers.0.self_attn.q_norm.weight")
    tensors = load_file(file)
    del tensors["model.layers.0.self_attn.q_norm.weight"]
    tensors["model.layers.0.self_attn.k_norm.weight"] = torch.ones(17)
    tensors["model.layers.0.self_attn.v_norm.weight"] = torch.ones(16)
    save_file(tensors, file)
    index = json.loads((sharded / INDEX).read_text())
    del index["weight_map"]["model.layers.0.self_attn.q_norm.weight"]
    index["weight_map"]["model.layers.0.self_attn.v_norm.weight"] = file.name
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as refusal:
        HfWeights(sharded, RECIPE)
    assert "missing: model.layers.0.self_attn.q_norm.weight [16]" in str(refusal.value)
    assert "left over: model.layers.0.self_attn.v_norm.weight [16]" in str(refusal.value)
    assert "model.layers.0.self_attn.k_norm.weight: [17] in the file, [16] in the recipe" in str(refusal.value)


def test_a_fused_tensor_with_more_experts_than_the_recipe_is_refused(tmp_path):
    transformers = pytest.importorskip("transformers")
    export(open_run(write_run(tmp_path / "run", RECIPE)), tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    file = tmp_path / "fused" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.experts.down_proj"
    save_file({**tensors, name: torch.cat([tensors[name], tensors[name][:1]])}, file)
    with pytest.raises(CheckpointError, match=r"down_proj: \[5, 64, 32\] in the file, \[4, 64, 32\]"):
        HfWeights(tmp_path / "fused", RECIPE)


def test_a_config_of_another_model_names_every_key(sharded):
    other = changed(RECIPE, model__rope_theta=5e5, moe__normalize_weights=False, moe__top_k=1)
    with pytest.raises(UsageError) as refusal:
        HfWeights(sharded, other)
    for key in ("model.rope_theta=10000.0", "moe.normalize_weights=true", "moe.top_k=2"):
        assert f"--set {key}" in str(refusal.value)


ODD_VALUES = [None, True, [], {"a": 1}, "x", -1, 0, 2.5, float("inf"), float("nan"), 10**30]


def test_odd_values_in_a_config_are_refused_or_make_no_difference(tmp_path):
    recipe = RECIPES["glm4_moe"]
    export(open_run(write_run(tmp_path / "run", recipe)), tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    sound = json.loads(file.read_text())
    refused = 0
    for key in [*sound, "num_nextn_predict_layers", "rope_scaling", "quantization_config"]:
        for value in [*ODD_VALUES, float(sound["vocab_size"])]:
            file.write_text(json.dumps(sound | {key: value}))
            try:
                assert HfWeights(tmp_path / "model", recipe).vocab_size is not True
            except MokError:
                refused += 1
    assert refused > 100
    for text in ("[" * 100_000, "[]", '{"a": 1, "a": 2}'):
        file.write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json: "):
            HfWeights(tmp_path / "model", recipe)


@pytest.mark.parametrize("header", [b"[" * 100_000, b'{"__metadata__":' * 50_000, b'{"' + b"y" * 1_000_000 + b'": 1}', b"[]"])
def test_a_hostile_header_is_refused_in_few_words(sharded, header):
    file = next(sharded.glob("*.safetensors"))
    content = file.read_bytes()
    for size in (len(header), 2**63):
        file.write_bytes(size.to_bytes(8, "little") + header + content)
        with pytest.raises(CheckpointError, match="not a whole safetensors file") as caught:
            read_all(sharded)
        assert len(str(caught.value)) < 2000


def test_a_long_name_is_cut_in_a_list():
    assert len(listed("left over", ["y" * 1_000_000])) < 500


def test_quantized_or_integer_weights_are_refused(sharded):
    file = shard_of(sharded, "model.layers.0.input_layernorm.weight")
    tensors = load_file(file)
    tensors["model.layers.0.input_layernorm.weight"] = torch.ones(64, dtype=torch.int8)
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"input_layernorm\.weight: I8, only F32, BF16, F16"):
        HfWeights(sharded, RECIPE)


# Damaged and hostile folders


def test_a_missing_shard_is_named(sharded):
    (sharded / "model-00002-of-00005.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"missing model-00002-of-00005\.safetensors, which \d+ tensors"):
        HfWeights(sharded, RECIPE)


def test_an_index_that_points_to_the_wrong_shard_is_refused(sharded):
    rewrite_index(sharded, model__norm__weight="model-00001-of-00005.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is not in model-00001"):
        HfWeights(sharded, RECIPE)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/tmp/abs.safetensors", "a/b.safetensors", "..", "x.bin", "a\\b.safetensors"]
)
def test_shard_names_outside_of_the_folder_are_refused_before_anything_is_opened(sharded, monkeypatch, name):
    save_file({"model.norm.weight": torch.ones(64)}, sharded.parent / "outside.safetensors")
    rewrite_index(sharded, model__norm__weight=name)
    monkeypatch.setattr("mok.safetensors_files.safe_open", None)
    with pytest.raises(CheckpointError, match="not the plain name"):
        HfWeights(sharded, RECIPE)


def test_two_tensors_of_one_name_are_refused(sharded):
    first = sharded / "model-00001-of-00005.safetensors"
    last = sharded / "model-00005-of-00005.safetensors"
    name = "model.layers.0.input_layernorm.weight"
    save_file({**load_file(last), name: torch.ones(64)}, last)
    with pytest.raises(CheckpointError, match=f"{name} is in {first.name} too"):
        HfWeights(sharded, RECIPE)


@pytest.mark.parametrize("where", ["header", "index"])
def test_a_name_twice_in_one_file_is_refused(sharded, where):
    if where == "index":
        text = (sharded / INDEX).read_text()
        (sharded / INDEX).write_text(text.replace('"model.norm.weight"', '"lm_head.weight"'))
    else:
        file = shard_of(sharded, "model.layers.0.self_attn.q_norm.weight")
        data = file.read_bytes()
        swapped = data.replace(b'"model.layers.0.self_attn.q_norm.weight"', b'"model.layers.0.self_attn.k_norm.weight"')
        file.write_bytes(swapped)
    with pytest.raises(CheckpointError, match="appears twice"):
        HfWeights(sharded, RECIPE)


@pytest.mark.parametrize("keep", [0, 4, 8, 60, 500, -1])
def test_a_truncated_file_is_refused(sharded, keep):
    file = sharded / "model-00003-of-00005.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="model-00003-of-00005"):
        HfWeights(sharded, RECIPE)


def test_a_flipped_bit_anywhere_in_a_header_never_passes_unnoticed(sharded):
    file = sharded / "model-00003-of-00005.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    end = len(data[: 8 + length].rstrip())
    expected = random_weights(RECIPE)
    for position in range(0, end, 3):
        flipped = bytearray(data)
        flipped[position] ^= 1
        file.write_bytes(flipped)
        try:
            weights = HfWeights(sharded, RECIPE)
        except MokError:
            continue
        # A flip in the metadata text, or one that swaps nothing: all the same numbers must come out.
        assert all(torch.equal(weights.read(name), tensor) for name, tensor in expected.items()), position


def test_a_flipped_bit_in_the_data_is_found_by_the_exports_own_checksums(tmp_path):
    export(open_run(write_run(tmp_path / "run", RECIPE)), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    weights = HfWeights(tmp_path / "model", RECIPE)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is damaged"):
        weights.read("lm_head.weight")


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return (Path("/tmp/mok-pwned").touch, ())


def test_pickles_are_refused_unopened(tmp_path, sharded):
    folder = tmp_path / "pickled"
    folder.mkdir()
    (folder / "config.json").write_bytes((sharded / "config.json").read_bytes())
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin may run code"):
        HfWeights(folder, RECIPE)
    (folder / "model.safetensors").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        HfWeights(folder, RECIPE)
    assert not Path("/tmp/mok-pwned").exists()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_a_broken_index_is_refused(sharded, content):
    (sharded / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        HfWeights(sharded, RECIPE)


def test_a_missing_folder_or_config_is_named(tmp_path, sharded):
    with pytest.raises(CheckpointError, match="no such folder"):
        HfWeights(tmp_path / "nowhere", RECIPE)
    (sharded / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: missing"):
        HfWeights(sharded, RECIPE)
    assert random_weights(RECIPE)["lm_head.weight"].shape[0] == VOCAB
