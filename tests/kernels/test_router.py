"""The router's kernels against the separate operations of `mok/model/router.py`, which have tests of their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mok.model.router import Routing, _Route, _RouteOnGpu
from tests.tolerances import relative_error

ROUTINGS = {
    "softmax": Routing(3, normalize_weights=False),
    "normalised": Routing(3),
    "sigmoid": Routing(2, score="sigmoid", scaling_factor=2.5),
    "one": Routing(1, score="sigmoid", normalize_weights=False),
    "all": Routing(6, score="softmax"),
}


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("losses", [False, True])
def test_routes_losses_and_gradients(name: str, masked: bool, losses: bool, device: torch.device) -> None:
    routing, slices, tokens, experts = ROUTINGS[name], 2, 50, 6
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(tokens, experts, generator=generator).mul(3).to(device)
    logits[7, :4] = 1.25  # ties
    logits[8] = 0.0
    bias = torch.randn(experts, generator=generator).to(device) if routing.score == "sigmoid" else None
    valid = torch.rand(tokens, generator=generator).gt(0.3).to(device) if masked else None
    dweights = torch.randn(tokens, routing.top_k, generator=generator).to(device)
    slopes = [torch.randn(slices, generator=generator).to(device) for _ in range(2)]

    def results(function: type[torch.autograd.Function], dtype: torch.dtype) -> list[Tensor]:
        leaf = logits.detach().clone().to(dtype).requires_grad_()
        wide_bias = None if bias is None else bias.to(dtype)
        ids, weights, balance, z = function.apply(leaf, wide_bias, routing, slices, valid)
        roots, gradients = [weights], [dweights.to(dtype)]
        if losses:
            roots, gradients = [*roots, balance, z], [*gradients, *(slope.to(dtype) for slope in slopes)]
        torch.autograd.backward(roots, gradients)
        return [ids, weights.detach(), balance.detach(), z.detach(), leaf.grad]

    found, expected = results(_RouteOnGpu, torch.float32), results(_Route, torch.float64)
    assert found[0].dtype == torch.int32 and found[0].equal(expected[0])
    for what, mine, truth in zip(("weights", "balance", "z", "gradient"), found[1:], expected[1:], strict=True):
        assert relative_error(mine, truth) < 1e-5, what
    if masked:
        assert (found[0][~valid] == -1).all() and not found[1][~valid].any() and not found[4][~valid].any()
