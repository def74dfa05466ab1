"""AdamW and the sums of squares behind the gradient norm, one pass over memory each, in plain Triton.

Owns the arithmetic of one element, which is that of `mok/train/optim.py` operation by operation (every launch switches fused
multiply-add off, so that the bits are too), and the sums over blocks. Knows nothing of groups, schedules or clipping.
Read next: `mok/launch/optimizer.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def adamw(
    weights, master, exp_avg, exp_avg_sq, grads, numbers, numel, beta1, beta2,
    DECAY: tl.constexpr, APART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """m = beta1 m + grad_to_avg g, v = beta2 v + (grad_to_root g)^2, w = keep w - (rate m) / (sqrt(v) + epsilon), in fp32.

    Program: BLOCK elements. Reads and writes exp_avg, exp_avg_sq (rounded to their dtype on the way out) and master fp32
    [numel]; reads grads fp32, and numbers fp32: grad_to_avg, grad_to_root, epsilon, rate, keep. A grad_to_avg of NaN leaves
    everything as it is. DECAY: whether w is multiplied by keep. APART: weights are memory of their own and get w rounded.
    Example: m = v = 0, g = 2, beta1 = beta2 = 0.5, grad_to_avg = grad_to_root = 0.5, epsilon = 0, rate = 0.25, w = 1, no decay:
    m = 1, v = 1, w = 0.75.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    grad_to_avg, grad_to_root = tl.load(numbers), tl.load(numbers + 1)
    inside = at < tl.where(grad_to_avg == grad_to_avg, numel, 0)
    g = tl.load(grads + at, mask=inside, other=0.0)
    m = tl.load(exp_avg + at, mask=inside, other=0.0).to(tl.float32) * beta1 + g * grad_to_avg
    root = g * grad_to_root
    v = tl.load(exp_avg_sq + at, mask=inside, other=0.0).to(tl.float32) * beta2 + root * root
    w = tl.load(master + at, mask=inside, other=0.0)
    if DECAY:
        w = w * tl.load(numbers + 4)
    w = w - tl.div_rn(tl.load(numbers + 3) * m, tl.sqrt_rn(v) + tl.load(numbers + 2))
    tl.store(exp_avg + at, m.to(exp_avg.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq + at, v.to(exp_avg_sq.dtype.element_ty), mask=inside)
    tl.store(master + at, w, mask=inside)
    if APART:
        tl.store(weights + at, w.to(weights.dtype.element_ty), mask=inside)


@triton.jit
def square_sums(values, sums, num_blocks, WIDTH: tl.constexpr, BLOCKS: tl.constexpr):
    """sums[b] = sum over i < WIDTH of values[b WIDTH + i]^2, in one fixed order.

    Program: BLOCKS blocks. Reads values fp32 [num_blocks WIDTH]. Writes sums fp32 [num_blocks].
    Example, WIDTH = 2: values 1 2 3 4 give 5 25.
    """
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = tl.load(values + at, mask=(block < num_blocks)[:, None], other=0.0)
    tl.store(sums + block, tl.sum(x * x, axis=1), mask=block < num_blocks)
