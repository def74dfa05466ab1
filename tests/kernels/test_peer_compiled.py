"""The kernels of peer memory, and the megakernel's movers over several ranks, compiled for Hopper on any machine."""

from __future__ import annotations

from collections import Counter

from tests.kernels.cross_compile import reports

KERNELS = (
    *("publish_ids", "raise_and_await", "gather_ids", "keep_local", "trace_rows"),
    *("pull_rows", "pull_weights", "return_rows", "await_rows"),
)
MAX_SPILL_BYTES = {"mega_forward": 160, "mega_backward": 160}
"""The mover has 40 registers and more tables than on one rank; wide rows spill a little around its copies."""


def test_rows_are_pulled_past_the_registers_and_nothing_is_serialized() -> None:
    every = reports(90, "tests.kernels.launches_peer")
    found = {report["kernel"]: report for report in every}
    assert set(KERNELS) | set(MAX_SPILL_BYTES) <= set(found)
    names = Counter(report["kernel"] for report in every)
    # A rank that compiles what others have already keeps them waiting.
    assert all(names[name] == 1 for name in (*KERNELS, *MAX_SPILL_BYTES)), names
    for name, report in found.items():
        assert report["spill_bytes"] <= MAX_SPILL_BYTES.get(name, 0), report
        assert not [warning for warning in report["warnings"] if warning.startswith("(C751")], report
    for name in MAX_SPILL_BYTES:
        report = found[name]
        assert report["registers"] <= 168 and report["shared_bytes"] <= 232448, report
        counts = report["instructions"]
        assert counts["wgmma"] >= 8 and counts["bulk_store"] > 0 and counts["fused_multiply_add"] == 0, report
        # One row of 7168 values in two boxes of 8 KiB: 16 bytes for each of 32 lanes.
        assert counts["async_copy"] % 16 == 0 and counts["async_copy"] > 0, report
