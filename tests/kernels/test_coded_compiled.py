"""Kernels on 8-bit operands compiled for Hopper and Blackwell, on any machine: their instructions, registers and memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from mok.launch.config import KernelConfig
from tests.kernels.cross_compile import reports

MAX_SPILL_BYTES = {"mega_forward_coded": 0, "mega_backward_coded": 512}
"""The DH epilogue holds 64 columns of d(gate) and d(up) until the other 64 of their block are there; 368 bytes with Triton
3.6."""

STAGED_SPILL_BYTES = 0

ACCUMULATOR_VALUES = 64
"""Of each product, in every thread: each is scaled and added by one fused instruction, which is exact but for that addition."""


TILES = ("run_gate_up", "run_down", "run_dh", "run_dx")
BLACKWELL = (100, 103)


@pytest.fixture(scope="module")
def by_arch() -> dict[int, dict[str, dict]]:
    """The reports by architecture and kernel, two processes at a time."""
    architectures = (90, *BLACKWELL)
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda arch: reports(arch, "tests.kernels.launches_coded"), architectures)
        return {arch: {report["kernel"]: report for report in part} for arch, part in zip(architectures, found, strict=True)}


@pytest.fixture(scope="module")
def compiled(by_arch: dict[int, dict[str, dict]]) -> dict[str, dict]:
    return by_arch[90]


@pytest.mark.parametrize("arch", [90, *BLACKWELL])
@pytest.mark.parametrize("name", TILES)
def test_staged_tiles_use_the_8_bit_units(name: str, arch: int, by_arch: dict[int, dict[str, dict]]) -> None:
    report = by_arch[arch][name]
    found = report["instructions"]
    if arch == 90:
        assert found["wgmma"] == found["wgmma_8_bit"] > 0, report
    else:
        assert found["tcgen05"] == found["tcgen05_scaled"] > 0 and found["fused_multiply_add"] == 0, report
    assert found["bulk_load"] > 0 and found["mma"] == 0 and report["spill_bytes"] <= STAGED_SPILL_BYTES, report


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
