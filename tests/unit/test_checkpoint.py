from __future__ import annotations

import errno
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mok import checkpoint, dcp
from mok.errors import CheckpointError
from mok.safetensors_files import tensor_bytes


def state(value: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model.a.weight": torch.randn(16, 32, generator=generator) * value,
        "model.b.weight": torch.randn(8, generator=generator).bfloat16(),
        "exp_avg:model.a.weight": torch.randn(64, 32, generator=generator)[::4],
    }


def empty() -> dict[str, Tensor]:
    return {name: torch.full_like(tensor, float("nan")) for name, tensor in state().items()}


def test_what_was_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    saved = dcp.save(tmp_path, 7, state(), {"seed": 3}, keep_last=2)
    found = checkpoint.latest(tmp_path)
    assert found is not None and found.step == 7 and found.manifest["seed"] == 3
    loaded = empty()
    dcp.load(found, loaded)
    for name, tensor in state().items():
        assert tensor_bytes(loaded[name]) == tensor_bytes(tensor)
    digest = checkpoint.state_sha256(checkpoint.tensor_checksums(loaded))
    assert digest == saved.manifest["state_sha256"] == found.manifest["state_sha256"]
    assert (tmp_path / "latest").read_text() == "step_000007\n"


def test_the_digest_sees_bits_names_shapes_and_dtypes_but_not_strides() -> None:
    def digest(**tensors: Tensor) -> str:
        return checkpoint.state_sha256(checkpoint.tensor_checksums(tensors))

    zero = torch.zeros(2, 2)
    assert digest(a=zero) == digest(a=torch.zeros(2, 4)[:, ::2])
    assert len({digest(a=zero), digest(b=zero), digest(a=-zero), digest(a=zero.view(4)), digest(a=zero.int())}) == 5
    assert digest(a=zero, b=zero + 1) == digest(b=zero + 1, a=zero)


def test_only_the_last_are_kept_and_nothing_is_overwritten(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        dcp.save(tmp_path, step, state(step), {}, keep_last=2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "step_000002", "step_000003"]
    before = {file.name: file.read_bytes() for file in (tmp_path / "step_000003").iterdir()}
    with pytest.raises(CheckpointError, match="never overwritten"):
        dcp.save(tmp_path, 3, state(9.0), {}, keep_last=2)
    assert before == {file.name: file.read_bytes() for file in (tmp_path / "step_000003").iterdir()}


def test_leftovers_of_a_killed_save_are_ignored_and_removed(tmp_path: Path) -> None:
    dcp.save(tmp_path, 1, state(), {}, keep_last=2)
    stump = tmp_path / ".unfinished-step_000002"
    stump.mkdir()
    (stump / "model.safetensors").write_bytes(b"x" * 100)
    (tmp_path / ".unfinished-latest").write_text("step_000002\n")
    (tmp_path / "step_000005").mkdir()
    found = checkpoint.latest(tmp_path)
    assert found is not None and found.step == 1
    dcp.save(tmp_path, 2, state(), {}, keep_last=2)
    assert not list(tmp_path.glob(".unfinished*"))


def test_missing_unknown_and_differing_tensors_are_all_listed(tmp_path: Path) -> None:
    tensors = state()
    tensors["model.extra"] = torch.ones(3)
    del tensors["model.b.weight"]
    tensors["model.a.weight"] = torch.ones(4, 4)
    saved = dcp.save(tmp_path, 1, tensors, {}, keep_last=0)
    with pytest.raises(CheckpointError) as caught:
        dcp.load(saved, empty())
    text = str(caught.value)
    assert "missing: model.b.weight" in text and "unknown: model.extra" in text
    assert "model.a.weight: float32 [4, 4] in the checkpoint, float32 [16, 32] in the model" in text


def test_one_flipped_byte_is_found_and_named(tmp_path: Path) -> None:
    saved = dcp.save(tmp_path, 1, state(), {}, keep_last=0)
    (file,) = saved.path.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    moment = tensor_bytes(state()["exp_avg:model.a.weight"]).tobytes()
    content[content.find(moment) + 101] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged, checksums differ") as caught:
        dcp.load(saved, empty())
    assert "exp_avg:model.a.weight" in str(caught.value) and "model.b.weight" not in str(caught.value)


def test_a_truncated_file_and_a_foreign_folder_are_refused(tmp_path: Path) -> None:
    saved = dcp.save(tmp_path, 1, state(), {}, keep_last=0)
    (file,) = saved.path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(CheckpointError, match="cannot be read"):
        dcp.load(saved, empty())
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        checkpoint.open_checkpoint(tmp_path)
    manifest = json.loads((saved.path / "manifest.json").read_text())
    (saved.path / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        checkpoint.open_checkpoint(saved.path)


def test_a_manifest_knows_its_own_damage_and_old_ones_are_still_read(tmp_path: Path) -> None:
    saved = dcp.save(tmp_path, 1, state(), {"samples": 64, "rate": 1e-5}, keep_last=0)
    file = saved.path / "manifest.json"
    sound = file.read_text()
    assert checkpoint.open_checkpoint(saved.path).fact("samples", int) == 64
    for before, after in (('"samples": 64', '"samples": 65'), ("manifest_sha256", "manifest_sha255"), ("1e-05", "1e-06")):
        assert sound.count(before) == 1
        file.write_text(sound.replace(before, after))
        with pytest.raises(CheckpointError, match="damaged"):
            checkpoint.open_checkpoint(saved.path)
    old = json.loads(sound) | {"format": 1}
    del old["manifest_sha256"], old["samples"]
    file.write_text(json.dumps(old))
    found = checkpoint.open_checkpoint(saved.path)
    dcp.load(found, empty())
    for kind, name in ((int, "samples"), (str, "rate")):
        with pytest.raises(CheckpointError, match=f"manifest.json: '{name}' is"):
            found.fact(name, kind)


def test_a_copy_under_the_name_of_another_step_is_not_the_newest(tmp_path: Path) -> None:
    saved = dcp.save(tmp_path / "checkpoints", 2, state(), {}, keep_last=0)
    shutil.copytree(saved.path, tmp_path / "best")
    assert checkpoint.open_checkpoint(tmp_path / "best").step == 2
    shutil.copytree(saved.path, tmp_path / "checkpoints" / "step_000099")
    with pytest.raises(CheckpointError, match="step_000099: holds step 2 under another step's name; rename or remove"):
        checkpoint.latest(tmp_path / "checkpoints")


def test_a_newest_checkpoint_without_its_manifest_is_no_reason_to_take_an_older_one(tmp_path: Path) -> None:
    for step in (1, 2):
        saved = dcp.save(tmp_path, step, state(), {}, keep_last=0)
    (saved.path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"step_000002: no checkpoint here \(manifest.json is missing\)"):
        checkpoint.latest(tmp_path)


class Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.path,))


def test_no_code_in_a_checkpoint_is_run(tmp_path: Path) -> None:
    """A pickle under every name that a reader might open."""
    saved = dcp.save(tmp_path, 1, state(), {}, keep_last=0)
    trap = tmp_path / "pwned"
    payload = pickle.dumps(Attack(trap))
    for file in saved.path.glob("*.safetensors"):
        file.write_bytes(payload)
    (saved.path / ".metadata").write_bytes(payload)
    with pytest.raises(CheckpointError):
        dcp.load(saved, empty())
    assert not trap.exists()
    pickle.loads(payload)
    assert trap.exists(), "the trap works"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG])
def test_a_full_disk_names_path_and_bytes_and_leaves_no_stump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    for step in (1, 2):
        dcp.save(tmp_path, step, state(), {}, keep_last=2)

    def full(*_: object, **__: object) -> None:
        raise OSError(number, "full")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, "fsync", full)
        with pytest.raises(CheckpointError, match="no space") as caught:
            dcp.save(tmp_path, 3, state(), {}, keep_last=1)
    assert str(tmp_path / "step_000003") in str(caught.value) and "bytes needed" in str(caught.value)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "step_000001", "step_000002"]
    assert checkpoint.latest(tmp_path).step == 2


def test_too_little_space_is_seen_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 100}))
    with pytest.raises(CheckpointError, match="100 bytes free"):
        dcp.save(tmp_path, 1, state(), {}, keep_last=0)
    assert not list(tmp_path.glob("*step*"))


def test_dcp_itself_loads_a_folder_through_the_reader(tmp_path: Path) -> None:
    """Its own planner and state dict, some tensors of the checkpoint only."""
    saved = dcp.save(tmp_path, 1, state(), {}, keep_last=0)
    wanted = {"model.a.weight": torch.zeros(16, 32)}
    with pytest.warns(UserWarning, match="single process"):
        torch.distributed.checkpoint.load(wanted, storage_reader=dcp.FolderReader(saved), no_dist=True)
    assert torch.equal(wanted["model.a.weight"], state()["model.a.weight"])


def test_what_is_no_whole_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="only whole tensors are stored"):
        dcp.save(tmp_path, 1, {"model.step": 7}, {}, keep_last=0)  # type: ignore[dict-item]
    assert not list(tmp_path.glob("*step*"))
