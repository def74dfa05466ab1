"""The names of the axes, for the command line: needs no torch."""

from __future__ import annotations

__all__ = ["AXES", "LAYER_AXES"]

AXES = ("rerun", "resume", "threads", "ranks", "ep", "accumulation", "batch", "backend", "alignment", "jitter")
LAYER_AXES = ("rerun", "threads", "batch", "alignment", "backend")
