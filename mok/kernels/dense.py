"""What a decoder block does between its matrix products, and the cross-entropy, one pass over memory each, in plain Triton.

Owns the arithmetic of RMSNorm, of the norms and rotation of attention heads, and of the loss, with the roundings of
`mok/model/norm.py`, `mok/model/attention.py` and `mok/model/loss.py`. A row of a result depends on that row alone; sums over
tokens are made of the rows of one program in order, each program's left apart for whoever adds them. Knows nothing of torch.
Read next: `mok/launch/dense.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _normed(values, scale, dtype: tl.constexpr):
    return (values * scale).to(dtype).to(tl.float32)


@triton.jit
def _rounded(values, dtype: tl.constexpr):
    return values.to(dtype).to(tl.float32)


@triton.jit
def rms_norm(x, total, weight, y, rstd, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """y[t] = weight * round(s[t] / sqrt(mean(s[t]^2) + eps)), rstd[t] the reciprocal root. s is x, or with ADD x + total, which
    then takes the place of total.

    Program: one row. Reads x, total [T, width], weight [width]. Writes y [T, width], rstd fp32 [T]. BLOCK: at least width.
    Example, eps = 0: x = (3, 4) with weight (1, 1) gives (0.849, 1.131), rstd = 0.283.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        branch = tl.load(total + row * width + column, mask=inside, other=0.0).to(tl.float32)
        values = _rounded(branch + values, x.dtype.element_ty)
        tl.store(total + row * width + column, values.to(x.dtype.element_ty), mask=inside)
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(values * values, axis=0) / width + eps))
    normed = (values * scale).to(x.dtype.element_ty).to(tl.float32)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + column, (w * normed).to(y.dtype.element_ty), mask=inside)
    tl.store(rstd + row, scale)


@triton.jit
def rms_norm_backward(
    dy, dtotal, x, rstd, weight, dx, partial, width, num_rows,
    ADD: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx = rstd (weight dy - n mean(n weight dy)) with n = round(x rstd); partial[p] = sum over the rows of p of dy n.
    ADD: dtotal is added to the rounded dx.

    Program: ROWS rows of one slice (second grid axis; num_rows rows each), AT_ONCE after AT_ONCE, so that memory is asked for
    several at a time. Reads dy, dtotal, x [slices num_rows, width], rstd fp32. Writes dx like dy, partial fp32
    [slices, programs, width].
    """
    column = tl.arange(0, BLOCK)
    inside = column < width
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, ROWS, AT_ONCE):
        local = tl.program_id(0) * ROWS + i + tl.arange(0, AT_ONCE)
        exists = local < num_rows
        row = tl.program_id(1).to(tl.int64) * num_rows + local
        valid = exists[:, None] & inside[None, :]
        place = row[:, None] * width + column[None, :]
        scale = tl.load(rstd + row, mask=exists, other=0.0)[:, None]
        d = tl.load(dy + place, mask=valid, other=0.0).to(tl.float32)
        values = tl.load(x + place, mask=valid, other=0.0).to(tl.float32)
        normed = _normed(values, scale, x.dtype.element_ty)
        total += tl.sum(d * normed, axis=0)
        d = d * w[None, :]
        mean = tl.sum(d * normed, axis=1)[:, None] / width
        found = (d - normed * mean) * scale
        if ADD:
            residual = tl.load(dtotal + place, mask=valid, other=0.0).to(tl.float32)
            found = _rounded(found, dx.dtype.element_ty) + residual
        tl.store(dx + place, found.to(dx.dtype.element_ty), mask=valid)
    place = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(partial + place * width + column, total, mask=inside)


@triton.jit
def norm_and_rotate(
    x, weight, cos, sin, y, rstd, length, x_stride, y_stride, table_stride, eps, num_heads,
    KIND: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """y[t] = the heads x[t], normalised and rotated by the angles of position t mod length.

    Program: one token. KIND: "none", "head" (each head of DIM channels by itself) or "full" (all heads together). Channel
    c < HALF is rotated with channel c + HALF, the channels from 2 HALF on are not. Reads x, heads side by side, tokens x_stride
    apart; weight [DIM] or [num_heads DIM]; cos, sin, positions table_stride apart. Writes y, tokens y_stride apart, rstd fp32
    [T, num_heads] ("head") or [T] ("full"). HEADS, BLOCK_HALF, BLOCK_REST: powers of two no less than num_heads, HALF and
    DIM - 2 HALF.
    Example, no norm: channels (1, 0) at an angle of 90 degrees become (0, 1).
    """
    token = tl.program_id(0).to(tl.int64)
    dtype = x.dtype.element_ty
    head = tl.arange(0, HEADS)[:, None]
    half, rest = tl.arange(0, BLOCK_HALF)[None, :], 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    in_half = (head < num_heads) & (half < HALF)
    in_rest = (head < num_heads) & (rest < DIM)
    source = x + token * x_stride + head * DIM
    first = tl.load(source + half, mask=in_half, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + half, mask=in_half, other=0.0).to(tl.float32)
    others = tl.load(source + rest, mask=in_rest, other=0.0).to(tl.float32)
    if KIND != "none":
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1) + tl.sum(others * others, axis=1)
        w = weight + (head * DIM if KIND == "full" else head * 0)
        if KIND == "full":
            scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(squares, axis=0) / (num_heads * DIM) + eps))
            tl.store(rstd + token, scale)
        else:
            scale = tl.div_rn(1.0, tl.sqrt_rn(squares / DIM + eps))[:, None]
            tl.store(rstd + token * num_heads + head, scale, mask=head < num_heads)
        w_first = tl.load(w + half, mask=in_half, other=0.0).to(tl.float32)
        w_second = tl.load(w + HALF + half, mask=in_half, other=0.0).to(tl.float32)
        w_others = tl.load(w + rest, mask=in_rest, other=0.0).to(tl.float32)
        first = _rounded(_normed(first, scale, dtype) * w_first, dtype)
        second = _rounded(_normed(second, scale, dtype) * w_second, dtype)
        others = _normed(others, scale, dtype) * w_others
    angle = (token % length) * table_stride + half
    c = tl.load(cos + angle, mask=half < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=half < HALF, other=0.0).to(tl.float32)
    turned_first = _rounded(first * c, dtype) - _rounded(second * s, dtype)
    turned_second = _rounded(second * c, dtype) + _rounded(first * s, dtype)
    target = y + token * y_stride + head * DIM
    tl.store(target + half, turned_first.to(dtype), mask=in_half)
    tl.store(target + HALF + half, turned_second.to(dtype), mask=in_half)
    tl.store(target + rest, others.to(dtype), mask=in_rest)


@triton.jit
def norm_and_rotate_backward(
    dy, x, weight, cos, sin, rstd, dx, partial, length, dy_stride, x_stride, table_stride, num_heads, num_tokens,
    KIND: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dx of `norm_and_rotate`, and partial[p] = sum over the tokens of p of (d normed) normed, for each head.

    Program: ROWS tokens of one slice (second grid axis; num_tokens tokens each), in order. Reads dy, tokens dy_stride apart,
    and what the forward read and wrote. Writes dx, tokens x_stride apart like x, and partial fp32
    [slices, programs, num_heads, DIM].
    """
    dtype = x.dtype.element_ty
    head = tl.arange(0, HEADS)[:, None]
    half, rest = tl.arange(0, BLOCK_HALF)[None, :], 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    in_half = (head < num_heads) & (half < HALF)
    in_rest = (head < num_heads) & (rest < DIM)
    if KIND != "none":
        w = weight + (head * DIM if KIND == "full" else head * 0)
        w_first = tl.load(w + half, mask=in_half, other=0.0).to(tl.float32)
        w_second = tl.load(w + HALF + half, mask=in_half, other=0.0).to(tl.float32)
        w_others = tl.load(w + rest, mask=in_rest, other=0.0).to(tl.float32)
        total_first = tl.zeros((HEADS, BLOCK_HALF), tl.float32)
        total_second = tl.zeros((HEADS, BLOCK_HALF), tl.float32)
        total_others = tl.zeros((HEADS, BLOCK_REST), tl.float32)
    for i in range(ROWS):
        local = tl.program_id(0) * ROWS + i
        if local < num_tokens:
            token = tl.program_id(1).to(tl.int64) * num_tokens + local
            arrived = dy + token * dy_stride + head * DIM
            d_first = tl.load(arrived + half, mask=in_half, other=0.0).to(tl.float32)
            d_second = tl.load(arrived + HALF + half, mask=in_half, other=0.0).to(tl.float32)
            d_others = tl.load(arrived + rest, mask=in_rest, other=0.0).to(tl.float32)
            angle = (token % length) * table_stride + half
            c = tl.load(cos + angle, mask=half < HALF, other=0.0).to(tl.float32)
            s = tl.load(sin + angle, mask=half < HALF, other=0.0).to(tl.float32)
            back_first = _rounded(_rounded(d_first * c, dtype) + _rounded(d_second * s, dtype), dtype)
            d_second = _rounded(_rounded(d_second * c, dtype) - _rounded(d_first * s, dtype), dtype)
            d_first = back_first
            if KIND != "none":
                source = x + token * x_stride + head * DIM
                if KIND == "full":
                    scale = tl.load(rstd + token)
                else:
                    scale = tl.load(rstd + token * num_heads + head, mask=head < num_heads, other=0.0)
                n_first = _normed(tl.load(source + half, mask=in_half, other=0.0).to(tl.float32), scale, dtype)
                n_second = _normed(tl.load(source + HALF + half, mask=in_half, other=0.0).to(tl.float32), scale, dtype)
                n_others = _normed(tl.load(source + rest, mask=in_rest, other=0.0).to(tl.float32), scale, dtype)
                total_first += d_first * n_first
                total_second += d_second * n_second
                total_others += d_others * n_others
                d_first, d_second, d_others = d_first * w_first, d_second * w_second, d_others * w_others
                sums = tl.sum(d_first * n_first, axis=1) + tl.sum(d_second * n_second, axis=1)
                sums += tl.sum(d_others * n_others, axis=1)
                if KIND == "full":
                    mean = tl.sum(sums, axis=0) / (num_heads * DIM)
                else:
                    mean = (sums / DIM)[:, None]
                d_first = (d_first - n_first * mean) * scale
                d_second = (d_second - n_second * mean) * scale
                d_others = (d_others - n_others * mean) * scale
            target = dx + token * x_stride + head * DIM
            tl.store(target + half, d_first.to(dtype), mask=in_half)
            tl.store(target + HALF + half, d_second.to(dtype), mask=in_half)
            tl.store(target + rest, d_others.to(dtype), mask=in_rest)
    if KIND != "none":
        place = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        target = partial + place * num_heads * DIM + head * DIM
        tl.store(target + half, total_first, mask=in_half)
        tl.store(target + HALF + half, total_second, mask=in_half)
        tl.store(target + rest, total_others, mask=in_rest)


@triton.jit
def cross_entropy(logits, targets, losses, width, vocab_size, scale, ignored, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    """losses[t] = log(sum over v of exp(logits[t, v])) - logits[t, target], 0 for an ignored target.

    GRADIENT: logits are replaced by scale (one number in memory) times (softmax(logits) - [v is the target]), zeros for an
    ignored target and in the columns from vocab_size on. Program: one row of width columns. Reads targets int64 [T]. Writes
    losses fp32 [T].
    Example: logits (0, 0) with target 1, scale 1: loss 0.693, gradient (0.5, -0.5).
    """
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    counts = target != ignored
    line = logits + row * width
    top = -float("inf")
    total = 0.0
    for start in range(0, vocab_size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        values = tl.load(line + column, mask=column < vocab_size, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(values, axis=0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(values - higher), axis=0)
        top = higher
    chosen = tl.load(line + target, mask=counts, other=0.0).to(tl.float32)
    tl.store(losses + row, tl.where(counts, tl.log(total) - (chosen - top), 0.0))
    if GRADIENT:
        tl.debug_barrier()  # every thread has read its target's logit before it is overwritten
        slope = tl.load(scale).to(tl.float32)
        factor = tl.where(counts, slope / total, 0.0)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            values = tl.load(line + column, mask=column < vocab_size, other=-float("inf")).to(tl.float32)
            gradient = tl.exp(values - top) * factor
            gradient = tl.where(counts & (column == target), gradient - slope, gradient)
            gradient = tl.where(counts & (column < vocab_size), gradient, 0.0)
            tl.store(line + column, gradient.to(logits.dtype.element_ty), mask=column < width)
