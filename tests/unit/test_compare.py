"""Byte comparison of tensors: every difference is named and measured, nothing equal is reported."""

from __future__ import annotations

import math

import pytest
import torch

from mok.determinism.compare import compare_states, compare_tensors, ulp_distance
from mok.determinism.digest import digest, digest_of_state


def nan(payload: int) -> torch.Tensor:
    """One fp32 NaN with this payload."""
    return torch.tensor([0x7FC00000 | payload], dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    ("left", "right", "kind"),
    [
        pytest.param(nan(0), nan(0), None, id="the same NaN"),
        pytest.param(nan(0), nan(1), "bits", id="another NaN payload"),
        pytest.param(torch.tensor([0.0]), torch.tensor([-0.0]), "bits", id="signed zero"),
        pytest.param(torch.tensor([1.0]), torch.nextafter(torch.tensor([1.0]), torch.tensor([2.0])), "bits", id="next float"),
        pytest.param(torch.tensor([1.5]).bfloat16(), torch.tensor([1.5]), "dtype", id="dtype"),
        pytest.param(torch.zeros(2, 3), torch.zeros(3, 2), "shape", id="shape"),
        pytest.param(torch.tensor([1, 2]), torch.tensor([1, 3]), "bits", id="integers"),
        pytest.param(torch.tensor([True]), torch.tensor([False]), "bits", id="booleans"),
        pytest.param(torch.tensor([1, 2]), torch.tensor([1, 2]), None, id="equal integers"),
        pytest.param(torch.zeros(0), torch.zeros(0), None, id="empty"),
        pytest.param(torch.tensor(2.0), torch.tensor(3.0), "bits", id="no axes"),
        pytest.param(torch.tensor([1 + 2j]), torch.tensor([1 + 3j]), "bits", id="complex"),
        pytest.param(torch.arange(6.0).view(2, 3).t(), torch.arange(6.0).view(2, 3).t().contiguous(), None, id="strides"),
    ],
)
def test_pairs(left: torch.Tensor, right: torch.Tensor, kind: str | None) -> None:
    difference = compare_tensors("w", left, right)
    assert (difference.kind if difference else None) == kind
    assert (digest(left) == digest(right)) is (kind is None)


def test_a_difference_is_located_and_measured() -> None:
    left = torch.linspace(-1, 1, 24).view(4, 6)
    right = left.clone()
    right.view(torch.int32)[2, 3] += 5
    right[3, 0] += 0.25
    difference = compare_tensors("w", left, right)
    assert difference is not None
    assert (difference.index, difference.coordinates, difference.ulp) == (15, (2, 3), 5)
    assert (difference.num_differing, difference.num_elements) == (2, 24)
    assert math.isclose(difference.max_difference, 0.25, rel_tol=1e-6)
    decimals = torch.tensor([float(value) for value in difference.values])
    assert torch.equal(decimals, torch.stack([left[2, 3], right[2, 3]])), "nine digits name one fp32 number"
    patterns = torch.tensor([int(value, 16) for value in difference.hex_values], dtype=torch.int32)
    assert torch.equal(patterns.view(torch.float32), torch.stack([left[2, 3], right[2, 3]]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_ulp_counts_representable_numbers_across_zero(dtype: torch.dtype) -> None:
    zero = torch.zeros(1, dtype=dtype)
    above = torch.nextafter(zero, torch.ones(1, dtype=dtype))
    assert ulp_distance(zero, above) == 1
    assert ulp_distance(-zero, zero) == 1
    assert ulp_distance(-above, above) == 3
    assert ulp_distance(zero, zero) == 0


def test_states_are_compared_by_name_and_every_difference_is_named() -> None:
    left = {"a": torch.zeros(2), "only_left": torch.zeros(1), "same": torch.full((3,), float("nan")), "b": torch.tensor([1, 2])}
    right = {
        "b": torch.tensor([1, 9]),
        "same": torch.full((3,), float("nan")),
        "a": torch.zeros(2),
        "only_right": torch.zeros(1),
    }
    assert [(d.name, d.kind) for d in compare_states(left, right)] == [
        ("only_left", "missing"),
        ("b", "bits"),
        ("only_right", "missing"),
    ]
    assert digest_of_state(left) != digest_of_state(right)
    assert digest_of_state({"x": torch.zeros(1), "y": torch.ones(1)}) == digest_of_state(
        {"y": torch.ones(1), "x": torch.zeros(1)}
    )
    assert digest_of_state({"x": torch.zeros(1)}) != digest_of_state({"y": torch.zeros(1)})
