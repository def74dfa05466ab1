"""Checkpoints written by several ranks: one content whatever the layout, readable by every other, all or nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from mok import checkpoint, dcp, safetensors_files
from mok.errors import CheckpointError
from mok.grid import Grid, Layout
from mok.train.processes import assemble
from tests.distributed.processes import run_distributed

NUM_EXPERTS = 4


def state(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """What a rank holds: dense tensors, and its share of the experts; expert e is filled with e."""
    local = NUM_EXPERTS // world_size
    experts = {f"experts.{e}.w": torch.full((3, 5), float(e)) for e in range(rank * local, (rank + 1) * local)}
    return {"dense": torch.arange(6.0), **experts, "norm": torch.ones(4, dtype=torch.bfloat16)}


def save(rank: int, world_size: int, folder: str) -> str:
    saved = dcp.save(Path(folder), 1, state(rank, world_size), {"samples": 8}, 0, checkpoint.Collective(dist.group.WORLD))
    return saved.manifest["state_sha256"]


def load(rank: int, world_size: int, folder: str) -> bool:
    """Whether every tensor of this rank comes back as it was written."""
    saved = checkpoint.open_checkpoint(Path(folder) / "step_000001")
    found = {name: torch.full_like(tensor, -1.0) for name, tensor in state(rank, world_size).items()}
    dcp.load(saved, found, checkpoint.Collective(dist.group.WORLD if world_size > 1 else None))
    return all(torch.equal(found[name], tensor) for name, tensor in state(rank, world_size).items())


def test_every_layout_reads_what_another_wrote(tmp_path: Path) -> None:
    digests = set(run_distributed(save, 2, str(tmp_path / "two")))
    digests.add(dcp.save(tmp_path / "one", 1, state(0, 1), {"samples": 8}, 0).manifest["state_sha256"])
    digests |= set(run_distributed(save, 4, str(tmp_path / "four")))
    assert len(digests) == 1
    assert all(run_distributed(load, 4, str(tmp_path / "two")))
    assert all(run_distributed(load, 2, str(tmp_path / "four")))
    assert load(0, 1, str(tmp_path / "four"))
    stored = checkpoint.open_checkpoint(tmp_path / "four" / "step_000001").manifest["tensors"]
    assert set(stored) == set(state(0, 1))
    assert len(list((tmp_path / "four" / "step_000001").glob("*.safetensors"))) == 4, "each rank writes a file of its own"


def load_by_dcp_alone(rank: int, world_size: int, folder: str) -> list[torch.Tensor]:
    """Rows of a matrix as DTensor shards, planned by DCP's own planner."""
    wanted = {"experts.3.w": distribute_tensor(torch.zeros(3, 5), init_device_mesh("cpu", (world_size,)), [Shard(0)])}
    saved = checkpoint.open_checkpoint(Path(folder) / "step_000001")
    torch.distributed.checkpoint.load(wanted, storage_reader=dcp.FolderReader(saved))
    return [wanted["experts.3.w"].to_local(), wanted["experts.3.w"].full_tensor()]


def test_dcp_itself_loads_shards_of_what_other_ranks_wrote(tmp_path: Path) -> None:
    run_distributed(save, 4, str(tmp_path))
    found = run_distributed(load_by_dcp_alone, 2, str(tmp_path))
    assert [len(shard) for shard, _ in found] == [2, 1]
    assert all(torch.equal(whole, torch.full((3, 5), 3.0)) for _, whole in found)


def load_what_is_damaged(rank: int, world_size: int, folder: str) -> str:
    try:
        load(rank, world_size, folder)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def test_damage_that_one_rank_finds_is_an_error_on_all(tmp_path: Path) -> None:
    """Expert 3 is read by the last rank alone."""
    dcp.save(tmp_path, 1, state(0, 1), {}, 0)
    (file,) = (tmp_path / "step_000001").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[content.find(torch.full((3, 5), 3.0).numpy().tobytes()) + 20] ^= 1
    file.write_bytes(content)
    for message in run_distributed(load_what_is_damaged, 2, str(tmp_path)):
        assert "damaged, checksums differ" in message and message.endswith("experts.3.w")


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
    dcp.save(tmp_path, 0, state(0, 1), {}, 0)
    for message in run_distributed(save_that_fails_on_one, 2, str(tmp_path)):
        assert "the disk of rank 1 is gone" in message
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["latest", "step_000000"]
    assert checkpoint.latest(tmp_path) is not None


def test_the_same_step_is_never_overwritten_by_several_ranks(tmp_path: Path) -> None:
    run_distributed(save, 2, str(tmp_path))
    with pytest.raises(RuntimeError, match="exists already and is never overwritten"):
        run_distributed(save, 2, str(tmp_path))


def save_slowly(rank: int, world_size: int, folder: str, pauses: tuple[float, float], timeout_s: float) -> int:
    """The steps that rank `rank` saved after it paused inside its part of the writing; what a watch says goes to a file."""
    layout = Layout(Grid(2, 1, 1, 1, 2), 2, 1, rank)
    ranks = assemble(layout, torch.device("cpu"), timeout_s)

    def end(message: str) -> None:
        Path(folder, f"rank-{rank}.txt").write_text(message)
        os._exit(1)

    def on_host(tensor: torch.Tensor) -> torch.Tensor:
        time.sleep(pauses[rank])
        return tensor

    ranks.watch._end = end
    checkpoint.on_host = on_host
    tensors = {f"of rank {rank}": torch.ones(4)}
    saved = dcp.save(Path(folder), 1, tensors, {}, 0, ranks.collective)
    ranks.watch.stop()
    return saved.step


def test_a_rank_that_stalls_in_a_save_is_named_and_one_that_works_is_left_alone(tmp_path: Path) -> None:
    """Writing for longer than the limit is work; what counts is for how long another rank has waited."""
    assert run_distributed(save_slowly, 2, str(tmp_path / "both"), (2.0, 2.0), 1.0) == [1, 1]
    (tmp_path / "one").mkdir()
    with pytest.raises(RuntimeError, match="died"):
        run_distributed(save_slowly, 2, str(tmp_path / "one"), (0.0, 40.0), 1.0)
    message = (tmp_path / "one" / "rank-0.txt").read_text()
    assert message == "rank 1 stalled at step 0, stage save: the others waited for 1 s"
    assert checkpoint.latest(tmp_path / "one") is None
