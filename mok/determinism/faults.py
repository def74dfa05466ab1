"""Faults planted on purpose, so that the verification is seen to find one: a check that cannot fail is no check.

Owns the three kinds of `--inject` and the disturbances of the axes `jitter` and `alignment`, which must change nothing. Used in
the processes that a verification starts, never in a run of a user's. Read next: `mok/determinism/arm.py`.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import mok.gradients
from mok.determinism.compare import INTEGER_OF_SIZE
from mok.determinism.trace import Key
from mok.errors import UsageError

__all__ = ["Flip", "flip_bit", "jitter", "misalign", "parse_injection", "swap_order"]


@dataclass(frozen=True)
class Flip:
    """Bit `bit` of tensor `name`, counted over the flattened tensor, least significant bit of an element first, in `step`."""

    step: int
    name: str
    bit: int


def parse_injection(text: str) -> Flip | str:
    """ "order", "clock", or a Flip from "STEP:TENSOR:BIT" (a tensor's name may hold colons). Raises UsageError otherwise."""
    if text in ("order", "clock"):
        return text
    match = re.fullmatch(r"(\d+):(.+):(\d+)", text)
    if not match or int(match[1]) < 1:
        raise UsageError(
            f"--inject {text}: must be STEP:TENSOR:BIT, order or clock; for example 3:model.embed_tokens.weight:7, steps from 1"
        )
    return Flip(int(match[1]), match[2], int(match[3]))


def flip_bit(tensor: Tensor, bit: int) -> None:
    """Flip one bit of `tensor` in place, whatever its strides. Raises UsageError beyond its last bit."""
    width = 8 * tensor.element_size()
    if bit >= width * tensor.numel():
        raise UsageError(f"--inject bit {bit}: the tensor has {width * tensor.numel()} bits, counted from 0")
    index, place = divmod(bit, width)
    element = (
        tensor.detach()[tuple(torch.unravel_index(torch.tensor(index), tensor.shape))] if tensor.dim() else tensor.detach()
    )
    mask = 1 << place
    element.view(INTEGER_OF_SIZE[tensor.element_size()]).bitwise_xor_(mask - (1 << width) if place == width - 1 else mask)


def swap_order(by_clock: bool, from_step: Callable[[], bool]) -> Callable[[], bool]:
    """Let two parts of every gradient sum of this process change places; gives whether that has happened yet.

    by_clock: only where the clock shows an odd microsecond when the sum is made. from_step: whether the fault is on yet.
    """
    num_swapped = 0
    in_order = mok.gradients.halving_tree

    def swapped(terms: Tensor, out: Tensor | None = None) -> Tensor:
        nonlocal num_swapped
        count = terms.shape[0]
        if count > 2 and from_step() and (not by_clock or time.perf_counter_ns() // 1000 % 2):
            second, third = 1, (count + 1) // 2
            terms[[second, third]] = terms[[third, second]]
            num_swapped += 1
        return in_order(terms, out)

    mok.gradients.halving_tree = swapped
    return lambda: num_swapped > 0


def jitter(longest_s: float, share: float) -> Callable[[Key, Tensor], None]:
    """A watcher that sleeps at random places for up to `longest_s`, so that ranks meet in other orders."""
    source = random.SystemRandom()

    def wait(key: Key, tensor: Tensor) -> None:
        if source.random() < share:
            time.sleep(source.random() * longest_s)

    return wait


def misalign(bank: Any) -> None:
    """Let the flat tensors of every later `mok.gradients.Bank` start 16 bytes after the address the allocator gives."""
    zeros = bank.zeros

    def shifted(self: mok.gradients.Bank, dtype: torch.dtype, *shape: int) -> Tensor:
        aligned = zeros(self, dtype, *shape)
        offset = 16 // aligned.element_size()
        return torch.zeros(aligned.numel() + offset, dtype=dtype, device=aligned.device)[offset:].view(aligned.shape)

    bank.zeros = shifted
