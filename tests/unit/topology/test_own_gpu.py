"""Which GPU a rank takes, and with how many it shares it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mok.errors import UsageError
from mok.launch.config import KernelConfig
from mok.launch.mega import num_programs
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


@pytest.mark.parametrize(("ranks", "programs"), [(1, 132), (3, 44), (4, 33), (200, 1)])
def test_programs_of_all_ranks_of_a_gpu_fit_at_once(ranks: int, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert num_programs(KernelConfig()) == programs
    assert num_programs(KernelConfig(programs=7)) == 7


def test_what_no_launcher_sets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
    with pytest.raises(UsageError, match="LOCAL_WORLD_SIZE=many in the environment: not a number"):
        ranks_of_a_gpu()


def test_without_gpus_nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert ranks_of_a_gpu() == 1
