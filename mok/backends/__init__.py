"""Who computes the experts: the backends by name, and the choice among them.

Owns the table of names and the rule of `auto`. Knows nothing of how a backend works; each is a module with the three functions
of `mok.backends.interface`, imported when it is chosen.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch import get_float32_matmul_precision

from mok.backends.interface import LayerShape
from mok.errors import UsageError
from mok.quantization import Quantization

if TYPE_CHECKING:
    import torch  # at run time the name is that of the submodule

__all__ = ["AUTO", "BACKENDS", "choose", "kernel_choices"]

BACKENDS = {
    "reference": "mok.backends.reference",
    "torch": "mok.backends.torch",
    "mega": "mok.backends.mega",
    "staged": "mok.backends.staged",
}
"""Name -> module."""

AUTO = ("mega", "staged", "torch")
"""What `auto` tries, best first; the last runs everywhere."""


def choose(
    name: str,
    shape: LayerShape,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization | None = None,
    tokens: int | None = None,
    transport: str = "collective",
) -> tuple[ModuleType, str | None]:
    """The module of backend `name` for a layer with operands rounded as `quantization` says, and a notice worth showing once,
    or None.

    `auto` takes the first of `AUTO` that can run, and the notice says why better ones cannot; where mega and staged both can,
    the one that was faster in the measured table's row nearest to the shape and `tokens` (`mok.launch.tables.nearest_row`).
    transport: how rows travel where `shape` has several ranks. Raises UsageError for an unknown name, and where a named
    backend, or all of `auto`, cannot run, with every reason.
    """
    # A layer asks on every call. The precision of matmul is a setting of the process that a backend may refuse.
    at_hand = tokens if name == "auto" else None
    return _choice(name, shape, dtype, device, quantization, at_hand, transport, get_float32_matmul_precision())


def kernel_choices(
    name: str,
    shape: LayerShape,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization | None = None,
    tokens: int | None = None,
    transport: str = "collective",
) -> dict[str, Any]:
    """What `choose` takes and the settings of its kernels, for the record of a run: a pure function of the arguments."""
    module, _ = choose(name, shape, dtype, device, quantization, tokens, transport)
    chosen = next(known for known, path in BACKENDS.items() if path == module.__name__)
    settings = module.settings(shape, device, tokens) if hasattr(module, "settings") else None
    return {"backend": chosen} | ({} if settings is None else {"settings": asdict(settings)})


@lru_cache(1024)
def _choice(
    name: str,
    shape: LayerShape,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization | None,
    tokens: int | None,
    transport: str,
    precision: str,
) -> tuple[ModuleType, str | None]:
    if name != "auto":
        if name not in BACKENDS:
            raise UsageError(f"moe.backend = {name!r}: must be one of auto, {', '.join(BACKENDS)}")
        backend = import_module(BACKENDS[name])
        reasons = backend.why_not(shape, dtype, device, quantization) + _not_over(transport, shape, backend)
        if reasons:
            raise UsageError(f"moe.backend = {name} cannot run here: {'; '.join(reasons)}")
        return backend, None
    refused: list[str] = []
    for candidate in AUTO:
        backend = import_module(BACKENDS[candidate])
        reasons = backend.why_not(shape, dtype, device, quantization) + _not_over(transport, shape, backend)
        if candidate == "mega" and not reasons and _staged_was_faster(shape, device, tokens):
            continue
        if not reasons:
            # On a CPU nothing better is to be had, so there is nothing to say.
            notice = f"moe.backend = auto takes {candidate}: {' | '.join(refused)}"
            return backend, notice if refused and device.type == "cuda" else None
        refused.append(f"{candidate} cannot run ({'; '.join(reasons)})")
    raise UsageError(f"moe.backend = auto: {' | '.join(refused)}")


def _not_over(transport: str, shape: LayerShape, backend: ModuleType) -> list[str]:
    """Why rows cannot travel between the ranks of `shape` as `transport` does it."""
    if shape.ranks == 1 or transport in backend.TRANSPORTS:
        return []
    able = " or ".join(backend.TRANSPORTS)
    if not able:
        return [f"{shape.ranks} ranks: it computes on one only"]
    return [f"its rows travel between {shape.ranks} ranks by moe.transport = {able}, not {transport}"]


def _staged_was_faster(shape: LayerShape, device: torch.device, tokens: int | None) -> bool:
    from mok.launch.config import device_facts
    from mok.launch.tables import nearest_row, table_of

    facts = device_facts(device)
    return facts is not None and nearest_row(table_of(facts.name), shape, tokens).staged_is_faster
