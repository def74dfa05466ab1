"""Where the kernels of these tests run: on the GPU if there is one, else on the CPU in Triton's patched interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import interpreter


@pytest.fixture(scope="session")
def device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    interpreter.install()
    return torch.device("cpu")
