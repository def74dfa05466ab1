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
    launch_layer(config, tokens=5, hidden=48, width=80, top_k=3, clamp=7.0, shared=400, again=True)


def launch_layer(
    config: KernelConfig, *, tokens: int, hidden: int, width: int, top_k: int, clamp: float = 0.0, shared: int = 0,
    again: bool = False,
) -> None:  # fmt: skip
    num_experts = 8
    x = torch.zeros(tokens, hidden, dtype=torch.bfloat16)
    router = torch.zeros(tokens, top_k)
    weights = weights_of(num_experts, hidden, width)
    gradients = mega.Gradients(*(weight.float() for weight in weights), False)
    plan = plan_on_device(
        torch.zeros(tokens, top_k, dtype=torch.int32), num_experts, hidden, width, config.forward_order, config.backward_order,
        again=again, shared_size=shared,
    )  # fmt: skip
    shared_experts = mega.Shared(weights_of(1, hidden, shared), torch.zeros(tokens)) if shared else None
    _, kept = mega.forward(x, router, weights, plan, config, clamp=clamp, keep=not again, shared=shared_experts)
    mega.backward(x, x, router, weights, kept, plan, gradients, config, clamp=clamp, shared=shared_experts)


def weights_of(num_experts: int, hidden: int, width: int) -> mega.Weights:
    gate, up = (torch.zeros(num_experts, width, hidden, dtype=torch.bfloat16) for _ in range(2))
    return mega.Weights(gate, up, torch.zeros(num_experts, hidden, width, dtype=torch.bfloat16))
