"""Which GPU of its machine a rank has, and with how many others it shares it.

A GPU for each rank is the rule. Where a launcher starts more ranks than there are GPUs they take them in turns, for tests of
what ranks do together: the bits are the same, the speed says nothing. Read next: `mok/train/processes.py`.
"""

from __future__ import annotations

import os

import torch

from mok.errors import UsageError
from mok.topology.ranks import local_rank

__all__ = ["own_gpu", "ranks_of_a_gpu", "share_memory_of_one_gpu"]


def own_gpu() -> torch.device:
    """The GPU of this rank."""
    return torch.device("cuda", local_rank() % torch.cuda.device_count())


def ranks_of_a_gpu() -> int:
    """How many ranks of this machine have the same GPU, at most: 1 where there are enough."""
    gpus, ranks = torch.cuda.device_count(), os.environ.get("LOCAL_WORLD_SIZE") or "1"
    if not ranks.isdecimal():
        raise UsageError(
            f"LOCAL_WORLD_SIZE={ranks} in the environment: not a number; a launcher sets it, so without one unset it"
        )
    return -(-int(ranks) // gpus) if gpus else 1


def share_memory_of_one_gpu() -> None:
    """Let ranks of one GPU open memory to one another, where they have to: torch's symmetric memory refuses it otherwise."""
    if ranks_of_a_gpu() > 1:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
