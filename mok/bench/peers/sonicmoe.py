"""SonicMoE (the distribution sonic-moe, with quack-kernels): its two differentiable halves on routes that are given.

What its own layer does after its router: metadata from the ids of the K experts of each token, up projection, down projection.
Written for release 0.1.2, whose functions have leading underscores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mok.bench.peers.absent import Absent
from mok.bench.peers.layer import Fused

__all__ = ["sonicmoe"]


def sonicmoe(problem: Any) -> Fused:
    """A contestant. Raises Absent where SonicMoE, or a function that is used of it, is missing."""
    try:
        from sonicmoe.enums import ActivationType
        from sonicmoe.functional import _DownProjection, _UpProjection
        from sonicmoe.functional.triton_kernels import TC_topk_router_metadata_triton
    except ImportError as error:
        raise Absent(f"SonicMoE 0.1.2 is not installed: pip install sonic-moe quack-kernels ({error})") from error

    def compute(x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, gate_up_EJH: Tensor, down_EHI: Tensor) -> Tensor:
        (tokens, top_k), experts = ids_TK.shape, down_EHI.shape[0]
        routes = tokens * top_k

        def ints(size: int) -> Tensor:
            return torch.empty(size, dtype=torch.int32, device=x_TH.device)

        counts, offsets = ints(experts), ints(experts + 1)
        gather, scatter, reverse = ints(routes), ints(routes), ints(routes)
        TC_topk_router_metadata_triton(ids_TK, experts, counts, offsets, gather, scatter, reverse)
        hidden, gate_up = _UpProjection.apply(
            x_TH, gate_up_EJH.permute(1, 2, 0), None, offsets, routes, top_k, gather, scatter, reverse, None, False,
            ActivationType.SWIGLU, False, True,
        )  # fmt: skip
        return _DownProjection.apply(
            hidden, gate_up, down_EHI.permute(1, 2, 0), None, weights_TK, offsets, tokens, top_k, gather, scatter, reverse,
            None, False, ActivationType.SWIGLU,
        )  # fmt: skip

    return Fused("SonicMoE", problem, compute)
