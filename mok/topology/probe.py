"""The picture of this host: asks every source, joins what they say about the same GPU, and names those that did not answer.

Owns the order of trust (NVML, then CUDA, then nvidia-smi, then sysfs) and the join by identity. Must not judge: see
`findings.py`. Read next: `ranks.py`, for pictures of many hosts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from mok.topology import smi, sysfs
from mok.topology.model import Fabric, Gpu, Host, MigDevice, Pair, Reading, Source
from mok.topology.sources import Unavailable, ask
from mok.topology.visible import identity, visible_positions

__all__ = ["join", "probe_host", "reason_for_no_gpu"]

NVML_LIMIT_S = 20.0
CUDA_LIMIT_S = 60.0  # importing torch from a cold network file system takes most of it
SMI_LIMIT_S = 10.0

RecordT = TypeVar("RecordT", Gpu, Pair)


def probe_host(root: Path = Path("/")) -> Host:
    """Everything that can be learned about this host by one process. Never raises for a source that fails."""
    questions = [ask("nvml", "mok.topology.nvml", NVML_LIMIT_S), ask("cuda", "mok.topology.cuda", CUDA_LIMIT_S)]
    readings: dict[str, Reading] = {}
    sources: list[Source] = []
    for question in questions:
        reading, source = question.result()
        sources.append(source)
        if reading is not None:
            readings[source.name] = reading
    if "nvml" in readings:
        sources.append(Source("nvidia-smi", True, "not asked: nvml answered"))
    else:
        try:
            readings["nvidia-smi"] = smi.read(SMI_LIMIT_S)
            sources.append(Source("nvidia-smi", True, readings["nvidia-smi"].detail))
        except Unavailable as reason:
            sources.append(Source("nvidia-smi", False, str(reason)))
    return join(sysfs.read_host(root), readings, sources, root)


def join(host: Host, readings: dict[str, Reading], sources: Iterable[Source] = (), root: Path = Path("/")) -> Host:
    """`host` with the GPUs of all `readings` (by source name), each GPU once.

    Two records are the same GPU if their UUIDs are, or their bus ids; a known value of a more trusted source wins. Order:
    CUDA ordinals, then hidden GPUs by bus id. Without an answer from CUDA the ordinals follow from CUDA_VISIBLE_DEVICES,
    assuming CUDA counts in bus order.
    """
    gpus: list[Gpu] = []
    position: dict[str, list[int]] = {}
    for name in ("nvml", "cuda", "nvidia-smi"):
        if name in readings:
            position[name] = [_add(gpus, gpu) for gpu in readings[name].gpus]
    if "cuda" not in readings:
        gpus = _assign_ordinals(gpus, host.environment.get("CUDA_VISIBLE_DEVICES"))
    gpus = [_with_bus_facts(gpu, root) for gpu in gpus]
    order = sorted(range(len(gpus)), key=lambda i: (not gpus[i].visible, _first_ordinal(gpus[i]), gpus[i].bus_id))
    place = {old: new for new, old in enumerate(order)}
    ordered = tuple(gpus[i] for i in order)
    pairs: dict[tuple[int, int], Pair] = {}
    for name, positions in position.items():
        for pair in readings[name].pairs:
            first, second = place[positions[pair.first]], place[positions[pair.second]]
            moved = dataclasses.replace(pair, first=first, second=second)
            pairs[first, second] = _merge(pairs.get((first, second), moved), moved)
    for pair in sysfs.pci_pairs(ordered, root):
        pairs[pair.first, pair.second] = _merge(pairs.get((pair.first, pair.second), pair), pair)
    drivers = [reading.driver for reading in readings.values() if reading.driver]
    return dataclasses.replace(
        host,
        gpus=ordered,
        pairs=tuple(pairs[key] for key in sorted(pairs)),
        nics=sysfs.nic_facts(ordered, root),
        driver=drivers[0] if drivers else host.driver,
        cuda=next((reading.cuda for reading in readings.values() if reading.cuda), host.cuda),
        sources=(*host.sources, *sources),
    )


def reason_for_no_gpu(host: Host) -> str:
    """Why no GPU can be used here, "" if one can."""
    if any(gpu.visible for gpu in host.gpus):
        return ""
    cuda = next((source.detail for source in host.sources if source.name == "cuda" and not source.ok), "")
    if not host.gpus:
        return (
            "; ".join(f"{source.name}: {source.detail}" for source in host.sources if not source.ok) or "no GPU in this machine"
        )
    if "CUDA_VISIBLE_DEVICES" in host.environment:
        return f"CUDA_VISIBLE_DEVICES = {host.environment['CUDA_VISIBLE_DEVICES']!r} hides all {len(host.gpus)} GPUs"
    return cuda or f"CUDA shows none of the {len(host.gpus)} GPUs"


def _add(gpus: list[Gpu], gpu: Gpu) -> int:
    """Merge `gpu` into the record of the same device, or append it; its position."""
    for i, known in enumerate(gpus):
        instance = next((m for m in known.mig_devices if identity(m.uuid) == identity(gpu.uuid)), None)
        same_card = bool(gpu.uuid and identity(gpu.uuid) == identity(known.uuid)) or bool(
            gpu.bus_id and gpu.bus_id == known.bus_id
        )
        if instance is not None or (same_card and known.mig_enabled and gpu.ordinal is not None):
            gpus[i] = _see_mig(known, instance, gpu)
            return i
        if same_card:
            merged = _merge(known, gpu)
            gpus[i] = dataclasses.replace(merged, found_by=(*known.found_by, *gpu.found_by))
            return i
    gpus.append(gpu)
    return len(gpus) - 1


def _see_mig(known: Gpu, instance: MigDevice | None, seen: Gpu) -> Gpu:
    """CUDA sees a MIG instance of `known` as device `seen.ordinal`; which one, if it does not say, is the first."""
    instances = known.mig_devices or (MigDevice(seen.uuid, seen.name, seen.memory_bytes),)
    chosen = instance or instances[0]
    marked = tuple(dataclasses.replace(m, ordinal=seen.ordinal) if m == chosen else m for m in instances)
    return dataclasses.replace(
        known,
        mig_devices=marked,
        compute_capability=known.compute_capability or seen.compute_capability,
        found_by=(*known.found_by, *seen.found_by),
    )


def _merge(known: RecordT, other: RecordT) -> RecordT:
    """Two records of the same thing: each field as `known` has it, where it knows."""
    values = {entry.name: (getattr(known, entry.name), getattr(other, entry.name)) for entry in dataclasses.fields(known)}
    return dataclasses.replace(known, **{n: b if _unknown(a) and not _unknown(b) else a for n, (a, b) in values.items()})


def _unknown(value: object) -> bool:
    if isinstance(value, Fabric):
        return value.state == "unknown"
    return value is None or value is False or value in ("", ())


def _assign_ordinals(gpus: list[Gpu], visible: str | None) -> list[Gpu]:
    by_bus = sorted(range(len(gpus)), key=lambda i: gpus[i].bus_id)
    assigned = list(gpus)
    for ordinal, (place, mig_uuid) in enumerate(visible_positions(visible, [gpus[i] for i in by_bus])):
        position = by_bus[place]
        gpu = assigned[position]
        if gpu.mig_enabled and gpu.mig_devices:
            chosen = mig_uuid or gpu.mig_devices[0].uuid
            devices = tuple(dataclasses.replace(m, ordinal=ordinal) if m.uuid == chosen else m for m in gpu.mig_devices)
            assigned[position] = dataclasses.replace(gpu, mig_devices=devices)
        else:
            assigned[position] = dataclasses.replace(gpu, ordinal=ordinal)
    return assigned


def _with_bus_facts(gpu: Gpu, root: Path) -> Gpu:
    node, cpus = sysfs.gpu_facts(gpu, root)
    return dataclasses.replace(gpu, numa_node=gpu.numa_node if node is None else node, cpus=gpu.cpus or cpus)


def _first_ordinal(gpu: Gpu) -> int:
    ordinals = [gpu.ordinal, *(device.ordinal for device in gpu.mig_devices)]
    return min((ordinal for ordinal in ordinals if ordinal is not None), default=0)
