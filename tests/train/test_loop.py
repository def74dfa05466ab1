"""What a run does when something is asked of it or goes wrong; mostly from reports of users of such tools."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mok import checkpoint
from mok.errors import CheckpointError, DataError, Interrupted, NonFiniteError, RunError, UsageError
from mok.recipe import load
from mok.train import loop
from mok.train.run_folder import RunFolder, plan_start
from tests.train.runs import RECIPE, At, arguments, make_run, metrics_of, timeless, train


def test_lines_metrics_and_files_of_a_run(tmp_path: Path) -> None:
    run, lines = make_run(tmp_path, "log.every=2", "eval.every=3", "sample.every=3", "checkpoint.every=4", steps=6)
    run.train()
    text = lines.getvalue()
    assert "\r" not in text and "\x1b" not in text
    steps = [line for line in text.splitlines() if re.match(r"\d+/6 loss", line)]
    assert [line.split()[0] for line in steps] == ["1/6", "2/6", "4/6", "6/6"]
    for word in ("loss", "norm", "lr", "tok/s", "bal", "eta"):
        assert f" {word} " in steps[0]
    assert all(len(line) <= 80 for line in steps)
    folder = tmp_path / "run"
    metrics = metrics_of(folder)
    assert [line["step"] for line in metrics] == list(range(1, 7))
    assert [("val/bits_per_byte" in line, "state_sha256" in line) for line in metrics] == [
        (False, False), (False, False), (True, False), (False, True), (False, False), (True, True),
    ]  # fmt: skip
    assert metrics[5]["train/loss"] < metrics[0]["train/loss"]
    assert (folder / "train.log").read_text().count("parameters on this rank") == 1
    assert {"environment.json", "recipe.toml", "train.log", "samples.jsonl", "tokenizer.json"} <= set(os.listdir(folder))
    assert json.loads((folder / "environment.json").read_text())["kernels"] == {"backend": "torch"}
    assert sorted(os.listdir(folder / "checkpoints")) == ["latest", "step_000004", "step_000006"]
    assert [json.loads(line)["step"] for line in (folder / "samples.jsonl").read_text().splitlines()] == [3, 6]
    saved = checkpoint.latest(folder / "checkpoints")
    assert saved is not None and saved.manifest["state_sha256"] == metrics[5]["state_sha256"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_saves_and_the_run_goes_on_from_there(tmp_path: Path, number: int) -> None:
    straight = train(tmp_path, out="straight", steps=9)
    run, _ = make_run(tmp_path, steps=9)
    run.observer = At(4, lambda: os.kill(os.getpid(), number))
    with pytest.raises(Interrupted, match="after step 4, which is saved") as caught:
        run.train()
    assert caught.value.exit_code == 130 and "--resume auto" in str(caught.value)
    assert timeless(train(tmp_path, steps=9, resume="auto"))[4:] == timeless(straight)[4:]


def test_out_of_time_saves_and_ends_well(tmp_path: Path) -> None:
    run, lines = make_run(tmp_path, steps=1000)
    run.train(max_minutes=1e-9)
    assert "time is up at step 1 of 1000" in lines.getvalue()
    assert os.listdir(tmp_path / "run/checkpoints").count("step_000001") == 1


def interrupt(*seconds: float) -> None:
    for pause in seconds:
        time.sleep(pause)
        signal.raise_signal(signal.SIGINT)


def test_one_ctrl_c_may_arrive_twice_and_a_second_one_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = make_run(tmp_path)
    run.observer = At(2, lambda: interrupt(0.0, 0.1))
    with pytest.raises(Interrupted, match="after step 2, which is saved"):
        run.train()
    monkeypatch.setattr(loop, "SAME_CTRL_C_S", 0.05)
    run, _ = make_run(tmp_path, resume="auto")
    run.observer = At(4, lambda: interrupt(0.0, 0.1))
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert checkpoint.latest(tmp_path / "run/checkpoints").step == 2


def test_ranks_stop_together_and_forget_no_wish(tmp_path: Path) -> None:
    """A rank whose time is up goes on until all agree, and a signal in the middle of an agreement counts in the next."""
    run, lines = make_run(tmp_path, steps=1000)
    wishes: list[str] = []

    def agreed(value: Any) -> list[Any]:
        if isinstance(value, str):
            wishes.append(value)
            return ["time" if len(wishes) == 3 else ""]
        return [value]

    run.ranks.gather = agreed  # type: ignore[method-assign]
    run.train(max_minutes=1e-9)
    assert wishes == ["time"] * 3 and "time is up at step 3 of 1000" in lines.getvalue()

    run, _ = make_run(tmp_path, out="second", steps=1000)

    def interrupted(value: Any) -> list[Any]:
        if value == "":
            os.kill(os.getpid(), signal.SIGTERM)
        return [value]

    run.ranks.gather = interrupted  # type: ignore[method-assign]
    with pytest.raises(Interrupted, match="after step 2, which is saved"):
        run.train()


def test_a_finished_run_says_so(tmp_path: Path) -> None:
    first = train(tmp_path, steps=2)
    run, lines = make_run(tmp_path, steps=2, resume="auto")
    run.train()
    assert "is finished: step 2 of 2" in lines.getvalue()
    assert metrics_of(tmp_path / "run") == first


def test_a_number_that_is_not_finite_stops_the_run_and_never_reaches_a_checkpoint(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, "optim.lr=1e30", "optim.clip_norm=0", "optim.warmup_steps=0", "checkpoint.every=1", steps=50)
    with pytest.raises(NonFiniteError) as caught:
        run.train()
    saved = checkpoint.latest(tmp_path / "run/checkpoints")
    good = saved.step if saved else 0
    assert f"step {good + 1}, rank 0" in str(caught.value) and caught.value.exit_code == 1
    (batch,) = (tmp_path / "run").glob("bad_batch_*.safetensors")
    assert str(batch) in str(caught.value)
    assert len(metrics_of(tmp_path / "run")) == good


def test_a_router_that_is_not_finite_is_named(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, steps=4)
    weight = run.state.model.moe_layers[0].router.weight
    run.observer = At(2, lambda: weight.data.fill_(float("nan")))
    with pytest.raises(NonFiniteError, match=r"step 2, rank 0: router of layer 0: 128 of 128 rows"):
        run.train()
    assert not (tmp_path / "run/checkpoints").exists()


def test_a_folder_in_use_is_refused_and_so_is_one_that_cannot_be_made(tmp_path: Path) -> None:
    train(tmp_path, steps=1)
    with pytest.raises(UsageError, match="is not empty"):
        make_run(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written"):
        make_run(tmp_path, out="file/run")


def test_a_folder_whose_run_never_took_a_step_may_be_used_again(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        make_run(tmp_path, "data.path=nowhere")
    assert (tmp_path / "run/recipe.toml").is_file()
    make_run(tmp_path)
    (tmp_path / "run/notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="is not empty"):
        make_run(tmp_path)


def test_what_changed_since_the_checkpoint_is_judged_by_kind(tmp_path: Path) -> None:
    train(tmp_path, steps=2)
    with pytest.raises(UsageError, match=r"optim.lr: 0.003 -> 0.1 \(trajectory\)") as caught:
        make_run(tmp_path, "optim.lr=0.1", "train.batch_size=8", steps=4, resume="auto")
    assert "train.batch_size: 4 -> 8" in str(caught.value) and "--allow-changes" in str(caught.value)
    with pytest.raises(UsageError, match=r"moe.num_experts: 4 -> 8 \(structure\)"):
        make_run(tmp_path, "moe.num_experts=8", steps=2, resume="auto", allow=True)
    harmless, _ = make_run(tmp_path, "log.every=1", "train.threads=1", steps=2, resume="auto")
    assert harmless.state.step == 2
    run, lines = make_run(tmp_path, "train.batch_size=8", steps=4, resume="auto", allow=True)
    run.train()
    assert run.state.samples == 2 * 4 + 2 * 8
    assert "changed: train.batch_size  4 -> 8  (trajectory)" in lines.getvalue()


def test_a_checkpoint_that_does_not_fit_or_is_damaged_ends_the_resume(tmp_path: Path) -> None:
    train(tmp_path, steps=2)
    (path,) = (tmp_path / "run/checkpoints").glob("step_*")
    (file,) = path.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-9] ^= 4
    file.write_bytes(content)
    with (tmp_path / "run/metrics.jsonl").open("a") as later:
        later.write('{"step": 3}\n')  # of a run that was killed: dropped by a resume that succeeds
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name != ".lock"]
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}
    with pytest.raises(CheckpointError, match="checksums differ"):
        make_run(tmp_path, steps=2, resume="auto")
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name != ".lock"]
    after = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}
    assert after == before, "a resume that failed changed the run"
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        make_run(tmp_path, steps=2, resume=str(tmp_path / "nowhere"))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["tensors"]["model.surplus"] = manifest["tensors"].pop("model.norm.weight")
    del manifest["manifest_sha256"]
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": 1}))
    with pytest.raises(CheckpointError) as caught:
        make_run(tmp_path, steps=2, resume="auto")
    assert "missing: model.norm.weight" in str(caught.value) and "unknown: model.surplus" in str(caught.value)


def test_an_older_checkpoint_is_resumed_elsewhere_though_the_newest_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, "checkpoint.every=2", steps=4)
    first, second = sorted((tmp_path / "run/checkpoints").glob("step_*"))
    manifest = second / "manifest.json"
    manifest.write_text(manifest.read_text().replace("samples", "sample?"))
    with pytest.raises(CheckpointError, match=r"step_000004.*damaged.*use another checkpoint"):
        make_run(tmp_path, "checkpoint.every=2", steps=4, resume="auto")
    with pytest.raises(UsageError, match="later checkpoint, step_000004; choose another folder with --out, or move"):
        make_run(tmp_path, "checkpoint.every=2", steps=4, resume=str(first))
    run, _ = make_run(tmp_path, "checkpoint.every=2", steps=4, resume=str(first), out="again")
    assert run.state.step == 2
    with pytest.raises(UsageError, match=r"is at step 2 of train.steps = 2, so there is nothing to do in .*; ask for more"):
        make_run(tmp_path, "checkpoint.every=2", steps=2, resume=str(first), out="again2")
    second.rename(tmp_path / "damaged")
    monkeypatch.chdir(first)
    recipe = load(str(RECIPE), [*arguments(tmp_path, "checkpoint.every=2"), "train.steps=4"])
    assert plan_start(recipe, "small", None, ".", False, 1, 1).folder.path == tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    assert plan_start(recipe, "small", None, str(first.relative_to(tmp_path)), False, 1, 1).folder.path == Path("run")
    first.rename(tmp_path / "copy")
    with pytest.raises(UsageError, match="not in the folder of a run; say with --out"):
        plan_start(recipe, "small", None, "copy", False, 1, 1)
    for options in (("", "auto"), ("run", "")):
        with pytest.raises(UsageError, match="is empty; name a folder"):
            plan_start(recipe, "small", *options, False, 1, 1)


def test_damaged_lines_of_metrics_are_left_out_and_counted(tmp_path: Path) -> None:
    train(tmp_path, "checkpoint.every=2", steps=4)
    file = tmp_path / "run/metrics.jsonl"
    one, two, three, four = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join((one, b"\xff\xfe", b"[1]", b'{"step": "2"}', b"[" * 100_000, two, three, four, b'{"step"')))
    run, lines = make_run(tmp_path, "checkpoint.every=2", steps=4, resume="auto")
    assert run.state.step == 4 and "metrics.jsonl: 4 damaged lines were left out" in lines.getvalue()
    assert file.read_bytes().splitlines() == [one, two, three, four]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_pipe_or_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path, make: Callable[[Path], None]) -> None:
    for name in ("train.log", "metrics.jsonl", "tokenizer.json", "checkpoints/latest"):
        odd = tmp_path / name.replace("/", "-") / name
        odd.parent.mkdir(parents=True)
        make(odd)
        with pytest.raises(RunError, match=f"{name}: .*move it away"):
            RunFolder(tmp_path / name.replace("/", "-")).claim()
    train(tmp_path, steps=1)
    (tmp_path / "run/trace").mkdir()
    make(tmp_path / "run/trace/rank_00000.jsonl")
    with pytest.raises(RunError, match=r"rank_00000.jsonl: .*move it away"):
        make_run(tmp_path, "log.trace=steps", steps=1, resume="auto")
    shutil.rmtree(tmp_path / "run/checkpoints")
    os.mkfifo(tmp_path / "run/checkpoints")
    with pytest.raises(RunError, match="checkpoints: is no folder; move it away"):
        RunFolder(tmp_path / "run").claim()


def test_a_second_process_in_the_folder_is_refused(tmp_path: Path) -> None:
    held = (
        "import sys; from pathlib import Path; from mok.train.run_folder import RunFolder\n"
        "kept = RunFolder(Path(sys.argv[1])).claim(); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", held, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(RunError, match=f"process {other.pid} on .* is training into this folder"):
            make_run(tmp_path, steps=1)
        other.communicate("")
    assert train(tmp_path, steps=1)


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_master_weights_and_moments_come_back_in_bf16_too(tmp_path: Path, moments: str) -> None:
    overrides = ["train.dtype=bf16", f"optim.moment_dtype={moments}"]
    straight = train(tmp_path, *overrides, out="straight", steps=6)
    train(tmp_path, *overrides, steps=3, out="first")
    resumed, lines = make_run(tmp_path, *overrides, steps=6, resume=str(tmp_path / "first"), out="second", allow=True)
    assert f"state_sha256 {metrics_of(tmp_path / 'first')[-1]['state_sha256'][:16]} as saved" in lines.getvalue()
    tensors = resumed.state.tensors()
    assert {str(tensors[f"{kind}model.norm.weight"].dtype) for kind in ("exp_avg:", "exp_avg_sq:")} == {
        f"torch.{'float32' if moments == 'fp32' else 'bfloat16'}"
    }
    assert tensors["master:model.norm.weight"].dtype == torch.float32
    # The schedule of a run of 6 steps differs from that of 3; a resumed copy of a 6-step checkpoint is exact.
    again, _ = make_run(tmp_path, *overrides, steps=6, resume="auto", out="straight")
    assert again.state.state_sha256() == straight[-1]["state_sha256"]


def test_text_that_is_too_short_is_an_error_before_training(tmp_path: Path) -> None:
    (tmp_path / "text.py").write_text("tiny")
    with pytest.raises(DataError, match="tokens"):
        make_run(tmp_path)
    assert not (tmp_path / "run/checkpoints").exists()


def test_frozen_tensors_keep_their_bytes_and_everything_else_moves(tmp_path: Path) -> None:
    """Whole parameters, and parts of parameters that are trained together: one expert, the queries alone."""
    patterns = ["model.embed_tokens.weight", "*.experts.1.*", "*.q_proj.weight", "*input_layernorm*"]
    run, _ = make_run(tmp_path, f"train.freeze={json.dumps(patterns)}", steps=3)
    before = {name: tensor.clone() for name, tensor in run.state.model.named_tensors()}
    run.train()
    for name, tensor in run.state.model.named_tensors():
        frozen = name == patterns[0] or ".experts.1." in name or ".q_proj." in name or "input_layernorm" in name
        assert torch.equal(tensor, before[name]) == frozen, name
    head, _ = make_run(tmp_path, 'train.freeze=["model.*"]', out="head", steps=1)
    head.train()
    with pytest.raises(UsageError, match=r"'\*nothing\*' matches no tensor"):
        make_run(tmp_path, 'train.freeze=["*nothing*"]', out="other")


def test_the_loss_that_is_shown_holds_no_auxiliary_term(tmp_path: Path) -> None:
    plain = train(tmp_path, "moe.balance_loss=0", "moe.z_loss=0", out="a", steps=1)[0]
    heavy = train(tmp_path, "moe.balance_loss=1", "moe.z_loss=1", out="b", steps=1)[0]
    for name in ("train/loss", "train/balance_loss", "train/z_loss"):
        assert plain[name] == heavy[name]
    assert plain["train/grad_norm"] != heavy["train/grad_norm"]
