"""The status word of a device: where kernels leave the reason why a launch could not be completed.

A kernel that gives up waiting sets a bit and goes on, so nothing hangs and no launch waits for the host. Whoever uses results
reads the word once its work is queued (the trainer after a step and before a checkpoint). Owns the bits and their messages.
"""

from __future__ import annotations

import torch

from mok.errors import RunError

__all__ = ["check_status", "status_word"]

REASONS = {
    1: "a tile waited too long for another one: its counters never reached their target (is the device shared or stopped?)",
}
"""Bit -> what happened. Bit 1 is `mok.kernels.ring.STATUS_TIMED_OUT`."""

_words: dict[torch.device, torch.Tensor] = {}


def status_word(device: torch.device) -> torch.Tensor:
    """int32 [1] on `device`, 0 while all is well; kernels or bits into it, `check_status` reads and clears it."""
    if device not in _words:
        _words[device] = torch.zeros(1, dtype=torch.int32, device=device)
    return _words[device]


def check_status(device: torch.device) -> None:
    """Wait for the device, and raise RunError with every reason that kernels have left since the last look."""
    word = _words.get(device)
    if word is None:
        return
    bits = int(word)
    if bits:
        word.zero_()
        reasons = [reason for bit, reason in REASONS.items() if bits & bit]
        raise RunError(f"expert kernels on {device} did not finish: {'; '.join(reasons) or f'status {bits:#x}'}")
