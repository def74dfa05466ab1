"""Many processes, one picture: reports are merged by host, and a silent rank is named within the limit."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import subprocess
import sys
import threading
import time

import pytest

from mok.errors import RankError, UsageError
from mok.shapes import LAYER_SHAPES
from mok.topology import advise, domains, findings, ranks
from mok.topology.measurement import Exchange, Measurement, Transfer
from mok.topology.model import to_plain
from mok.topology.ranks import Report, agree_on_ep, free_port, gather, merge, spawn
from tests.unit.topology.machines import bare_host, h100_box, launched, rack


def test_ranks_of_one_host_share_it():
    host = h100_box().hosts[0]
    topology = merge([Report(rank, rank, host) for rank in range(8)])
    assert len(topology.hosts) == 1
    assert [(rank.host, rank.gpu) for rank in topology.ranks] == [(0, i) for i in range(8)]


def test_launchers_that_show_each_rank_its_own_gpu():
    host = h100_box().hosts[0]
    reports = []
    for rank in range(8):
        gpus = tuple(dataclasses.replace(gpu, ordinal=0 if i == rank else None) for i, gpu in enumerate(host.gpus))
        environment = {"CUDA_VISIBLE_DEVICES": str(rank)}
        reports.append(Report(rank, rank, dataclasses.replace(host, gpus=gpus, environment=environment)))
    topology = merge(reports)
    assert [rank.gpu for rank in topology.ranks] == list(range(8))
    assert [gpu.label for gpu in topology.hosts[0].gpus] == [f"GPU {i}" for i in range(8)]
    assert [domain.ranks for domain in domains(topology)] == [tuple(range(8))]
    assert topology.ranks[3].environment == {"CUDA_VISIBLE_DEVICES": "3"}


def test_containers_that_show_each_rank_one_gpu_are_joined():
    host = h100_box().hosts[0]
    reports = []
    for rank in range(4):
        alone = dataclasses.replace(host.gpus[rank], ordinal=0)
        reports.append(Report(rank, rank, dataclasses.replace(host, name=f"pod-{rank}", gpus=(alone,), pairs=(), nics=())))
    topology = merge(reports)
    assert [gpu.uuid for gpu in topology.hosts[0].gpus] == [gpu.uuid for gpu in host.gpus[:4]]
    assert [rank.gpu for rank in topology.ranks] == [0, 1, 2, 3]


def test_wrong_numa_binding_and_shared_gpu_are_found():
    host = h100_box().hosts[0]
    wrong = dataclasses.replace(host, cpus="0-51")  # GPU 7 is local to 52-103
    found = findings(merge([Report(0, 0, wrong), Report(1, 7, wrong), Report(2, 7, host)]))
    assert {(f.code, f.where) for f in found} == {("numa-binding", "rank 1"), ("gpu-shared", "h100 GPU 7")}
    assert "numactl --cpunodebind=1" in next(f.fix for f in found if f.code == "numa-binding")


def test_spawned_processes_report(mok):
    done = mok("probe-topology", "--nproc", "2", "--json", "--shape", "toy")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [rank["rank"] for rank in report["topology"]["ranks"]] == [0, 1]
    assert report["advice"]["ep"] == 2


SOMETIMES_SILENT = """
import os, sys, time
if os.environ["RANK"] == "1": time.sleep(60)
if os.environ["RANK"] == "2": sys.exit("no such device")
print(sys.argv[1])
"""


def test_silent_process_is_named():
    report = json.dumps(to_plain(Report(0, 0, bare_host("x"))))
    start = time.monotonic()
    topology = spawn(3, 2.0, None, (sys.executable, "-c", SOMETIMES_SILENT, report))
    assert time.monotonic() - start < 10
    assert topology.silent == ("rank 1: no report within 2 s", "rank 2: ended with code 1: no such device")
    assert [f.where for f in findings(topology) if f.code == "rank-silent"] == ["rank 1", "rank 2"]


def store():
    from torch.distributed import HashStore

    shared = HashStore()
    shared.set_timeout(datetime.timedelta(seconds=5))
    return shared


@pytest.mark.parametrize("hosts", [18, 144])
def test_gather_of_synthetic_ranks(hosts):
    one = rack(1)[0]
    shared = store()
    reports = []
    for rank in range(hosts * 4):
        number = rank // 4
        gpus = tuple(dataclasses.replace(gpu, uuid=f"GPU-{number}-{i}") for i, gpu in enumerate(one.gpus))
        host = dataclasses.replace(one, name=f"h{number}", boot_id=f"b{number}", gpus=gpus)
        reports.append(Report(rank, rank % 4, host))
    silent = {5, 70}
    for report in reports[1:]:
        if report.rank not in silent:
            shared.set(f"mok/topology/report/{report.rank}", json.dumps(to_plain(report)))
    topology = gather(shared, 0, len(reports), reports[0], 0.5)
    assert topology is not None
    assert topology.silent == ("rank 5: no report within 0.5 s", "rank 70: no report within 0.5 s")
    assert len(topology.ranks) == hosts * 4 - 2
    assert [domain.size for domain in domains(topology)] == [hosts * 4 - 2]


def test_auto_size_is_the_same_on_every_rank_and_needs_all():
    shape = LAYER_SHAPES["kimi-k2.7"]
    shared, answers = store(), [0] * 3

    def run(rank: int) -> None:
        answers[rank] = agree_on_ep(shape, shared, rank, 3, 30.0)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [3, 3, 3]
    with pytest.raises(RankError, match="rank 1: no report within 2 s"):
        agree_on_ep(shape, store(), 0, 2, 2.0)


def test_auto_size_leaves_no_running_rank_out():
    shape = LAYER_SHAPES["kimi-k2.7"]
    assert advise(launched(rack(16)), shape, every_rank=True).ep == 64
    assert advise(launched(rack()), shape, every_rank=True).ep == 24
    # 71 + 1: no size but 1 divides both domains, and the broken GPU is running.
    assert advise(launched(rack(unhealthy=(7, 1))), shape, every_rank=True).ep == 1


def test_the_ranks_that_one_process_is_about_to_start(monkeypatch):
    shape = LAYER_SHAPES["qwen3-30b-a3b"]
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(ranks, "probe_host", lambda: h100_box().hosts[0])
    assert [ranks.ep_of_launch(shape, number, 1.0) for number in (1, 2, 8)] == [1, 2, 8]
    monkeypatch.setattr(ranks, "probe_host", lambda: bare_host("no-gpu"))
    assert ranks.ep_of_launch(shape, 4, 1.0) == 4


@pytest.mark.parametrize(("rank", "size"), [("", ""), ("", "2"), ("0", "")])
def test_empty_variables_are_no_launch(monkeypatch, rank, size):
    for name, value in (("RANK", rank), ("WORLD_SIZE", size), ("LOCAL_RANK", ""), ("MASTER_ADDR", ""), ("MASTER_PORT", "")):
        monkeypatch.setenv(name, value)
    assert ranks.launched_ranks() is None and not ranks.in_launch() and ranks.local_rank() == 0


@pytest.mark.parametrize(("rank", "size"), [("x", "2"), ("2", "2"), ("-1", "2"), ("0", "two")])
def test_variables_that_no_launcher_sets_are_named(monkeypatch, rank, size):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(UsageError, match=f"RANK={rank} WORLD_SIZE={size} in the environment"):
        ranks.launched_ranks()


def test_torchrun_prints_one_picture(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "mok_cli"]
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "probe-topology", "--timeout", "60"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ranks 0-1") == 1


def test_all_to_all_among_cpu_processes(mok):
    done = mok("probe-topology", "--nproc", "2", "--measure", "--shape", "toy", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    exchanges = report["topology"]["measurement"]["exchanges"]
    assert [(e["routing"], e["method"], e["verdict"], e["ranks"]) for e in exchanges] == [
        (routing, "gloo", "verified", [0, 1]) for routing in ("even", "skewed", "one-hot")
    ]
    assert report["advice"]["measured_from"] == "even all-to-all among 2 ranks"
    assert report["advice"]["exchange_ms"] > 0


@pytest.mark.parametrize(
    ("devices", "reason"),
    [
        (["cpu a", "cpu a"], ""),
        (["cuda GPU-1", "cuda GPU-2"], ""),
        (["cuda GPU-1", "cuda GPU-1"], "ranks share a GPU, which NCCL refuses"),
        (["cuda GPU-1", "cpu a"], "some ranks have a GPU and some have none"),
        (["cuda GPU-1"], "rank 1 did not come to the exchange"),
    ],
)
def test_exchange_is_started_by_all_ranks_or_none(devices, reason):
    from mok.topology.measure.collective import verdict_of

    shared = store()
    for rank, device in enumerate(devices):
        shared.set(f"mok/exchange/here/{rank}", device)
    assert verdict_of(shared, 2, lambda key: shared.check([key])) == (f"no:{reason}" if reason else "go:")


def test_figures_of_hosts_become_figures_of_ranks():
    hosts = rack(2)
    local = Measurement(
        (Transfer(0, 3, "copy", "verified", gb_per_s=100.0),),
        (Exchange((0, 1, 2, 3), "even", "load", 1, 2, 3, "verified"),),
        seconds=3.0,
    )
    reports = [Report(rank, rank % 4, hosts[rank // 4], local if rank % 4 == 0 else None) for rank in range(8)]
    reports[0] = dataclasses.replace(reports[0], no_exchange_reason="rank 3 did not come to the exchange")
    measurement = merge(reports).measurement
    assert [(t.source, t.target) for t in measurement.transfers] == [(0, 3), (4, 7)]
    assert [e.ranks for e in measurement.exchanges] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert measurement.unfinished == "no all-to-all among the ranks: rank 3 did not come to the exchange"


def launched_rank(rank: int, port: int, *arguments: str) -> subprocess.Popen[str]:
    """One rank of a launch of two by something else than torchrun."""
    numbers = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "mok_cli", "probe-topology", *arguments],
        env={**os.environ, **numbers},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_launch_with_a_lost_rank_names_it_and_ends():
    alone = launched_rank(0, free_port(), "--timeout", "3", "--json", "--require", "p2p")
    orphan = launched_rank(1, free_port(), "--timeout", "3")
    output, errors = alone.communicate(timeout=100)
    assert alone.returncode == 3
    assert json.loads(output)["topology"]["silent"] == ["rank 1: no report within 3 s"]
    assert errors.endswith("Error: p2p is required: rank 1: no report within 3 s\n")
    output, errors = orphan.communicate(timeout=100)
    assert orphan.returncode == 1
    assert "rank 1: no store at 127.0.0.1" in errors
    assert "is rank 0 up?" in errors
