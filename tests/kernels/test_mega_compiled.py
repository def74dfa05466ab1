"""The megakernel compiled to machine code for Hopper, on any machine: its instructions, registers and memory."""

from __future__ import annotations

import pytest

from mok.kernels.gluon_compat import RELEASE
from tests.kernels.cross_compile import reports

MAX_SPILL_BYTES = {"mega_forward": 0, "mega_backward": 640 if RELEASE == "3.8" else 64}
"""The widest epilogue (DH) spills some values in 64 columns, never in a loop of products; with Triton 3.8 more of them."""

CLAMPED_SPILL_BYTES = 1024
"""The clamped DH epilogue keeps raw and limited values; it spills once in 64 columns, never in a loop of products."""


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    return [report for report in reports(90, "tests.kernels.launches_mega") if report["kernel"].startswith("mega_")]


def test_products_and_copies_use_hopper_units(compiled: list[dict]) -> None:
    assert [report["kernel"] for report in compiled] == ["mega_forward", "mega_backward"] * 2
    for report in compiled:
        found = report["instructions"]
        assert found["wgmma"] >= 8 and found["bulk_load"] > 0 and found["bulk_store"] > 0, report
        assert found["mma"] == found["async_copy"] == 0, report
        assert found["fused_multiply_add"] == 0, "products and sums must be rounded apart (docs/numerics.md, rule 4)"


def test_registers_and_shared_memory_fit(compiled: list[dict]) -> None:
    for place, report in enumerate(compiled):
        assert report["num_warps"] == 12 and report["registers"] <= 168 and report["shared_bytes"] <= 232448, report
        assert report["spill_bytes"] <= (MAX_SPILL_BYTES[report["kernel"]] if place < 2 else CLAMPED_SPILL_BYTES), report


def test_no_product_is_serialized(compiled: list[dict]) -> None:
    """C7510 to C7515: ptxas waits after every wgmma, at half the speed."""
    for report in compiled:
        assert not [warning for warning in report["warnings"] if warning.startswith("(C751")], report
