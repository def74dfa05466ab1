"""The kernels between the dense products compiled to machine code for the GPUs they are meant for, on any machine."""

from __future__ import annotations

import pytest

from tests.kernels.cross_compile import reports

KERNELS = {
    "adamw", "cross_entropy", "norm_and_rotate", "norm_and_rotate_backward", "rms_norm", "rms_norm_backward", "square_sums",
}  # fmt: skip


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_every_kernel_compiles_without_spills_and_rounds_products_apart(arch: int) -> None:
    found = reports(arch, "tests.kernels.launches_dense")
    assert {report["kernel"] for report in found} == KERNELS
    for report in found:
        assert report["spill_bytes"] == 0, report
        assert report["instructions"]["fused_multiply_add"] == 0, report
