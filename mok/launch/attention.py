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
    """Of each kernel: queries and keys at a time, warps, stages of loads. kept: of the one for queries where dS is kept."""

    kv: tuple[int, int, int, int] = (64, 64, 4, 2)
    q: tuple[int, int, int, int] = (128, 64, 8, 3)
    kept: tuple[int, int, int, int] = (256, 64, 8, 3)


BLOCKS = Blocks()

KEPT_BYTES = 1 << 29
"""Most memory for dS, which heads share in turns."""

ENOUGH_PROGRAMS = 512
"""Fewer of them in a launch leave a GPU idle at its end for longer than keeping dS saves."""


def attention_backward(
    dout_BSAD: Tensor,
    qk_BSXD: Tensor,
    heads_BSXD: Tensor,
    out_BSAD: Tensor,
    lse_BAS: Tensor,
    dqk_BSXD: Tensor,
    dheads_BSXD: Tensor,
    blocks: Blocks = BLOCKS,
    kept_bytes: int | None = None,
) -> None:
    """Write the gradients of queries and keys into dqk, shaped as qk, and that of the values into the last heads of dheads.

    qk_BSXD: rotated queries of A heads, then keys of G. heads_BSXD: A + 2 G heads, the last G of which are values. All
    contiguous, bf16; lse_BAS fp32, natural logarithms. D is a power of two from 16 on. kept_bytes: memory for dS; 0 to compute
    it twice, None for what is faster. No choice changes a bit.
    """
    batch, length, num_heads, dim = out_BSAD.shape
    num_kv = qk_BSXD.shape[2] - num_heads
    group, tokens, pairs = num_heads // num_kv, batch * length, batch * num_kv
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
    widest = max(blocks.kv[:2] + blocks.kept[:2])
    ds_length = triton.cdiv(length, widest) * widest
    fitting = (KEPT_BYTES if kept_bytes is None else kept_bytes) // (group * ds_length**2 * qk_BSXD.element_size())
    pairs_at_once = min(fitting, pairs)
    if kept_bytes is None:
        # Measured: with 64 channels, or with several query heads to a key head, moving dS takes longer than computing it.
        programs = pairs_at_once * triton.cdiv(length, blocks.kv[1])
        pairs_at_once *= dim >= 128 and group == 1 and programs >= ENOUGH_PROGRAMS
    keep = pairs_at_once > 0
    ds = qk_BSXD.new_empty(pairs_at_once * group * ds_length, ds_length) if keep else None

    def operands(block_m: int, block_n: int) -> tuple[TensorDescriptor | Tensor | None, ...]:
        matrices = ((qk_BSXD, block_m), (qk_BSXD, block_n), (heads_BSXD, block_n), (dout_BSAD, block_m))
        rows = [TensorDescriptor.from_tensor(tensor.view(tokens, -1), [block, dim]) for tensor, block in matrices]
        return *rows, None if ds is None else TensorDescriptor.from_tensor(ds, [block_n, block_m]), lse_BAS, sums

    blocks_q = blocks.kept if keep else blocks.q
    operands_kv, operands_q = operands(*blocks.kv[:2]), operands(*blocks_q[:2])
    columns = {"Q_COLUMN": 0, "K_COLUMN": num_heads * dim, "V_COLUMN": (num_heads + num_kv) * dim, "DIM": dim}
    for first in range(0, pairs, pairs_at_once or pairs):
        at_once = min(pairs_at_once or pairs, pairs - first)
        block_m, block_n, warps, stages = blocks.kv
        kernels.attention_backward_kv[(triton.cdiv(length, block_n) * at_once,)](
            *operands_kv,
            dqk_BSXD,
            dheads_BSXD,
            dqk_BSXD.stride(1),
            dheads_BSXD.stride(1),
            first,
            length,
            num_kv,
            group,
            dim**-0.5,
            ds_length,
            **columns,
            DK_COLUMN=columns["K_COLUMN"],
            DV_COLUMN=columns["V_COLUMN"],
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            KEEP=keep,
            num_warps=warps,
            num_stages=stages,
            enable_fp_fusion=False,
        )
        block_m, block_n, warps, stages = blocks_q
        kernels.attention_backward_q[(triton.cdiv(length, block_m) * at_once * group,)](
            *operands_q,
            dqk_BSXD,
            dqk_BSXD.stride(1),
            first * group,
            length,
            num_heads,
            group,
            dim**-0.5,
            ds_length,
            **columns,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            KEPT=keep,
            num_warps=warps,
            num_stages=stages,
            enable_fp_fusion=False,
        )
