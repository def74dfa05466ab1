"""The router against formulas, published values and finite differences."""

from __future__ import annotations

import pytest
import torch

from mok.model.router import Routing, route


@pytest.mark.parametrize(
    ("routing", "bias", "padding"),
    [
        (Routing(3), False, False),
        (Routing(3, normalize_weights=False, scaling_factor=1.7), False, True),
        (Routing(3, score_order="after_top_k"), False, False),
        (Routing(3, score="sigmoid", num_groups=2, scaling_factor=1.7), True, False),
        (Routing(1, score="sigmoid", normalize_weights=False), True, True),
        (Routing(8), False, False),
    ],
)
def test_backward_is_the_derivative_of_weights_and_losses(routing: Routing, bias: bool, padding: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 8, dtype=torch.float64, generator=generator).requires_grad_()
    bias_E = torch.randn(8, dtype=torch.float64, generator=generator) * 0.1 if bias else None
    valid_T = torch.rand(12, generator=generator) > 0.3 if padding else None

    def outputs(logits_TE: torch.Tensor) -> tuple[torch.Tensor, ...]:
        routes = route(logits_TE, routing, bias_E, num_slices=3, valid_T=valid_T)
        return routes.weights_TK, routes.balance_loss_C, routes.z_loss_C

    torch.autograd.gradcheck(outputs, (logits,))
