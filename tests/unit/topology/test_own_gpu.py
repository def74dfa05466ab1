"""Which GPU a rank takes, and with how many it shares it."""

from __future__ import annotations

import pytest
import torch

from mok.topology.own_gpu import own_gpu, ranks_of_a_gpu


@pytest.mark.parametrize(
    ("gpus", "environment", "device", "sharers"),
    [
        (4, {}, 0, 1),  # no launcher
        (4, {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}, 3, 1),
        (8, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 1, 1),
        (1, {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}, 0, 4),
        (2, {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3"}, 0, 2),
    ],
)
def test_ranks_take_gpus_in_turns(
    gpus: int, environment: dict[str, str], device: int, sharers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert own_gpu() == torch.device("cuda", device)
    assert ranks_of_a_gpu() == sharers


def test_without_gpus_nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert ranks_of_a_gpu() == 1
