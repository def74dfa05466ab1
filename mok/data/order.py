"""The order in which samples are seen: a keyed permutation that is computed, not stored.

Owns nothing but arithmetic on integers, so that sample `index` of `epoch` is the same on every rank, after every resume and
for any number of readers. Must not know tokens, files or torch. Read next: `mok/data/loader.py`.
"""

from __future__ import annotations

from hashlib import blake2b

__all__ = ["permute"]

ROUNDS = 6


def permute(index: int, size: int, seed: int, epoch: int) -> int:
    """Where sample `index` of an epoch lies among `size` samples: a permutation of range(size) chosen by (seed, epoch).

    A balanced Feistel network over the next even power of two permutes a range of less than 4 * size numbers; a number outside
    range(size) is sent through again until it falls inside ("cycle walking"), which keeps it a permutation.
    """
    if not 0 <= index < size:
        raise ValueError(f"index {index} is outside of the {size} samples of an epoch")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    key = seed.to_bytes(8, "little") + epoch.to_bytes(8, "little")
    place = index
    while True:
        left, right = place >> half_bits, place & mask
        for turn in range(ROUNDS):
            digest = blake2b(right.to_bytes(8, "little"), digest_size=8, key=key, salt=turn.to_bytes(8, "little")).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        place = (left << half_bits) | right
        if place < size:
            return place
