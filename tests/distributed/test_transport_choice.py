"""`moe.transport`, decided by all ranks together: what is refused, what a rank whose set-up fails does to the others.

The ranks are gloo processes. Memory is really opened in tests/kernels/test_gpu_peer.py.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from mok.errors import MokError
from mok.grid import Grid, Layout
from mok.recipe import load
from mok.train import transport
from mok.train.processes import assemble
from mok.transport.peer import PeerTransport
from tests.distributed.processes import run_distributed

CPU = torch.device("cpu")


def settled(rank: int, world_size: int, wanted: str, failing: str) -> tuple[str, str, float]:
    """(transport or error, reason, seconds) of a rank; `failing`: at which half of the set-up rank 1 fails, "" nowhere."""
    room = 1.5 if failing == "room" else 2.0
    recipe = load("toy", [f"moe.transport={wanted}", f"moe.ep={world_size}", "train.dtype=bf16", f"moe.peer_rows={room}"])
    layout = Layout(Grid.of(recipe, 1, world_size), 1, world_size, rank)
    ranks = assemble(layout, CPU, 20.0)
    if failing:
        # As if the GPUs were there and joined, up to the memory.
        transport._refused = lambda *arguments: ""
        transport._advised_against = lambda *arguments: ""

        def allocate(shape, group, device, agree, **options):
            agree("the driver said no" if failing == "memory" and rank == 1 else "")
            agree("failed to send fd" if failing == "handles" and rank == 1 else "")
            return PeerTransport(shape, rank, torch.zeros(shape.bytes, dtype=torch.uint8), [0] * world_size, **options)

        PeerTransport.allocate = allocate
    began = time.monotonic()
    try:
        group = transport.settle_transport(recipe, ranks, CPU)
        found = (group.transport.name, group.transport_reason)
    except MokError as error:
        found = (type(error).__name__, str(error))
    ranks.gather(None)  # nobody leaves before all have decided
    ranks.watch.stop()
    return (*found, time.monotonic() - began)


@pytest.mark.parametrize(
    ("wanted", "failing", "name", "reason"),
    [
        ("collective", "", "collective", ""),
        ("auto", "", "collective", "ranks on CPUs have no memory to open"),
        ("peer", "", "UsageError", 'moe.transport = "peer" cannot be had here: ranks on CPUs'),
        ("auto", "memory", "collective", "rank 1 failed at step 0, stage transport: the driver said no"),
        ("peer", "handles", "RankError", "rank 1 failed at step 0, stage transport: failed to send fd"),
        ("auto", "none", "peer", "every rank opened its memory"),
        ("auto", "room", "collective", "moe.peer_rows = 1.5 has room for less than all rows of 2 ranks"),
        ("peer", "room", "peer", "every rank opened its memory"),
    ],
)
def test_all_ranks_decide_alike(wanted: str, failing: str, name: str, reason: str) -> None:
    found = run_distributed(settled, 2, wanted, failing)
    for chosen, said, _ in found:
        assert chosen == name and reason in said, found


def test_backends_that_cannot_are_named() -> None:
    recipe = load("toy", ["moe.transport=peer", "moe.ep=2", "moe.backend=torch"])
    layout = Layout(Grid.of(recipe, 1, 2), 1, 2)
    assert "moe.transport = collective, not peer" in transport._refused(recipe, layout, torch.device("cuda"))
    recipe = replace(recipe, moe=replace(recipe.moe, backend="reference"))
    assert "2 ranks: it computes on one only" in transport._refused(recipe, layout, torch.device("cuda"))
