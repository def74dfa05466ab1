"""The backward of causal attention, in plain Triton: one kernel for keys and values, one for queries.

Each element of a gradient is summed by one program, block after block in rising order, so that it repeats bit for bit without
the copies of dq that deterministic FlashAttention 2 keeps. The kernel for keys and values leaves dS behind for the other; where
memory is too short for that, both compute it. Knows nothing of torch. Read next: `mok/launch/attention.py`.

With S = scale q k^T, P = exp(S - lse) under the causal mask, D = sum over channels of dout out:

    dv = P^T dout        dS = P (dout v^T - D)        dk = scale dS^T q        dq = scale dS k

Operands are matrices [tokens, heads DIM]: sequences one after the other, heads side by side.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def dout_times_out(out, dout, sums, num_heads, length, DIM: tl.constexpr, HEADS: tl.constexpr):
    """sums[b, h, i] = sum over channels of dout out, fp32.

    Program: one token, all heads. HEADS: a power of two no less than num_heads.
    """
    token = tl.program_id(0).to(tl.int64)
    head, channel = tl.arange(0, HEADS), tl.arange(0, DIM)
    at = token * num_heads * DIM + head[:, None] * DIM + channel[None, :]
    inside = head < num_heads
    a = tl.load(out + at, mask=inside[:, None], other=0.0).to(tl.float32)
    b = tl.load(dout + at, mask=inside[:, None], other=0.0).to(tl.float32)
    target = sums + (token // length * num_heads + head) * length + token % length
    tl.store(target, tl.sum(a * b, axis=1), mask=inside)


@triton.jit
def _add_to_kv(
    dk, dv, k, v, q_rows, dout_rows, ds_rows, lse, sums, row, column, dout_column, ds_row, first, last, start_n, length, scale,
    DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KEEP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the queries [first, last) of one head to the gradients of BLOCK_N keys and values."""
    position_n = start_n + tl.arange(0, BLOCK_N)
    for start_m in range(first, last, BLOCK_M):
        position_m = start_m + tl.arange(0, BLOCK_M)
        q = q_rows.load([row + start_m, column])
        dout = dout_rows.load([row + start_m, dout_column])
        lse_m = tl.load(lse + position_m, mask=position_m < length, other=0.0) * LOG2_E
        sums_m = tl.load(sums + position_m, mask=position_m < length, other=0.0)
        scores = tl.dot(k, q.T)
        p = tl.math.exp2(scores * (scale * LOG2_E) - lse_m[None, :])
        if MASKED:
            p = tl.where((position_n[:, None] <= position_m[None, :]) & (position_m < length)[None, :], p, 0.0)
        dv = tl.dot(p.to(dout.dtype), dout, dv)
        ds = (p * (tl.dot(v, dout.T) - sums_m[None, :])).to(q.dtype)
        dk = tl.dot(ds, q, dk)
        if KEEP:
            ds_rows.store([ds_row + start_n, start_m], ds)
    return dk, dv


@triton.jit
def attention_backward_kv(
    q_rows, k_rows, v_rows, dout_rows, ds_rows, lse, sums, dk_rows, dv_rows, dk_stride, dv_stride, first_pair, length, num_kv,
    group, scale, ds_length,
    Q_COLUMN: tl.constexpr, K_COLUMN: tl.constexpr, V_COLUMN: tl.constexpr, DK_COLUMN: tl.constexpr,
    DV_COLUMN: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_N positions of one key head: over the query heads of its group in order, then over query blocks.

    Program: place in a list of (block, sequence, head), the blocks with most queries first; pairs of a sequence and a key head
    count from first_pair on. *_rows: descriptors that load [BLOCK, DIM]; the first head of an operand starts at its *_COLUMN.
    lse, sums: fp32 [B, heads, length]. dk_rows, dv_rows: pointers, rows *_stride apart. KEEP: whether dS is stored into
    ds_rows, a descriptor of blocks [BLOCK_N, BLOCK_M], keys by queries, of the query heads one below the other, ds_length rows
    each.
    """
    pairs = tl.num_programs(0) // tl.cdiv(length, BLOCK_N)
    local, start_n = tl.program_id(0) % pairs, tl.program_id(0) // pairs * BLOCK_N
    pair = first_pair + local
    head, row = pair % num_kv, pair // num_kv * length
    k = k_rows.load([row + start_n, K_COLUMN + head * DIM])
    v = v_rows.load([row + start_n, V_COLUMN + head * DIM])
    dk = tl.zeros((BLOCK_N, DIM), tl.float32)
    dv = tl.zeros((BLOCK_N, DIM), tl.float32)
    # Queries before start_n + BLOCK_N see a part of these keys only, and a last block may hold another sequence's rows.
    whole_from = tl.minimum(start_n + BLOCK_N, length)
    whole_to = tl.maximum(length // BLOCK_M * BLOCK_M, whole_from)
    for member in range(group):
        query_head = head * group + member
        line = (pair // num_kv * num_kv * group + query_head).to(tl.int64) * length
        column, dout_column = Q_COLUMN + query_head * DIM, query_head * DIM
        ds_row = (local * group + member) * ds_length
        dk, dv = _add_to_kv(
            dk, dv, k, v, q_rows, dout_rows, ds_rows, lse + line, sums + line, row, column, dout_column, ds_row, start_n,
            whole_from, start_n, length, scale, DIM, BLOCK_M, BLOCK_N, KEEP, True,
        )  # fmt: skip
        dk, dv = _add_to_kv(
            dk, dv, k, v, q_rows, dout_rows, ds_rows, lse + line, sums + line, row, column, dout_column, ds_row, whole_from,
            whole_to, start_n, length, scale, DIM, BLOCK_M, BLOCK_N, KEEP, False,
        )  # fmt: skip
        dk, dv = _add_to_kv(
            dk, dv, k, v, q_rows, dout_rows, ds_rows, lse + line, sums + line, row, column, dout_column, ds_row, whole_to,
            length, start_n, length, scale, DIM, BLOCK_M, BLOCK_N, KEEP, True,
        )  # fmt: skip
    position = start_n + tl.arange(0, BLOCK_N)
    channel = head * DIM + tl.arange(0, DIM)
    rows = (row + position).to(tl.int64)[:, None]
    inside = (position < length)[:, None]
    tl.store(
        dk_rows + rows * dk_stride + (DK_COLUMN + channel)[None, :], (dk * scale).to(dk_rows.dtype.element_ty), mask=inside
    )
    tl.store(dv_rows + rows * dv_stride + (DV_COLUMN + channel)[None, :], dv.to(dv_rows.dtype.element_ty), mask=inside)


@triton.jit
def _add_to_q(
    dq, q, dout, k_rows, v_rows, lse_m, sums_m, row, k_column, v_column, first, last, start_m, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the keys [first, last) of one head to the gradient of BLOCK_M queries."""
    position_m = start_m + tl.arange(0, BLOCK_M)
    for start_n in range(first, last, BLOCK_N):
        k = k_rows.load([row + start_n, k_column])
        v = v_rows.load([row + start_n, v_column])
        p = tl.math.exp2(tl.dot(q, k.T) * (scale * LOG2_E) - lse_m[:, None])
        if MASKED:
            position_n = start_n + tl.arange(0, BLOCK_N)
            p = tl.where(position_n[None, :] <= position_m[:, None], p, 0.0)
        ds = p * (tl.dot(dout, v.T) - sums_m[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    return dq


@triton.jit
def _add_kept_to_q(
    dq, ds_rows, k_rows, row, k_column, ds_row, first, last, start_m,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`_add_to_q` with the dS that `attention_backward_kv` has kept; it left out blocks of which no query sees a key."""
    position_m = start_m + tl.arange(0, BLOCK_M)
    for start_n in range(first, last, BLOCK_N):
        k = k_rows.load([row + start_n, k_column])
        ds = ds_rows.load([ds_row + start_n, start_m])
        if MASKED:
            position_n = start_n + tl.arange(0, BLOCK_N)
            ds = tl.where(position_n[:, None] <= position_m[None, :], ds, 0.0)
        dq = tl.dot(ds.T, k, dq)
    return dq


@triton.jit
def attention_backward_q(
    q_rows, k_rows, v_rows, dout_rows, ds_rows, lse, sums, dq_rows, dq_stride, first_pair, length, num_heads, group, scale,
    ds_length, Q_COLUMN: tl.constexpr, K_COLUMN: tl.constexpr, V_COLUMN: tl.constexpr, DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK_M positions of one query head, over key blocks in order.

    Program: place in a list of (block, sequence, head), the blocks with most keys first; pairs of a sequence and a query head
    count from first_pair on. KEPT: whether dS is in ds_rows, of blocks [BLOCK_N, BLOCK_M], or computed again. Other arguments
    as `attention_backward_kv`.
    """
    pairs = tl.num_programs(0) // tl.cdiv(length, BLOCK_M)
    local = tl.program_id(0) % pairs
    pair = first_pair + local
    start_m = (tl.cdiv(length, BLOCK_M) - 1 - tl.program_id(0) // pairs) * BLOCK_M
    head, row = pair % num_heads, pair // num_heads * length
    position = start_m + tl.arange(0, BLOCK_M)
    k_column, v_column = K_COLUMN + head // group * DIM, V_COLUMN + head // group * DIM
    dq = tl.zeros((BLOCK_M, DIM), tl.float32)
    # Keys before start_m are seen by every query of the block.
    whole_to, end = start_m // BLOCK_N * BLOCK_N, tl.minimum(start_m + BLOCK_M, length)
    if KEPT:
        ds_row = local * ds_length
        dq = _add_kept_to_q(dq, ds_rows, k_rows, row, k_column, ds_row, 0, whole_to, start_m, BLOCK_M, BLOCK_N, False)
        dq = _add_kept_to_q(dq, ds_rows, k_rows, row, k_column, ds_row, whole_to, end, start_m, BLOCK_M, BLOCK_N, True)
    else:
        q = q_rows.load([row + start_m, Q_COLUMN + head * DIM])
        dout = dout_rows.load([row + start_m, head * DIM])
        line = pair.to(tl.int64) * length
        lse_m = tl.load(lse + line + position, mask=position < length, other=0.0) * LOG2_E
        sums_m = tl.load(sums + line + position, mask=position < length, other=0.0)
        dq = _add_to_q(
            dq, q, dout, k_rows, v_rows, lse_m, sums_m, row, k_column, v_column, 0, whole_to, start_m, scale, BLOCK_M, BLOCK_N,
            False,
        )  # fmt: skip
        dq = _add_to_q(
            dq, q, dout, k_rows, v_rows, lse_m, sums_m, row, k_column, v_column, whole_to, end, start_m, scale, BLOCK_M,
            BLOCK_N, True,
        )  # fmt: skip
    channel = head * DIM + tl.arange(0, DIM)
    target = dq_rows + (row + position).to(tl.int64)[:, None] * dq_stride + channel[None, :]
    tl.store(target, (dq * scale).to(dq_rows.dtype.element_ty), mask=(position < length)[:, None])
