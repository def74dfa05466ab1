"""A management library for tests: the functions of nvidia-ml-py that mok calls, answering from a description.

Structures are ctypes ones as in the real binding, so that the same `byref` calls work.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from uuid import UUID

NOT_SUPPORTED, FUNCTION_NOT_FOUND, LIBRARY_NOT_FOUND, NOT_FOUND, INVALID, INSUFFICIENT_RESOURCES = 3, 13, 12, 6, 2, 23
WORDS = {
    INVALID: "Invalid Argument",
    NOT_SUPPORTED: "Not Supported",
    NOT_FOUND: "Not Found",
    LIBRARY_NOT_FOUND: "NVML Shared Library Not Found",
    FUNCTION_NOT_FOUND: "Function Not Found",
    INSUFFICIENT_RESOURCES: "Insufficient Resources",
}
ZERO = "00000000-0000-0000-0000-000000000000"
SWITCH = "switch"


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        self.value = value
        super().__init__(WORDS.get(value, f"NVML Error with code {value}"))


@dataclass(frozen=True)
class FakeFabric:
    state: int = 3
    status: int = 0
    cluster: str = ZERO
    clique: int = 0
    health_mask: int = 0
    summary: int = 0


@dataclass(frozen=True)
class FakeGpu:
    """links: the other end of each link: SWITCH, the bus id of a GPU, or None for a link that is down."""

    uuid: str
    bus_id: str
    name: str
    memory_gib: int = 80
    capability: tuple[int, int] = (9, 0)
    links: tuple[str | None, ...] = ()
    link_version: int = 4
    pcie: tuple[int, int] = (5, 16)
    fabric: FakeFabric | None = None
    mig: tuple[tuple[str, str, int], ...] = ()


@dataclass
class FakeNvml:
    """ancestor and p2p by position; p2p[(i, j)][capability] = status, all "ok" where not given."""

    gpus: list[FakeGpu]
    ancestors: dict[tuple[int, int], int] = field(default_factory=dict)
    p2p: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    driver: str = "580.159.04"
    missing: frozenset[str] = frozenset()
    init_error: int | None = None
    newest_fabric: str = "v3"
    calls: list[str] = field(default_factory=list)

    NVMLError = NVMLError
    NVML_ERROR_FUNCTION_NOT_FOUND = FUNCTION_NOT_FOUND
    NVML_ERROR_NOT_SUPPORTED = NOT_SUPPORTED

    class c_nvmlGpuFabricInfo_t(ctypes.Structure):
        _fields_ = (
            ("clusterUuid", ctypes.c_uint8 * 16),
            ("status", ctypes.c_uint),
            ("cliqueId", ctypes.c_uint32),
            ("state", ctypes.c_uint),
        )

    class c_nvmlGpuFabricInfo_v2_t(ctypes.Structure):
        _fields_ = (
            ("version", ctypes.c_uint),
            ("clusterUuid", ctypes.c_uint8 * 16),
            ("status", ctypes.c_uint),
            ("cliqueId", ctypes.c_uint32),
            ("state", ctypes.c_uint),
            ("healthMask", ctypes.c_uint32),
        )

    class c_nvmlGpuFabricInfo_v3_t(ctypes.Structure):
        _fields_ = (
            ("version", ctypes.c_uint),
            ("clusterUuid", ctypes.c_uint8 * 16),
            ("status", ctypes.c_uint),
            ("cliqueId", ctypes.c_uint32),
            ("state", ctypes.c_uint),
            ("healthMask", ctypes.c_uint32),
            ("healthSummary", ctypes.c_uint8),
        )

    class c_nvmlGpuFabricInfo_v4_t(ctypes.Structure):
        class Clique(ctypes.Structure):
            _fields_ = (("type", ctypes.c_uint8), ("id", ctypes.c_uint32))

        _fields_ = (
            ("clusterUuid", ctypes.c_uint8 * 16),
            ("status", ctypes.c_uint),
            ("cliques", Clique * 64),
            ("numCliques", ctypes.c_uint32),
            ("state", ctypes.c_uint8),
            ("healthMask", ctypes.c_uint32),
            ("healthSummary", ctypes.c_uint8),
        )

    def __getattribute__(self, name: str):
        if name.startswith("nvml") and name in object.__getattribute__(self, "missing"):

            def absent(*_: object) -> None:
                raise NVMLError(FUNCTION_NOT_FOUND)

            return absent
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise NVMLError(self.init_error)

    def nvmlShutdown(self) -> None:
        pass

    def nvmlErrorString(self, code: int) -> str:
        return WORDS[code]

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.driver

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13000

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:
        return gpu.name

    def nvmlDeviceGetPciInfo(self, gpu: FakeGpu) -> SimpleNamespace:
        return SimpleNamespace(busId="0000" + gpu.bus_id.upper())

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> SimpleNamespace:
        return SimpleNamespace(total=gpu.memory_gib << 30)

    def nvmlDeviceGetCudaComputeCapability(self, gpu: FakeGpu) -> tuple[int, int]:
        return gpu.capability

    def nvmlDeviceGetMaxPcieLinkGeneration(self, gpu: FakeGpu) -> int:
        return gpu.pcie[0]

    def nvmlDeviceGetMaxPcieLinkWidth(self, gpu: FakeGpu) -> int:
        return gpu.pcie[1]

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:
        return [int(bool(gpu.mig)), int(bool(gpu.mig))]

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: FakeGpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, index: int) -> FakeGpu:
        if index >= len(gpu.mig):
            raise NVMLError(NOT_FOUND)
        uuid, name, memory_gib = gpu.mig[index]
        return replace(gpu, uuid=uuid, name=name, memory_gib=memory_gib)

    def _link(self, gpu: FakeGpu, link: int) -> str | None:
        if link >= len(gpu.links):
            raise NVMLError(INVALID)
        return gpu.links[link]

    def nvmlDeviceGetNvLinkState(self, gpu: FakeGpu, link: int) -> int:
        return int(self._link(gpu, link) is not None)

    def nvmlDeviceGetNvLinkVersion(self, gpu: FakeGpu, link: int) -> int:
        self._link(gpu, link)
        return gpu.link_version

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu: FakeGpu, link: int) -> int:
        return 2 if self._link(gpu, link) == SWITCH else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu: FakeGpu, link: int) -> SimpleNamespace:
        return SimpleNamespace(busId="0000" + str(self._link(gpu, link)).upper())

    def _positions(self, first: FakeGpu, second: FakeGpu) -> tuple[int, int]:
        return self.gpus.index(first), self.gpus.index(second)

    def nvmlDeviceGetTopologyCommonAncestor(self, first: FakeGpu, second: FakeGpu) -> int:
        i, j = self._positions(first, second)
        return self.ancestors.get((min(i, j), max(i, j)), 50)

    def nvmlDeviceGetP2PStatus(self, first: FakeGpu, second: FakeGpu, capability: int) -> int:
        return self.p2p.get(self._positions(first, second), {}).get(capability, 0)

    def _fill(self, form: str, gpu: FakeGpu, record: ctypes.Structure) -> None:
        self.calls.append(form)
        forms = ("plain", "v2", "v3", "v4")
        if forms.index(form) > forms.index(self.newest_fabric):
            raise NVMLError(FUNCTION_NOT_FOUND)
        if gpu.fabric is None:
            raise NVMLError(NOT_SUPPORTED)
        record.clusterUuid = (ctypes.c_uint8 * 16)(*UUID(gpu.fabric.cluster).bytes)
        record.status, record.state = gpu.fabric.status, gpu.fabric.state
        if form == "v4":
            # A clique for multicast first: only the one for plain pointers says who can share memory.
            record.cliques[0].type, record.cliques[0].id = 1, 7
            record.cliques[1].type, record.cliques[1].id = 0, gpu.fabric.clique
            record.numCliques = 2
        else:
            record.cliqueId = gpu.fabric.clique
        if form != "plain":
            record.healthMask = gpu.fabric.health_mask
        if form in ("v3", "v4"):
            record.healthSummary = gpu.fabric.summary

    def nvmlDeviceGetGpuFabricInfo(self, gpu: FakeGpu, reference) -> None:
        self._fill("plain", gpu, reference._obj)

    def nvmlDeviceGetGpuFabricInfoV(self, gpu: FakeGpu, reference) -> None:
        record = reference._obj
        self._fill("v3" if hasattr(record, "healthSummary") else "v2", gpu, record)

    def nvmlDeviceGetGpuFabricInfo_v4(self, gpu: FakeGpu, reference) -> None:
        self._fill("v4", gpu, reference._obj)
