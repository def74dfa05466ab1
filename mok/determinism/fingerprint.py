"""What must be the same before two results may be expected to have the same bytes: versions, devices, threads, switches.

Read next: `mok/determinism/report.py`, which keeps a fingerprint beside every result.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

import torch

from mok.errors import UsageError

__all__ = ["fingerprint", "fingerprint_differences", "prepare_cuda"]

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_CHOICES = (":4096:8", ":16:8")


def prepare_cuda() -> None:
    """Give cuBLAS a fixed workspace, which it reads once, when CUDA starts. Nothing to do without a GPU.

    Raises UsageError if CUDA has started without it: setting it then would have no effect.
    """
    if os.environ.get(CUBLAS_WORKSPACE) in CUBLAS_CHOICES:
        return
    if torch.cuda.is_initialized():
        raise UsageError(
            f"{CUBLAS_WORKSPACE} is {os.environ.get(CUBLAS_WORKSPACE, 'not set')} and CUDA has already started; set it to "
            f"{CUBLAS_CHOICES[0]} before the first CUDA call, or call mok.determinism.prepare_cuda() first thing"
        )
    if torch.cuda.is_available():
        os.environ[CUBLAS_WORKSPACE] = CUBLAS_CHOICES[0]


def fingerprint(*, compiled: bool = False, **more: Any) -> dict[str, Any]:
    """Plain values that name the environment. compiled: whether torch.compile is used, which changes bits.

    more: further facts of the run, such as dtype or recipe digest. NCCL's algorithm is as the user set it: mok uses no
    reduction of NCCL, so in-switch sums (NVLS) never enter a result.
    """
    cuda = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
        "cuda": torch.version.cuda or "",
        "tf32": torch.backends.cuda.matmul.allow_tf32 if cuda else False,
        "cublas_workspace": os.environ.get(CUBLAS_WORKSPACE, "") if cuda else "",
        "nccl_algo": os.environ.get("NCCL_ALGO", "") if cuda else "",
        "nccl_nvls": os.environ.get("NCCL_NVLS_ENABLE", "") if cuda else "",
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "mode": "compiled" if compiled else "eager",
        **more,
    }


def fingerprint_differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    """One sentence for each fact that differs, in the order of `left`."""
    names = dict.fromkeys([*left, *right])
    return [
        f"{name}: {left.get(name, 'unknown')} against {right.get(name, 'unknown')}"
        for name in names
        if left.get(name) != right.get(name)
    ]


def version_of(distribution: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
