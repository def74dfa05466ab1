"""`mok bench exchange` on CPU ranks: what it times, what it leaves out, what it refuses."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_all_to_all_is_checked_and_timed(mok: Run) -> None:
    done = mok(
        "bench", "exchange", "--shape", "toy", "--nproc", "2", "--tokens", "32", "--calls", "2", "--device", "cpu", "--json"
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [row["what"] for row in report["rows"]] == ["plan", "dispatch", "combine", "forward", "backward"]
    assert all(row["median_ms"] > 0 and row["name"] == "collective (gloo), torch" for row in report["rows"])
    # A row of 128 fp32 values for each route to the other rank: about half of 64.
    assert 0 < report["rows"][1]["link_bytes"] < 64 * 512 and report["rows"][1]["link_bytes"] % 512 == 0
    assert "no memory to open" in report["left_out"]["peer, staged"]
    assert report["environment"]["ranks"] == 2 and not report["environment"]["ranks_share_a_gpu"]


def test_ranks_that_cannot_share_the_experts_are_refused(mok: Run) -> None:
    done = mok("bench", "exchange", "--shape", "toy", "--nproc", "3")
    assert done.returncode == 2 and "must be 2 or more and divide the 8 experts" in done.stderr
    done = mok("bench", "exchange", "--shape", "toy", "--device", "cpu", "--trace", "timeline.json")
    assert done.returncode == 2 and "--trace: the megakernel needs a CUDA device" in done.stderr
    done = mok("bench", "exchange", "--shape", "nonsense")
    assert done.returncode == 2 and "must be one of toy" in done.stderr
