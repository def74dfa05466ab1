"""The launches of the quantising kernel that a training step makes, on small CPU tensors: what `cross_compile` compiles."""

from __future__ import annotations

import torch

from mok.launch.quantize import quantize, quantize_squares
from mok.quantization import FORMATS


def launch_all(arch: int) -> None:
    x = torch.zeros(256, 512, dtype=torch.bfloat16)
    for form in FORMATS.values():
        quantize(x, form.block)
        if form.square_weights:
            quantize_squares(x, form.block)
