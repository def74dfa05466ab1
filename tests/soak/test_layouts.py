"""200 steps on 1, 2 and 4 gloo ranks, experts shared by 1, 2 and 4 of them: one state, one set of metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launches import metrics, run

pytestmark = pytest.mark.soak

LAYOUTS = ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4))


def test_every_layout_ends_with_the_same_bytes(tmp_path: Path) -> None:
    options = ("--steps", "200", "--set", "eval.every=50")
    expected = None
    for ranks, ep in LAYOUTS:
        out = tmp_path / f"{ranks}-{ep}"
        run(tmp_path, out, *options, "--nproc", str(ranks), "--set", f"moe.ep={ep}", limit_s=3600.0)
        found = metrics(out)
        expected = expected or found
        print(f"\n{ranks} ranks, ep {ep}: {found[-1]['state_sha256']}", flush=True)
        assert found == expected
