"""The megakernel compiled to machine code for Hopper and Blackwell, on any machine: its instructions, registers and memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.kernels.cross_compile import reports

ARCHITECTURES = (90, 100, 103)
BLACKWELL = (100, 103)

MAX_SPILL_BYTES = {"mega_forward": 0, "mega_backward": 96}
"""The backward keeps pointers of its combine through all tiles: a few spill around the widest epilogue (DH), never in a loop of
products; 52, 84 and 72 bytes with Triton 3.6, 3.7 and 3.8."""

CLAMPED_SPILL_BYTES = 1024
"""The clamped DH epilogue keeps raw and limited values of a few elements at a time; it spills once in 64 columns, never in a
loop of products: 436, 496 and 940 bytes with Triton 3.6, 3.7 and 3.8, with shared experts and gate and up computed again."""

BLACKWELL_SPILL_BYTES = 64
"""Eight warps finish a tile whose sums are in tensor memory; a role spills a little."""


@pytest.fixture(scope="module")
def compiled() -> dict[int, list[dict]]:
    """The reports of both launches by architecture, two processes at a time."""
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda arch: reports(arch, "tests.kernels.launches_mega"), ARCHITECTURES)
        return {
            arch: [report for report in part if report["kernel"].startswith("mega_")]
            for arch, part in zip(ARCHITECTURES, found, strict=True)
        }


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_products_and_copies_use_the_units_of_the_architecture(arch: int, compiled: dict[int, list[dict]]) -> None:
    assert [report["kernel"] for report in compiled[arch]] == ["mega_forward", "mega_backward"] * (1 if arch == 103 else 2)
    for report in compiled[arch]:
        found = report["instructions"]
        assert found["bulk_load"] > 0 and found["bulk_store"] > 0, report
        assert found["mma"] == found["async_copy"] == 0, report
        assert found["fused_multiply_add"] == 0, "products and sums must be rounded apart (docs/numerics.md, rule 4)"
        if arch in BLACKWELL:
            assert found["tcgen05"] >= 4 and found["tensor_memory_load"] > 0 and found["wgmma"] == 0, report
            assert (found["tensor_memory_store"] > 0) == (report["kernel"] == "mega_backward"), report  # gradients carried on
        else:
            assert found["wgmma"] >= 8 and found["tcgen05"] == found["tensor_memory_load"] == 0, report


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_registers_and_shared_memory_fit(arch: int, compiled: dict[int, list[dict]]) -> None:
    for place, report in enumerate(compiled[arch]):
        assert report["num_warps"] == 12 and report["registers"] <= 168 and report["shared_bytes"] <= 232448, report
        allowed = MAX_SPILL_BYTES[report["kernel"]] if place < 2 else CLAMPED_SPILL_BYTES
        assert report["spill_bytes"] <= (BLACKWELL_SPILL_BYTES if arch in BLACKWELL else allowed), report


def test_no_product_is_serialized(compiled: dict[int, list[dict]]) -> None:
    """C7510 to C7515: ptxas waits after every wgmma, at half the speed."""
    for report in (report for part in compiled.values() for report in part):
        assert not [warning for warning in report["warnings"] if warning.startswith("(C751")], report
