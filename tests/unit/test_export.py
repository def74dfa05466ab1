"""What an export writes, and what it refuses."""

from __future__ import annotations

import json
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mok.errors import CheckpointError, NonFiniteError, RunError, UsageError
from mok.export import export, open_run
from mok.hf_import import HfWeights
from mok.hf_layout import FAMILIES
from mok.safetensors_files import INDEX, TensorEntry, shard_entries
from tests.families import RECIPES, changed, in_bf16, random_weights, write_run


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("name", RECIPES)
def test_transformers_loads_every_family_without_a_complaint(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    export(open_run(write_run(tmp_path / "run", RECIPES[name])), tmp_path / "model", max_shard_bytes=150_000)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(info.values()), info
    assert type(model).__name__ == FAMILIES[name].architecture
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer("hé")["input_ids"] == list("hé".encode())
    assert tokenizer.eos_token_id == model.config.eos_token_id == 256


@pytest.mark.parametrize("name", RECIPES)
def test_every_tensor_is_in_its_own_place(tmp_path, name):
    """Expert e of layer l is filled with 100 l + e, plus a quarter for each kind of matrix."""
    recipe = RECIPES[name]
    weights = random_weights(recipe)
    for tensor_name, tensor in weights.items():
        if ".experts." in tensor_name:
            _, _, layer, _, _, expert, kind, _ = tensor_name.split(".")
            tensor.fill_(100 * int(layer) + int(expert) + {"gate_proj": 0.25, "up_proj": 0.5, "down_proj": 0.75}[kind])
    report = export(open_run(write_run(tmp_path / "run", recipe, weights)), tmp_path / "model", max_shard_bytes=50_000)
    stored = tensors_of(tmp_path / "model")
    assert (
        report.num_parameters == sum(tensor.numel() for tensor in stored.values()) == sum(t.numel() for t in weights.values())
    )
    jobs = {"w1": 0.25, "w3": 0.5, "w2": 0.75, "gate_proj": 0.25, "up_proj": 0.5, "down_proj": 0.75}
    for layer in range(recipe.model.num_dense_layers, recipe.model.num_layers):
        for expert in range(4):
            found = {n: t for n, t in stored.items() if n.startswith(f"model.layers.{layer}.") and f".experts.{expert}." in n}
            assert len(found) == 3
            for tensor_name, tensor in found.items():
                assert (tensor == 100 * layer + expert + jobs[tensor_name.split(".")[-2]]).all(), tensor_name


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", RECIPES)
def test_import_then_export_gives_the_same_bytes(tmp_path, name, dtype):
    recipe = in_bf16(RECIPES[name]) if dtype == "bf16" else RECIPES[name]
    export(open_run(write_run(tmp_path / "run", recipe)), tmp_path / "first")
    weights = HfWeights(tmp_path / "first", recipe)
    again = {tensor: weights.read(tensor).float() for tensor in random_weights(recipe)}
    export(open_run(write_run(tmp_path / "again", recipe, again)), tmp_path / "second")
    assert (tmp_path / "first" / "model.safetensors").read_bytes() == (tmp_path / "second" / "model.safetensors").read_bytes()


def test_the_bias_for_choosing_stays_fp32(tmp_path):
    report = export(open_run(write_run(tmp_path / "run", in_bf16(RECIPES["glm4_moe"]))), tmp_path / "model")
    dtypes = {name: tensor.dtype for name, tensor in tensors_of(tmp_path / "model").items()}
    kept = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert kept == {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)} == set(report.kept_fp32)
    assert set(dtypes.values()) == {torch.float32, torch.bfloat16}
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    record = json.loads((tmp_path / "model" / "mok_export.json").read_text())
    assert record["kept_fp32"] == ["e_score_correction_bias"]
    expected = random_weights(RECIPES["glm4_moe"])["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert torch.equal(tensors_of(tmp_path / "model")["model.layers.1.mlp.gate.e_score_correction_bias"], expected)


def test_an_fp32_export_of_a_bf16_run_has_the_master_weights(tmp_path):
    run = open_run(write_run(tmp_path / "run", in_bf16(RECIPES["qwen3_moe"])))
    export(run, tmp_path / "model", dtype="fp32")
    for name, tensor in random_weights(RECIPES["qwen3_moe"]).items():
        assert torch.equal(tensors_of(tmp_path / "model")[name], tensor)


def test_tied_embeddings_are_stored_once_and_reload_tied(tmp_path):
    transformers = pytest.importorskip("transformers")
    recipe = changed(RECIPES["qwen3_moe"], model__tie_embeddings=True)
    export(open_run(write_run(tmp_path / "run", recipe)), tmp_path / "model")
    assert "lm_head.weight" not in tensors_of(tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    untied = export(open_run(write_run(tmp_path / "run2", RECIPES["qwen3_moe"])), tmp_path / "model2")
    assert "lm_head.weight" in tensors_of(untied.folder)


def test_the_choice_of_routing_is_recorded(tmp_path):
    for number, (normalize, words) in enumerate([(True, "divided by their sum"), (False, "not divided by their sum")]):
        recipe = changed(RECIPES["qwen3_moe"], moe__normalize_weights=normalize)
        folder = tmp_path / f"model{number}"
        export(open_run(write_run(tmp_path / f"run{number}", recipe)), folder)
        assert json.loads((folder / "config.json").read_text())["norm_topk_prob"] is normalize
        assert json.loads((folder / "mok_export.json").read_text())["router"].endswith(f"weights {words}")


# Files


def test_every_shard_has_the_format_marker_and_aligned_data(tmp_path):
    report = export(open_run(write_run(tmp_path / "run", RECIPES["qwen3_moe"])), tmp_path / "model", max_shard_bytes=100_000)
    shards = sorted((tmp_path / "model").glob("*.safetensors"))
    assert [shard.name for shard in shards] == [
        f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)
    ]
    assert report.num_shards == len(shards) > 2
    for shard in shards:
        data = shard.read_bytes()
        assert (8 + int.from_bytes(data[:8], "little")) % 64 == 0
        with safe_open(shard, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            logical = sum(opened.get_tensor(name).nbytes for name in opened.keys())  # noqa: SIM118
        assert len(data) == 8 + int.from_bytes(data[:8], "little") + logical
    index = json.loads((tmp_path / "model" / INDEX).read_text())
    assert list(index["weight_map"]) == sorted(index["weight_map"])
    assert index["metadata"] == {"total_parameters": report.num_parameters, "total_size": report.num_bytes}


def test_shards_are_cut_at_tensors_and_an_oversize_tensor_has_its_own():
    entries = [TensorEntry("embedding", torch.float32, (750_000,))]
    entries += [TensorEntry(f"small{number}", torch.float32, (25_000,)) for number in range(20)]
    entries.insert(11, TensorEntry("large", torch.float32, (300_000,)))
    shards = shard_entries(entries, 1_000_000)
    assert [entry for shard in shards for entry in shard] == entries
    assert [[entry.name for entry in shard] for shard in shards if len(shard) == 1] == [["embedding"], ["large"]]
    assert [len(shard) for shard in shards] == [1, 10, 1, 10]
    assert shard_entries([], 10) == []


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_files_follow_the_umask(tmp_path, umask, mode):
    run = open_run(write_run(tmp_path / "run", RECIPES["qwen3_moe"]))
    before = os.umask(umask)
    try:
        export(run, tmp_path / "model", max_shard_bytes=200_000)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "model").iterdir()} == {mode}


def test_the_record_has_the_hash_of_every_tensor(tmp_path):
    from hashlib import sha256

    export(open_run(write_run(tmp_path / "run", RECIPES["mixtral"])), tmp_path / "model")
    record = json.loads((tmp_path / "model" / "mok_export.json").read_text())
    stored = tensors_of(tmp_path / "model")
    assert record["tensors"].keys() == stored.keys()
    assert record["step"] == 7
    for name, tensor in stored.items():
        assert record["tensors"][name]["sha256"] == sha256(tensor.numpy().tobytes()).hexdigest()


def test_progress_ends_at_the_total(tmp_path):
    seen: list[tuple[int, int]] = []
    report = export(
        open_run(write_run(tmp_path / "run", RECIPES["olmoe"])), tmp_path / "model", wrote=lambda *done: seen.append(done)
    )
    assert len(seen) == report.num_tensors
    assert seen[-1] == (report.num_bytes, report.num_bytes)
    assert seen == sorted(seen)


# Refused


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_need_the_flag(tmp_path, value):
    weights = random_weights(RECIPES["qwen3_moe"])
    weights["model.layers.1.mlp.experts.2.up_proj.weight"][3, 4] = value
    run = open_run(write_run(tmp_path / "run", RECIPES["qwen3_moe"], weights))
    with pytest.raises(NonFiniteError, match=r"experts\.2\.up_proj\.weight: 1 of 2048 values .*--allow-nan"):
        export(run, tmp_path / "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    report = export(run, tmp_path / "model", allow_nan=True)
    assert len(report.notices) == 1


def test_a_target_that_is_not_empty_is_refused_and_kept(tmp_path):
    run = open_run(write_run(tmp_path / "run", RECIPES["qwen3_moe"]))
    (tmp_path / "model").mkdir()
    export(run, tmp_path / "model")
    before = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    with pytest.raises(UsageError, match="not an empty folder"):
        export(run, tmp_path / "model")
    assert {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()} == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="not an empty folder"):
        export(run, tmp_path / "file")


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path, monkeypatch):
    run = open_run(write_run(tmp_path / "run", RECIPES["qwen3_moe"]))
    usage = __import__("shutil")._ntuple_diskusage(1000, 900, 100)
    monkeypatch.setattr("mok.export.shutil.disk_usage", lambda path: usage)
    with pytest.raises(RunError, match=r"no space for the export \(\d+ bytes needed, 100 bytes free\)"):
        export(run, tmp_path / "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


LIMITED = """
import resource, signal, sys
from pathlib import Path
from mok.errors import RunError
from mok.export import export, open_run
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
try:
    export(open_run(Path(sys.argv[1])), Path(sys.argv[2]))
except RunError as error:
    print(error)
"""


def test_a_write_that_fails_half_way_leaves_nothing(tmp_path):
    write_run(tmp_path / "run", RECIPES["qwen3_moe"])
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "run"), str(tmp_path / "model")]
    assert (
        "no space for the export (File too large)" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_a_target_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    run = open_run(write_run(tmp_path / "run", RECIPES["qwen3_moe"]))
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot be written"):
        export(run, tmp_path / "file" / "model")

    def read_only(self, *_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("pathlib.Path.mkdir", read_only)
    with pytest.raises(RunError, match=r"cannot be written .*Read-only"):
        export(run, tmp_path / "model")


def test_a_damaged_checkpoint_is_refused(tmp_path):
    folder = write_run(tmp_path / "run", RECIPES["qwen3_moe"])
    (file,) = folder.glob("checkpoints/step_000007/*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is damaged"):
        export(open_run(folder), tmp_path / "model")
    del tensors["model.norm.weight"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        export(open_run(folder), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no such folder"):
        open_run(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        open_run(tmp_path)
    folder = write_run(tmp_path / "run", RECIPES["qwen3_moe"])
    assert open_run(folder / "checkpoints" / "step_000007").folder == folder
    (folder / "recipe.toml").unlink()
    with pytest.raises(CheckpointError, match=r"no recipe\.toml"):
        open_run(folder)
