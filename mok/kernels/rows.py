"""Moving rows between token order and expert order, in plain Triton: dispatch, combine, and the router weight's gradient.

Owns the sums of rule 4 and of rule 6 (`docs/numerics.md`): slots in order, product and sum rounded apart (every launch switches
fused multiply-add off), no atomics. Knows nothing of torch or of experts. Read next: `mok/kernels/staged.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mok.kernels.tasks import SIZE_ROWS


@triton.jit
def dispatch_rows(
    x, x_rows, route_of_row_P, sizes, width, x_stride, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """x_rows[p] = x[route_of_row[p] // K], zeros where a row holds no route.

    Program: ROWS rows, all columns. Rows past `sizes`' count are left alone. Reads x [T, width], rows x_stride apart. Writes
    x_rows [P, width].
    Example, K = 2: routes (5, -1, 0) make rows x[2], zeros, x[0].
    """
    num_rows = tl.load(sizes + SIZE_ROWS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(0) * ROWS < num_rows:
        exists = row < num_rows
        route = tl.load(route_of_row_P + row, mask=exists, other=-1)
        source = x + (route // K).to(tl.int64)[:, None] * x_stride
        target = x_rows + row.to(tl.int64)[:, None] * width
        for start in range(0, width, COLUMNS):
            columns = (start + tl.arange(0, COLUMNS))[None, :]
            inside = columns < width
            values = tl.load(source + columns, mask=inside & (route >= 0)[:, None], other=0.0)
            tl.store(target + columns, values, mask=inside & exists[:, None])


@triton.jit
def dispatch_scales(
    scales, scales_of_rows, route_of_row_P, sizes, num_blocks, max_rows, top_k, ROWS: tl.constexpr, BLOCKS: tl.constexpr
):
    """scales_of_rows[b, p] = scales[route_of_row[p] // K, b]: what belongs to the codes of a row, block by block; 0 where a row
    holds no route.

    Program: ROWS rows (first grid axis), BLOCKS blocks (second). Rows past `sizes`' count are left alone. Reads scales uint8
    [T, num_blocks]. Writes scales_of_rows uint8 [num_blocks, max_rows].
    Example, K = 2, one block: routes (5, -1, 0) make the scales of tokens 2, none, 0.
    """
    num_rows = tl.load(sizes + SIZE_ROWS)
    if tl.program_id(0) * ROWS < num_rows:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
        route = tl.load(route_of_row_P + row, mask=row < num_rows, other=-1)
        inside = (block < num_blocks)[:, None] & (route >= 0)[None, :]
        source = scales + (route // top_k).to(tl.int64)[None, :] * num_blocks + block[:, None]
        codes = tl.load(source, mask=inside, other=0)
        exists = (block < num_blocks)[:, None] & (row < num_rows)[None, :]
        tl.store(scales_of_rows + block.to(tl.int64)[:, None] * max_rows + row[None, :], codes, mask=exists)


@triton.jit
def combine_rows(
    y_rows, row_of_route_N, weights_N, shared, shared_scale_T, out, width, out_stride,
    K: tl.constexpr, WEIGHTED: tl.constexpr, SHARED: tl.constexpr, SCALED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over slots k in order of w[t, k] * y_rows[row of (t, k)], then + scale[t] * shared[t]; one rounding.

    Program: one token, COLUMNS columns (second grid axis). Masked routes add +0. WEIGHTED: multiply by weights_N; SHARED: add
    shared [T, width]; SCALED: multiply it by shared_scale_T first. Reads y_rows [P, width]. Writes out [T, width].
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    total = tl.zeros((COLUMNS,), tl.float32)
    for k in range(K):
        row = tl.load(row_of_route_N + token * K + k)
        value = tl.load(y_rows + row.to(tl.int64) * width + columns, mask=inside & (row >= 0), other=0.0).to(tl.float32)
        if WEIGHTED:
            value = value * tl.load(weights_N + token * K + k, mask=row >= 0, other=0.0)
        total = total + value
    if SHARED:
        value = tl.load(shared + token * width + columns, mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            value = value * tl.load(shared_scale_T + token)
        total = total + value
    tl.store(out + token * out_stride + columns, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def sum_partials(partial, row_of_route_N, dweights_N, num_routes, num_sums, WIDTH: tl.constexpr):
    """dweights[n] = partial[row of n, 0] + partial[row of n, 1] + ... in order; +0 for a masked route.

    Program: WIDTH routes. Reads partial fp32 [P, num_sums]. Writes dweights_N fp32.
    """
    route = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    exists = route < num_routes
    row = tl.load(row_of_route_N + route, mask=exists, other=-1)
    total = tl.zeros((WIDTH,), tl.float32)
    for place in range(num_sums):
        total += tl.load(partial + row.to(tl.int64) * num_sums + place, mask=row >= 0, other=0.0)
    tl.store(dweights_N + route, total, mask=exists)
