"""Keeps freed memory in the process: a step allocates the same tensors again and again."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["keep_freed_memory"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of glibc's mallopt
_ONE_GIB = 1 << 30


def keep_freed_memory() -> None:
    """Make glibc take tensors of up to 1 GiB from its heap and not give memory back after each.

    By default each tensor above 32 MiB, and most above 128 KiB, is mapped anew and its pages are faulted in: about 3500 faults
    and a quarter of the CPU time of a step of the toy recipe. Does nothing where the C library is another.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _ONE_GIB)
        mallopt(_TRIM_THRESHOLD, _ONE_GIB)
