"""Compiled kernels: several processes may fill one empty cache at the same time; nothing is chosen by timing."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.kernels.cross_compile import reports

ROOT = Path(__file__).parents[2]


def test_processes_that_compile_the_same_kernel_into_one_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: reports(90, "tests.kernels.launches_digest"), range(3)))
    assert found[0] and found[1:] == found[:1] * 2
    assert not [path.name for path in (tmp_path / "cache").rglob("*") if "tmp" in path.name], "a half-written file is left"


def test_no_kernel_is_tuned_by_timing() -> None:
    sources = [*(ROOT / "mok" / "kernels").glob("*.py"), *(ROOT / "mok" / "launch").glob("*.py")]
    assert sources
    for source in sources:
        assert not re.search(r"\bautotune\b|do_bench|perf_counter", source.read_text()), source
