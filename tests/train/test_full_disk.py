"""A disk that fills up in the middle of a run, and a run folder that turns read-only: on real file systems, where that may be
arranged."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from mok import checkpoint
from mok.errors import CheckpointError, RunError
from tests.train.runs import At, make_run, metrics_of, timeless, train

EVERY_STEP = ("checkpoint.every=1", "checkpoint.keep_last=0")
CHECKPOINT_BYTES = 400_000
"""A checkpoint of the small recipe is a little smaller."""

Mount = Callable[[int], Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts a tmpfs of so many bytes on the folder `run` of the test."""
    folder = tmp_path / "run"

    def mounted(num_bytes: int) -> Path:
        folder.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "mok-test", folder], capture_output=True)
        if done.returncode:
            pytest.skip(f"mounting a file system is not permitted here: {done.stderr.decode().strip()}")
        return folder

    yield mounted
    subprocess.run(["umount", "--lazy", folder], capture_output=True, check=False)


def test_a_disk_that_fills_up_keeps_the_last_checkpoint_and_the_run_goes_on_with_more_room(
    tmp_path: Path, mount: Mount
) -> None:
    straight = train(tmp_path, *EVERY_STEP, out="straight", steps=6)
    folder = mount(2 * CHECKPOINT_BYTES + CHECKPOINT_BYTES // 2)
    run, _ = make_run(tmp_path, *EVERY_STEP, steps=6)
    with pytest.raises(CheckpointError, match="no space for the checkpoint") as caught:
        run.train()
    assert str(folder / "checkpoints/step_000003") in str(caught.value) and "bytes needed" in str(caught.value)
    assert caught.value.exit_code == 1
    saved = sorted(entry.name for entry in (folder / "checkpoints").iterdir())
    assert saved == ["latest", "step_000001", "step_000002"]
    assert checkpoint.latest(folder / "checkpoints").step == 2
    subprocess.run(["mount", "-o", f"remount,size={20 * CHECKPOINT_BYTES}", folder], check=True)
    assert timeless(train(tmp_path, *EVERY_STEP, steps=6, resume="auto")) == timeless(straight)


def test_a_disk_without_room_for_a_line_of_metrics_ends_the_run(tmp_path: Path, mount: Mount, capfd) -> None:
    how = "checkpoint.every=20", "checkpoint.keep_last=1", "log.every=1"
    straight = train(tmp_path, *how, out="straight", steps=50)
    folder = mount(4 * CHECKPOINT_BYTES)
    run, _ = make_run(tmp_path, *how, steps=50)
    filler = folder / "filler"

    def fill() -> None:
        with suppress(OSError), filler.open("wb", buffering=0) as stream:
            while True:
                stream.write(bytes(4096))

    run.observer = At(21, fill)
    with pytest.raises(RunError, match=r"metrics\.jsonl: cannot be written .*--resume auto") as caught:
        run.train()
    assert caught.value.exit_code == 1
    assert "Traceback" not in capfd.readouterr().err
    assert len((folder / "metrics.jsonl").read_bytes()) % 4096 == 0, "the disk was full in the middle of a line"
    filler.unlink()
    assert timeless(train(tmp_path, *how, steps=50, resume="auto")) == timeless(straight)


@pytest.fixture
def read_only() -> Iterator[Callable[[Path], None]]:
    """Makes a folder read-only until the end of the test, for root too."""
    changed: list[Path] = []

    def forbid(folder: Path) -> None:
        changed.append(folder)
        if os.geteuid():
            folder.chmod(0o555)
        elif (done := subprocess.run(["chattr", "+i", folder], capture_output=True)).returncode:
            pytest.skip(f"nothing stops root from writing here: {done.stderr.decode().strip()}")

    yield forbid
    for folder in changed:
        if os.geteuid():
            folder.chmod(0o755)
        else:
            subprocess.run(["chattr", "-i", folder], check=True)


def test_a_folder_that_turns_read_only_ends_the_run_at_the_save(tmp_path: Path, read_only, capfd) -> None:
    run, _ = make_run(tmp_path, *EVERY_STEP, steps=6)
    folder = tmp_path / "run"
    run.observer = At(3, lambda: read_only(folder / "checkpoints"))
    with pytest.raises(CheckpointError, match=r"cannot be written|not permitted") as caught:
        run.train()
    assert str(folder / "checkpoints/step_000003") in str(caught.value) and caught.value.exit_code == 1
    assert "Traceback" not in capfd.readouterr().err
    assert checkpoint.latest(folder / "checkpoints").step == 2 and metrics_of(folder)[-1]["step"] == 2
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["cache", "run", "text.py"], "no other place was used"


def test_a_folder_that_is_read_only_is_refused_before_the_data_is_opened(tmp_path: Path, read_only) -> None:
    (tmp_path / "run").mkdir()
    read_only(tmp_path / "run")
    with pytest.raises(RunError, match=r"cannot be written .*--out"):
        make_run(tmp_path, "data.path=nowhere")
