"""Whole runs on GPUs, as they are typed: what is set before CUDA starts; cold caches and ranks choose the same kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from mok import dcp
from mok.grid import Grid, Layout
from mok.recipe import load
from mok.train.batches import Batches
from mok.train.processes import assemble
from mok.train.ranks import OneRank
from mok.train.state import TrainState
from mok.train.step import train_step
from tests.train.runs import RECIPE, arguments
from tests.train.test_gpu_step import VOCABULARY, Sequences

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
SIZES = (
    *("model.hidden_size=128", "model.num_layers=2", "moe.num_experts=8", "moe.intermediate_size=64", "train.dtype=bf16"),
    *("distributed.lanes=2", "distributed.slices=2", "log.trace=steps", "sample.every=0", "checkpoint.every=0"),
)


def start(folder: Path, name: str, *options: str, steps: int = 3) -> subprocess.Popen[str]:
    """Some steps into folder / name, with a cache of compiled kernels that is empty, and nothing set for cuBLAS."""
    overrides = [word for entry in arguments(folder, *SIZES) for word in ("--set", entry)]
    words = ["train", str(RECIPE), *overrides, "--out", str(folder / name), "--steps", str(steps), "--device", "cuda", *options]
    environment = {key: value for key, value in os.environ.items() if key != "CUBLAS_WORKSPACE_CONFIG"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(folder / f"cache-{name}")}
    command = [sys.executable, "-m", "mok_cli", *words]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def outcome(process: subprocess.Popen[str], run: Path) -> tuple[dict[str, Any], dict[str, dict[str, str]], str]:
    """(environment, every digest of every step, digest of the final state)."""
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == 0, printed
    digests: dict[str, dict[str, str]] = {}
    for file in sorted((run / "trace").glob("rank_*.jsonl")):
        for line in map(json.loads, file.read_text().splitlines()):
            for phase, found in line["digests"].items():
                digests.setdefault(f"step {line['step']}, {phase}", {}).update(found)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return json.loads((run / "environment.json").read_text()), digests, last["state_sha256"]


def test_cold_caches_choose_the_same_kernels_and_give_the_same_bits(tmp_path: Path) -> None:
    processes = [start(tmp_path, name) for name in ("first", "second")]
    first, second = (outcome(process, tmp_path / name) for process, name in zip(processes, ("first", "second"), strict=True))
    assert first[0]["cublas_workspace"] == ":4096:8", "the command sets it before CUDA starts, and records it"
    assert first[0]["kernels"] and first[0]["kernels"] == second[0]["kernels"]
    assert any("reduce" in key for key in first[1]) and first[1] == second[1]
    assert first[2] == second[2]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_choose_the_kernels_of_one_and_give_its_bits(tmp_path: Path) -> None:
    alone = outcome(start(tmp_path, "alone", "--set", "moe.transport=collective"), tmp_path / "alone")
    options = ("--nproc", "2", "--set", "moe.ep=1", "--set", "moe.transport=collective")
    together = outcome(start(tmp_path, "together", *options), tmp_path / "together")
    assert together[0]["kernels"] == alone[0]["kernels"]
    assert together[1] == alone[1] and together[2] == alone[2]


@pytest.mark.parametrize(("backend", "ranks"), [("staged", 2), ("mega", 2), ("mega", 4)])
def test_ranks_that_share_a_gpu_train_over_peer_memory_with_the_bits_of_one(backend: str, ranks: int, tmp_path: Path) -> None:
    """Four ranks are two groups beside each other, each a part of the world."""
    options = ("--set", f"moe.backend={backend}")
    apart = ("--nproc", str(ranks), "--set", "moe.ep=2", "--set", "moe.transport=peer")
    alone, together = start(tmp_path, "alone", *options, steps=20), start(tmp_path, "together", *options, *apart, steps=20)
    one, two = outcome(alone, tmp_path / "alone"), outcome(together, tmp_path / "together")
    assert "moe.transport = peer takes peer" in (tmp_path / "together" / "train.log").read_text()
    assert len({key.split(",")[0] for key in one[1]}) >= 20 and two[1] == one[1] and two[2] == one[2]


def test_what_ranks_over_nccl_save_is_what_one_rank_loads(tmp_path: Path) -> None:
    """A launch of one rank with its groups: DTensors on the GPU, plans over gloo."""
    recipe = load(str(RECIPE), arguments(tmp_path, *SIZES))
    layout = Layout(Grid.of(recipe))
    device = torch.device("cuda", 0)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    try:
        ranks = assemble(layout, device, 60.0)
        state = TrainState(recipe, VOCABULARY, ranks, device)
        assert all(isinstance(group.exp_avg, DTensor) for group in state.optimizer.groups)
        train_step(state, Batches(Sequences(recipe.train.sequence_length), layout.grid))
        saved = dcp.save(tmp_path, 1, state.tensors(), {"samples": state.samples}, 0, ranks.collective)
        ranks.watch.stop()
    finally:
        dist.destroy_process_group()
    alone = TrainState(recipe, VOCABULARY, OneRank(layout), device, fill=False)
    alone.load(saved)
    assert alone.state_sha256() == state.state_sha256() == saved.manifest["state_sha256"]


def test_the_library_refuses_a_cuda_that_started_without_its_workspace() -> None:
    code = (
        "import torch; torch.ones(1, device='cuda')\n"
        "from mok.determinism import verify_step; from mok.errors import UsageError\n"
        "try: verify_step(lambda: (torch.nn.Linear(1, 1), lambda n: torch.ones(())))\n"
        "except UsageError as error: print(error)"
    )
    environment = {key: value for key, value in os.environ.items() if key != "CUBLAS_WORKSPACE_CONFIG"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    (line,) = done.stdout.splitlines()
    assert line.startswith("CUBLAS_WORKSPACE_CONFIG is not set and CUDA has already started; set it to :4096:8"), line
