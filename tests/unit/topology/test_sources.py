"""The readers one by one: sysfs on a made-up tree, CUDA through a made-up torch, NVML through the real binding."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mok.topology import cuda, sysfs
from mok.topology.model import Gpu, Source
from mok.topology.sources import Unavailable, ask

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("text", "cpus"), [("", set()), ("0", {0}), ("0-2,5", {0, 1, 2, 5}), ("0-1,4-5,9", {0, 1, 4, 5, 9}), ("7,8", {7, 8})]
)
def test_cpu_lists(text, cpus):
    assert sysfs.cpu_set(text) == cpus
    assert sysfs.cpu_set(sysfs.cpu_list(cpus)) == cpus
    assert sysfs.cpu_list({0, 1, 2, 5}) == "0-2,5"


@pytest.mark.parametrize(
    ("text", "bus_id"),
    [
        ("00000000:18:00.0", "0000:18:00.0"),
        ("0000:AB:00.0", "0000:ab:00.0"),
        ("00000009:01:00.0", "0009:01:00.0"),
        ("18:00.0", "0000:18:00.0"),
        ("N/A", ""),
    ],
)
def test_bus_ids(text, bus_id):
    assert sysfs.normalise_bus_id(text) == bus_id


SWITCH = "pci0000:10/0000:10:01.0/0000:11:00.0"
PATHS = {
    "gpu": f"{SWITCH}/0000:12:00.0/0000:18:00.0",
    "same switch": f"{SWITCH}/0000:12:01.0/0000:19:00.0",
    "second switch": f"{SWITCH}/0000:12:02.0/0000:1a:00.0/0000:1b:00.0/0000:1c:00.0",
    "other port": "pci0000:10/0000:10:02.0/0000:1d:00.0",
    "other bridge": "pci0000:20/0000:20:01.0/0000:21:00.0",
    "bare": "pci0000:00/0000:00:06.0",
}


@pytest.mark.parametrize(
    ("other", "same_node", "letters"),
    [
        ("same switch", True, "PIX"),
        ("second switch", True, "PXB"),
        ("other port", True, "PHB"),
        ("other bridge", True, "NODE"),
        ("other bridge", False, "SYS"),
        ("bare", None, "NODE"),
    ],
)
def test_pci_letters(other, same_node, letters):
    assert sysfs.pci_letters(PATHS["gpu"], PATHS[other], same_node) == letters
    assert sysfs.pci_letters(PATHS[other], PATHS["gpu"], same_node) == letters
    assert sysfs.pci_letters("", PATHS["gpu"], same_node) == ""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two NUMA nodes, two GPUs (one hides its node, as virtual machines do), an RDMA adapter beside the first."""
    devices = {"0000:18:00.0": ("gpu", 0), "0000:21:00.0": ("other bridge", -1), "0000:19:00.0": ("same switch", 0)}
    bus = tmp_path / "sys/bus/pci/devices"
    bus.mkdir(parents=True)
    for bus_id, (path, node) in devices.items():
        folder = tmp_path / "sys/devices" / PATHS[path]
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
        (folder / "local_cpulist").write_text("0-3\n" if node == 0 else "0-7\n")
        (bus / bus_id).symlink_to(folder)
    adapter = tmp_path / "sys/class/infiniband/mlx5_0"
    adapter.mkdir(parents=True)
    (adapter / "device").symlink_to(bus / "0000:19:00.0")
    for node, cpus in ((0, "0-3"), (1, "4-7")):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
        (folder / "meminfo").write_text(f"Node {node} MemTotal:       {1 << 20} kB\nNode {node} MemFree: 5 kB\n")
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"
    (tmp_path / "proc/driver/nvidia/version").write_text(version)
    (tmp_path / "proc/meminfo").write_text("MemTotal:       2097152 kB\n")
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nmodel name\t: Made-up CPU\n")
    return tmp_path


def test_host_from_sysfs(tree, monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("HOME_ADDRESS", "secret")
    host = sysfs.read_host(tree)
    assert [(node.node, node.cpus, node.memory_bytes) for node in host.numa_nodes] == [(0, "0-3", 1 << 30), (1, "4-7", 1 << 30)]
    assert (host.cpu_model, host.memory_bytes, host.driver) == ("Made-up CPU", 2 << 30, "580.159.04")
    assert host.environment["NCCL_P2P_DISABLE"] == "1"
    assert "HOME_ADDRESS" not in host.environment


def test_devices_from_sysfs(tree):
    gpus = (Gpu("GPU-a", "0000:18:00.0", numa_node=0), Gpu("GPU-b", "0000:21:00.0"), Gpu("GPU-c"))
    assert [sysfs.gpu_facts(gpu, tree) for gpu in gpus] == [(0, "0-3"), (None, "0-7"), (None, "")]
    (nic,) = sysfs.nic_facts(gpus, tree)
    assert (nic.name, nic.bus_id, nic.numa_node, nic.links) == ("mlx5_0", "0000:19:00.0", 0, ("PIX", "NODE", ""))
    assert {(pair.first, pair.second): pair.link for pair in sysfs.pci_pairs(gpus[:2], tree)} == {
        (0, 1): "NODE",
        (1, 0): "NODE",
    }


def test_empty_tree_is_no_error(tmp_path):
    host = sysfs.read_host(tmp_path)
    assert (host.numa_nodes, host.imex, host.driver) == ((), "missing", "")
    assert host.sources == (Source("sysfs", False, "no NUMA nodes under /sys"),)


def made_up_torch(count=2, cuda_version="13.0", error=None):
    def properties(ordinal):
        return SimpleNamespace(
            name="NVIDIA H200",
            total_memory=1 << 37,
            major=9,
            minor=0,
            uuid=f"u{ordinal}",
            pci_domain_id=0,
            pci_bus_id=24,
            pci_device_id=6,
        )

    def device_count():
        if error:
            raise error
        return count

    access = SimpleNamespace(
        device_count=device_count, get_device_properties=properties, can_device_access_peer=lambda i, j: i < j
    )
    return SimpleNamespace(__version__="2.13.0", version=SimpleNamespace(cuda=cuda_version), cuda=access)


def test_cuda_through_torch():
    reading = cuda.read(made_up_torch())
    assert [(gpu.ordinal, gpu.uuid, gpu.bus_id) for gpu in reading.gpus] == [
        (0, "u0", "0000:18:06.0"),
        (1, "u1", "0000:18:06.0"),
    ]
    assert [(pair.first, pair.second, pair.peer_access) for pair in reading.pairs] == [(0, 1, True), (1, 0, False)]
    assert reading.detail == "torch 2.13.0 sees 2 GPUs"
    assert cuda.read(made_up_torch(0)).gpus == ()


@pytest.mark.parametrize(
    ("torch", "reason"),
    [
        (made_up_torch(cuda_version=None), "torch 2.13.0 is built without CUDA"),
        (made_up_torch(error=RuntimeError("CUDA driver version is insufficient\nmore")), "CUDA driver version is insufficient"),
    ],
)
def test_cuda_that_cannot_be_used(torch, reason):
    with pytest.raises(Unavailable) as caught:
        cuda.read(torch)
    assert reason in str(caught.value)
    assert "more" not in str(caught.value)


def test_a_source_that_hangs_is_given_up(tmp_path, monkeypatch):
    (tmp_path / "pynvml.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    start = time.monotonic()
    assert ask("nvml", "mok.topology.nvml", 1.0).result() == (None, Source("nvml", False, "no answer within 1 s"))
    assert time.monotonic() - start < 10


def test_words_printed_by_a_library_do_no_harm(tmp_path, monkeypatch):
    (tmp_path / "pynvml.py").write_text("print('hello from a library')\nraise ImportError\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    reason = ask("nvml", "mok.topology.nvml", 20.0).result()[1].detail
    assert reason == "nvidia-ml-py is not installed (pip install nvidia-ml-py)"


def test_the_whole_command_on_a_made_up_library(mok, tmp_path):
    """NVML answers, CUDA does not: GPUs are shown, ordinals are assumed, and no requirement holds."""
    (tmp_path / "pynvml.py").write_text(
        "from tests.unit.topology.fake_nvml import FakeFabric, FakeNvml\n"
        "from tests.unit.topology.machines import halves, hgx_gpus\n"
        "library = FakeNvml(hgx_gpus(FakeFabric(3, 0)), halves(8, 40))\n"
        "def __getattr__(name): return getattr(library, name)\n"
    )
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "CUDA_VISIBLE_DEVICES": "3,1"}
    done = mok("probe-topology", "--json", "--require", "p2p", env=environment)
    assert done.returncode == 3
    assert "CUDA cannot be used" in done.stderr
    report = json.loads(done.stdout)
    assert [(gpu["label"], gpu["bus_id"]) for gpu in report["gpus"]][:3] == [
        ("GPU 0", "0000:5d:00.0"),
        ("GPU 1", "0000:2a:00.0"),
        ("hidden GPU 0000:18:00.0", "0000:18:00.0"),
    ]
    assert "cuda-failed" in {finding["code"] for finding in report["findings"]}


OLD_LIBRARY = """
/* A management library of the 535 generation: two GPUs with two NVLinks each, no fabric query, no remote device type. */
#include <string.h>
typedef struct { char busIdLegacy[16]; unsigned domain, bus, device, pciDeviceId, pciSubSystemId; char busId[32]; } pci;
static int devices[2];
static int at(void *d) { return (int *)d - devices; }
int nvmlInitWithFlags(unsigned f) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d) { *d = &devices[i]; return 0; }
int nvmlDeviceGetUUID(void *d, char *s, unsigned n) { strcpy(s, at(d) ? "GPU-b" : "GPU-a"); return 0; }
int nvmlDeviceGetName(void *d, char *s, unsigned n) { strcpy(s, "NVIDIA A100-SXM4-80GB"); return 0; }
int nvmlDeviceGetPciInfo_v3(void *d, pci *p) { strcpy(p->busId, at(d) ? "00000000:2A:00.0" : "00000000:18:00.0"); return 0; }
int nvmlSystemGetDriverVersion(char *s, unsigned n) { strcpy(s, "535.183.01"); return 0; }
int nvmlDeviceGetNvLinkState(void *d, unsigned l, unsigned *up) { *up = l == 0; return l < 2 ? 0 : 2; }
int nvmlDeviceGetNvLinkVersion(void *d, unsigned l, unsigned *v) { *v = 3; return 0; }
int nvmlDeviceGetCudaComputeCapability(void *d, int *major, int *minor) { *major = 8; *minor = 0; return 0; }
int nvmlDeviceGetP2PStatus(void *a, void *b, int what, int *status) { *status = what == 3 ? 5 : 0; return 0; }
const char *nvmlErrorString(int code) { return code == 2 ? "Invalid Argument" : "Other"; }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build a stub library with")
def test_e02_real_binding_on_an_old_library(tmp_path, monkeypatch):
    pytest.importorskip("pynvml")
    (tmp_path / "stub.c").write_text(OLD_LIBRARY)
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-w", "-shared", "-fPIC", "-o", library, tmp_path / "stub.c"], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    reading, source = ask("nvml", "mok.topology.nvml", 20.0).result()
    assert source == Source("nvml", True, "2 GPUs")
    assert reading.driver == "535.183.01"
    assert [(gpu.uuid, gpu.bus_id, gpu.compute_capability) for gpu in reading.gpus] == [
        ("GPU-a", "0000:18:00.0", "8.0"),
        ("GPU-b", "0000:2a:00.0", "8.0"),
    ]
    assert (reading.gpus[0].links_up, reading.gpus[0].links_total, reading.gpus[0].link_gb_per_s) == (1, 2, 25.0)
    assert reading.gpus[0].fabric.reason == "driver too old (needs 550)"
    pair = reading.pairs[0]
    assert (pair.link, pair.read, pair.write, pair.nvlink, pair.atomics) == ("NV?", "ok", "ok", "ok", "not supported")
