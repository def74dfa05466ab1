"""How close is close enough: relative errors against float64, with the error of plain torch as the measure."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["assert_no_worse", "assert_same_bits", "relative_error"]


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """Frobenius norm of the difference over that of `exact`; the difference itself where `exact` is 0."""
    exact = exact.detach().double()
    difference = (actual.detach().double() - exact).norm()
    norm = exact.norm()
    return float(difference / norm if norm > 0 else difference)


def assert_no_worse(name: str, actual: Tensor, exact: Tensor, plain: Tensor, factor: float) -> None:
    """`actual` may be `factor` times as far from `exact` as `plain`, the same computation by plain torch in the same dtype.

    One unit of the dtype is always allowed: plain torch is exact by luck where few values are added. NaN never passes.
    """
    assert actual.shape == exact.shape, f"{name}: shape {tuple(actual.shape)}, must be {tuple(exact.shape)}"
    bar = factor * max(relative_error(plain, exact), torch.finfo(plain.dtype).eps)
    error = relative_error(actual, exact)
    assert error <= bar, f"{name}: relative error {error:.2e}, allowed {bar:.2e}"


def assert_same_bits(name: str, first: Tensor, second: Tensor) -> None:
    """Bytes, not values: -0.0 is not 0.0, and NaN equals NaN."""
    assert first.dtype == second.dtype and first.shape == second.shape, (
        f"{name}: {first.dtype} {first.shape}, {second.dtype} {second.shape}"
    )
    one, two = (value.detach().contiguous().view(torch.uint8) for value in (first, second))
    different = one != two
    assert not different.any(), (
        f"{name} {tuple(first.shape)}: {different.sum().item()} of {one.numel()} bytes differ, the first at element "
        f"{int(different.flatten().int().argmax()) // first.element_size()}, in rows "
        f"{different.flatten(1).any(1).nonzero().flatten().tolist()[:16] if different.dim() > 1 else []}"
    )
