"""Launches of the backward of causal attention.

Owns block sizes. The layer is `mok/model/attention.py`, the arithmetic `mok/kernels/attention.py`'s.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mok.kernels import attention as kernels

__all__ = ["Blocks", "attention_backward"]


class Blocks(NamedTuple):
    """Of each of the two kernels: queries and keys at a time, warps, stages of loads."""

    kv: tuple[int, int, int, int] = (64, 64, 4, 2)
    q: tuple[int, int, int, int] = (128, 64, 8, 3)


BLOCKS = Blocks()


def attention_backward(
    dout_BSAD: Tensor,
    qk_BSXD: Tensor,
    heads_BSXD: Tensor,
    out_BSAD: Tensor,
    lse_BAS: Tensor,
    dqk_BSXD: Tensor,
    dheads_BSXD: Tensor,
    blocks: Blocks = BLOCKS,
) -> None:
    """Write the gradients of queries and keys into dqk, shaped as qk, and that of the values into the last heads of dheads.

    qk_BSXD: rotated queries of A heads, then keys of G. heads_BSXD: A + 2 G heads, the last G of which are values. All
    contiguous, bf16; lse_BAS fp32, natural logarithms. D is a power of two from 16 on.
    """
    batch, length, num_heads, dim = out_BSAD.shape
    num_kv = qk_BSXD.shape[2] - num_heads
    group, tokens, scale = num_heads // num_kv, batch * length, dim**-0.5
    sums = torch.empty_like(lse_BAS)
    kernels.dout_times_out[(tokens,)](
        out_BSAD,
        dout_BSAD,
        sums,
        num_heads,
        length,
        DIM=dim,
        HEADS=triton.next_power_of_2(num_heads),
        num_warps=4,
        enable_fp_fusion=False,
    )

    def rows(tensor_BSXD: Tensor, block: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(tensor_BSXD.view(tokens, -1), [block, dim])

    columns = {"Q_COLUMN": 0, "K_COLUMN": num_heads * dim, "V_COLUMN": (num_heads + num_kv) * dim, "DIM": dim}
    block_m, block_n, warps, stages = blocks.kv
    kernels.attention_backward_kv[(triton.cdiv(length, block_n) * batch * num_kv,)](
        rows(qk_BSXD, block_m),
        rows(qk_BSXD, block_n),
        rows(heads_BSXD, block_n),
        rows(dout_BSAD, block_m),
        lse_BAS,
        sums,
        dqk_BSXD,
        dheads_BSXD,
        dqk_BSXD.stride(1),
        dheads_BSXD.stride(1),
        length,
        num_kv,
        group,
        scale,
        **columns,
        DK_COLUMN=columns["K_COLUMN"],
        DV_COLUMN=columns["V_COLUMN"],
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=warps,
        num_stages=stages,
        enable_fp_fusion=False,
    )
    block_m, block_n, warps, stages = blocks.q
    kernels.attention_backward_q[(triton.cdiv(length, block_m) * batch * num_heads,)](
        rows(qk_BSXD, block_m),
        rows(qk_BSXD, block_n),
        rows(heads_BSXD, block_n),
        rows(dout_BSAD, block_m),
        lse_BAS,
        sums,
        dqk_BSXD,
        dqk_BSXD.stride(1),
        length,
        num_heads,
        group,
        scale,
        **columns,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=warps,
        num_stages=stages,
        enable_fp_fusion=False,
    )
