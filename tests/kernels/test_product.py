"""Products whose rows know nothing of one another: right, and the same bits in any company and at any address."""

from __future__ import annotations

import pytest
import torch

from mok.launch.product import product_of_rows


def operands(device: torch.device, dtype: torch.dtype, inner: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(150, inner, generator=generator).to(device, dtype)
    return x, torch.randn(width, inner, generator=generator).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "width"), [(96, 72), (40, 1)])
def test_it_is_the_product(device: torch.device, dtype: torch.dtype, inner: int, width: int) -> None:
    x, w = operands(device, dtype, inner, width)
    expected = x.double() @ w.double().t()
    for weights in (w.t(), w.t().contiguous()):
        for result in (torch.float32, dtype):
            found = product_of_rows(x, weights, result)
            error = (found.double() - expected).norm() / expected.norm()
            assert found.dtype == result and error < (1e-6 if result == torch.float32 else 4e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_company(device: torch.device, dtype: torch.dtype) -> None:
    x, w = operands(device, dtype, 96, 72)
    whole = product_of_rows(x, w.t(), torch.float32)
    for first, count in ((0, 1), (1, 2), (7, 64), (3, 147)):
        assert product_of_rows(x[first : first + count], w.t(), torch.float32).equal(whole[first : first + count])
    off = torch.empty(x.numel() + 1, dtype=dtype, device=device)[1:].view(x.shape).copy_(x)
    out = torch.full((150, 72), torch.nan, device=device)
    assert product_of_rows(off, w.t(), torch.float32, out) is out and out.equal(whole)


def test_no_rows_and_operands_of_two_kinds(device: torch.device) -> None:
    x, w = operands(device, torch.float32, 96, 72)
    assert product_of_rows(x[:0], w.t(), torch.float32).shape == (0, 72)
    with pytest.raises(TypeError, match="or both"):
        product_of_rows(x, w.t().bfloat16(), torch.float32)
