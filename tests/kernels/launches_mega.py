"""Both launches of the megakernel on small CPU tensors, in two variants: what `cross_compile` compiles. Of the two Blackwell
architectures one is spared the second variant."""

from __future__ import annotations

import torch

from mok.launch import mega
from mok.launch.config import KernelConfig
from mok.launch.plan import plan_on_device
from tests.kernels.cross_compile import NUM_SMS


def launch_all(arch: int) -> None:
    config = KernelConfig(programs=NUM_SMS[arch], tensor_memory=arch >= 100)
    launch_layer(config, tokens=300, hidden=2048, width=512, top_k=8)
    if arch == 103:
        return
    launch_layer(config, tokens=5, hidden=48, width=80, top_k=3, clamp=7.0)


def launch_layer(config: KernelConfig, *, tokens: int, hidden: int, width: int, top_k: int, clamp: float = 0.0) -> None:
    num_experts = 8
    x = torch.zeros(tokens, hidden, dtype=torch.bfloat16)
    router = torch.zeros(tokens, top_k)
    gate, up = (torch.zeros(num_experts, width, hidden, dtype=torch.bfloat16) for _ in range(2))
    down = torch.zeros(num_experts, hidden, width, dtype=torch.bfloat16)
    weights = mega.Weights(gate, up, down)
    gradients = mega.Gradients(gate.float(), up.float(), down.float(), False)
    plan = plan_on_device(
        torch.zeros(tokens, top_k, dtype=torch.int32), num_experts, hidden, width, config.forward_order, config.backward_order
    )
    _, gate_rows, up_rows = mega.forward(x, router, weights, plan, config, clamp=clamp, keep=True)
    assert gate_rows is not None and up_rows is not None
    mega.backward(x, x, router, weights, gate_rows, up_rows, plan, gradients, config, clamp=clamp)
