"""Made-up machines, and the snapshots under tests/fixtures/topology that are written from them.

`python -m tests.unit.topology.machines` writes the snapshots again, and for every snapshot there (captured ones too) the
golden text of `mok probe-topology --from FILE --shape kimi-k2.7 --ep auto`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Callable, Iterable
from pathlib import Path

from mok.errors import CheckFailed
from mok.topology import nvml
from mok.topology.model import Gpu, Host, Nic, NumaNode, Reading, Source, Topology
from mok.topology.probe import join
from mok.topology.ranks import Report, merge
from mok.topology.snapshot import save
from mok.topology.sources import Unavailable, count_of
from tests.unit.topology.fake_nvml import (
    INSUFFICIENT_RESOURCES,
    LIBRARY_NOT_FOUND,
    SWITCH,
    FakeFabric,
    FakeGpu,
    FakeNvml,
)
from tests.unit.topology.made_up_gpus import MadeUpGpus, result

FIXTURES = Path(__file__).parent.parent.parent / "fixtures" / "topology"

NOWHERE = Path("/nonexistent")

CLUSTER = "9c6f5af3-53bf-49b5-a436-b66766c413c3"

HEALTHY_MASK = 0xAA  # no degraded bandwidth, no recovery, no unhealthy route, no timeout


def uuid(host: int, gpu: int) -> str:
    return f"GPU-{host:08x}-0000-4000-8000-{gpu:012x}"


def bare_host(name: str, number: int = 0, **changes: object) -> Host:
    """A host with two NUMA nodes of 52 CPUs and no GPU yet."""
    nodes = (NumaNode(0, "0-51", 512 << 30), NumaNode(1, "52-103", 512 << 30))
    host = Host(
        name=name,
        boot_id=f"{number:08d}-made-up",
        num_cpus=104,
        cpu_model="Made-up CPU",
        memory_bytes=1024 << 30,
        cpus="0-103",
        numa_nodes=nodes,
    )
    host = dataclasses.replace(host, **changes)
    count = len(host.numa_nodes)
    return dataclasses.replace(host, sources=(Source("sysfs", True, f"{count} NUMA node{'s' * (count > 1)}"),))


def cuda_view(gpus: Iterable[Gpu]) -> Reading:
    """What CUDA shows when nothing is hidden: ordinals in the order given."""
    seen = tuple(
        Gpu(uuid=gpu.uuid.removeprefix("GPU-"), bus_id=gpu.bus_id, ordinal=i, found_by=("cuda",)) for i, gpu in enumerate(gpus)
    )
    return Reading(seen, detail=f"torch 2.13.0 sees {count_of(seen)}")


def probed(host: Host, library: FakeNvml, cuda: Reading | None = None) -> Host:
    """`host` with the GPUs of a fake library, as `probe_host` would join them; half of them local to each NUMA node."""
    reading = nvml.read(library)
    sources = [Source("nvml", True, reading.detail)]
    view = cuda if cuda is not None else cuda_view(reading.gpus)
    sources += [Source("cuda", True, view.detail), Source("nvidia-smi", True, "not asked: nvml answered")]
    joined = join(host, {"nvml": reading, "cuda": view}, sources, NOWHERE)
    half = max(1, len(joined.gpus) // max(1, len(host.numa_nodes)))
    gpus = []
    for i, gpu in enumerate(joined.gpus):
        node = host.numa_nodes[min(i // half, len(host.numa_nodes) - 1)] if host.numa_nodes else None
        gpus.append(dataclasses.replace(gpu, numa_node=node.node if node else None, cpus=node.cpus if node else ""))
    return dataclasses.replace(joined, gpus=tuple(gpus))


def hgx_gpus(fabric: FakeFabric, name: str = "NVIDIA H100 80GB HBM3", down: dict[int, int] | None = None) -> list[FakeGpu]:
    """Eight GPUs behind NVSwitches with 18 links each; down: GPU -> links that are down."""
    buses = ("18", "2a", "3a", "5d", "9a", "ab", "ba", "db")
    return [
        FakeGpu(
            uuid(0, i),
            f"0000:{bus}:00.0",
            name,
            links=tuple(None if link < (down or {}).get(i, 0) else SWITCH for link in range(18)),
            fabric=fabric,
        )
        for i, bus in enumerate(buses)
    ]


def halves(count: int, within: int) -> dict[tuple[int, int], int]:
    """Common ancestors of a two-socket box: `within` inside a half, SYS across."""
    return {(i, j): within if i // (count // 2) == j // (count // 2) else 50 for i in range(count) for j in range(i + 1, count)}


def h100_box(down: dict[int, int] | None = None) -> Topology:
    gpus = hgx_gpus(FakeFabric(state=3, status=0), down=down)
    host = probed(bare_host("h100"), FakeNvml(gpus, halves(8, 40)))
    nics = tuple(
        Nic(
            f"mlx5_{i}",
            f"0000:{20 + i:02x}:00.0",
            i // 4,
            tuple("PXB" if g == i else "NODE" if g // 4 == i // 4 else "SYS" for g in range(8)),
        )
        for i in range(8)
    )
    return Topology((dataclasses.replace(host, nics=nics),), origin="made up", note="8 x H100 SXM behind NVSwitch")


def h200_vm() -> Topology:
    """As such a machine answered: NVLink counters are not supported, fabric state and status are 0, one NUMA node."""
    gpu = FakeGpu(uuid(1, 0), "0000:00:06.0", "NVIDIA H200", memory_gib=140, fabric=FakeFabric(state=0, status=0))
    host = bare_host(
        "h200-vm", 1, numa_nodes=(NumaNode(0, "0-15", 128 << 30),), num_cpus=16, memory_bytes=128 << 30, cpus="0-15"
    )
    return Topology(
        (probed(host, FakeNvml([gpu])),), origin="made up", note="1 x H200 in a virtual machine, no NVLink counters"
    )


def pcie_box() -> Topology:
    gpus = [
        FakeGpu(uuid(2, i), f"0000:{bus}:00.0", "NVIDIA L40S", memory_gib=45, capability=(8, 9), pcie=(4, 16))
        for i, bus in enumerate(("01", "21", "81", "a1"))
    ]
    off = {(i, j): {0: 3, 1: 3, 2: 5, 3: 5} for i in range(4) for j in range(4) if i // 2 != j // 2}
    close = {(i, j): {2: 5, 3: 5} for i in range(4) for j in range(4) if i != j and i // 2 == j // 2}
    host = probed(bare_host("pcie", 2), FakeNvml(gpus, halves(4, 30), {**off, **close}))
    return Topology((host,), origin="made up", note="4 x L40S on PCIe, peer access within a socket only")


def rack(
    hosts: int = 18,
    per_host: int = 4,
    *,
    prefix: str = "gb200",
    name: str = "NVIDIA GB200",
    capability: tuple[int, int] = (10, 0),
    imex: str = "ready",
    clique_of: Callable[[int], int] = lambda host: 4026,
    unhealthy: tuple[int, int] | None = None,
    environment: dict[str, str] | None = None,
) -> list[Host]:
    """Hosts of one NVL72-like rack, all in one cluster."""
    made = []
    for number in range(hosts):
        gpus = []
        for i in range(per_host):
            fabric = FakeFabric(3, 0, CLUSTER, clique_of(number), HEALTHY_MASK, 1)
            if unhealthy == (number, i):
                fabric = FakeFabric(3, INSUFFICIENT_RESOURCES)
            gpus.append(
                FakeGpu(
                    uuid(100 + number, i),
                    f"{(8, 9, 18, 19)[i % 4]:04x}:{1 + i // 4:02x}:00.0",
                    name,
                    memory_gib=186,
                    capability=capability,
                    links=(SWITCH,) * 18,
                    link_version=5,
                    fabric=fabric,
                )
            )
        host = bare_host(f"{prefix}-{number:02d}", 100 + number, imex=imex, environment=environment or {})
        made.append(probed(host, FakeNvml(gpus, halves(per_host, 40) if per_host > 1 else {})))
    return made


def launched(hosts: list[Host], origin: str = "made up", note: str = "") -> Topology:
    """One rank a GPU, host after host."""
    reports = []
    for host in hosts:
        for local in range(max(1, len(host.gpus))):
            reports.append(Report(len(reports), local, host))
    return dataclasses.replace(merge(reports), origin=origin, captured_at="", note=note)


def old_driver() -> Topology:
    missing = frozenset({"nvmlDeviceGetGpuFabricInfo", "nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetGpuFabricInfo_v4"})
    gpus = hgx_gpus(FakeFabric(), name="NVIDIA A100-SXM4-80GB")
    gpus = [dataclasses.replace(gpu, capability=(8, 0), links=(SWITCH,) * 12, link_version=3, pcie=(4, 16)) for gpu in gpus]
    library = FakeNvml(gpus, halves(8, 40), driver="535.183.01", missing=missing)
    return Topology((probed(bare_host("a100"), library),), origin="made up", note="8 x A100, driver without the fabric query")


def no_library() -> Topology:
    try:
        nvml.read(FakeNvml([], init_error=LIBRARY_NOT_FOUND))
        raise AssertionError("the fake library must not start")
    except Unavailable as reason:
        sources = [
            Source("nvml", False, str(reason)),
            Source("cuda", False, "no NVIDIA driver: libcuda.so.1 is not on this machine"),
            Source("nvidia-smi", False, "nvidia-smi is not on the PATH"),
        ]
    return Topology((join(bare_host("cpu", 4), {}, sources, NOWHERE),), origin="made up", note="no GPU, no management library")


def mig_box() -> Topology:
    name = "NVIDIA H100 80GB HBM3 MIG 3g.40gb"
    parts = tuple((f"MIG-{letter * 8}-0000-4000-8000-000000000000", name, 40) for letter in "ab")
    gpus = hgx_gpus(FakeFabric())[:2]
    gpus[0] = dataclasses.replace(gpus[0], mig=parts)
    seen = Reading(
        (Gpu(uuid=parts[1][0], bus_id=gpus[0].bus_id, ordinal=0, name=parts[1][1], found_by=("cuda",)),),
        detail="torch 2.13.0 sees 1 GPU",
    )
    host = bare_host("mig", 5, environment={"CUDA_VISIBLE_DEVICES": parts[1][0]})
    return Topology((probed(host, FakeNvml(gpus, {(0, 1): 40}), seen),), origin="made up", note="2 x H100, one split by MIG")


MACHINES: dict[str, Callable[[], Topology]] = {
    "h100-8": h100_box,
    "h100-8-links-down": lambda: dataclasses.replace(h100_box({3: 2}), note="8 x H100, GPU 3 with 2 of 18 links down"),
    "h100-8-measured": lambda: dataclasses.replace(
        h100_box(), measurement=result(MadeUpGpus(slow={(3, 6): 210.0})), note="8 x H100, measured, one slow pair"
    ),
    "h100-8-lost-writes": lambda: dataclasses.replace(
        h100_box(), measurement=result(MadeUpGpus(broken={(0, 1)})), note="8 x H100, writes from GPU 0 to GPU 1 are lost"
    ),
    "h200-vm": h200_vm,
    "pcie-4": pcie_box,
    "gb200-nvl72": lambda: launched(rack(), note="GB200 NVL72: 18 hosts x 4, one clique"),
    "gb300-two-cliques": lambda: launched(
        rack(prefix="gb300", name="NVIDIA GB300", capability=(10, 3), clique_of=lambda host: 1 + host // 9),
        note="GB300 rack in two cliques of 36",
    ),
    "gb200-one-unhealthy": lambda: launched(
        rack(unhealthy=(7, 1)), note="GB200 NVL72 with one GPU that did not join the fabric"
    ),
    "gb200-no-imex": lambda: launched(rack(2, imex="missing"), note="two hosts of a GB200 rack without IMEX channels"),
    "old-driver": old_driver,
    "no-library": no_library,
    "mig": mig_box,
}


def golden_text(path: Path) -> str:
    """What `mok probe-topology --from PATH --shape kimi-k2.7 --ep auto` prints."""
    from mok_cli.probe_topology import probe_topology

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        try:
            probe_topology.main(["--from", str(path), "--shape", "kimi-k2.7", "--ep", "auto"], standalone_mode=False)
        except CheckFailed as error:
            print(f"Error: {error}")
    return "".join(line.rstrip() + "\n" for line in output.getvalue().splitlines())


def write() -> None:
    for name, machine in MACHINES.items():
        save(machine(), FIXTURES / f"{name}.json")
    for path in sorted(FIXTURES.glob("*.json")):
        path.with_suffix(".advice.txt").write_text(golden_text(path), encoding="utf-8")


if __name__ == "__main__":
    write()
