"""CUDA's own view of the GPUs, through torch: ordinals, visibility, peer access.

Owns the only place of the probe that needs torch. Run as a module, so that no CUDA context stays in the calling process
and a driver that hangs cannot hang the caller; see `sources.py`.
"""

from __future__ import annotations

import ctypes
from typing import Any

from mok.topology.model import Gpu, Pair, Reading
from mok.topology.sources import Unavailable, answer, count_of

__all__ = ["read"]


def read(torch: Any) -> Reading:
    """The GPUs that CUDA shows this process, in ordinal order. `Unavailable` if torch cannot use CUDA at all."""
    if torch.version.cuda is None:
        raise Unavailable(f"torch {torch.__version__} is built without CUDA")
    try:
        count = torch.cuda.device_count()
        gpus = tuple(_gpu(torch, ordinal) for ordinal in range(count))
        pairs = tuple(
            Pair(first, second, peer_access=bool(torch.cuda.can_device_access_peer(first, second)))
            for first in range(count)
            for second in range(count)
            if first != second
        )
    except (RuntimeError, AssertionError) as error:
        raise Unavailable(f"CUDA does not start: {str(error).splitlines()[0]}") from None
    return Reading(gpus, pairs, detail=f"torch {torch.__version__} sees {count_of(gpus)}")


def _gpu(torch: Any, ordinal: int) -> Gpu:
    properties = torch.cuda.get_device_properties(ordinal)
    bus = getattr(properties, "pci_bus_id", None)
    return Gpu(
        uuid=str(getattr(properties, "uuid", "")),
        bus_id=f"{properties.pci_domain_id:04x}:{bus:02x}:{properties.pci_device_id:02x}.0" if bus is not None else "",
        ordinal=ordinal,
        name=properties.name,
        memory_bytes=properties.total_memory,
        compute_capability=f"{properties.major}.{properties.minor}",
        found_by=("cuda",),
    )


def main() -> Reading:
    # Without the driver's own library no torch can see a GPU, and importing torch to learn that takes seconds.
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise Unavailable("no NVIDIA driver: libcuda.so.1 is not on this machine") from None
    try:
        import torch
    except ImportError as error:
        raise Unavailable(f"torch cannot be imported: {error}") from None
    return read(torch)


if __name__ == "__main__":
    answer(main)
