"""A rank of tests/kernels/test_gpu_peer.py: `python -m tests.kernels.peer_ranks RANK RANKS FOLDER WHAT`.

Ranks are processes that share one GPU and open memory to one another there (torch allows it where
TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES is set); they meet through gloo. Each leaves FOLDER/RANK.pt.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mok.autograd import Plan, experts
from mok.backends import mega, staged
from mok.backends.interface import LayerShape, Options
from mok.errors import MokError
from mok.grid import CallGrid
from mok.launch.status import check_status
from mok.shapes import WorkspaceShape
from mok.transport.interface import Transport
from mok.transport.peer import PeerTransport

DEVICE = torch.device("cuda", 0)
SHAPE = LayerShape(512, 384, 12, 4)
TOKENS = 192
"""Of all ranks in a call; 3/4 of an even share for the last one."""
STEPS = 20
BACKENDS = {"staged": staged, "mega": mega}


def tokens_of(rank: int, ranks: int) -> slice:
    """Which of a step's tokens a rank has: unequally many."""
    share = TOKENS // ranks
    stops = [share * (r + 1) + (share // 4 if r + 2 == ranks else 0) for r in range(ranks - 1)] + [TOKENS]
    return slice(stops[rank - 1] if rank else 0, stops[rank])


def train(backend: Any, rank: int, ranks: int, transport: Transport | None, steps: int = STEPS) -> dict[str, Tensor]:
    """Some steps of plain gradient descent on one layer's experts; every result of the last step, and the weights."""
    device = DEVICE
    grid = CallGrid(ranks, ranks, (0,), ranks, rank)
    generator = torch.Generator().manual_seed(7)
    local = slice(rank * SHAPE.num_experts // ranks, (rank + 1) * SHAPE.num_experts // ranks)
    sizes = (SHAPE.intermediate_size, SHAPE.hidden_size)
    masters = [
        (torch.randn(SHAPE.num_experts, *size, generator=generator) / 20)[local].to(device)
        for size in (sizes, sizes, sizes[::-1])
    ]
    weights = [master.bfloat16().requires_grad_() for master in masters]
    shape = replace(SHAPE, ranks=ranks)
    options = Options(transport=transport, recompute="none")
    mine = tokens_of(rank, ranks)
    found: dict[str, Tensor] = {}
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(TOKENS, SHAPE.hidden_size, generator=generator)[mine].bfloat16().to(device).requires_grad_()
        scores = torch.rand(TOKENS, SHAPE.num_experts, generator=generator)
        ids = scores.argsort(1)[:, : SHAPE.top_k].sort(1).values.int()
        ids[torch.rand(ids.shape, generator=generator) < 0.1] = -1
        router = torch.randn(TOKENS, SHAPE.top_k, generator=generator)[mine].to(device).requires_grad_()
        for weight in weights:
            weight.main_grad = torch.zeros(weight.shape, device=device)
        schedule = backend.build_schedule(ids[mine].to(device), shape, grid, options)
        y = experts(x, router, tuple(weights), Plan(backend, schedule, options))
        y.backward(y.detach() * 0.5)
        with torch.no_grad():
            for master, weight in zip(masters, weights, strict=True):
                master.sub_(weight.main_grad, alpha=0.05)
                weight.copy_(master)
        assert x.grad is not None and router.grad is not None
        found = {"y": y.detach(), "dx": x.grad, "drouter": router.grad}
    check_status(device)
    return {name: value.cpu() for name, value in (found | dict(zip("gud", masters, strict=True))).items()}


def fail(rank: int, transport: PeerTransport, how: str) -> dict[str, Any]:
    """Rank 1 is killed or stopped between two steps; what the others find, after how long, and whether the GPU still works."""
    ranks = transport.ranks
    train(staged, rank, ranks, transport, steps=2)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    began = time.monotonic()
    try:
        train(staged, rank, ranks, transport, steps=1)
        message = "nothing was noticed"
    except MokError as error:
        message = str(error)
    works = bool((torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda") == 64).all())
    return {"message": message, "seconds": time.monotonic() - began, "works": works}


def main() -> None:
    rank, ranks, folder, what = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    torch.cuda.set_device(DEVICE)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=60))
    group = dist.group.WORLD
    assert group is not None

    def agree(problem: str) -> None:
        problems: list[str] = [""] * ranks
        dist.all_gather_object(problems, problem)
        if any(problems):
            raise MokError("; ".join(problems))

    shape = WorkspaceShape(TOKENS, SHAPE.top_k, SHAPE.hidden_size, SHAPE.intermediate_size, ranks)
    timeout_s = 3.0 if what in ("kill", "stall") else 30.0
    transport = PeerTransport.allocate(shape, group, DEVICE, agree, row_room=0.0, timeout_s=timeout_s)
    if what in ("kill", "stall"):
        result: Any = fail(rank, transport, what)
    else:
        result = train(BACKENDS[what], rank, ranks, transport)
        dist.barrier()
    torch.save(result, folder / f"{rank}.pt")
    os._exit(0)  # the memory of a rank that is gone must not keep the others


if __name__ == "__main__":
    main()
