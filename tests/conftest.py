"""What every test may use."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

# A slow machine is not a wrong answer, and a test that fails must fail again for whoever looks into it.
hypothesis.settings.register_profile("mok", deadline=None, derandomize=True)
hypothesis.settings.load_profile("mok")

ROOT = Path(__file__).parent.parent

if not Path("/dev/nvidiactl").exists():
    # Before anything imports Triton: without a GPU its kernels run in its interpreter (tests/kernels/interpreter.py).
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is no GPU, and soak tests unless they are asked for."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
    if "soak" not in (config.option.markexpr or ""):
        for item in items:
            if item.get_closest_marker("soak"):
                item.add_marker(pytest.mark.skip(reason="long; run by `make soak`"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """One thread inside this process: most tests are many tiny operations, for which waking a second thread costs more than it
    brings, on a busy machine a hundred times more. Tests of threads set their number themselves."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture
def mok(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the `mok` command in a process of its own, in an empty folder: mok("train", "toy") -> CompletedProcess."""

    def run(*arguments: str, env: dict[str, str] | None = None, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
        command = [sys.executable, "-m", "mok_cli", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )

    return run
