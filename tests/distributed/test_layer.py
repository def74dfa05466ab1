"""`mok.MoE` and `mok.moe` with experts on two ranks: what one rank with all tokens computes."""

from __future__ import annotations

import torch
import torch.distributed as dist

import mok
from mok.grid import CallGrid
from tests.distributed.processes import run_distributed
from tests.tolerances import assert_same_bits

TOKENS = (6, 0)
"""Of each rank."""


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return dict(mok.MoE(16, 32, 4, 2).state_dict())


def inputs() -> torch.Tensor:
    return torch.randn(sum(TOKENS), 16, generator=torch.Generator().manual_seed(1))


def on_rank(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    layer = mok.MoE(16, 32, 4, 2, group=dist.group.WORLD)
    mine = slice(rank * 2, rank * 2 + 2)
    layer.load_state_dict({n: w[mine] if n.startswith("w_") else w for n, w in weights().items()})
    x = inputs().split(TOKENS)[rank].clone().requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    ids = torch.arange(4).expand(len(x), 4)[:, ::2]
    plain = mok.moe(x, ids, torch.ones(len(x), 2), *layer.w_gate_up.unbind(1), layer.w_down, group=dist.group.WORLD)
    return {"y": y, "dx": x.grad, "gate_up": layer.w_gate_up.grad, "down": layer.w_down.grad, "plain": plain}


def test_layer_on_two_ranks_one_of_them_without_tokens() -> None:
    found = run_distributed(on_rank, 2)
    layer = mok.MoE(16, 32, 4, 2)
    layer.load_state_dict(weights())
    x = inputs().requires_grad_()
    y, _ = layer.call(x, CallGrid())
    y.square().sum().backward()
    ids = torch.arange(4).expand(len(x), 4)[:, ::2]
    plain = mok.moe(x, ids, torch.ones(len(x), 2), *layer.w_gate_up.unbind(1), layer.w_down)
    for name, one, parts in (
        ("y", y, [part["y"] for part in found]),
        ("dx", x.grad, [part["dx"] for part in found]),
        ("gate_up", layer.w_gate_up.grad, [part["gate_up"] for part in found]),
        ("down", layer.w_down.grad, [part["down"] for part in found]),
        ("plain", plain, [part["plain"] for part in found]),
    ):
        assert_same_bits(name, torch.cat(list(parts)), one)
