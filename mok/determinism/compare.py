"""Compares tensors as bytes and says where, by how much and how often they differ.

Bytes, not values: -0.0 differs from 0.0 and NaN payloads count, while a NaN equals the same NaN.
Read next: `mok/determinism/trace.py`, which finds the step and the tensor; this module looks inside one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mok.determinism.digest import bytes_of

__all__ = ["INTEGER_OF_SIZE", "Difference", "compare_states", "compare_tensors", "ulp_distance"]

INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """One tensor that is not the same in two places.

    kind: "missing", "dtype", "shape" or "bits"; the fields after `what` are set for "bits" only.
    index: flat index of the first element that differs; coordinates: the same as one index per axis.
    ulp: representable numbers between the two values there; None for integers, NaN, infinities of unlike sign and so on.
    num_differing, num_elements: elements that differ, of all.
    max_difference: largest absolute difference of the finite elements (complex and integer tensors included).
    """

    name: str
    kind: str
    what: str
    index: int = -1
    coordinates: tuple[int, ...] = ()
    values: tuple[str, str] = ("", "")
    hex_values: tuple[str, str] = ("", "")
    ulp: int | None = None
    num_differing: int = 0
    num_elements: int = 0
    max_difference: float = 0.0

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"


def compare_tensors(name: str, left: torch.Tensor, right: torch.Tensor) -> Difference | None:
    """None if both have the same dtype, shape and bytes; sparse and quantised tensors are not handled."""
    if left.dtype != right.dtype:
        return Difference(name, "dtype", f"dtype {short(left.dtype)} against {short(right.dtype)}")
    if left.shape != right.shape:
        return Difference(name, "shape", f"shape {list(left.shape)} against {list(right.shape)}")
    left, right = left.detach().cpu(), right.detach().cpu()
    size = left.element_size()
    left_bytes = bytes_of(left).view(-1, size)
    right_bytes = bytes_of(right).view(-1, size)
    differs = (left_bytes != right_bytes).any(1)
    num_differing = int(differs.sum())
    if not num_differing:
        return None
    index = int(differs.to(torch.uint8).argmax())
    at = (left.reshape(-1)[index : index + 1], right.reshape(-1)[index : index + 1])
    values = (decimal(at[0]), decimal(at[1]))
    # Most significant byte first, as numbers are read.
    hex_values = tuple("0x" + bytes(raw[index].flip(0).tolist()).hex() for raw in (left_bytes, right_bytes))
    ulp = ulp_distance(*at) if left.dtype.is_floating_point else None
    share = num_differing / left.numel()
    what = (
        f"element {index} is {values[0]} ({hex_values[0]}) against {values[1]} ({hex_values[1]})"
        + (f", {ulp} ULP apart" if ulp is not None else "")
        + f"; {num_differing} of {left.numel()} elements differ ({share:.2%})"
    )
    coordinates = tuple(int(axis) for axis in torch.unravel_index(torch.tensor(index), left.shape)) if left.dim() else ()
    return Difference(
        name,
        "bits",
        what,
        index,
        coordinates,
        values,
        (hex_values[0], hex_values[1]),
        ulp,
        num_differing,
        left.numel(),
        largest_difference(left, right),
    )


def compare_states(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> list[Difference]:
    """Every difference, in the order of `left`, then the names only `right` has."""
    found = []
    for name, tensor in left.items():
        if name not in right:
            found.append(Difference(name, "missing", "is missing in the second"))
        elif difference := compare_tensors(name, tensor, right[name]):
            found.append(difference)
    found += [Difference(name, "missing", "is missing in the first") for name in right if name not in left]
    return found


def ulp_distance(left: torch.Tensor, right: torch.Tensor) -> int | None:
    """Representable numbers from `left` to `right` (one element each, one floating dtype); None where one is NaN.

    +0.0 and -0.0 are one step apart, since they are two bit patterns.
    """
    if bool(left.isnan().any()) or bool(right.isnan().any()):
        return None
    return abs(ordinal(left) - ordinal(right))


def ordinal(value: torch.Tensor) -> int:
    """The place of a float among all floats of its dtype, rising with the value: -0.0 is -1 and +0.0 is 0."""
    bits = int(value.contiguous().view(INTEGER_OF_SIZE[value.element_size()]))
    width = 8 * value.element_size()
    return bits if bits >= 0 else -(bits & ((1 << (width - 1)) - 1)) - 1


def largest_difference(left: torch.Tensor, right: torch.Tensor) -> float:
    wide = torch.complex128 if left.dtype.is_complex else torch.float64
    gap = (left.to(wide) - right.to(wide)).abs()
    gap = gap[torch.isfinite(gap)]
    return float(gap.max()) if gap.numel() else 0.0


def decimal(value: torch.Tensor) -> str:
    """Enough digits to tell neighbours apart: 9 for fp32 and below, 17 for fp64."""
    item = value.item()
    if isinstance(item, float):
        return f"{item:.17g}" if value.dtype == torch.float64 else f"{item:.9g}"
    return str(item)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
