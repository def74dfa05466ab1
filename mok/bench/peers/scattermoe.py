"""ScatterMoE: its grouped linear layers around SwiGLU. It is on GitHub (shawntan/scattermoe) and on no package index.

Written for release 0.3.0.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import silu

from mok.bench.peers.absent import Absent
from mok.bench.peers.layer import Fused

__all__ = ["scattermoe"]


def scattermoe(problem: Any) -> Fused:
    """A contestant. Raises Absent where ScatterMoE is missing."""
    try:
        from scattermoe.parallel_experts import flatten_sort_count, parallel_linear
    except ImportError as error:
        raise Absent(
            f"ScatterMoE 0.3.0 is not installed: pip install git+https://github.com/shawntan/scattermoe ({error})"
        ) from error

    def compute(x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, gate_up_EJH: Tensor, down_EHI: Tensor) -> Tensor:
        experts, order, offsets = flatten_sort_count(ids_TK.long(), num_experts=down_EHI.shape[0])
        rows = parallel_linear(x_TH, gate_up_EJH.permute(0, 2, 1), ids_TK.shape[1], experts, order, offsets, grouped_out=True)
        gate, up = rows.chunk(2, dim=-1)
        hidden, weights = silu(gate) * up, weights_TK.to(x_TH.dtype)
        return parallel_linear(hidden, down_EHI.permute(0, 2, 1), 1, experts, order, offsets, gates=weights, grouped_in=True)

    return Fused("ScatterMoE", problem, compute)
