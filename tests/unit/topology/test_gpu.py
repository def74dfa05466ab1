"""On real GPUs: the picture agrees with CUDA, and transfers (with itself, and between GPUs) are measured and verified."""

from __future__ import annotations

import json

import pytest

from mok.shapes import LAYER_SHAPES
from mok.topology.measure.plan import make_plan
from mok.topology.measure.watch import measure

pytestmark = pytest.mark.gpu

PLAIN = {"TRITON_INTERPRET": "0"}


def test_picture_agrees_with_cuda(mok):
    import torch

    done = mok("probe-topology", "--json", env=PLAIN)
    assert done.returncode == 0, done.stderr
    visible = [gpu for gpu in json.loads(done.stdout)["gpus"] if gpu["visible"]]
    assert [gpu["ordinal"] for gpu in visible] == list(range(torch.cuda.device_count()))
    for gpu in visible:
        assert gpu["uuid"].removeprefix("GPU-") == str(torch.cuda.get_device_properties(gpu["ordinal"]).uuid)


def test_hidden_gpus_are_hidden(mok):
    done = mok("probe-topology", "--json", "--require", "p2p", env={**PLAIN, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 3
    report = json.loads(done.stdout)
    assert report["gpus"]
    assert not any(gpu["visible"] for gpu in report["gpus"])
    assert "hides all" in report["no_gpu_reason"]


def test_measure_by_the_command(mok):
    import torch

    done = mok("probe-topology", "--measure", "--json", "--shape", "olmoe-1b-7b", env=PLAIN, timeout=300)
    assert done.returncode == 0, done.stderr
    measurement = json.loads(done.stdout)["topology"]["measurement"]
    count = torch.cuda.device_count()
    assert len(measurement["transfers"]) == 3 * max(1, count * (count - 1))
    assert {record["verdict"] for record in measurement["exchanges"]} == {"verified"}
    for record in measurement["transfers"]:
        assert record["verdict"] in ("verified", "not capable"), record
        if record["verdict"] == "verified":
            assert record["gb_per_s"] > 1, record
            assert 0.01 < record["latency_us"] < 1000, record
    assert measurement["unfinished"] == ""


def test_lost_writes_are_noticed_on_the_device(monkeypatch):
    import torch

    from mok.topology.measure.backend import CudaBackend

    monkeypatch.setenv("TRITON_INTERPRET", "1")  # copies only: the kernels are built by the command above
    backend = CudaBackend()
    last = torch.cuda.device_count() - 1
    assert backend.transfer("copy", 0, last, 1 << 20, seed=1)[1] == ""
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, *_, **__: self)
    assert "words are wrong" in backend.transfer("copy", 0, last, 1 << 20, seed=2)[1]


def test_time_limit_holds_on_the_device():
    # A start limit that no CUDA context can be made in: the child is killed and the reason said.
    measurement = measure(make_plan(1, LAYER_SHAPES["toy"]), start_limit_s=0.05)
    assert "no end within 0.05 s" in measurement.unfinished
