"""Status words of a device: where kernels leave the reason why a result must not be used.

A kernel that gives up waiting, or is given expert ids that cannot be, sets a bit and goes on: nothing hangs, nothing is read
from memory that is not there, and no launch waits for the host. Whoever uses results reads the words once its work is queued
(the trainer after a step, which its update then left out). Owns the words, their bits and their messages. Read next:
`mok/train/step.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mok.errors import RunError

__all__ = ["HostCopy", "check_status", "explain", "forget_status", "raise_if_seen", "status_word", "tell_host"]

REASONS = {
    1: "a tile waited too long for another one: its counters never reached their target (is the device shared or stopped?)",
    2: "expert ids out of range were taken as masked: ids must be -1 (masked) to the number of experts less 1",
    4: "rank {rank} of the expert group was awaited at stage dispatch and did not come within distributed.timeout_s",
    8: "rows from rank {rank} of the expert group were awaited at stage return and did not come within distributed.timeout_s",
    16: "the experts of rank {rank} of the expert group got {rows} rows, more than there is room for: raise moe.peer_rows, or "
    "set it to 0 for any routing",
}
"""Bit -> what happened. Bit 1 is `mok.kernels.ring.STATUS_TIMED_OUT`, bit 2 `mok.kernels.plan.STATUS_BAD_IDS`, the others those
of `mok.kernels.peer`, which puts a rank and a number of 64-row blocks into the bits above them."""

LAYERS = 256
"""Layers that have a word of their own; those behind share the last."""

STRIDE = 4
"""int32 from word to word: each starts on 16 bytes, or Triton would compile a kernel anew for some of them."""


class HostCopy:
    """Numbers of a device as the host last heard of them; nobody ever waits."""

    def __init__(self) -> None:
        self._copy: Tensor | None = None

    def refresh(self, values: Tensor) -> None:
        """Queue a copy of `values`, always the same tensor."""
        if self._copy is None:
            self._copy = torch.zeros(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
        self._copy.copy_(values, non_blocking=True)

    def any(self) -> bool:
        return self._copy is not None and bool(self._copy.any())

    def clear(self) -> None:
        if self._copy is not None:
            self._copy.zero_()


_words: dict[torch.device, Tensor] = {}
_seen: dict[torch.device, HostCopy] = {}


def status_word(device: torch.device, layer: int = 0) -> Tensor:
    """int32 [1] of a layer on `device`, 0 while all is well; kernels or bits into it. Calls of `mok.moe` are layer 0."""
    if device not in _words:
        _words[device] = torch.zeros(LAYERS, STRIDE, dtype=torch.int32, device=device)
    return _words[device][min(layer, LAYERS - 1), :1]


def check_status(device: torch.device | None = None) -> None:
    """Wait for `device` (None: the current CUDA device), and raise RunError with all that its kernels have left since the last
    time. What they computed since then must not be used."""
    if device is None or device == torch.device("cuda"):
        if not torch.cuda.is_available():
            return
        device = torch.device("cuda", torch.cuda.current_device())
    if device not in _words:
        return
    found = _words[device][:, 0].tolist()
    if any(found):
        forget_status(device)
        reasons = "; ".join(f"layer {layer}: {explain(bits)}" for layer, bits in enumerate(found) if bits)
        raise RunError(f"expert kernels on {device}: {reasons}")


def forget_status(device: torch.device) -> None:
    """All is well again."""
    if device in _words:
        _words[device].zero_()
    if device in _seen:
        torch.cuda.synchronize(device)
        _seen[device].clear()


def explain(bits: int) -> str:
    """The messages of all bits of a word."""
    details = {"rank": bits >> 5 & 127, "rows": (bits >> 12) * 64}
    return "; ".join(reason.format(**details) for bit, reason in REASONS.items() if bits & bit) or f"status {bits:#x}"


def tell_host(device: torch.device) -> None:
    """Queue a copy of the words for `raise_if_seen`; kernels that were queued before have left theirs by then."""
    if device in _words and device.type == "cuda":
        _seen.setdefault(device, HostCopy()).refresh(_words[device])


def raise_if_seen(device: torch.device) -> None:
    """RunError if the host has heard of trouble by now; waits for nothing while all is well."""
    if device in _seen and _seen[device].any():
        check_status(device)
