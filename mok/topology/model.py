"""What a machine looks like to mok: hosts, GPUs, the links between them, the ranks that run on them.

Owns plain frozen records and their JSON form; every reader (NVML, CUDA, nvidia-smi, sysfs) answers in them, with None or ""
for what it cannot know. Must not know how anything is read, judged or printed. Read next: `fabric.py`, then `probe.py`.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, NamedTuple, TypeVar

from mok.topology.measurement import Measurement

__all__ = [
    "SCHEMA_VERSION",
    "Fabric",
    "Gpu",
    "Host",
    "MigDevice",
    "Nic",
    "NumaNode",
    "Pair",
    "Place",
    "Rank",
    "Reading",
    "Source",
    "Topology",
    "from_plain",
    "to_plain",
]

SCHEMA_VERSION = 1

Record = TypeVar("Record")


@dataclass(frozen=True)
class Source:
    """One place that was asked about the machine: `ok`, and what it is or why it had no answer."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class Fabric:
    """NVLink fabric registration of one GPU, as the driver words it; `mok.topology.fabric.judge` says what it means.

    state: unknown, not supported, not started, in progress, completed.
    status: the driver's words, read only when state is completed ("Success", "Insufficient Resources").
    cluster_uuid: "" where there is none; the driver writes that as all zeros.
    health_mask: bit fields, see `fabric.HEALTH_FIELDS`; None where the driver has none.
    query: which form of the query answered (v4, v3, v2, plain, nvidia-smi), "" if none did; `reason` then says why.
    """

    state: str = "unknown"
    status: str = ""
    cluster_uuid: str = ""
    clique_id: int | None = None
    health_mask: int | None = None
    summary: str = ""
    query: str = ""
    reason: str = ""


@dataclass(frozen=True)
class MigDevice:
    """One MIG instance; `ordinal` is its CUDA ordinal if this process sees it."""

    uuid: str
    name: str = ""
    memory_bytes: int | None = None
    ordinal: int | None = None


@dataclass(frozen=True)
class Gpu:
    """One GPU. `ordinal` is its CUDA ordinal, None when CUDA of this process does not see it (or sees MIG instances of it).

    bus_id: PCI address as in sysfs, "0000:18:00.0".
    links_up, links_total: NVLinks; None where the driver does not tell (virtual machines).
    link_gb_per_s: one NVLink, one direction, nominal. pcie_gb_per_s: the PCIe link, one direction, nominal.
    found_by: names of the sources that know this GPU.
    """

    uuid: str
    bus_id: str = ""
    ordinal: int | None = None
    name: str = ""
    memory_bytes: int | None = None
    compute_capability: str = ""
    numa_node: int | None = None
    cpus: str = ""
    links_up: int | None = None
    links_total: int | None = None
    link_gb_per_s: float | None = None
    pcie_gb_per_s: float | None = None
    fabric: Fabric = field(default_factory=Fabric)
    mig_enabled: bool = False
    mig_devices: tuple[MigDevice, ...] = ()
    found_by: tuple[str, ...] = ()

    @property
    def visible(self) -> bool:
        """CUDA of the probing process sees this GPU, whole or as a MIG instance."""
        return self.ordinal is not None or any(device.ordinal is not None for device in self.mig_devices)

    @property
    def label(self) -> str:
        """How people call it: "GPU 3", or "hidden GPU 0000:18:00.0"."""
        ordinals = (
            [self.ordinal] if self.ordinal is not None else [m.ordinal for m in self.mig_devices if m.ordinal is not None]
        )
        return f"GPU {ordinals[0]}" if ordinals else f"hidden GPU {self.bus_id or self.uuid}"

    @property
    def nvlink_gb_per_s(self) -> float | None:
        """Nominal NVLink bandwidth of the links that are up, one direction."""
        return None if self.links_up is None or self.link_gb_per_s is None else self.links_up * self.link_gb_per_s


@dataclass(frozen=True)
class Pair:
    """What the driver says of one ordered pair of GPUs, by position in the list they belong to.

    link: NV18, NV? (NVLink, count unknown), PIX, PXB, PHB, NODE, SYS, or "" if nobody knows.
    read, write, nvlink, atomics: "ok", or the driver's reason; "" if nobody knows. Capability, not proof.
    peer_access: CUDA's own answer to the same question.
    """

    first: int
    second: int
    link: str = ""
    read: str = ""
    write: str = ""
    nvlink: str = ""
    atomics: str = ""
    peer_access: bool | None = None

    @property
    def capable(self) -> bool | None:
        """The first GPU can read and write memory of the second, says the driver; None if nobody knows."""
        if self.peer_access is False or any(word not in ("", "ok") for word in (self.read, self.write)):
            return False
        return True if self.peer_access or (self.read and self.write) else None

    @property
    def nvlinked(self) -> bool:
        return self.nvlink == "ok" or (not self.nvlink and self.link.startswith("NV"))


@dataclass(frozen=True)
class Nic:
    """One network adapter; `links` holds its distance to each GPU of the host, in the order of `Host.gpus`."""

    name: str
    bus_id: str = ""
    numa_node: int | None = None
    links: tuple[str, ...] = ()


@dataclass(frozen=True)
class NumaNode:
    node: int
    cpus: str
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Reading:
    """What one source knows of the GPUs of a host; `Pair` positions count in `gpus`."""

    gpus: tuple[Gpu, ...] = ()
    pairs: tuple[Pair, ...] = ()
    driver: str = ""
    cuda: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Host:
    """One operating system.

    boot_id: identity of the running kernel; containers of one host share it.
    cpus: CPUs this process may use. gpus: visible ones by CUDA ordinal, then hidden ones by bus id.
    imex: ready, missing or unreadable: the channel device that memory shared across hosts needs.
    environment: the variables that change what CUDA and NCCL do.
    """

    name: str
    boot_id: str = ""
    num_cpus: int | None = None
    cpu_model: str = ""
    memory_bytes: int | None = None
    cpus: str = ""
    numa_nodes: tuple[NumaNode, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    pairs: tuple[Pair, ...] = ()
    nics: tuple[Nic, ...] = ()
    imex: str = "missing"
    driver: str = ""
    cuda: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    sources: tuple[Source, ...] = ()

    def pair(self, first: int, second: int) -> Pair:
        """What is known of an ordered pair of positions in `gpus`; an empty `Pair` if nothing is."""
        return self._pair_by_position.get((first, second), Pair(first, second))

    @cached_property
    def _pair_by_position(self) -> dict[tuple[int, int], Pair]:
        return {(pair.first, pair.second): pair for pair in self.pairs}


@dataclass(frozen=True)
class Rank:
    """One process of a launch: its host and GPU by position, and what differs from its host."""

    rank: int
    host: int
    gpu: int | None = None
    cpus: str = ""
    environment: dict[str, str] = field(default_factory=dict)


class Place(NamedTuple):
    """Where one rank runs, or would run: positions in `Topology.hosts` and `Host.gpus` (None: on the CPU)."""

    rank: int
    host: int
    gpu: int | None


@dataclass(frozen=True)
class Topology:
    """One picture of all hosts.

    origin: "captured" on a real machine, or "made up".
    ranks: empty when one process looked on its own. silent: ranks that did not report, with the reason.
    """

    hosts: tuple[Host, ...]
    ranks: tuple[Rank, ...] = ()
    silent: tuple[str, ...] = ()
    origin: str = "captured"
    captured_at: str = ""
    note: str = ""
    measurement: Measurement | None = None

    def places(self) -> list[Place]:
        """The ranks of the launch; without one, a rank for each visible GPU in host and ordinal order."""
        if self.ranks:
            return [Place(rank.rank, rank.host, rank.gpu) for rank in self.ranks]
        gpus = [(h, g) for h, host in enumerate(self.hosts) for g, gpu in enumerate(host.gpus) if gpu.visible]
        return [Place(rank, host, gpu) for rank, (host, gpu) in enumerate(gpus)]

    @cached_property
    def place_of(self) -> dict[int, Place]:
        """`places` by rank."""
        return {place.rank: place for place in self.places()}

    @property
    def num_visible_gpus(self) -> int:
        return sum(gpu.visible for host in self.hosts for gpu in host.gpus)


def to_plain(record: Any) -> Any:
    """The record as dicts, lists and scalars, ready for `json.dumps`."""
    return dataclasses.asdict(record)


_hints = cache(typing.get_type_hints)


def from_plain(kind: type[Record], value: Any, where: str = "") -> Record:
    """Build a record of `kind` from its plain form. ValueError names the place where the value does not fit."""
    return _build(kind, value, where)


def _build(kind: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _build_record(kind, value, where)
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        if value is None:
            return None
        return _build(next(option for option in arguments if option is not type(None)), value, where)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{where}: a list is expected, not {type(value).__name__}")
        kinds = arguments if arguments[-1] is not Ellipsis else [arguments[0]] * len(value)
        if len(kinds) != len(value):
            raise ValueError(f"{where}: {len(kinds)} values are expected, not {len(value)}")
        return tuple(_build(entry, item, f"{where}[{i}]") for i, (entry, item) in enumerate(zip(kinds, value, strict=True)))
    if typing.get_origin(kind) is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{where}: an object is expected, not {type(value).__name__}")
        return {str(key): _build(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{where}: {kind.__name__} is expected, not {value!r}")
    return value


def _build_record(kind: Any, value: Any, where: str) -> Any:
    where = where or "top"
    if not isinstance(value, dict):
        raise ValueError(f"{where}: an object is expected, not {type(value).__name__}")
    entries = dataclasses.fields(kind)
    names = {entry.name for entry in entries}
    if unknown := sorted(set(value) - names):
        raise ValueError(f"{where}: unknown key {unknown[0]!r}")
    required = [e.name for e in entries if e.default is dataclasses.MISSING and e.default_factory is dataclasses.MISSING]
    if missing := [name for name in required if name not in value]:
        raise ValueError(f"{where}: key {missing[0]!r} is missing")
    hints = _hints(kind)
    return kind(**{name: _build(hints[name], item, f"{where}.{name}") for name, item in value.items()})
