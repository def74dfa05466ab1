"""Rows through peer memory on a GPU: ranks as streams of one process, and as processes with symmetric memory; the same bits.

One GPU stands for several: what travels here never leaves it. Processes share it best under MPS (docs/scaling.md).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mok.backends import mega, staged
from mok.backends.interface import LayerShape
from mok.kernels import ring
from mok.launch.status import check_status
from tests.kernels import litmus, peer_ranks
from tests.kernels.test_peer import Case, check, over_ranks
from tests.tolerances import assert_same_bits

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
ROOT = Path(__file__).parents[2]
RUNS = [
    (Case(2, (300, 300), experts=8, hidden=2048, width=384, top_k=4), "none"),
    (Case(2, (300, 300), experts=8, hidden=2048, width=384, top_k=4), "all"),
    (Case(2, (130, 0), experts=8, hidden=256, width=256, top_k=8, shared=64), "none"),
    (Case(4, (65, 64, 1, 200), experts=8, routing="masked", hidden=512, width=128, top_k=3), "all"),
    (Case(3, (40,) * 6, experts=6, segment=3, hidden=64, width=128), "none"),
    (Case(2, (50, 70), experts=4, routing="first", hidden=7168, width=128), "all"),
    (Case(2, (64, 1), experts=32, hidden=128, width=64, top_k=8), "none"),
]
"""Every width of rows that movers carry in another way, and what a backward keeps."""


@pytest.mark.parametrize("backend", [staged, mega], ids=["staged", "mega"])
@pytest.mark.parametrize(("case", "recompute"), RUNS, ids=lambda value: str(value))
def test_streams_have_the_bits_of_one_rank(
    case: Case, backend: ModuleType, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel: Any = None
    if backend is mega:
        shape = LayerShape(case.hidden, case.width, case.experts, case.top_k, case.ranks)
        if reasons := mega.why_not(shape, torch.bfloat16, CUDA):
            pytest.skip(f"no megakernel here: {reasons}")
        programs = torch.cuda.get_device_properties(CUDA).multi_processor_count // case.ranks
        kernel = replace(mega.settings(shape, CUDA), programs=programs)
    found = over_ranks(case, monkeypatch, CUDA, calls=3, recompute=recompute, backend=backend, kernel=kernel, timeout_s=5.0)
    torch.cuda.synchronize()
    check_status(CUDA)
    for results in found:
        check(case, results, CUDA)


@pytest.mark.parametrize("pair", ["plain", "stores", "bulk stores"])
def test_a_flag_is_never_seen_before_its_row(pair: str) -> None:
    """3000 messages for each pair of release and acquire, from one stream to another."""
    rounds, given_up = 3000, torch.zeros(4, dtype=torch.int32, device=CUDA)
    buffers = torch.zeros(2, 8192, dtype=torch.uint8, device=CUDA)
    bases = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64, device=CUDA)
    row = buffers[1, : 2 * litmus.WIDTH].view(torch.bfloat16)
    flag, answer = buffers[1, 4096:4112].view(torch.int32), buffers[0, 4096:4112].view(torch.int32)
    boxes = TensorDescriptor.from_tensor(row.view(1, 8, 256), [1, 8, 256], ring.PLAIN_ROWS.value)

    def launch(rank: int, count: int) -> None:
        if pair == "plain":
            litmus.plain[(1,)](bases, 4096, 4096, faults, rank, count, given_up, 5_000_000_000, WIDTH=litmus.WIDTH)
        else:
            litmus.mover[(1,)](row, boxes, flag, answer, faults, count, rank, BULK_STORE=pair == "bulk stores", num_warps=1)

    faults = torch.zeros(4, dtype=torch.int32, device=CUDA)
    for rank in range(2):
        launch(rank, 0)  # loaded before one waits for the other
    torch.cuda.synchronize()
    for rank, stream in enumerate((torch.cuda.Stream(), torch.cuda.Stream())):
        with torch.cuda.stream(stream):
            launch(rank, rounds)
    torch.cuda.synchronize()
    assert not faults.any()
    assert flag[0] == answer[0] == rounds


def start(ranks: int, folder: Path, what: str) -> list[subprocess.Popen[str]]:
    environment = {
        **os.environ,
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "LOCAL_WORLD_SIZE": str(ranks),
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
    }
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.peer_ranks", str(rank), str(ranks), str(folder), what],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]


def wait(processes: list[subprocess.Popen[str]], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    for process in processes:
        try:
            output, _ = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
            assert process.returncode == 0, output[-4000:]
        finally:
            if process.poll() != 0:
                for other in processes:
                    other.kill()
                    other.communicate()


@pytest.mark.parametrize("name", ["staged", "mega"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_twenty_steps_of_processes_have_the_bits_of_one(ranks: int, name: str, tmp_path: Path) -> None:
    wait(start(ranks, tmp_path, name), 100.0)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    for part, value in peer_ranks.train(peer_ranks.BACKENDS[name], 0, 1, None).items():
        assert_same_bits(part, torch.cat([results[part] for results in found]), value)


@pytest.mark.parametrize("how", ["kill", "stall"])
def test_a_lost_rank_ends_the_step_of_the_others(how: str, tmp_path: Path) -> None:
    processes = start(3, tmp_path, how)
    try:
        wait([processes[0], processes[2]], 60.0)
    finally:
        processes[1].kill()
        processes[1].communicate()
    for rank in (0, 2):
        result = torch.load(tmp_path / f"{rank}.pt")
        assert "layer 0: rank 1 of the expert group was awaited at stage dispatch" in result["message"]
        assert result["seconds"] < 20.0 and result["works"]
