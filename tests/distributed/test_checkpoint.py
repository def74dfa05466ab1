"""Checkpoints written by several ranks: one content whatever the layout, readable by every other, all or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mok import checkpoint, safetensors_files
from mok.errors import CheckpointError
from tests.distributed.processes import run_distributed

NUM_EXPERTS = 4


def state(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """What a rank holds: dense tensors, and its share of the experts; expert e is filled with e."""
    local = NUM_EXPERTS // world_size
    experts = {f"experts.{e}.w": torch.full((3, 5), float(e)) for e in range(rank * local, (rank + 1) * local)}
    return {"dense": torch.arange(6.0), **experts, "norm": torch.ones(4, dtype=torch.bfloat16)}


def writers(rank: int, world_size: int) -> checkpoint.Writers:
    def gather(value):
        values = [None] * world_size
        dist.all_gather_object(values, value)
        return values

    return checkpoint.Writers(rank, gather)


def save(rank: int, world_size: int, folder: str) -> str:
    saved = checkpoint.save(Path(folder), 1, state(rank, world_size), {"samples": 8}, 0, writers(rank, world_size))
    return saved.manifest["state_sha256"]


def load(rank: int, world_size: int, folder: str) -> bool:
    """Whether every tensor of this rank comes back as it was written."""
    names = [name for member in range(world_size) for name in state(member, world_size)]
    saved = checkpoint.open_checkpoint(Path(folder) / "step_000001")
    found = dict(checkpoint.read_tensors(saved, state(rank, world_size), elsewhere=names))
    return all(torch.equal(found[name], tensor) for name, tensor in state(rank, world_size).items())


def test_every_layout_reads_what_another_wrote(tmp_path: Path) -> None:
    digests = set(run_distributed(save, 2, str(tmp_path / "two")))
    digests.add(checkpoint.save(tmp_path / "one", 1, state(0, 1), {"samples": 8}, 0).manifest["state_sha256"])
    digests |= set(run_distributed(save, 4, str(tmp_path / "four")))
    assert len(digests) == 1
    assert all(run_distributed(load, 4, str(tmp_path / "two")))
    assert all(run_distributed(load, 2, str(tmp_path / "four")))
    assert load(0, 1, str(tmp_path / "four"))
    stored = checkpoint.open_checkpoint(tmp_path / "four" / "step_000001").manifest["tensors"]
    assert set(stored) == set(state(0, 1))
    assert len(list((tmp_path / "four" / "step_000001").glob("*.safetensors"))) == 4, "each rank writes a file of its own"


def save_that_fails_on_one(rank: int, world_size: int, folder: str) -> str:
    def refuse(*_: object) -> None:
        raise OSError("the disk of rank 1 is gone")

    if rank == 1:
        safetensors_files.os.pwrite = refuse
    try:
        save(rank, world_size, folder)
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_nothing(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 0, state(0, 1), {}, 0)
    for message in run_distributed(save_that_fails_on_one, 2, str(tmp_path)):
        assert "the disk of rank 1 is gone" in message
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["latest", "step_000000"]
    assert checkpoint.latest(tmp_path) is not None


def test_the_same_step_is_never_overwritten_by_several_ranks(tmp_path: Path) -> None:
    run_distributed(save, 2, str(tmp_path))
    with pytest.raises(RuntimeError, match="exists already and is never overwritten"):
        run_distributed(save, 2, str(tmp_path))
