"""Reports from the field, one test for each: what was seen elsewhere, and what mok does with it."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import sys
from pathlib import Path

import pytest

from mok.errors import UsageError
from mok.shapes import LAYER_SHAPES, LayerShape
from mok.topology import advise, domains, findings, nvml, smi, unmet
from mok.topology.fabric import decode_health, judge
from mok.topology.measurement import Measurement, Transfer
from mok.topology.model import Gpu, Host, Reading, Source, Topology
from mok.topology.probe import join, reason_for_no_gpu
from mok.topology.sources import Unavailable, ask
from mok.topology.sysfs import imex_state
from mok.topology.visible import visible_positions
from tests.unit.topology.fake_nvml import INSUFFICIENT_RESOURCES, NOT_SUPPORTED, FakeFabric, FakeNvml
from tests.unit.topology.machines import (
    CLUSTER,
    NOWHERE,
    bare_host,
    cuda_view,
    h100_box,
    h200_vm,
    hgx_gpus,
    launched,
    mig_box,
    old_driver,
    pcie_box,
    rack,
    uuid,
)


def codes(topology: Topology, **options: int) -> list[str]:
    return [finding.code for finding in findings(topology, **options)]


def test_e01_no_driver_is_a_normal_answer(mok):
    plain = mok("probe-topology")
    assert plain.returncode == 0, plain.stderr
    assert "no GPUs found: CPU only" in plain.stdout
    assert "Traceback" not in plain.stdout + plain.stderr
    done = mok("probe-topology", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0
    assert report["schema_version"] == 1
    assert report["gpus"] == []
    assert "nvidia-smi" in report["no_gpu_reason"]
    assert "nvml" in report["no_gpu_reason"]
    assert report["topology"]["hosts"][0]["numa_nodes"]
    required = mok("probe-topology", "--require", "p2p")
    assert required.returncode == 3
    assert "no GPU is visible" in required.stderr


def test_e02_old_driver_lacks_the_fabric_query():
    topology = old_driver()
    gpu = topology.hosts[0].gpus[0]
    assert judge(gpu.fabric).words == "unknown: driver too old (needs 550)"
    assert (gpu.links_up, gpu.links_total, gpu.name) == (12, 12, "NVIDIA A100-SXM4-80GB")
    assert topology.hosts[0].pair(0, 7).link == "NV12"
    assert unmet(topology, None) == ""


def test_e02_newer_nvlink_functions_missing_too():
    absent = {"nvmlDeviceGetNvLinkState", "nvmlDeviceGetNvLinkVersion", "nvmlDeviceGetMigMode", "nvmlDeviceGetP2PStatus"}
    reading = nvml.read(FakeNvml(hgx_gpus(FakeFabric()), missing=frozenset(absent)))
    assert [gpu.links_up for gpu in reading.gpus] == [None] * 8
    assert reading.gpus[0].bus_id == "0000:18:00.0"


def test_e02_library_that_kills_its_process_costs_one_answer(tmp_path, monkeypatch):
    (tmp_path / "pynvml.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGABRT)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    reading, source = ask("nvml", "mok.topology.nvml", 20).result()
    assert reading is None
    assert source == Source("nvml", False, "its process was ended by SIGABRT")


def test_e03_completed_with_an_error_status_is_not_healthy():
    good = FakeFabric(3, 0, CLUSTER, 4026, 0xAA, 1)
    bad = FakeFabric(3, INSUFFICIENT_RESOURCES)
    gpus = hgx_gpus(good)[:2]
    gpus[1] = dataclasses.replace(gpus[1], fabric=bad)
    reading = nvml.read(FakeNvml(gpus))
    assert judge(reading.gpus[0].fabric).words == "healthy"
    assert judge(reading.gpus[1].fabric).words == "fabric unhealthy: Insufficient Resources"
    host = join(bare_host("x", imex="ready"), {"nvml": reading, "cuda": cuda_view(reading.gpus)}, (), NOWHERE)
    groups = domains(Topology((host,)))
    assert [domain.ranks for domain in groups] == [(0,), (1,)]
    assert groups[1].kind == "alone"


@pytest.mark.parametrize(
    ("fabric", "kind"),
    [
        (FakeFabric(3, INSUFFICIENT_RESOURCES), "unhealthy"),
        (FakeFabric(3, 0, CLUSTER, 0), "unhealthy"),
        (FakeFabric(3, 0, CLUSTER, 4026, 0x9A), "unhealthy"),
        (FakeFabric(3, 0, CLUSTER, 4026, 0x4AA), "unhealthy"),
        (FakeFabric(3, 0, CLUSTER, 4026, 0x80AA), "unhealthy"),
        (FakeFabric(3, 0, CLUSTER, 4026, 0xAA, 2), "unhealthy"),
        (FakeFabric(3, 0, CLUSTER, 4026, 0xA9), "degraded"),
        (FakeFabric(3, 0, CLUSTER, 4026, 0xAA, 3), "degraded"),
    ],
    ids=["status", "no clique", "route", "configuration", "manager", "summary", "bandwidth", "capacity"],
)
def test_e03_healthy_takes_every_field(fabric, kind):
    reading = nvml.read(FakeNvml(hgx_gpus(fabric)[:1]))
    assert judge(reading.gpus[0].fabric).kind == kind


def test_e03_single_box_with_zero_cluster_claims_no_other_host():
    verdict = judge(h100_box().hosts[0].gpus[0].fabric)
    assert verdict.kind == "single host"
    assert not verdict.usable_across_hosts


def test_e04_registration_in_progress_is_not_ready_and_a_lost_gpu_is_missed():
    gpus = hgx_gpus(FakeFabric(3, 0))
    gpus[3] = dataclasses.replace(gpus[3], fabric=FakeFabric(2, 0))
    for present, expected in ((gpus, 8), (gpus[:7], 8)):
        reading = nvml.read(FakeNvml(present))
        topology = Topology((join(bare_host("x"), {"nvml": reading, "cuda": cuda_view(reading.gpus)}, (), NOWHERE),))
        assert judge(topology.hosts[0].gpus[3].fabric).words == "not ready: in progress"
        found = findings(topology, expected)
        assert any(f.where == "x GPU 3" and f.what == "not ready: GPU 3 in progress" for f in found)
        assert ("gpu-count" in codes(topology, expect_gpus=expected)) == (len(present) == 7)
        assert "GPU 3: not ready: in progress" in unmet(topology, "nvlink")
    assert unmet(topology, None, 8) == "7 GPUs are visible, 8 are expected"


def test_e04_nvidia_smi_listing_with_n_a_fields():
    listing = """
GPU 00000000:18:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    Fabric
        State                             : Completed
        Status                            : Success
        CliqueId                          : 0
        ClusterUUID                       : 00000000-0000-0000-0000-000000000000
        Health
            Summary                       : Healthy
            Bandwidth                     : Full
    Processes                             : None
GPU 00000000:5D:00.0
    Fabric
        State                             : In Progress
        Status                            : N/A
        CliqueId                          : N/A
        ClusterUUID                       : N/A
        Health
            Summary                       : N/A
"""
    found = smi.parse_fabric(listing)
    assert judge(found["0000:18:00.0"]).kind == "single host"
    assert judge(found["0000:5d:00.0"]).words == "not ready: in progress"


CARDS = [Gpu(uuid=uuid(9, i), bus_id=f"0000:{bus}:00.0", found_by=("nvml",)) for i, bus in enumerate(("18", "2a", "3a"))]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("1", [1]),
        ("1,0", [1, 0]),
        ("0,-1,1", [0]),
        ("0,7,1", [0]),
        ("1,1", []),
        (uuid(9, 2), [2]),
        (uuid(9, 2).lower() + ",0", [2, 0]),
        ("GPU-0000", []),
        ("MIG-unknown", []),
    ],
)
def test_e05_visible_device_lists(value, expected):
    assert [position for position, _ in visible_positions(value, CARDS)] == expected
    environment = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    host = join(bare_host("x", environment=environment), {"nvml": Reading(tuple(CARDS))}, (), NOWHERE)
    assert [gpu.uuid for gpu in host.gpus if gpu.visible] == [CARDS[i].uuid for i in expected]
    assert len(host.gpus) == 3
    if not expected:
        assert "hides all 3 GPUs" in reason_for_no_gpu(host)


def test_e05_cuda_order_wins_and_cards_are_joined_by_identity():
    # CUDA counts fastest first here: its 0 is NVML's 2. One card is joined by UUID, one by bus id alone.
    seen = Reading(
        (
            Gpu(uuid=CARDS[2].uuid.removeprefix("GPU-"), ordinal=0, found_by=("cuda",)),
            Gpu(uuid="", bus_id=CARDS[0].bus_id, ordinal=1, found_by=("cuda",)),
        )
    )
    host = join(bare_host("x"), {"nvml": Reading(tuple(CARDS)), "cuda": seen}, (), NOWHERE)
    assert [(gpu.ordinal, gpu.uuid) for gpu in host.gpus] == [(0, CARDS[2].uuid), (1, CARDS[0].uuid), (None, CARDS[1].uuid)]
    assert host.gpus[0].found_by == ("nvml", "cuda")
    assert host.gpus[2].label == "hidden GPU 0000:2a:00.0"
    assert [place.gpu for place in Topology((host,)).places()] == [0, 1]
    assert "hidden-gpus" in codes(Topology((host,)))


def test_e05_mig_instance_in_the_visible_list():
    host = mig_box().hosts[0]
    assert [device.ordinal for device in host.gpus[0].mig_devices] == [None, 0]
    assert host.gpus[0].label == "GPU 0"
    assert not host.gpus[1].visible
    without_cuda = join(bare_host("x", environment=host.environment), {"nvml": Reading(strip(host.gpus))}, (), NOWHERE)
    assert [device.ordinal for device in without_cuda.gpus[0].mig_devices] == [None, 0]


def strip(gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """The cards as NVML tells of them, without ordinals."""
    return tuple(
        dataclasses.replace(
            gpu, ordinal=None, mig_devices=tuple(dataclasses.replace(device, ordinal=None) for device in gpu.mig_devices)
        )
        for gpu in gpus
    )


def test_e06_capability_is_not_proof():
    box = h100_box()
    assert box.hosts[0].pair(0, 1).capable is True
    assert unmet(box, "p2p") == ""
    wrong = Transfer(0, 1, "copy", "FAILED", "131072 of 131072 words are wrong")
    measured = dataclasses.replace(box, measurement=Measurement((wrong, Transfer(1, 0, "copy", "verified", gb_per_s=300.0))))
    assert unmet(measured, "p2p") == "p2p is required: rank 0 to rank 1: copy failed (131072 of 131072 words are wrong)"
    assert [f.severity for f in findings(measured) if f.code == "transfer-failed"] == ["error"]
    advice = advise(measured, LAYER_SHAPES["kimi-k2.7"])
    assert advice.transport == "collective"


def test_e07_links_down_are_counted_and_bandwidth_is_scaled():
    box = h100_box({3: 2, 5: 18})
    gpus = box.hosts[0].gpus
    assert (gpus[3].links_up, gpus[3].nvlink_gb_per_s) == (16, 400.0)
    assert (gpus[5].links_up, gpus[5].nvlink_gb_per_s) == (0, 0.0)
    what = {finding.where: finding.what for finding in findings(box)}
    assert what["h100 GPU 3"] == "NVLink degraded: 16/18 links up, 400 GB/s nominal"
    assert what["h100 GPU 5"] == "NVLink down: 0 of 18 links up"
    assert box.hosts[0].pair(0, 3).link == "NV16"
    assert "16 of 18 NVLinks up" in unmet(h100_box({3: 2}), "nvlink")


def test_e07_text_of_nvidia_smi_in_any_case():
    text = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-11111111-0000-4000-8000-000000000000)
\t Link 0: 26.562 GB/s
\t Link 1: <inactive>
\t Link 2: Inactive
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-22222222-0000-4000-8000-000000000000)
NVML: Unable to retrieve NVLink information as all links are inActive
"""
    found = smi.parse_nvlinks(text)
    assert found["GPU-11111111-0000-4000-8000-000000000000"] == (1, 3)
    assert found["GPU-22222222-0000-4000-8000-000000000000"] == (0, None)
    host = bare_host("x", gpus=(Gpu(uuid="GPU-2", ordinal=0, links_up=0, links_total=None),))
    assert "links-down" in codes(Topology((host,)))


HEADER = "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m"
ROWS = "GPU0\t X \tNV18\tPXB\t0-51\t0\t\tN/A\nGPU1\tNV18\t X \tSYS\t52-103\t1\t\tN/A\nNIC0\tPXB\tSYS\t X \t\t\t\t\n"
LEGEND = (
    "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe\n  NV#  = Connection\n\nNIC Legend:\n\n  NIC0: mlx5_0\n"
)


def test_e08_matrix_text_with_escape_codes_nics_and_legend():
    matrix = smi.parse_matrix(f"{HEADER}\n{ROWS}{LEGEND}", 2)
    assert [(pair.first, pair.second, pair.link) for pair in matrix] == [(0, 1, "NV18"), (1, 0, "NV18")]
    assert smi.parse_matrix(HEADER.replace("\x1b[4m", "").replace("\x1b[0m", "") + "\n" + ROWS, 2) == matrix
    assert smi.parse_matrix("\tGPU0\tCPU Affinity\nGPU0\t X \tN/A\n", 1) == ()
    eight = "\t" + "\t".join(f"GPU{i}" for i in range(8)) + "\n"
    eight += "".join(f"GPU{i}\t" + "\t".join(" X " if i == j else "NV18" for j in range(8)) + "\t0-51\n" for i in range(8))
    assert {pair.link for pair in smi.parse_matrix(eight, 8)} == {"NV18"}


@pytest.mark.parametrize("text", ["", "Failed to initialize NVML: Unknown Error\n", HEADER + "\nGPU0\t X \tNV18\n"])
def test_e08_text_without_a_matrix_is_unknown(text):
    with pytest.raises(Unavailable, match="no matrix"):
        smi.parse_matrix(text, 2)


@pytest.mark.parametrize(
    ("hosts", "environment", "domain_sizes"),
    [(18, {}, [72]), (2, {}, [8]), (2, {"NCCL_MNNVL_ENABLE": "0"}, [4, 4])],
)
def test_e09_domain_size_is_not_host_size(hosts, environment, domain_sizes):
    topology = launched(rack(hosts, environment=environment))
    assert [domain.size for domain in domains(topology)] == domain_sizes
    assert {sum(gpu.visible for gpu in host.gpus) for host in topology.hosts} == {4}


@pytest.mark.parametrize(("hosts", "per_host"), [(11, 3), (11, 4), (16, 4), (18, 4), (144, 4)])
def test_e10_many_ranks(hosts, per_host):
    one = rack(1, per_host)[0]
    copies = [
        dataclasses.replace(
            one,
            name=f"host-{number}",
            boot_id=f"boot-{number}",
            gpus=tuple(dataclasses.replace(gpu, uuid=uuid(number, i)) for i, gpu in enumerate(one.gpus)),
        )
        for number in range(hosts)
    ]
    topology = launched(copies)
    assert len(topology.ranks) == hosts * per_host
    assert [domain.size for domain in domains(topology)] == [hosts * per_host]
    advice = advise(topology, LayerShape(7168, 2048, 576, 8))
    assert (hosts * per_host) - len(advice.groups) * advice.ep == len(advice.spare_ranks)
    assert unmet(topology, "nvl72", hosts * per_host) == ""
    assert findings(topology) == []


def test_e10_health_bits_have_words_and_experts_are_not_fewer_than_ranks():
    assert decode_health(0xAA) == {
        "degraded bandwidth": "no",
        "route recovery": "no",
        "route unhealthy": "no",
        "access timeout recovery": "no",
        "incorrect configuration": "not supported",
        "partition assigned": "not supported",
        "fabric manager": "not supported",
    }
    assert decode_health(0x55AA)["incorrect configuration"] == "insufficient NVLinks"
    with pytest.raises(UsageError, match="72 ranks cannot share 8 experts, some would have none; use 1, 2, 4 or 8"):
        advise(launched(rack()), LAYER_SHAPES["mixtral-8x7b"], 72)
    assert advise(launched(rack()), LAYER_SHAPES["mixtral-8x7b"]).ep == 8


def test_e11_imex_channel_missing_or_unreadable_is_said(tmp_path, monkeypatch):
    folder = tmp_path / "dev/nvidia-caps-imex-channels"
    assert imex_state(tmp_path) == "missing"
    folder.mkdir(parents=True)
    assert imex_state(tmp_path) == "missing"
    channel = folder / "channel0"
    channel.touch()
    assert imex_state(tmp_path) == "ready"
    # Not by mode bits: root may read everything.
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert imex_state(tmp_path) == "unreadable"
    for state in ("missing", "unreadable"):
        topology = launched(rack(2, imex=state))
        found = [finding for finding in findings(topology) if finding.code == f"imex-{state}"]
        assert len(found) == 2
        words = f"NVLink fabric is up but IMEX channel {state}: cross-node NVLink unavailable"
        assert words in found[0].what
        assert "groups stay within the host" in found[0].what
        assert unmet(topology, "nvl72").endswith(f"IMEX channel {state}")


@pytest.mark.parametrize("machine", [h100_box, h200_vm, pcie_box])
def test_e11_no_warning_where_imex_is_not_needed(machine):
    assert not [code for code in codes(machine()) if code.startswith("imex")]


def smi_script(folder: Path, body: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!{sys.executable}\n{body}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("import sys; print('NVIDIA-SMI has failed'); sys.exit(9)", "nvidia-smi exited with 9: NVIDIA-SMI has failed"),
        ("print('something else')", "nvidia-smi: not a GPU list: 'something else'"),
        ("import time; time.sleep(60)", "nvidia-smi gave no answer within 0.5 s"),
    ],
)
def test_e12_nvidia_smi_that_fails_is_a_named_reason(tmp_path, monkeypatch, body, reason):
    smi_script(tmp_path, body)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable) as caught:
        smi.read(0.5)
    assert str(caught.value) == reason


def test_e12_no_nvidia_smi_and_no_nvml_but_torch_sees_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="nvidia-smi is not on the PATH"):
        smi.read()
    seen = Reading((Gpu(uuid="11111111-0000-4000-8000-000000000000", ordinal=0, name="NVIDIA H200", found_by=("cuda",)),))
    sources = [
        Source("nvml", False, "nvidia-ml-py is not installed"),
        Source("cuda", True, "torch sees 1 GPU"),
        Source("nvidia-smi", False, "nvidia-smi is not on the PATH"),
    ]
    host = join(bare_host("slim"), {"cuda": seen}, sources, NOWHERE)
    assert reason_for_no_gpu(host) == ""
    assert [gpu.name for gpu in host.gpus] == ["NVIDIA H200"]
    assert [f.what for f in findings(Topology((host,))) if f.code == "source-failed"] == ["nvml: nvidia-ml-py is not installed"]


def test_every_fabric_form_is_tried_from_the_newest():
    fabric = FakeFabric(3, 0, CLUSTER, 4026, 0xAA, 1)
    for newest, tried in (("v4", 1), ("v3", 2), ("v2", 3), ("plain", 4)):
        library = FakeNvml(hgx_gpus(fabric)[:1], newest_fabric=newest)
        answer = nvml.read(library).gpus[0].fabric
        assert answer.query == newest
        assert (answer.cluster_uuid, answer.clique_id) == (CLUSTER, 4026)
        assert len(library.calls) == tried


def test_no_fabric_is_a_normal_answer():
    reading = nvml.read(FakeNvml([dataclasses.replace(hgx_gpus(FakeFabric())[0], fabric=None)]))
    assert judge(reading.gpus[0].fabric).kind == "not supported"
    with pytest.raises(Unavailable, match="NVML does not start: Not Supported"):
        nvml.read(FakeNvml([], init_error=NOT_SUPPORTED))


def test_hosts_without_anything_still_make_a_picture():
    topology = Topology((Host("empty"),))
    assert codes(topology) == ["no-gpu"]
    assert advise(topology, LAYER_SHAPES["toy"]).ep == 1
