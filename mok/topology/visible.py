"""The rules of CUDA_VISIBLE_DEVICES, for when CUDA itself cannot be asked.

Owns only the rules. Read next: `probe.py`, which prefers CUDA's own answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from mok.topology.model import Gpu

__all__ = ["identity", "visible_positions"]


def identity(uuid: str) -> str:
    """A UUID without the prefix that some sources write and others leave out."""
    return uuid.lower().removeprefix("gpu-")


def visible_positions(value: str | None, gpus: Sequence[Gpu]) -> list[tuple[int, str]]:
    """(position in `gpus`, MIG UUID or "") of each visible device in CUDA's order, for `gpus` in bus order.

    None: all. "" and "-1": none. Entries are positions, UUIDs (any unambiguous start of one) or MIG UUIDs; the list ends at
    the first entry that names no device, as it does in CUDA. An entry given twice makes the whole list invalid.
    """
    if value is None:
        return [(i, gpu.mig_devices[0].uuid if gpu.mig_devices else "") for i, gpu in enumerate(gpus)]
    found: list[tuple[int, str]] = []
    for entry in (part.strip() for part in value.split(",")):
        place = _place(entry, gpus)
        if place is None:
            break
        if place in found:
            return []
        found.append(place)
    return found


def _place(entry: str, gpus: Sequence[Gpu]) -> tuple[int, str] | None:
    if entry.isdigit():
        return (int(entry), "") if int(entry) < len(gpus) else None
    if entry.upper().startswith("MIG-"):
        instances = [
            (i, device.uuid) for i, gpu in enumerate(gpus) for device in gpu.mig_devices if device.uuid.lower() == entry.lower()
        ]
        return instances[0] if instances else None
    if not entry.upper().startswith("GPU-"):
        return None
    matches = [i for i, gpu in enumerate(gpus) if identity(gpu.uuid).startswith(identity(entry))]
    return (matches[0], "") if len(matches) == 1 else None
