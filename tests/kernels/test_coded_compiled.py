"""The megakernel on 8-bit operands compiled for Hopper, on any machine: its instructions, registers and memory."""

from __future__ import annotations

import pytest

from mok.launch.config import KernelConfig
from tests.kernels.cross_compile import reports

MAX_SPILL_BYTES = {"mega_forward_coded": 0, "mega_backward_coded": 512}
"""The DH epilogue holds 64 columns of d(gate) and d(up) until the other 64 of their block are there; 368 bytes with Triton
3.6."""

ACCUMULATOR_VALUES = 64
"""Of each product, in every thread: each is scaled and added by one fused instruction, which is exact but for that addition."""


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict]:
    found = reports(90, "tests.kernels.launches_coded")
    return {report["kernel"]: report for report in found}


@pytest.mark.parametrize("name", MAX_SPILL_BYTES)
def test_compiles_to_8_bit_products(name: str, compiled: dict[str, dict]) -> None:
    report = compiled[name]
    found = report["instructions"]
    per_tile = 4  # products of 32 elements in a block of 128
    assert found["wgmma_8_bit"] >= 16 and found["bulk_load"] > 0 and found["bulk_store"] > 0, report
    assert (found["wgmma"] > found["wgmma_8_bit"]) == (name == "mega_backward_coded"), "weight gradients are bf16"
    assert found["fused_multiply_add"] == found["wgmma_8_bit"] // per_tile * ACCUMULATOR_VALUES, "only where scales are exact"
    assert found["mma"] == found["async_copy"] == 0, report


@pytest.mark.parametrize("name", MAX_SPILL_BYTES)
def test_fits(name: str, compiled: dict[str, dict]) -> None:
    report = compiled[name]
    assert report["num_warps"] == 12 and report["registers"] <= 168, report
    assert report["shared_bytes"] <= KernelConfig().coded_shared_bytes <= 232448, report
    assert report["spill_bytes"] <= MAX_SPILL_BYTES[name], report
    assert not [warning for warning in report["warnings"] if warning.startswith("(C751")], "products wait for one another"


@pytest.mark.parametrize("name", ["quantize_weights", "dispatch_scales"])
def test_what_prepares_operands_spills_nothing(name: str, compiled: dict[str, dict]) -> None:
    assert compiled[name]["spill_bytes"] == 0
