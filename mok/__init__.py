"""Train and verify Mixture-of-Experts language models.

`mok.MoE` is a layer with its router, `mok.moe` its experts for a router of one's own, `mok.errors` what both raise, and
`mok.check_status` asks a GPU whether anything went wrong so far. They are loaded when they are first used: importing the
package loads no torch and touches no GPU.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mok import errors
    from mok.launch.status import check_status
    from mok.layer import moe
    from mok.model.moe import MoE
    from mok.quantization import Quantization

__all__ = ["MoE", "Quantization", "check_status", "errors", "moe"]
__version__ = "0.1.0"

# MKL splits the sum of a long, narrow product among its threads, so their number shows in the bits; in this mode it does not,
# for 10 to 20 % more time in weight gradients. It is read at MKL's first call, so it is set here, not where products are made.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def __getattr__(name: str) -> Any:
    if name == "MoE":
        return import_module("mok.model.moe").MoE
    if name == "moe":
        return import_module("mok.layer").moe
    if name == "check_status":
        return import_module("mok.launch.status").check_status
    if name == "Quantization":
        return import_module("mok.quantization").Quantization
    if name == "errors":
        return import_module("mok.errors")
    raise AttributeError(f"module 'mok' has no attribute {name!r}")
