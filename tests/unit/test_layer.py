"""`mok.moe` and `mok.MoE`: what users call."""

from __future__ import annotations

import torch

import mok


def test_layer_runs_and_every_parameter_gets_a_gradient() -> None:
    torch.manual_seed(0)
    layer = mok.MoE(32, 48, 8, 2, num_shared_experts=2, shared_intermediate_size=24, shared_gate=True)
    x = torch.randn(3, 7, 32, requires_grad=True)
    y = layer(x)
    y.square().sum().backward()
    assert y.shape == x.shape
    assert x.grad is not None
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
