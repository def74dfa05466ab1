"""Which device a run uses."""

from __future__ import annotations

import torch

from mok.errors import UsageError

__all__ = ["choose_device", "prepare_device"]


def choose_device(name: str) -> torch.device:
    """The device that `--device` means; auto is a GPU if there is one. Raises UsageError for a GPU that is not there."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UsageError(f"--device cuda: torch {torch.__version__} sees no GPU on this machine; use --device cpu or auto")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and available) else "cpu")


def prepare_device(device: torch.device) -> None:
    """Hold torch to operations that repeat bit for bit. On a CPU they all do, by the rules of docs/numerics.md."""
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True)
        # By default that also fills every new tensor, a pass over memory for each: no operation here reads what it has not
        # written, and the tests of the kernels poison their outputs themselves.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
