"""Proof that runs repeat bit for bit: digests, traces, comparison, and the axes that `mok verify-determinism` runs.

For code of one's own: `verify_step` (in `mok/determinism/step.py`). Read next: `mok/determinism/digest.py`, then `trace.py`.
"""

from __future__ import annotations

from mok.determinism.fingerprint import prepare_cuda
from mok.determinism.step import verify_step

__all__ = ["prepare_cuda", "verify_step"]
