"""Which device a run uses."""

from __future__ import annotations

import torch

from mok.errors import UsageError

__all__ = ["choose_device"]


def choose_device(name: str) -> torch.device:
    """The device that `--device` means; auto is a GPU if there is one. Raises UsageError for a GPU that is not there."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UsageError(f"--device cuda: torch {torch.__version__} sees no GPU on this machine; use --device cpu or auto")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and available) else "cpu")
