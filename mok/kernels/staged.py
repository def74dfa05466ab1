"""Tile bodies of an expert layer in plain Triton, and the kernels that walk a stretch of the task table with each of them.

Owns the arithmetic of one output tile per kind of task (`mok/kernels/tasks.py`), for any GPU that Triton compiles for, and
bit for bit that of `mok/kernels/mega.py` where both run: bf16 operands, one fp32 chain per element along the contraction in
order, one rounding at the end. Knows nothing of torch, of how a table is made or of what waits for what: the launches of
`mok/launch/staged.py` follow one another, so every operand is there. Read next: `mok/kernels/rows.py`, which moves rows.

Operands of products come as descriptors or as pointers with sizes, see `load_block`; row buffers are one matrix of them. With
`scales`, they are 8-bit codes that run along the contraction on both sides: `multiply_coded`.
A tile is 128 rows by 256 columns (gate_up: 128 columns of gate and the same of up), worked on BLOCK_N columns at a time and
BLOCK_C contraction elements a step. Neither choice changes a bit, nor does the number of programs. Every launch switches fused
multiply-add off. Rows past the end of a half tile, and columns past the width, are computed and not stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mok.kernels.tasks import EXPERT, FIELDS, HALF, PART, ROW, ROW_BLOCK, SIZE_MTILES, STEPS, TILE_C, TILE_M, TILE_N, M, N

CODED_C = tl.constexpr(128)  # contraction elements of a step of 8-bit codes; of fp8_block they share a scale
GROUP = tl.constexpr(32)  # that share one of mxfp8
E4M3 = tl.constexpr("e4m3")
SUM_COLUMNS = tl.constexpr(128)  # columns of one partial sum of the router weight's gradient


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) by one hardware tanh: off by at most 2^-12, a tenth of a bf16 step at 1."""
    tanh = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [0.5 * x], dtype=tl.float32, is_pure=True, pack=1)
    return 0.5 * tanh + 0.5


@triton.jit
def limited(gate, up, CLAMP: tl.constexpr):
    """gate at most CLAMP, up within +-CLAMP; 0 sets no limits. NaN stays NaN."""
    if CLAMP > 0:
        gate = tl.where(gate > CLAMP, CLAMP, gate)
        up = tl.where(up > CLAMP, CLAMP, tl.where(up < -CLAMP, -CLAMP, up))
    return gate, up


@triton.jit
def halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Left and right half of the columns, without leaving the registers."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def load_block(matrices, place, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """matrices[place, row:row + ROWS, column:column + COLUMNS], zero past the ends.

    `matrices`: a descriptor with blocks [1, ROWS, COLUMNS], or, for GPUs without bulk copies, (pointer, stride of a matrix,
    stride of a row, rows, columns): there a descriptor would be read element by element.
    """
    if isinstance(matrices, tl.tuple):
        rows = tl.arange(0, ROWS)[:, None]
        columns = tl.arange(0, COLUMNS)[None, :]
        inside = (row + rows < matrices[3]) & (column + columns < matrices[4])
        first = matrices[0] + tl.cast(place, tl.int64) * matrices[1] + tl.cast(row, tl.int64) * matrices[2] + column
        block = tl.load(first + rows * matrices[2] + columns, mask=inside, other=0.0)
    else:
        block = tl.reshape(matrices.load([place, row, column]), (ROWS, COLUMNS))
    return block


@triton.jit
def valid_rows(task):
    """Which of the 128 rows from `first_row` belong to the tile [TILE_M]."""
    return tl.arange(0, TILE_M) + tl.load(task + HALF) * ROW_BLOCK < TILE_M


@triton.jit
def first_row(task):
    return tl.multiple_of(tl.load(task + ROW), ROW_BLOCK)


@triton.jit
def first_column(task):
    """The multiple is what lets rows be stored 16 bytes at a time."""
    return tl.multiple_of(tl.load(task + N), TILE_N // 2)


@triton.jit
def block_at(row, valid, column, width, COLUMNS: tl.constexpr):
    """A block of a matrix of `width` columns: where its first element is (64 bits), where its elements are from there
    [TILE_M, COLUMNS] (32 bits), and which of them are inside."""
    columns = tl.arange(0, COLUMNS)
    places = tl.arange(0, TILE_M)[:, None] * width + columns[None, :]
    return row.to(tl.int64) * width + column, places, valid[:, None] & (column + columns < width)[None, :]


@triton.jit
def store_columns(target, row, valid, column, width, values, COLUMNS: tl.constexpr):
    """target[row:, column:column + COLUMNS] = values, rounded to the type of `target`."""
    first, places, inside = block_at(row, valid, column, width, COLUMNS)
    tl.store(target + first + places, values.to(target.dtype.element_ty), mask=inside)


@triton.jit
def scale_of(code):
    """2^(code - 127) in fp32; see `mok.kernels.coded.scale_of`."""
    code = code.to(tl.int32)
    return tl.where(code == 0, 0x400000, code << 23).to(tl.float32, bitcast=True)


@triton.jit
def multiply_coded(
    total, rows, row_scales, max_rows, weight, weight_scales, groups, row, valid, expert, column, width, steps,
    SQUARES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """total + rows[row, :] weight[expert, column:column + COLUMNS, :]^T of 8-bit codes, CODED_C contraction elements a step.

    SQUARES: a scale for CODED_C elements of a row and CODED_C x CODED_C of a weight. The products of a step start from zero and
    are added, times both scales, with one rounding. Else a scale for each of `groups` groups of 32 along the contraction, in
    rows and in weights, which the unit multiplies by itself on the way to one sum, where it has scaled products (Blackwell).
    row_scales: E8M0 [steps or groups, max_rows]. weight_scales: [L, width / CODED_C, steps], or [L, width, groups].
    """
    row_places = row + tl.arange(0, TILE_M)
    for step in range(steps):
        a = load_block(rows, 0, row, step * CODED_C, TILE_M, CODED_C)
        b = load_block(weight, expert, column, step * CODED_C, COLUMNS, CODED_C)
        if SQUARES:
            blocks = width // CODED_C
            block = tl.minimum(column // CODED_C, blocks - 1)  # columns past the width are not stored
            row_scale = scale_of(tl.load(row_scales + tl.cast(step, tl.int64) * max_rows + row_places, mask=valid, other=0))
            factor = row_scale * scale_of(tl.load(weight_scales + (expert * blocks + block) * steps + step))
            product, factor = tl.broadcast(tl.dot(a, b.T), factor[:, None])
            total = tl.fma(product, factor, total)
        else:
            group = step * (CODED_C // GROUP) + tl.arange(0, CODED_C // GROUP)[None, :]
            columns = column + tl.arange(0, COLUMNS)[:, None]
            of_rows = row_scales + group.to(tl.int64) * max_rows + row_places[:, None]
            a_scales = tl.load(of_rows, mask=valid[:, None] & (group < groups), other=0)
            of_columns = weight_scales + (expert * width + columns).to(tl.int64) * groups + group
            b_scales = tl.load(of_columns, mask=(columns < width) & (group < groups), other=0)
            total = tl.dot_scaled(a, a_scales, E4M3, b.T, b_scales, E4M3, total)
    return total


# ---------------------------------------------------------------------------------------------------------------------
# Forward


@triton.jit
def gate_up_tile(
    task, x_rows, gate, up, scales, h_rows, gate_rows, up_rows, width, steps,
    KEEP: tl.constexpr, CLAMP: tl.constexpr, SQUARES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """h = silu(g) * u with g = x gate_e^T and u = x up_e^T, each rounded first, so that a backward recomputes exactly this h.

    Program: 128 rows, 128 columns of h. Reads x_rows [P, H], gate, up [L, I, H]. Writes h_rows and, if KEEP,
    gate_rows and up_rows [P, I].
    """
    COLUMNS: tl.constexpr = BLOCK_N // 2
    row = first_row(task)
    expert = tl.load(task + EXPERT)
    valid = valid_rows(task)
    for part in range(TILE_N // BLOCK_N):
        column = first_column(task) + part * COLUMNS
        g = tl.zeros((TILE_M, COLUMNS), tl.float32)
        u = tl.zeros((TILE_M, COLUMNS), tl.float32)
        if scales is not None:
            g = multiply_coded(
                g, x_rows, scales[0], scales[2], gate, scales[4], scales[3], row, valid, expert, column, width, steps, SQUARES,
                COLUMNS,
            )  # fmt: skip
            u = multiply_coded(
                u, x_rows, scales[0], scales[2], up, scales[5], scales[3], row, valid, expert, column, width, steps, SQUARES,
                COLUMNS,
            )  # fmt: skip
        else:
            for step in range(steps):
                x = load_block(x_rows, 0, row, step * BLOCK_C, TILE_M, BLOCK_C)
                g = tl.dot(x, load_block(gate, expert, column, step * BLOCK_C, COLUMNS, BLOCK_C).T, g)
                u = tl.dot(x, load_block(up, expert, column, step * BLOCK_C, COLUMNS, BLOCK_C).T, u)
        g = g.to(tl.bfloat16)
        u = u.to(tl.bfloat16)
        if KEEP:
            store_columns(gate_rows, row, valid, column, width, g, COLUMNS)
            store_columns(up_rows, row, valid, column, width, u, COLUMNS)
        limited_g, limited_u = limited(g.to(tl.float32), u.to(tl.float32), CLAMP)
        h = (limited_g * sigmoid(limited_g)) * limited_u
        store_columns(h_rows, row, valid, column, width, h, COLUMNS)


@triton.jit
def down_tile(
    task, h_rows, down, scales, y_rows, width, steps, SQUARES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """y = h down_e^T.

    Program: 128 rows, 256 columns. Reads h_rows [P, I], down [L, H, I]. Writes y_rows [P, H].
    """
    row = first_row(task)
    expert = tl.load(task + EXPERT)
    valid = valid_rows(task)
    for part in range(TILE_N // BLOCK_N):
        column = first_column(task) + part * BLOCK_N
        y = tl.zeros((TILE_M, BLOCK_N), tl.float32)
        if scales is not None:
            y = multiply_coded(
                y, h_rows, scales[0], scales[2], down, scales[4], scales[3], row, valid, expert, column, width, steps, SQUARES,
                BLOCK_N,
            )  # fmt: skip
        else:
            for step in range(steps):
                h = load_block(h_rows, 0, row, step * BLOCK_C, TILE_M, BLOCK_C)
                y = tl.dot(h, load_block(down, expert, column, step * BLOCK_C, BLOCK_N, BLOCK_C).T, y)
        store_columns(y_rows, row, valid, column, width, y, BLOCK_N)


# ---------------------------------------------------------------------------------------------------------------------
# Backward


@triton.jit
def multiply(accumulator, rows, weight, row, expert, column, steps, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    """accumulator + rows[row, :] weight[expert, :, column], continuing the chain; the weight is read along its own rows."""
    for step in range(steps):
        a = load_block(rows, 0, row, step * BLOCK_C, TILE_M, BLOCK_C)
        accumulator = tl.dot(a, load_block(weight, expert, step * BLOCK_C, column, BLOCK_C, BLOCK_N), accumulator)
    return accumulator


@triton.jit
def swiglu_backward(
    dh, gate_rows, up_rows, wh_rows, dgate_rows, dup_rows, row, valid, weight, column, width,
    CLAMP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """From dh [TILE_M, COLUMNS], fp32 and without the router weight: writes h, d(gate) and d(up) times the weight of their row,
    each rounded once, and returns dh * h, h as stored."""
    first, places, inside = block_at(row, valid, column, width, COLUMNS)
    raw_gate = tl.load(gate_rows + first + places, mask=inside, other=0.0).to(tl.float32)
    raw_up = tl.load(up_rows + first + places, mask=inside, other=0.0).to(tl.float32)
    gate, up = limited(raw_gate, raw_up, CLAMP)
    s = sigmoid(gate)
    silu = gate * s
    h = (silu * up).to(tl.bfloat16).to(tl.float32)
    d = dh * weight[:, None]
    slope = up * (s + silu * (1.0 - s))
    if CLAMP > 0:
        slope = tl.where(raw_gate > CLAMP, 0.0, slope)
        silu = tl.where((raw_up > CLAMP) | (raw_up < -CLAMP), 0.0, silu)
    tl.store(wh_rows + first + places, (h * weight[:, None]).to(tl.bfloat16), mask=inside)
    tl.store(dgate_rows + first + places, (d * slope).to(tl.bfloat16), mask=inside)
    tl.store(dup_rows + first + places, (d * silu).to(tl.bfloat16), mask=inside)
    return dh * h


@triton.jit
def finish_64_columns(
    dh, gate_rows, up_rows, wh_rows, dgate_rows, dup_rows, row, valid, weight, column, width, CLAMP: tl.constexpr
):  # fmt: skip
    """`swiglu_backward` of 64 columns, 32 at a time to spare registers, and the sum of their dh * h [TILE_M].

    The sum is a tree over the bits of the column: 5, 4, 3, then 0, 2, 1. It is what `mega.py` adds in registers first, then
    across lanes; written out, so that no layout can give it another order.
    """
    left, right = halves(dh, TILE_M, 64)
    x = swiglu_backward(
        left, gate_rows, up_rows, wh_rows, dgate_rows, dup_rows, row, valid, weight, column, width, CLAMP, 32
    )  # fmt: skip
    x += swiglu_backward(
        right, gate_rows, up_rows, wh_rows, dgate_rows, dup_rows, row, valid, weight, column + 32, width, CLAMP, 32
    )  # fmt: skip
    left, right = halves(x, TILE_M, 32)
    left, right = halves(left + right, TILE_M, 16)
    even, odd = tl.split(tl.reshape(left + right, (TILE_M, 4, 2)))
    left, right = halves(even + odd, TILE_M, 4)
    left, right = halves(left + right, TILE_M, 2)
    return tl.reshape(left + right, (TILE_M,))


@triton.jit
def finish_dh(
    dh, gate_rows, up_rows, wh_rows, dgate_rows, dup_rows, partial, num_sums, row, valid, weight, column, width,
    CLAMP: tl.constexpr,
):  # fmt: skip
    """SwiGLU backward of 128 columns and their partial sum, partial[row, column / 128]."""
    left, right = halves(dh, TILE_M, SUM_COLUMNS)
    total = tl.zeros((TILE_M,), tl.float32)
    total += finish_64_columns(
        left, gate_rows, up_rows, wh_rows, dgate_rows, dup_rows, row, valid, weight, column, width, CLAMP
    )  # fmt: skip
    total += finish_64_columns(
        right, gate_rows, up_rows, wh_rows, dgate_rows, dup_rows, row, valid, weight, column + 64, width, CLAMP
    )  # fmt: skip
    place = column // SUM_COLUMNS
    places = partial + row.to(tl.int64) * num_sums + place + tl.arange(0, TILE_M) * num_sums
    tl.store(places, total, mask=valid & (place < num_sums))


@triton.jit
def dh_tile(
    task, dy_rows, down, scales, gate_rows, up_rows, wh_rows, dgate_rows, dup_rows, partial, num_sums, route_of_row_P,
    weights_N, width, steps, CLAMP: tl.constexpr, SQUARES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dh = dy down_e, then `finish_dh`. Program: 128 rows, 256 columns.

    Reads dy_rows [P, H], down [L, H, I]; gate_rows, up_rows [P, I]; weights_N, the router weight of each route,
    taken as 0 for padding. Writes wh_rows, dgate_rows, dup_rows [P, I] (the last two may be gate_rows and up_rows) and partial
    [P, num_sums] fp32.
    """
    row = first_row(task)
    expert = tl.load(task + EXPERT)
    valid = valid_rows(task)
    route = tl.load(route_of_row_P + row + tl.arange(0, TILE_M), mask=valid, other=-1)
    weight = tl.load(weights_N + route, mask=route >= 0, other=0.0)
    for part in range(TILE_N // BLOCK_N):
        column = first_column(task) + part * BLOCK_N
        dh = tl.zeros((TILE_M, BLOCK_N), tl.float32)
        if scales is not None:
            dh = multiply_coded(
                dh, dy_rows, scales[0], scales[2], down, scales[4], scales[3], row, valid, expert, column, width, steps,
                SQUARES, BLOCK_N,
            )  # fmt: skip
        else:
            dh = multiply(dh, dy_rows, down, row, expert, column, steps, BLOCK_N, BLOCK_C)
        if BLOCK_N == SUM_COLUMNS:
            finish_dh(
                dh, gate_rows, up_rows, wh_rows, dgate_rows, dup_rows, partial, num_sums, row, valid, weight, column, width,
                CLAMP,
            )  # fmt: skip
        else:
            left, right = halves(dh, TILE_M, BLOCK_N)
            finish_dh(
                left, gate_rows, up_rows, wh_rows, dgate_rows, dup_rows, partial, num_sums, row, valid, weight, column, width,
                CLAMP,
            )  # fmt: skip
            finish_dh(
                right, gate_rows, up_rows, wh_rows, dgate_rows, dup_rows, partial, num_sums, row, valid, weight,
                column + SUM_COLUMNS, width, CLAMP,
            )  # fmt: skip


@triton.jit
def dx_tile(
    task, dgate_rows, dup_rows, gate, up, scales, dx_rows, width, steps,
    SQUARES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dx = d(gate) gate_e + d(up) up_e, one chain: all of gate, then all of up. Program: 128 rows, 256 columns.

    Reads dgate_rows, dup_rows [P, I], gate, up [L, I, H]. Writes dx_rows [P, H].
    """
    row = first_row(task)
    expert = tl.load(task + EXPERT)
    valid = valid_rows(task)
    for part in range(TILE_N // BLOCK_N):
        column = first_column(task) + part * BLOCK_N
        dx = tl.zeros((TILE_M, BLOCK_N), tl.float32)
        if scales is not None:
            dx = multiply_coded(
                dx, dgate_rows, scales[0], scales[2], gate, scales[4], scales[3], row, valid, expert, column, width, steps,
                SQUARES, BLOCK_N,
            )  # fmt: skip
            dx = multiply_coded(
                dx, dup_rows, scales[1], scales[2], up, scales[5], scales[3], row, valid, expert, column, width, steps,
                SQUARES, BLOCK_N,
            )  # fmt: skip
        else:
            dx = multiply(dx, dgate_rows, gate, row, expert, column, steps, BLOCK_N, BLOCK_C)
            dx = multiply(dx, dup_rows, up, row, expert, column, steps, BLOCK_N, BLOCK_C)
        store_columns(dx_rows, row, valid, column, width, dx, BLOCK_N)


@triton.jit
def weight_tile(
    task, left_rows, part, right_rows, gradient, expert_stride, height, width,
    CONTINUE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """gradient[e] = left^T right over all rows of expert e in order, after what is there already if CONTINUE.

    Program: 128 rows, 256 columns of the gradient. An expert without rows keeps what it has, or gets zeros. Reads
    left_rows[part] [P, height], right_rows [P, width]. Reads and writes gradient fp32 [L, height, width], rows
    contiguous.
    """
    row = first_row(task)
    steps = tl.load(task + STEPS) * (TILE_C // BLOCK_C)
    m = tl.multiple_of(tl.load(task + M), TILE_M)
    valid = m + tl.arange(0, TILE_M) < height
    target = gradient + tl.load(task + EXPERT).to(tl.int64) * expert_stride
    if (steps > 0) | (not CONTINUE):
        for piece in range(TILE_N // BLOCK_N):
            column = first_column(task) + piece * BLOCK_N
            first, places, inside = block_at(m, valid, column, width, BLOCK_N)
            if CONTINUE:
                accumulator = tl.load(target + first + places, mask=inside, other=0.0)
            else:
                accumulator = tl.zeros((TILE_M, BLOCK_N), tl.float32)
            for step in range(steps):
                left = load_block(left_rows, part, row + step * BLOCK_C, m, BLOCK_C, TILE_M)
                right = load_block(right_rows, 0, row + step * BLOCK_C, column, BLOCK_C, BLOCK_N)
                accumulator = tl.dot(left.T, right, accumulator)
            tl.store(target + first + places, accumulator, mask=inside)


# ---------------------------------------------------------------------------------------------------------------------
# Kernels: each walks the tasks of one kind. In a table whose phases hold all groups they are one stretch: `tiles` tasks for
# each m-tile, after `tiles_before` for each, and after `tasks_before` others. `sizes` is the planner's.

RUNTIME_SIZES = ["tiles", "tiles_before", "steps", "num_sums", "tasks_before", "count"]


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def run_gate_up(
    tasks, sizes, tiles, x_rows, gate, up, scales, h_rows, gate_rows, up_rows, width, steps,
    KEEP: tl.constexpr, CLAMP: tl.constexpr, SQUARES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """`gate_up_tile` for every GATE_UP task. Program: one of any number; tasks round robin."""
    for i in range(tl.program_id(0), tl.load(sizes + SIZE_MTILES) * tiles, tl.num_programs(0)):
        task = tasks + i * FIELDS
        gate_up_tile(
            task, x_rows, gate, up, scales, h_rows, gate_rows, up_rows, width, steps, KEEP, CLAMP, SQUARES, BLOCK_N, BLOCK_C
        )


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def run_down(
    tasks, sizes, tiles_before, tiles, h_rows, down, scales, y_rows, width, steps,
    SQUARES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """`down_tile` for every DOWN task. Program: one of any number; tasks round robin."""
    mtiles = tl.load(sizes + SIZE_MTILES)
    for i in range(tl.program_id(0), mtiles * tiles, tl.num_programs(0)):
        task = tasks + (mtiles * tiles_before + i) * FIELDS
        down_tile(task, h_rows, down, scales, y_rows, width, steps, SQUARES, BLOCK_N, BLOCK_C)


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def run_dh(
    tasks, sizes, tiles, dy_rows, down, scales, gate_rows, up_rows, wh_rows, dgate_rows, dup_rows, partial, num_sums,
    route_of_row_P, weights_N, width, steps, CLAMP: tl.constexpr, SQUARES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """`dh_tile` for every DH task. Program: one of any number; tasks round robin."""
    for i in range(tl.program_id(0), tl.load(sizes + SIZE_MTILES) * tiles, tl.num_programs(0)):
        task = tasks + i * FIELDS
        dh_tile(
            task, dy_rows, down, scales, gate_rows, up_rows, wh_rows, dgate_rows, dup_rows, partial, num_sums, route_of_row_P,
            weights_N, width, steps, CLAMP, SQUARES, BLOCK_N, BLOCK_C,
        )  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def run_dx(
    tasks, sizes, tiles_before, tasks_before, tiles, dgate_rows, dup_rows, gate, up, scales, dx_rows, width, steps,
    SQUARES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """`dx_tile` for every DX task. Program: one of any number; tasks round robin."""
    mtiles = tl.load(sizes + SIZE_MTILES)
    for i in range(tl.program_id(0), mtiles * tiles, tl.num_programs(0)):
        task = tasks + (mtiles * tiles_before + tasks_before + i) * FIELDS
        dx_tile(task, dgate_rows, dup_rows, gate, up, scales, dx_rows, width, steps, SQUARES, BLOCK_N, BLOCK_C)


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def run_weights(
    tasks, sizes, tiles_before, tasks_before, count, left_rows, right_rows, gradient, up_gradient,
    expert_stride, up_stride, height, width, CONTINUE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """`weight_tile` for `count` tasks: all DW_DOWN, or all DW_GATE_UP, whose PART picks the left operand and the gradient.
    Program: one of any number; tasks round robin."""
    before = tl.load(sizes + SIZE_MTILES) * tiles_before + tasks_before
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        task = tasks + (before + i) * FIELDS
        part = tl.load(task + PART)
        target = gradient
        stride = expert_stride
        if part == 1:
            target = up_gradient
            stride = up_stride
        weight_tile(task, left_rows, part, right_rows, target, stride, height, width, CONTINUE, BLOCK_N, BLOCK_C)
