"""Every launch of `mok/launch/attention.py` once, on small CPU tensors, for `cross_compile`."""

from __future__ import annotations

import torch

from mok.launch.attention import attention_backward


def launch_all(arch: int) -> None:
    for dim, kept_bytes in ((64, 0), (128, 0), (128, 1 << 20)):
        qk, heads, out = (torch.zeros(1, 256, count, dim, dtype=torch.bfloat16) for count in (8, 12, 4))
        attention_backward(out, qk, heads, out, torch.zeros(1, 4, 256), qk, heads, kept_bytes=kept_bytes)
