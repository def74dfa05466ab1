"""The 8-bit formats that expert products may take their operands in, and what a recipe chooses among them.

Owns names, block sizes and which products are meant; docs/numerics.md says how a value is rounded. Needs no torch. Read next:
`mok/reference/quantization.py`, the definition, and `mok/backends/quantization.py`, which computes it.
"""

from __future__ import annotations

from dataclasses import dataclass

from mok.errors import UsageError

__all__ = ["FORMATS", "Format", "Quantization"]


@dataclass(frozen=True)
class Format:
    """E4M3 values with one scale, a power of two, per block.

    block: values along the contraction axis that share a scale. square_weights: in a weight, block x block values share one,
    so that both orientations have the same values; else each orientation has blocks of its own.
    """

    name: str
    block: int
    square_weights: bool

    def misfits(self, sizes: dict[str, int]) -> list[str]:
        """Which of `sizes` (by name) the format cannot take, in words."""
        return [
            f"{name} = {size} is not a multiple of {self.block}, the block of {self.name}"
            for name, size in sizes.items()
            if size % self.block
        ]


FORMATS = {
    "mxfp8": Format("mxfp8", 32, square_weights=False),
    "fp8_block": Format("fp8_block", 128, square_weights=True),
}
"""By the name that `train.dtype` and `Quantization` use."""


@dataclass(frozen=True)
class Quantization:
    """What of an expert layer is quantised: the operands of the routed experts' products, forward and towards the input.

    format: a name of `FORMATS`. weight_gradients: also the operands of the routed experts' weight gradients, in blocks of rows.
    shared_experts: also the shared experts' products, forward and towards the input. dispatch: rows go to their experts as
    8-bit values and scales; then everything there is computed from those, weight gradients included.
    """

    format: str
    weight_gradients: bool = False
    shared_experts: bool = False
    dispatch: bool = False

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise UsageError(f"quantization format {self.format!r}: must be one of {', '.join(FORMATS)}")

    @property
    def of_blocks(self) -> Format:
        return FORMATS[self.format]
