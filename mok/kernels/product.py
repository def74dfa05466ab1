"""A product whose rows know nothing of one another, in plain Triton.

Owns rule 3 (`docs/numerics.md`) for the products that no expert kernel makes. A library picks its kernel, and with it the order
of a sum, by the number of rows; here the tile never changes. Knows nothing of torch. Read next: `mok/launch/product.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product_of_rows(
    x, w, out, num_rows, inner, width, x_stride, w_inner_stride, w_column_stride, out_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """out[t, n] = sum over c of x[t, c] * w[c, n], in fp32, INNER at a time in order; one rounding to the dtype of out.

    Program: ROWS rows (first grid axis), COLUMNS columns (second). Reads x [num_rows, inner], rows x_stride apart, and
    w [inner, width] by its strides, both bf16 or both fp32 (no TF32). Writes out [num_rows, width], rows out_stride apart.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = tl.arange(0, INNER)
    x_tile = x + row.to(tl.int64)[:, None] * x_stride + here[None, :]
    w_tile = w + here.to(tl.int64)[:, None] * w_inner_stride + column.to(tl.int64)[None, :] * w_column_stride
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, inner, INNER):
        inside = start + here < inner
        rows = tl.load(x_tile, mask=(row < num_rows)[:, None] & inside[None, :], other=0.0)
        columns = tl.load(w_tile, mask=inside[:, None] & (column < width)[None, :], other=0.0)
        total = tl.dot(rows, columns, total, input_precision="ieee")
        x_tile += INNER
        w_tile += INNER * w_inner_stride
    target = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=(row < num_rows)[:, None] & (column < width)[None, :])
