"""Ranks agree before anyone waits: a set-up that fails on one rank, another layout, equal numbers of exchanges."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from mok.errors import RankError
from mok.grid import Grid, Layout
from mok.train import processes
from mok.train.processes import assemble
from tests.distributed.processes import run_distributed

GRID = Grid(lanes=2, slices=2, segment=2, slice_sequences=1, num_slices=4)


def set_up(rank: int, world_size: int, fails: bool, odd: bool) -> tuple[str, int]:
    """(error, exchanges entered) of a rank whose set-up fails, or that was started with another layout, if it is rank 1."""
    layout = Layout(GRID, 1, 2, rank) if odd and rank == 1 else Layout(GRID, 2, 1, rank)
    try:
        ranks = assemble(layout, torch.device("cpu"), 20.0)
        try:
            ranks.agree("no peer memory: the fabric manager is not running" if fails and rank == 1 else "", "set-up")
        finally:
            ranks.watch.stop()
    except RankError as error:
        return str(error), 0
    return "", ranks.progress.count


def test_a_set_up_that_fails_on_one_rank_ends_on_all_with_its_cause() -> None:
    for message, _ in run_distributed(set_up, 2, True, False):
        assert message == "rank 1 failed at step 0, stage set-up: no peer memory: the fabric manager is not running"


def test_ranks_started_with_other_layouts_are_refused_on_all() -> None:
    for message, _ in run_distributed(set_up, 2, False, True):
        assert message.startswith("rank 1 was started with another layout than rank 0")


def test_every_rank_enters_the_same_number_of_exchanges() -> None:
    counts = [count for _, count in run_distributed(set_up, 2, False, False)]
    assert counts[0] == counts[1] > 0


def test_each_rank_has_its_own_folder_of_compiled_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folders = set()
    for rank in ("0", "1"):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        folders.add(processes.use_private_triton_cache())
        assert os.environ["TRITON_CACHE_DIR"] in folders
    assert len(folders) == 2 and all(Path(folder).parent == tmp_path for folder in folders)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert processes.use_private_triton_cache() == str(tmp_path)
