"""NVML, NVIDIA's management library, through the nvidia-ml-py binding (import name `pynvml`).

Owns the calls and the translation of their numbers into `model` records. Every single answer may be missing: an old driver
lacks functions, a virtual machine refuses counters. Run as a module it prints its reading, see `sources.py`.
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

from mok.topology.fabric import STATES, SUMMARIES, driver_too_old
from mok.topology.model import Fabric, Gpu, MigDevice, Pair, Reading
from mok.topology.sources import Unavailable, answer, count_of
from mok.topology.sysfs import normalise_bus_id

__all__ = ["read"]

# GB/s of one link and direction, by NVLink version.
LINK_GB_PER_S = {1: 20.0, 2: 25.0, 3: 25.0, 4: 25.0, 5: 50.0}

# GB/s of one PCIe lane and direction after line coding, by generation.
PCIE_LANE_GB_PER_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}

ANCESTOR_LETTERS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}

P2P_WORDS = (
    "ok",
    "chipset not supported",
    "GPU not supported",
    "topology not supported",
    "disabled by driver setting",
    "not supported",
    "unknown",
)

# The binding defines its READ index as a tuple, so the numbers stand here.
P2P_READ, P2P_WRITE, P2P_NVLINK, P2P_ATOMICS = 0, 1, 2, 3

MAX_LINKS = 36
REMOTE_GPU, REMOTE_SWITCH = 0, 2


class Link(NamedTuple):
    """One NVLink; `remote` is the kind of its other end, `remote_bus_id` is set when that is a GPU."""

    up: bool
    version: int | None
    remote: int | None
    remote_bus_id: str


class Binding:
    """nvidia-ml-py with its errors turned into "no answer", except that `missing` remembers absent functions."""

    def __init__(self, pynvml: Any) -> None:
        self.pynvml = pynvml
        self.missing: set[str] = set()

    def ask(self, name: str, *arguments: Any, default: Any = None) -> Any:
        """Call the function `name`; `default` if the binding, the library or the device does not know it."""
        function: Callable[..., Any] | None = getattr(self.pynvml, name, None)
        if function is None:
            self.missing.add(name)
            return default
        try:
            return function(*arguments)
        except self.pynvml.NVMLError as error:
            if getattr(error, "value", None) == self.pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                self.missing.add(name)
            return default

    def words(self, code: int) -> str:
        """The library's own words for a return code."""
        text = "Success" if code == 0 else self.ask("nvmlErrorString", code, default=f"NVML error {code}")
        return text.decode() if isinstance(text, bytes) else str(text)


def read(pynvml: Any) -> Reading:
    """Everything NVML tells about the GPUs of this host, in NVML order. `Unavailable` if the library does not start."""
    binding = Binding(pynvml)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise Unavailable(f"NVML does not start: {error}") from None
    try:
        count = binding.ask("nvmlDeviceGetCount", default=0)
        handles = [(i, binding.ask("nvmlDeviceGetHandleByIndex", i)) for i in range(count)]
        lost = [i for i, handle in handles if handle is None]
        devices = [handle for _, handle in handles if handle is not None]
        links = [_links(binding, device) for device in devices]
        gpus = tuple(_gpu(binding, device, its_links) for device, its_links in zip(devices, links, strict=True))
        pairs = tuple(
            _pair(binding, devices, gpus, links, first, second)
            for first in range(len(devices))
            for second in range(len(devices))
            if first != second
        )
        driver = binding.ask("nvmlSystemGetDriverVersion", default="")
        detail = count_of(gpus) + (f"; no access to NVML index {', '.join(map(str, lost))}" if lost else "")
        return Reading(gpus, pairs, str(driver), _cuda_version(binding), detail)
    finally:
        binding.ask("nvmlShutdown")


def _cuda_version(binding: Binding) -> str:
    version = binding.ask("nvmlSystemGetCudaDriverVersion")
    return f"{version // 1000}.{version % 1000 // 10}" if version else ""


def _gpu(binding: Binding, device: Any, links: list[Link]) -> Gpu:
    pci = binding.ask("nvmlDeviceGetPciInfo", device)
    memory = binding.ask("nvmlDeviceGetMemoryInfo", device)
    capability = binding.ask("nvmlDeviceGetCudaComputeCapability", device)
    mig_mode = binding.ask("nvmlDeviceGetMigMode", device, default=(0, 0))
    versions = {link.version for link in links if link.version in LINK_GB_PER_S}
    lane = PCIE_LANE_GB_PER_S.get(binding.ask("nvmlDeviceGetMaxPcieLinkGeneration", device))
    width = binding.ask("nvmlDeviceGetMaxPcieLinkWidth", device)
    return Gpu(
        uuid=str(binding.ask("nvmlDeviceGetUUID", device, default="")),
        bus_id=normalise_bus_id(str(pci.busId)) if pci is not None else "",
        name=str(binding.ask("nvmlDeviceGetName", device, default="")),
        memory_bytes=int(memory.total) if memory is not None else None,
        compute_capability=".".join(map(str, capability)) if capability else "",
        links_up=sum(link.up for link in links) if links else None,
        links_total=len(links) or None,
        link_gb_per_s=LINK_GB_PER_S[max(versions)] if versions else None,
        pcie_gb_per_s=lane * width if lane and width else None,
        fabric=_fabric(binding, device),
        mig_enabled=mig_mode[0] == 1,
        mig_devices=_mig_devices(binding, device) if mig_mode[0] == 1 else (),
        found_by=("nvml",),
    )


def _links(binding: Binding, device: Any) -> list[Link]:
    """Each NVLink that the device has."""
    links = []
    for link in range(MAX_LINKS):
        state = binding.ask("nvmlDeviceGetNvLinkState", device, link)
        if state is None:
            continue
        version = binding.ask("nvmlDeviceGetNvLinkVersion", device, link)
        kind = binding.ask("nvmlDeviceGetNvLinkRemoteDeviceType", device, link) if state else None
        remote = binding.ask("nvmlDeviceGetNvLinkRemotePciInfo", device, link) if kind == REMOTE_GPU else None
        links.append(Link(state == 1, version, kind, normalise_bus_id(str(remote.busId)) if remote is not None else ""))
    return links


def _mig_devices(binding: Binding, device: Any) -> tuple[MigDevice, ...]:
    found = []
    for index in range(binding.ask("nvmlDeviceGetMaxMigDeviceCount", device, default=0)):
        instance = binding.ask("nvmlDeviceGetMigDeviceHandleByIndex", device, index)
        if instance is None:
            continue
        memory = binding.ask("nvmlDeviceGetMemoryInfo", instance)
        found.append(
            MigDevice(
                uuid=str(binding.ask("nvmlDeviceGetUUID", instance, default="")),
                name=str(binding.ask("nvmlDeviceGetName", instance, default="")),
                memory_bytes=int(memory.total) if memory is not None else None,
            )
        )
    return tuple(found)


def _pair(
    binding: Binding, devices: list[Any], gpus: tuple[Gpu, ...], links: list[list[Link]], first: int, second: int
) -> Pair:
    def status(index: int) -> str:
        code = binding.ask("nvmlDeviceGetP2PStatus", devices[first], devices[second], index)
        return "" if code is None else P2P_WORDS[code] if code < len(P2P_WORDS) else "unknown"

    nvlink = status(P2P_NVLINK)
    direct = sum(link.up and link.remote == REMOTE_GPU and link.remote_bus_id == gpus[second].bus_id for link in links[first])
    # Behind a switch the other end of every link is the switch: the pair shares as many links as the weaker GPU has up.
    switched = min(sum(link.up and link.remote == REMOTE_SWITCH for link in links[gpu]) for gpu in (first, second))
    if direct or (switched and nvlink in ("", "ok")):
        letters = f"NV{direct or switched}"
    elif nvlink == "ok":
        letters = "NV?"
    else:
        ancestor = binding.ask("nvmlDeviceGetTopologyCommonAncestor", devices[first], devices[second])
        letters = ANCESTOR_LETTERS.get(ancestor, "")
    return Pair(first, second, letters, status(P2P_READ), status(P2P_WRITE), nvlink, status(P2P_ATOMICS))


def _fabric(binding: Binding, device: Any) -> Fabric:
    """Ask in the newest form that binding and driver both know: v4, v3, v2, then the first one."""
    pynvml = binding.pynvml
    forms = (
        ("v4", "c_nvmlGpuFabricInfo_v4_t", "nvmlDeviceGetGpuFabricInfo_v4"),
        ("v3", "c_nvmlGpuFabricInfo_v3_t", "nvmlDeviceGetGpuFabricInfoV"),
        ("v2", "c_nvmlGpuFabricInfo_v2_t", "nvmlDeviceGetGpuFabricInfoV"),
        ("plain", "c_nvmlGpuFabricInfo_t", "nvmlDeviceGetGpuFabricInfo"),
    )
    reason = ""
    for query, record_name, function_name in forms:
        record_type, function = getattr(pynvml, record_name, None), getattr(pynvml, function_name, None)
        if record_type is None or function is None:
            continue
        record = record_type()
        try:
            function(device, ctypes.byref(record))
        except pynvml.NVMLError as error:
            if getattr(error, "value", None) == pynvml.NVML_ERROR_NOT_SUPPORTED:
                return Fabric(state="not supported", query=query)
            if getattr(error, "value", None) != pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                reason = str(error)
            continue
        return _fabric_of(binding, record, query)
    return Fabric(reason=reason) if reason else driver_too_old()


def _fabric_of(binding: Binding, record: Any, query: str) -> Fabric:
    state = int(record.state)
    completed = state == 3
    cluster = uuid.UUID(bytes=bytes(bytearray(record.clusterUuid)))
    if query == "v4":
        # mok shares memory by pointer between two GPUs: the clique of type 0, unicast pointer.
        cliques = [int(clique.id) for clique in list(record.cliques)[: int(record.numCliques)] if int(clique.type) == 0]
        clique_id = cliques[0] if cliques else None
    else:
        clique_id = int(record.cliqueId)
    summary = getattr(record, "healthSummary", None)
    mask = getattr(record, "healthMask", None)
    return Fabric(
        state=STATES[state] if state < len(STATES) else "unknown",
        status=binding.words(int(record.status)) if completed else "",
        cluster_uuid=str(cluster) if completed and cluster.int else "",
        clique_id=clique_id if completed else None,
        health_mask=int(mask) if mask is not None else None,
        summary=SUMMARIES[int(summary)] if summary is not None and int(summary) < len(SUMMARIES) else "",
        query=query,
        reason="" if state < len(STATES) else f"state {state}",
    )


def main() -> Reading:
    try:
        import pynvml
    except ImportError:
        raise Unavailable("nvidia-ml-py is not installed (pip install nvidia-ml-py)") from None
    return read(pynvml)


if __name__ == "__main__":
    answer(main)
