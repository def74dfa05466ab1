"""8-bit codes and scales: the kernel and the torch backend against the definition, bit for bit, on any fp32 or bf16 value."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mok.backends.quantization import round_row_groups, round_rows, round_weight
from mok.launch.quantize import quantize, quantize_squares
from mok.quantization import FORMATS
from mok.reference import quantization as definition
from tests.kernels.cross_compile import reports
from tests.tolerances import assert_same_bits

NASTY = torch.tensor(
    [
        *(0.0, -0.0, 448.0, -448.0, 448.00003, 464.0, 480.0, 512.0),  # around the largest code
        *(2.0**-9, 2.0**-10, -(2.0**-10), 1.5 * 2.0**-9, 2.5 * 2.0**-9, 2.0**-6, 0.0154),  # subnormal codes, ties, the border
        *(1.0625, 1.1875, 17.0, 19.0, 1.0624999),  # ties between codes, to either side
        *(1e-45, -1e-45, 1.1754942e-38, 1.1754944e-38, 2.0**-119, 2.0**-120),  # fp32 subnormals, the least scale
        *(3.4028235e38, -3.3e38, 1.7e38),  # the largest
    ]
)


def matrix(rows: int, columns: int, seed: int, kind: str, dtype: torch.dtype) -> Tensor:
    """kind: bits (any finite pattern), nasty (values with known trouble), narrow (a few binades, full of ties)."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "nasty":
        scale = 2.0 ** torch.randint(-3, 4, (rows, 1), generator=generator)
        values = NASTY[torch.randint(len(NASTY), (rows, columns), generator=generator)] * scale
    elif kind == "narrow":
        values = torch.randint(-256, 257, (rows, columns), generator=generator) / 16.0
    else:
        values = torch.randint(-(2**31), 2**31, (rows, columns), generator=generator).to(torch.int32).view(torch.float32)
    values = values.to(dtype)
    return torch.where(values.isfinite(), values, torch.ones((), dtype=dtype))


MATRICES = {
    "rows": st.integers(1, 200),
    "blocks": st.integers(1, 5),
    "seed": st.integers(0, 2**20),
    "kind": st.sampled_from(["bits", "nasty", "narrow"]),
    "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
}


def codes_and_scales(x: Tensor, block_rows: int, block_columns: int) -> tuple[Tensor, Tensor]:
    """By the definition, for blocks of that many rows and columns."""
    rows, columns = x.shape
    codes = torch.empty(rows, columns, dtype=torch.uint8)
    scales = torch.empty(-(-rows // block_rows), -(-columns // block_columns), dtype=torch.uint8)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = slice(i * block_rows, (i + 1) * block_rows), slice(j * block_columns, (j + 1) * block_columns)
            codes[block], scales[i, j] = definition.quantize_block(x[block])
    return codes, scales


def same_as_definition(x: Tensor, block: int, device: torch.device) -> None:
    """The kernel's codes and scales in both orientations from one launch, and the values that the torch backend computes on."""
    found = quantize(x.to(device), block)
    for name, part, shape in (("rows", found.rows, (1, block)), ("columns", found.columns, (block, 1))):
        codes, scales = codes_and_scales(x, *shape)
        assert_same_bits(f"codes of {name}", part.codes.view(torch.uint8).cpu(), codes)
        assert_same_bits(f"scales of {name}", part.scales.view(torch.uint8).cpu(), scales)
    rounded = definition.round_rows(x, block), definition.round_row_groups(x, block)
    for values, wanted in zip((round_rows(x, block), round_row_groups(x, block)), rounded, strict=True):
        assert_same_bits("rounded", values, wanted)
    for part, wanted in zip(found, rounded, strict=True):
        back = part.dequantized(x.dtype).cpu()  # the sign of its NaN is nobody's
        assert_same_bits("dequantized", back.masked_fill(back.isnan(), torch.nan), wanted)


@settings(max_examples=12)
@given(**MATRICES)
def test_mxfp8_is_its_definition(
    device: torch.device, rows: int, blocks: int, seed: int, kind: str, dtype: torch.dtype
) -> None:
    same_as_definition(matrix(rows, 32 * blocks, seed, kind, dtype), 32, device)


@settings(max_examples=6)
@given(**MATRICES)
def test_fp8_block_is_its_definition(
    device: torch.device, rows: int, blocks: int, seed: int, kind: str, dtype: torch.dtype
) -> None:
    same_as_definition(matrix(rows, 128 * blocks, seed, kind, dtype), 128, device)


@settings(max_examples=6)
@given(**MATRICES)
def test_weights_in_squares(device: torch.device, rows: int, blocks: int, seed: int, kind: str, dtype: torch.dtype) -> None:
    x = matrix(128 * -(-rows // 100), 128 * blocks, seed, kind, dtype)
    found = quantize_squares(x.to(device), 128)
    codes, scales = codes_and_scales(x, 128, 128)
    assert_same_bits("codes", found.codes.view(torch.uint8).cpu(), codes)
    assert_same_bits("scales", found.scales.view(torch.uint8).cpu(), scales)
    one, other = round_weight(x.unsqueeze(0), FORMATS["fp8_block"])
    assert one is other
    assert_same_bits("rounded", one[0], definition.round_weight(x, 128, square=True)[0])


def test_example_of_the_docstring(device: torch.device) -> None:
    from mok.kernels.quantize import quantize_tiles

    x = torch.tensor([[448.0, -0.0], [1.0, 0.0]], device=device)
    codes, scales, more_codes, more_scales = (torch.empty(2, n, dtype=torch.uint8, device=device) for n in (2, 1, 2, 2))
    quantize_tiles[(1, 1)](
        x, codes, scales, more_codes, more_scales[:1], 2, 2, 2, BLOCK=2, TILE=2, ROWS=True, COLUMNS=True, SQUARES=False
    )
    assert codes.tolist() == [[0x7E, 0x80], [0x78, 0x00]] and scales.flatten().tolist() == [127, 119]
    assert more_codes.tolist() == [[0x7E, 0x80], [0x38, 0x00]] and more_scales[0].tolist() == [127, 0]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_makes_its_block_nan_and_no_other(bad: float, device: torch.device) -> None:
    x = torch.ones(64, 64)
    x[33, 5] = bad
    same_as_definition(x, 32, device)
    rows, columns = round_rows(x, 32), round_row_groups(x, 32)
    assert rows[33, :32].isnan().all() and rows.isnan().sum() == 32
    assert columns[32:, 5].isnan().all() and columns.isnan().sum() == 32


def test_nothing_saturates_and_the_relative_error_is_half_a_step() -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).exp()
    x = x.clamp(min=x.amax(1, keepdim=True) * 2.0**-14)  # normal codes only
    for rounded in (round_rows(x, 32), definition.round_rows(x, 32)):
        assert ((rounded - x).abs() <= x * 2.0**-4).all()


def test_definition_is_torchs_cast_where_that_is_defined() -> None:
    values = torch.cat((NASTY, torch.arange(-448.0, 449.0, 0.25), torch.arange(-64, 65) * 2.0**-12))
    values = torch.cat((values[values.abs() <= 448], torch.full((1,), 448.0)))  # the largest makes the scale 1
    codes, scale = definition.quantize_block(values)
    assert scale == 127
    assert_same_bits("codes", codes, values.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("arch", [90, 100, 103])
def test_compiles_without_a_gpu(arch: int) -> None:
    found = reports(arch, "tests.kernels.launches_quantize")
    assert len(found) == 3
    for report in found:
        assert report["kernel"] == "quantize_tiles" and report["spill_bytes"] == 0, report
        assert report["instructions"]["fused_multiply_add"] == 0, report
