"""The planner and the staged kernels compiled to machine code for every architecture they are meant for, on any machine."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import triton

from mok.launch.staged import Gpu, choose_config
from tests.kernels.cross_compile import NUM_SMS, SHARED_MEMORY_BYTES, reports

ARCHITECTURES = (80, 89, 90, 100, 103, 120)
PRODUCT = {80: "mma", 89: "mma", 90: "wgmma", 100: "tcgen05", 103: "tcgen05", 120: "mma"}
TILES = {"run_gate_up", "run_down", "run_dh", "run_dx", "run_weights"}
ROWS = {"dispatch_rows", "combine_rows", "sum_partials"}
PLANNER = {
    "count_runs", "scan_runs", "place_experts", "place_routes", "count_groups", "describe_blocks", "write_tasks",
    "count_tokens", "order_tokens",
}  # fmt: skip

WEIGHTS_SPILL_BYTES = 1024
"""A gradient tile of 128 x 256 fp32 is loaded or stored with its addresses beside it, once per tile and outside the loop of
products."""

OTHER_SPILL_BYTES = {80: 256, 89: 256, 90: 0, 100: 0, 103: 0, 120: 256}
"""Where products take operands from registers, ptxas of Triton 3.8 spills up to 248 bytes of `run_dx`, that of 3.7.1 16."""


@pytest.fixture(scope="module")
def compiled() -> dict[int, list[dict]]:
    """The reports by architecture: two processes at a time, the oldest GPUs last since they take longest."""
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda arch: reports(arch, "tests.kernels.launches_staged"), reversed(ARCHITECTURES))
        return dict(zip(reversed(ARCHITECTURES), found, strict=True))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel_compiles(arch: int, compiled: dict[int, list[dict]]) -> None:
    assert {report["kernel"] for report in compiled[arch]} == TILES | ROWS | PLANNER


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tiles_use_the_units_of_the_architecture(arch: int, compiled: dict[int, list[dict]]) -> None:
    for report in compiled[arch]:
        found = report["instructions"]
        assert found["fused_multiply_add"] == 0, f"{report}: sums and products must be rounded apart (docs/numerics.md, rule 4)"
        if report["kernel"] in TILES:
            assert found[PRODUCT[arch]] > 0, report
            assert found["bulk_load" if arch >= 90 else "async_copy"] > 0, report


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_registers_and_shared_memory_fit(arch: int, compiled: dict[int, list[dict]]) -> None:
    config = choose_config(Gpu(arch, NUM_SMS[arch], SHARED_MEMORY_BYTES[arch]))
    for report in compiled[arch]:
        allowed = WEIGHTS_SPILL_BYTES if report["kernel"] == "run_weights" else OTHER_SPILL_BYTES[arch]
        assert report["spill_bytes"] <= allowed, report
        assert not [warning for warning in report["warnings"] if warning.startswith("(C751")], report  # serialised products
        if report["kernel"] in TILES:
            assert report["shared_bytes"] <= config.shared_memory_bytes <= SHARED_MEMORY_BYTES[arch], report


def test_compiles_with_the_release_that_was_asked_for() -> None:
    """`make test-triton` puts one release after another in front of the installed one."""
    release = os.environ.get("MOK_TRITON_RELEASE")
    if not release:
        pytest.skip("only `make test-triton` asks for a release")
    assert triton.__version__.startswith(release + ".")
