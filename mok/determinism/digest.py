"""Digests of tensors: equal digests mean equal bytes, dtype and shape; names, files, strides and devices do not enter.

On the CPU a digest is SHA-256. On a GPU it is `mix128`, computed there so that only 16 bytes per tensor travel: the sum, over
all 32-bit words, of a 64-bit bijection of (position, word), twice with different constants. Integer sums do not depend on
order, so no schedule of threads can change it, and a single changed word always changes it. It detects faults, it does not
resist forgery. The two kinds are never compared with each other: each digest starts with the name of its kind.

Read next: `mok/determinism/trace.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

__all__ = ["Digester", "bytes_of", "digest", "digest_of_state", "mix128", "mix128_torch"]

# The finaliser of splitmix64 (Steele, Lea, Flood 2014) is a bijection of 64-bit words; the two increments give two sums.
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB
INCREMENTS = (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)
WORDS_PER_PROGRAM = 4096


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of `tensor` in row-major order, uint8 [num_bytes], on its device; copies only what is not contiguous."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8, device=tensor.device)


def header_of(tensor: torch.Tensor) -> str:
    """dtype and shape as text, such as "float32[2, 3]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def digest(tensor: torch.Tensor) -> str:
    """Digest of one tensor as text: "sha256:..." on the CPU, "mix128:..." on a GPU (waits for the GPU)."""
    digester = Digester()
    digester.add("", tensor)
    return digester.finish()[""]


def digest_of_state(state: Mapping[str, torch.Tensor]) -> str:
    """One SHA-256 over names, dtypes, shapes and bytes, in the order of the names."""
    total = hashlib.sha256()
    for name in sorted(state):
        total.update(f"{name}\0{digest(state[name].cpu())}\n".encode())
    return total.hexdigest()


class Digester:
    """Digests many tensors with one transfer from the device: `add` starts the work, `finish` waits and returns all."""

    def __init__(self) -> None:
        self._done: dict[str, str] = {}
        self._waiting: dict[str, tuple[str, torch.Tensor]] = {}
        self.num_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Note the bytes that `tensor` has now; later changes to it do not matter. A second tensor of one name is an error."""
        if name in self._done or name in self._waiting:
            raise ValueError(f"two tensors are called {name!r} in one record; every tensor needs its own name")
        content = bytes_of(tensor)
        self.num_bytes += content.numel()
        header = header_of(tensor)
        if content.device.type == "cpu":
            sha = hashlib.sha256(header.encode())
            sha.update(content.numpy().data)
            self._done[name] = f"sha256:{sha.hexdigest()}"
        else:
            self._waiting[name] = header, mix128(content)

    def finish(self) -> dict[str, str]:
        """name -> digest of everything added since the last `finish`."""
        done, waiting = self._done, self._waiting
        self._done, self._waiting = {}, {}
        if waiting:
            found = torch.stack([sums for _, sums in waiting.values()]).tolist()
            for (name, (header, _)), sums in zip(waiting.items(), found, strict=True):
                words = "".join(f"{word & (1 << 64) - 1:016x}" for word in sums)
                done[name] = f"mix128:{hashlib.sha256(f'{header}{words}'.encode()).hexdigest()}"
        return done


def words_of(content: torch.Tensor) -> torch.Tensor:
    """uint8 [n] -> int32 [ceil(n / 4)], zeros appended; a copy only where length or address is not a multiple of 4."""
    missing = -content.numel() % 4
    if missing:
        content = torch.nn.functional.pad(content, (0, missing))
    elif content.data_ptr() % 4:
        content = content.clone()
    return content.view(torch.int32)


def mix128(content: torch.Tensor) -> torch.Tensor:
    """uint8 [n] on a GPU -> int64 [2] there, without waiting. One pass over memory; computes `mix128_torch`."""
    import triton

    from mok.kernels.digest import mix_words

    words = words_of(content)
    num_programs = max(triton.cdiv(words.numel(), WORDS_PER_PROGRAM), 1)
    parts = torch.zeros(num_programs, 2, dtype=torch.int64, device=content.device)
    if words.numel():
        mix_words[(num_programs,)](words, parts, words.numel(), BLOCK=WORDS_PER_PROGRAM)
    return finish_mix(parts, content.numel())


def mix128_torch(content: torch.Tensor) -> torch.Tensor:
    """uint8 [n] -> int64 [2]: s_k = n + sum over words i of mix(i * 2^32 + word_i + increment_k), modulo 2^64.

    mix(z): z = (z ^ z >> 30) * MULTIPLIER_1; z = (z ^ z >> 27) * MULTIPLIER_2; z ^ z >> 31, shifts without sign.
    """
    words = words_of(content)
    position = torch.arange(words.numel(), dtype=torch.int64, device=content.device)
    keyed = (position << 32) + (words.to(torch.int64) & 0xFFFFFFFF)
    parts = torch.stack([mix(keyed + signed(increment)).sum() for increment in INCREMENTS])
    return finish_mix(parts[None], content.numel())


def finish_mix(parts: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """[programs, 2] -> [2]; the length enters here because zero padding would hide it."""
    return parts.sum(0) + num_bytes


def mix(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ shift_right(z, 30)) * signed(MULTIPLIER_1)
    z = (z ^ shift_right(z, 27)) * signed(MULTIPLIER_2)
    return z ^ shift_right(z, 31)


def shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift without sign: torch's int64 shift repeats the sign bit."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def signed(constant: int) -> int:
    """The int64 with the same 64 bits."""
    return constant - (1 << 64) if constant >> 63 else constant
