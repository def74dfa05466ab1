"""Device code of the GPU digest; `mok/determinism/digest.py` launches it and says what the digest promises."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["mix_words"]


@triton.jit
def mix_words(words, parts, num_words, BLOCK: tl.constexpr):
    """Digest of the words of one block.

    Computes: parts[p, k] = sum over i of mix(i * 2^32 + words[i] + increment_k) modulo 2^64, i in block p
    Program: p owns words p * BLOCK .. (p + 1) * BLOCK
    Reads: words int32 [num_words]
    Writes: parts int64 [programs, 2], one row per program, no atomics
    Waits and signals: nothing
    Example: one program, words [1, 2]: parts[0, k] = mix(1 + increment_k) + mix(2^32 + 2 + increment_k)
    """
    program = tl.program_id(0)
    position = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < num_words
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
        tl.store(parts + program * 2 + k, total)
