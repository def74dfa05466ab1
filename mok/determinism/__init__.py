"""Proof that runs repeat bit for bit: digests, traces, comparison, and the axes that `mok verify-determinism` runs.

For code of one's own: `verify_step` (in `mok/determinism/step.py`), and `prepare_cuda` before CUDA starts. Both are loaded when
they are first used. Read next: `mok/determinism/digest.py`, then `trace.py`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mok.determinism.fingerprint import prepare_cuda
    from mok.determinism.step import verify_step

__all__ = ["prepare_cuda", "verify_step"]


def __getattr__(name: str) -> Any:
    if name == "prepare_cuda":
        return import_module("mok.determinism.fingerprint").prepare_cuda
    if name == "verify_step":
        return import_module("mok.determinism.step").verify_step
    raise AttributeError(f"module 'mok.determinism' has no attribute {name!r}")
