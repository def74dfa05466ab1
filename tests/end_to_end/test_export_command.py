"""`mok export` as a user runs it, and training that starts from a Hugging Face folder."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from mok.errors import CheckFailed, CheckpointError
from mok.export import export, open_run
from mok.export_verify import BOUNDS, Verdict, verify_export
from mok.grid import Grid, Layout
from mok.hf_import import HfWeights
from mok.train.ranks import OneRank
from mok.train.state import TrainState
from mok_cli.main import cli
from tests.families import RECIPES, VOCAB, changed, in_bf16, random_weights, write_run


def run(*arguments: object):
    return CliRunner().invoke(cli, ["export", *map(str, arguments)])


@pytest.mark.parametrize("name", RECIPES)
def test_an_export_is_verified_against_transformers(tmp_path, name):
    pytest.importorskip("transformers")
    folder = write_run(tmp_path / "run", RECIPES[name])
    result = run(
        folder, "--to", tmp_path / "model", "--verify", "--json", tmp_path / "report.json", "--max-shard-size", "200kB"
    )
    assert result.exit_code == 0, result.output
    assert f"{name}, fp32, step 7: 3 shard(s)" in result.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["family"] == name
    assert report["verify"]["argmax_agreement"] == 1.0
    assert report["verify"]["bit_equal"] is True or name == "glm4_moe"
    assert report["num_parameters"] == sum(tensor.numel() for tensor in random_weights(RECIPES[name]).values())


def test_what_stays_fp32_is_printed(tmp_path):
    result = run(write_run(tmp_path / "run", in_bf16(RECIPES["glm4_moe"])), "--to", tmp_path / "model")
    assert result.exit_code == 0
    assert "kept in fp32: model.layers.1.mlp.gate.e_score_correction_bias" in result.output


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--max-shard-size", "5 lots"], 2, "--max-shard-size 5 lots: not a size"),
        (["--max-shard-size", "0"], 2, "not a size"),
        (["--arch", "glm4_moe"], 2, "glm4_moe: moe.score: its router takes a sigmoid"),
        (["--arch", "llama"], 2, "--arch llama: not an architecture"),
    ],
)
def test_wrong_options_exit_2_and_write_nothing(tmp_path, arguments, code, words):
    folder = write_run(tmp_path / "run", RECIPES["qwen3_moe"])
    result = CliRunner().invoke(cli, ["export", str(folder), "--to", str(tmp_path / "model"), *arguments])
    assert words in str(result.exception)
    assert getattr(result.exception, "exit_code", None) == code
    assert not (tmp_path / "model").exists()


def test_exit_codes_and_messages_of_the_command(tmp_path, mok):
    folder = write_run(tmp_path / "run", RECIPES["qwen3_moe"])
    done = mok("export", str(folder), "--to", "model", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_shards"] == 1
    again = mok("export", str(folder), "--to", "model")
    assert again.returncode == 2
    assert again.stderr == "Error: --to model: exists and is not an empty folder; name another, or remove it\n"
    weights = random_weights(RECIPES["qwen3_moe"])
    weights["model.norm.weight"][0] = float("nan")
    poisoned = mok("export", str(write_run(tmp_path / "nan", RECIPES["qwen3_moe"], weights)), "--to", "other")
    assert poisoned.returncode == 1
    assert "--allow-nan" in poisoned.stderr
    assert not (tmp_path / "other").exists()


# Verification


def test_verification_fails_when_logits_differ(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    recipe = RECIPES["qwen3_moe"]
    export(open_run(write_run(tmp_path / "run", recipe)), tmp_path / "model")
    real = __import__("mok.export_verify", fromlist=["x"])._logits_of_mok
    monkeypatch.setattr("mok.export_verify._logits_of_mok", lambda *arguments: real(*arguments) * 1.001)
    verdict = verify_export(tmp_path / "model", recipe, "fp32")
    assert verdict.bit_equal is False
    with pytest.raises(CheckFailed, match=r"logits differ by 0\.001"):
        verdict.require()


def test_verification_finds_a_file_that_was_damaged(tmp_path):
    pytest.importorskip("transformers")
    export(open_run(write_run(tmp_path / "run", RECIPES["qwen3_moe"])), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="is damaged"):
        verify_export(tmp_path / "model", RECIPES["qwen3_moe"], "fp32")


def test_without_transformers_nothing_is_claimed(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    verdict = verify_export(tmp_path, RECIPES["qwen3_moe"], "bf16")
    assert verdict == Verdict(*BOUNDS["bf16"])
    assert str(verdict) == "not measured: transformers is not installed"
    verdict.require()


# Training from a folder


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_starts_from_the_weights_of_a_folder(tmp_path, name):
    export(open_run(write_run(tmp_path / "run", RECIPES[name])), tmp_path / "model")
    recipe = changed(in_bf16(RECIPES[name]), model__init=f"hf:{tmp_path / 'model'}", data__tokenizer="bytes")
    assert recipe.problems() == []
    ranks = OneRank(Layout(Grid.of(recipe, 1, 1), 1, 1))
    read = HfWeights(tmp_path / "model", recipe).read
    tensors = TrainState(recipe, VOCAB, ranks, torch.device("cpu"), read).tensors()
    for tensor_name, expected in random_weights(recipe).items():
        if tensor_name.endswith("e_score_correction_bias"):
            assert torch.equal(tensors[tensor_name], expected)
        else:
            assert torch.equal(tensors[tensor_name], expected.bfloat16()), tensor_name
            assert torch.equal(tensors[f"master:{tensor_name}"], expected), tensor_name


def test_a_model_is_trained_exported_and_trained_on_from_its_export(tmp_path, mok):
    """The first validation loss of the second run is the last one of the first: nothing was lost on the way."""
    sizes = ["model.hidden_size=64", "model.num_layers=2", "train.sequence_length=64", "eval.batches=1", "sample.tokens=4"]
    common = [option for size in sizes for option in ("--set", size)]
    first = mok("train", "toy", *common, "--steps", "4", "--out", "first")
    assert first.returncode == 0, first.stderr
    exported = mok("export", "first", "--to", "model", "--verify")
    assert exported.returncode == 0, exported.stderr
    assert "bit-equal yes" in exported.stdout or "not measured" in exported.stdout
    onward = ["model.init=hf:model", "data.tokenizer=model/tokenizer.json", "optim.lr=0"]
    second = mok("train", "toy", *common, *(o for key in onward for o in ("--set", key)), "--steps", "1", "--out", "second")
    assert second.returncode == 0, second.stderr
    last, start = (
        [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines() if "val/loss" in line][-1]
        for run in ("first", "second")
    )
    assert start["val/loss"] == last["val/loss"]
    # A step with a learning rate of 0 changes nothing, so the second export has the bytes of the first.
    assert mok("export", "second", "--to", "model2").returncode == 0
    name = "model.safetensors"
    assert (tmp_path / "model2" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()


@pytest.mark.parametrize(
    ("init", "tokenizer", "key"),
    [("hf:", "bytes", "model.init"), ("model", "bytes", "model.init"), ("hf:model", "bpe:512", "data.tokenizer")],
)
def test_recipes_that_cannot_start_from_a_folder_are_refused(init, tokenizer, key):
    recipe = changed(RECIPES["qwen3_moe"], model__init=init, data__tokenizer=tokenizer)
    assert [problem[0] for problem in recipe.problems()] == [key]


def test_a_run_with_8_bit_products_is_exported_in_bf16_and_verified_as_what_it_holds(tmp_path):
    """Its products are not part of the files: mok's side of the comparison computes like transformers, in bf16."""
    pytest.importorskip("transformers")
    verdicts = []
    for dtype in ("bf16", "mxfp8"):
        folder = write_run(tmp_path / dtype, in_bf16(RECIPES["qwen3_moe"]))
        text = (folder / "recipe.toml").read_text()
        (folder / "recipe.toml").write_text(text.replace('dtype = "bf16"', f'dtype = "{dtype}"', 1))
        result = run(folder, "--to", tmp_path / f"{dtype}-model", "--verify", "--json", tmp_path / "report.json")
        assert result.exit_code == 0, result.output
        assert "qwen3_moe, bf16, step 7" in result.output
        verdicts.append(json.loads((tmp_path / "report.json").read_text())["verify"])
    assert verdicts[0] == verdicts[1]
