"""`mok bench layer --nproc`: a layer over ranks, checked against float64 on every rank before it is timed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_groups_beside_each_other_are_checked_and_timed(mok: Run) -> None:
    sizes = ("--shape", "toy", "--tokens", "9", "--routing", "skewed", "--calls", "2", "--device", "cpu")
    done = mok("bench", "layer", *sizes, "--nproc", "4", "--ep", "2", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)["toy"]
    names = ["mok torch, collective", "all-to-all, grouped_mm"]
    assert [row["name"] for row in report["rows"]] == [name for name in names for _ in range(2)]
    assert [row["direction"] for row in report["rows"]] == ["forward", "forward+backward"] * 2
    for row in report["rows"]:
        assert row["median_ms"] > 0 and 0 < row["relative_error"] < 0.02
        times = 1 if row["direction"] == "forward" else 3
        assert row["tflops"] == pytest.approx(times * 2 * 9 * 3 * 128 * 2 * 128 / row["median_ms"] / 1e9, rel=1e-6)
    assert set(report["left_out"]) == {"mok staged, peer", "mok mega, peer"}
    assert report["environment"]["ranks"] == 4 and report["environment"]["ep"] == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--nproc", "2", "--ep", "3"), "--ep 3: must divide the 2 ranks"),
        (("--nproc", "3"), "must be 2 or more and divide the 8 experts"),
        (("--ep", "2"), "add --nproc N"),
        (("--nproc", "2", "--against", "torch"), "--against: for one rank only"),
        (("--nproc", "2", "--dtype", "mxfp8"), "--dtype mxfp8"),
        (("--nproc", "2", "--backend", "reference"), "it must be auto or one of staged, mega, torch"),
    ],
)
def test_what_ranks_cannot_time_is_refused(options: tuple[str, ...], said: str, mok: Run) -> None:
    done = mok("bench", "layer", "--shape", "toy", "--device", "cpu", *options)
    assert done.returncode == 2 and said in done.stderr, done.stderr
