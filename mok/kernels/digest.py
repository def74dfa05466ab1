"""Device code of the GPU digest; `mok/determinism/digest.py` launches it and says what the digest promises."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["mix_words"]


@triton.jit
def mix_words(addresses, num_words, first_program, tensor_of_program, sums, BLOCK: tl.constexpr):
    """Digests of many tensors, each taken as words of 32 bits.

    Computes, modulo 2^64: sums[t, 0] += sum over i of y_i, sums[t, 1] += sum over i of z_i, with x_i = i * 2^32 + words_t[i] +
        increment, y_i = x_i after two rounds z = (z ^ z >> 32) * multiplier, z_i = y_i after a third
    Program: p owns words (p - first_program[t]) * BLOCK and following of tensor t = tensor_of_program[p]
    Reads: addresses int64 [tensors], where words_t int32 [num_words[t]] begin; num_words, first_program int64 [tensors];
        tensor_of_program int64 [programs]
    Writes: sums int64 [tensors, 2]; by atomics, since integer sums do not depend on order
    Waits and signals: nothing
    Example: one tensor, words [1, 2]: sums[0, 0] += y(1 + increment) + y(2^32 + 2 + increment)
    """
    program = tl.program_id(0)
    tensor = tl.load(tensor_of_program + program)
    words = tl.load(addresses + tensor).to(tl.pointer_type(tl.int32))
    position = (program - tl.load(first_program + tensor)) * BLOCK + tl.arange(0, BLOCK)
    inside = position < tl.load(num_words + tensor)
    word = tl.load(words + position, mask=inside, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
    z = (position.to(tl.uint64) << 32) + word + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 32)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 32)) * 0x94D049BB133111EB
    first = tl.sum(tl.where(inside, z, 0).to(tl.int64, bitcast=True), axis=0)
    z = (z ^ (z >> 32)) * 0xD1B54A32D192ED03
    second = tl.sum(tl.where(inside, z, 0).to(tl.int64, bitcast=True), axis=0)
    tl.atomic_add(sums + tensor * 2, first, sem="relaxed")
    tl.atomic_add(sums + tensor * 2 + 1, second, sem="relaxed")
