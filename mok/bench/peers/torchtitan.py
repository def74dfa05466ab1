"""torchtitan's routed experts on one rank: its dispatcher (sort, gather, deterministic scatter-add) around grouped products.

Written for release 0.3.0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mok.bench.peers.absent import Absent

__all__ = ["torchtitan"]


def torchtitan(problem: Any) -> Torchtitan:
    """A contestant. Raises Absent where torchtitan, or something that it imports, is missing."""
    try:
        from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
        from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
    except ImportError as error:
        raise Absent(f"torchtitan 0.3.0 is not installed: pip install torchtitan ({error})") from error
    shape = problem.shape
    config = RoutedExperts.Config(
        inner_experts=GroupedExperts.Config(
            dim=shape.hidden_size, hidden_dim=shape.intermediate_size, num_experts=shape.num_experts
        ),
        token_dispatcher=LocalTokenDispatcher.Config(num_experts=shape.num_experts, top_k=shape.top_k),
    )
    with torch.device("meta"):
        module = config.build()
    return Torchtitan(problem, module)


class Torchtitan:
    """Its three weights are those of the problem."""

    name = "torchtitan"

    def __init__(self, problem: Any, module: Any) -> None:
        names = ("inner_experts.w1_EFD", "inner_experts.w3_EFD", "inner_experts.w2_EDF")
        weights = (problem.gate_EIH, problem.up_EIH, problem.down_EHI)
        self._weights = {name: weight.detach().requires_grad_() for name, weight in zip(names, weights, strict=True)}
        self._module, self._num_experts = module, problem.shape.num_experts

    def forward(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        self._inputs = x_TH.detach().requires_grad_(), weights_TK.detach().requires_grad_()
        x, weights = self._inputs
        counts_E = torch.bincount(ids_TK.reshape(-1), minlength=self._num_experts)
        arguments = (x.unsqueeze(0), weights.unsqueeze(0), ids_TK.long().unsqueeze(0), counts_E)
        return torch.func.functional_call(self._module, self._weights, arguments).squeeze(0)

    def backward(self, y_TH: Tensor, dy_TH: Tensor) -> dict[str, Tensor]:
        leaves = [*self._inputs, *self._weights.values()]
        return dict(zip(("dx", "dweights", "gate", "up", "down"), torch.autograd.grad(y_TH, leaves, dy_TH), strict=True))
