"""What the operating system tells without any driver library: CPUs, memory, NUMA, PCI distances, adapters, IMEX channels.

Owns the reading of /sys, /proc and /dev below a `root` that tests can replace. Never fails: what is not there is left out.
"""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Iterable
from pathlib import Path

from mok.topology.model import Gpu, Host, Nic, NumaNode, Pair, Source

__all__ = ["cpu_list", "cpu_set", "imex_state", "normalise_bus_id", "pci_letters", "read_host"]

WATCHED_PREFIXES = (
    "NCCL_",
    "NVSHMEM_",
    "TORCH_SYMM_MEM_",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "NVIDIA_VISIBLE_DEVICES",
)

IMEX_CHANNELS = "dev/nvidia-caps-imex-channels"


def normalise_bus_id(text: str) -> str:
    """A PCI address as sysfs writes it: "00000000:18:00.0" and "0000:18:00.0" are the same card; "" if it is none."""
    match = re.fullmatch(r"(?:([0-9a-f]+):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-7]))?", text.strip().lower())
    if match is None:
        return ""
    domain, bus, device, function = match.groups()
    return f"{int(domain or '0', 16):04x}:{bus}:{device}.{function or 0}"


def cpu_list(cpus: Iterable[int]) -> str:
    """CPU numbers in the kernel's list form: {0, 1, 2, 5} -> "0-2,5"."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def cpu_set(text: str) -> set[int]:
    """The inverse of `cpu_list`."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def pci_letters(first: str, second: str, same_node: bool | None) -> str:
    """Distance of two devices from their sysfs paths ("pci0000:00/0000:00:01.0/..."), in the letters of `nvidia-smi topo`.

    PIX: one bridge or switch apart. PXB: several, below one host bridge. PHB: through the host bridge. NODE: through several
    host bridges of one NUMA node. SYS: across NUMA nodes. "" if a path is unknown.
    """
    if not first or not second:
        return ""
    a, b = first.split("/"), second.split("/")
    if a[0] != b[0]:
        return "SYS" if same_node is False else "NODE"
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    if common == 1:
        return "PHB"
    # A switch is an upstream port and one downstream port per device: two steps below the shared bridge.
    return "PIX" if max(len(a), len(b)) - common <= 2 else "PXB"


def imex_state(root: Path) -> str:
    """ready, missing or unreadable: the device file that opens memory of other hosts over NVLink."""
    folder = root / IMEX_CHANNELS
    try:
        channels = sorted(folder.iterdir())
    except PermissionError:
        return "unreadable"
    except OSError:
        return "missing"
    if not channels:
        return "missing"
    return "ready" if any(os.access(channel, os.R_OK | os.W_OK) for channel in channels) else "unreadable"


def read_host(root: Path = Path("/")) -> Host:
    """The host without its GPUs; `gpu_facts` and `nic_facts` add what the bus tells about those."""
    nodes = tuple(_numa_nodes(root))
    available = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    version = re.search(r"Kernel Module(?: for \S+)?\s+([\d.]+)", _text(root / "proc/driver/nvidia/version"))
    return Host(
        name=socket.gethostname(),
        boot_id=_text(root / "proc/sys/kernel/random/boot_id"),
        num_cpus=os.cpu_count(),
        cpu_model=_cpu_model(root),
        memory_bytes=_memory_bytes(_text(root / "proc/meminfo"), "MemTotal"),
        cpus=cpu_list(available),
        numa_nodes=nodes,
        imex=imex_state(root),
        driver=version.group(1) if version else "",
        environment={name: value for name, value in sorted(os.environ.items()) if name.startswith(WATCHED_PREFIXES)},
        sources=(
            Source(
                "sysfs",
                bool(nodes),
                f"{len(nodes)} NUMA node{'s' if len(nodes) > 1 else ''}" if nodes else "no NUMA nodes under /sys",
            ),
        ),
    )


def gpu_facts(gpu: Gpu, root: Path = Path("/")) -> tuple[int | None, str]:
    """NUMA node (None if the machine hides it) and local CPUs of a GPU, from its PCI device."""
    device = root / "sys/bus/pci/devices" / gpu.bus_id
    return _numa_node(device), _text(device / "local_cpulist") if gpu.bus_id else ""


def pci_pairs(gpus: tuple[Gpu, ...], root: Path = Path("/")) -> tuple[Pair, ...]:
    """Distances between GPUs as the PCI tree has them, for machines whose driver does not tell."""
    paths = [_pci_path(root, gpu.bus_id) for gpu in gpus]
    return tuple(
        Pair(i, j, pci_letters(paths[i], paths[j], _same_node(gpus[i].numa_node, gpus[j].numa_node)))
        for i in range(len(gpus))
        for j in range(len(gpus))
        if i != j
    )


def nic_facts(gpus: tuple[Gpu, ...], root: Path = Path("/")) -> tuple[Nic, ...]:
    """RDMA adapters, and how far each is from each GPU."""
    nics = []
    for entry in sorted(_children(root / "sys/class/infiniband")):
        device = (entry / "device").resolve()
        bus_id, node = normalise_bus_id(device.name), _numa_node(device)
        path = _pci_path(root, bus_id)
        links = tuple(pci_letters(path, _pci_path(root, gpu.bus_id), _same_node(node, gpu.numa_node)) for gpu in gpus)
        nics.append(Nic(entry.name, bus_id, node, links))
    return tuple(nics)


def _same_node(first: int | None, second: int | None) -> bool | None:
    return None if first is None or second is None else first == second


def _pci_path(root: Path, bus_id: str) -> str:
    device = root / "sys/bus/pci/devices" / bus_id
    if not bus_id or not device.exists():
        return ""
    parts = device.resolve().parts
    start = next((i for i, part in enumerate(parts) if re.fullmatch(r"pci[0-9a-f]+:[0-9a-f]{2}", part)), None)
    return "/".join(parts[start:]) if start is not None else ""


def _numa_nodes(root: Path) -> Iterable[NumaNode]:
    folder = root / "sys/devices/system/node"
    numbers = sorted(int(entry.name[4:]) for entry in _children(folder) if re.fullmatch(r"node\d+", entry.name))
    for number in numbers:
        node = folder / f"node{number}"
        yield NumaNode(number, _text(node / "cpulist"), _memory_bytes(_text(node / "meminfo"), "MemTotal"))


def _numa_node(device: Path) -> int | None:
    text = _text(device / "numa_node")
    return int(text) if text and int(text) >= 0 else None


def _cpu_model(root: Path) -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", _text(root / "proc/cpuinfo"), re.MULTILINE)
    return match.group(1) if match else platform.processor() or platform.machine()


def _memory_bytes(text: str, key: str) -> int | None:
    match = re.search(rf"{key}:\s+(\d+) kB", text)
    return int(match.group(1)) * 1024 if match else None


def _children(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
