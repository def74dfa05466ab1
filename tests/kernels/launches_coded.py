"""Both launches of the megakernel on 8-bit operands, on small CPU tensors: what `cross_compile` compiles."""

from __future__ import annotations

import torch

from mok.launch import coded, mega
from mok.launch.config import KernelConfig
from mok.launch.plan import plan_on_device
from mok.launch.quantize import quantize_weight
from tests.kernels.cross_compile import NUM_SMS


def launch_all(arch: int) -> None:
    launch_layer(KernelConfig(programs=NUM_SMS[arch]), tokens=300, hidden=2048, width=512, top_k=8)


def launch_layer(config: KernelConfig, *, tokens: int, hidden: int, width: int, top_k: int, again: bool = False) -> None:
    num_experts = 8
    x = torch.zeros(tokens, hidden, dtype=torch.bfloat16)
    router = torch.zeros(tokens, top_k)
    gate, up = (torch.zeros(num_experts, width, hidden, dtype=torch.bfloat16) for _ in range(2))
    down = torch.zeros(num_experts, hidden, width, dtype=torch.bfloat16)
    weights = coded.CodedWeights(*(quantize_weight(weight, 128) for weight in (gate, up, down)))
    gradients = mega.Gradients(gate.float(), up.float(), down.float(), False)
    plan = plan_on_device(
        torch.zeros(tokens, top_k, dtype=torch.int32),
        num_experts,
        hidden,
        width,
        config.forward_order,
        config.backward_order,
        units=coded.code_box(hidden).units_per_block,
        row_units=mega.row_box(hidden).units_per_block,
        again=again,
    )
    _, kept = coded.forward(x, router, weights, plan, config, clamp=0.0, keep=not again)
    coded.backward(x, x, router, weights, kept, plan, gradients, config, clamp=0.0)
