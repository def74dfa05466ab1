"""Device code of the GPU digest; `mok/determinism/digest.py` launches it and says what the digest promises."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["mix_words"]


@triton.jit
def mix_words(addresses, num_words, first_program, tensor_of_program, sums, BLOCK: tl.constexpr):
    """Digests of many tensors, each taken as words of 32 bits.

    Computes: sums[t, k] += sum over i of mix(i * 2^32 + words_t[i] + increment_k) modulo 2^64
    Program: p owns words (p - first_program[t]) * BLOCK and following of tensor t = tensor_of_program[p]
    Reads: addresses int64 [tensors], where words_t int32 [num_words[t]] begin; num_words, first_program int64 [tensors];
        tensor_of_program int32 [programs]
    Writes: sums int64 [tensors, 2], zeros before; by atomics, since integer sums do not depend on order
    Waits and signals: nothing
    Example: one tensor, words [1, 2]: sums[0, k] = mix(1 + increment_k) + mix(2^32 + 2 + increment_k)
    """
    program = tl.program_id(0)
    tensor = tl.load(tensor_of_program + program).to(tl.int64)
    words = tl.load(addresses + tensor).to(tl.pointer_type(tl.int32))
    position = (program - tl.load(first_program + tensor)) * BLOCK + tl.arange(0, BLOCK)
    inside = position < tl.load(num_words + tensor)
    word = tl.load(words + position, mask=inside, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
    keyed = (position.to(tl.uint64) << 32) + word
    for k in tl.static_range(2):
        if k == 0:
            z = keyed + 0x9E3779B97F4A7C15
        else:
            z = keyed + 0xD1B54A32D192ED03
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB
        z = z ^ (z >> 31)
        total = tl.sum(tl.where(inside, z, 0).to(tl.int64, bitcast=True), axis=0)
        tl.atomic_add(sums + tensor * 2 + k, total, sem="relaxed")
