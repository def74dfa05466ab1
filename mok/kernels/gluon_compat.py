"""Gluon's names that differ between the Triton releases mok runs on, behind one name each.

Owns nothing else. `UNSUPPORTED` says why the installed release cannot run the Gluon kernels, or is empty.
Read next: `mok/kernels/mega.py`.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import _aggregate as aggregate

SUPPORTED = ("3.6", "3.7", "3.8")
RELEASE = ".".join(triton.__version__.split(".")[:2])
UNSUPPORTED = (
    ""
    if RELEASE in SUPPORTED
    else f"triton {triton.__version__}: the Gluon kernels are checked with {', '.join(SUPPORTED)}; install one of these"
)

# The barrier among the warps of one partition: `thread_barrier` in 3.6, `barrier` from 3.7 on.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
# Bulk tensor copies: `async_copy_*` up to 3.7, `async_load` / `async_store` from 3.8 on.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait


def record(cls):
    """Make a class of annotated fields a device-side record: one positional constructor argument per field.

    The module of `cls` must not postpone annotations: Triton checks the values of the fields against them.
    """
    names = tuple(cls.__annotations__)
    kinds = tuple(cls.__annotations__.values())

    def __init__(self, *values):
        for name, kind, value in zip(names, kinds, values, strict=True):
            # Compile-time constants arrive unwrapped.
            setattr(self, name, gl.constexpr(value) if kind is gl.constexpr else value)

    __init__.__qualname__ = f"{cls.__qualname__}.__init__"
    cls.__init__ = gluon.constexpr_function(__init__)
    return aggregate(cls)
