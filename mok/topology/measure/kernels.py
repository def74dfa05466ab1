"""Device code of the measurements: plain Triton, peer memory by address, no multicast.

Owns four small kernels. An address is an int64 that may belong to another GPU; the caller has enabled peer access.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["chase", "copy_words", "pull_chunks", "store_and_read"]


@triton.jit
def copy_words(source, target, num_words, BLOCK: tl.constexpr):
    """Computes target[i] = source[i] for i < num_words.

    Program: every num_programs-th block of BLOCK words. Reads source, writes target: addresses of int64 words, 16-byte
    aligned; one of them may be a peer's, which makes it a peer load or a peer store. Waits for nothing, signals nothing.
    """
    from_ptr = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
    to_ptr = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16)
    for block in range(tl.program_id(0), tl.cdiv(num_words, BLOCK), tl.num_programs(0)):
        words = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(to_ptr + words, tl.load(from_ptr + words, mask=words < num_words), mask=words < num_words)


@triton.jit
def pull_chunks(table, target, num_sources, BLOCK: tl.constexpr):
    """Computes target[offset_s + i] = source_s[i] for i < words_s, for every source s: one rank's part of an all-to-all.

    Program p serves source p % num_sources. Reads table, int64 [num_sources, 3] on this GPU: address, words, offset in words,
    the last two multiples of 4; and the sources, most of them peers'. Writes target, int64 words on this GPU. Waits for
    nothing, signals nothing.
    Example: table [[a, 4, 0], [b, 8, 4]] -> target = [a0 .. a3, b0 .. b7].
    """
    row = table + tl.program_id(0) % num_sources * 3
    from_ptr = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.int64)), 16)
    # Rows are multiples of 32 bytes; said here, it lets the compiler use 16-byte accesses.
    num_words, offset = tl.multiple_of(tl.load(row + 1), 4), tl.multiple_of(tl.load(row + 2), 4)
    lane, lanes = tl.program_id(0) // num_sources, tl.num_programs(0) // num_sources
    for block in range(lane, tl.cdiv(num_words, BLOCK).to(tl.int32), lanes):
        words = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(target + offset + words, tl.load(from_ptr + words, mask=words < num_words), mask=words < num_words)


@triton.jit
def chase(address, steps, result):
    """Computes the end of a walk of `steps` loads, each telling where the next one is: position = chain[position].

    Program: one, one warp. Reads chain, int64 words at `address`, with volatile loads that no cache near the reader may
    answer twice. Writes result, int64 [1]. Example: chain [2, 0, 1], 2 steps -> 1.
    """
    chain = address.to(tl.pointer_type(tl.int64))
    position = tl.full((), 0, tl.int64)
    for _ in range(steps):
        position = tl.load(chain + position, volatile=True)
    tl.store(result, position)


@triton.jit
def store_and_read(address, steps, result, STRIDE: tl.constexpr, SLOTS: tl.constexpr):
    """Counts to `steps` through memory: each step stores the count in the next slot, reads it back and adds one.

    Program: one, one warp. Reads and writes int64 words at `address`, slot s at word s * STRIDE, SLOTS slots in turn. Writes
    result, int64 [1]: `steps` if every store was there when it was read.
    """
    slots = address.to(tl.pointer_type(tl.int64))
    count = tl.full((), 0, tl.int64)
    for step in range(steps):
        slot = slots + step % SLOTS * STRIDE
        tl.store(slot, count)
        count = tl.load(slot, volatile=True) + 1
    tl.store(result, count)
