"""The kernels between the dense products compiled to machine code for the GPUs they are meant for, on any machine."""

from __future__ import annotations

import pytest

from tests.kernels.cross_compile import reports

KERNELS = {
    "adamw", "cross_entropy", "norm_and_rotate", "norm_and_rotate_backward", "product_of_rows", "rms_norm", "rms_norm_backward",
    "route", "route_backward", "square_sums",
}  # fmt: skip


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_every_kernel_compiles_without_spills_and_rounds_products_apart(arch: int) -> None:
    found = reports(arch, "tests.kernels.launches_dense")
    assert {report["kernel"] for report in found} == KERNELS
    for report in found:
        assert report["spill_bytes"] == 0, report
        if report["kernel"] != "product_of_rows":  # whose sums of products are fp32 chains either way
            assert report["instructions"]["fused_multiply_add"] == 0, report


def test_the_backward_of_attention_uses_hopper_units() -> None:
    found = reports(90, "tests.kernels.launches_attention")
    tiles = [report for report in found if report["kernel"] in ("attention_backward_kv", "attention_backward_q")]
    assert len(tiles) == 6
    for report in tiles:
        keeps = report["instructions"]["bulk_store"] > 0  # its address takes registers; measured faster all the same
        assert report["instructions"]["wgmma"] > 0 and report["instructions"]["bulk_load"] > 0, report
        assert report["spill_bytes"] <= (352 if keeps else 256) and not report["warnings"], report
    assert sum(report["instructions"]["bulk_store"] > 0 for report in tiles) == 1, "one of them keeps dS"
