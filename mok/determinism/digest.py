"""Digests of tensors: equal digests mean equal bytes, dtype and shape; names, files, strides and devices do not enter.

On the CPU a digest is SHA-256. On a GPU it is `mix128`, computed there so that only 16 bytes per tensor travel: the sum, over
all 32-bit words, of a 64-bit bijection of (position, word), twice with different constants. Integer sums do not depend on
order, so no schedule of threads can change it, and a single changed word always changes it. It detects faults, it does not
resist forgery. The two kinds are never compared with each other: each digest starts with the name of its kind.

Read next: `mok/determinism/trace.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache

import torch

__all__ = ["Digester", "bytes_of", "digest", "digest_of_state", "mix128", "mix128_torch"]

# The finaliser of splitmix64 (Steele, Lea, Flood 2014) is a bijection of 64-bit words; the two increments give two sums.
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB
INCREMENTS = (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)
WORD = (1 << 64) - 1
WORDS_PER_PROGRAM = 4096


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of `tensor` in row-major order, uint8 [num_bytes], on its device; copies only what is not contiguous."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8, device=tensor.device)


def header_of(tensor: torch.Tensor) -> str:
    """dtype and shape as text, such as "float32[2, 3]"."""
    return _header(tensor.dtype, tensor.shape)


@cache
def _header(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def digest(tensor: torch.Tensor) -> str:
    """Digest of one tensor as text: "sha256:..." on the CPU, "mix128:..." on a GPU (waits for the GPU)."""
    digester = Digester()
    digester.add({"": tensor})
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
        self._waiting: list[tuple[list[str], list[str], torch.Tensor]] = []
        self._waiting_names: set[str] = set()
        self.num_bytes = 0

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Note the bytes that `tensors` have now; later changes to them do not matter. A second tensor of one name is an error.
        Those on a GPU take one launch together."""
        if used := next((name for name in tensors if name in self._done or name in self._waiting_names), None):
            raise ValueError(f"two tensors are called {used!r} in one record; every tensor needs its own name")
        on_device: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if tensor.device.type == "cpu":
                content = bytes_of(tensor)
                self.num_bytes += content.numel()
                sha = hashlib.sha256(header_of(tensor).encode())
                sha.update(content.numpy().data)
                self._done[name] = f"sha256:{sha.hexdigest()}"
            else:
                on_device[name] = tensor
                self.num_bytes += tensor.nbytes
        if on_device:
            headers = [header_of(tensor) for tensor in on_device.values()]
            self._waiting.append((list(on_device), headers, mix128(list(on_device.values()))))
            self._waiting_names.update(on_device)

    def known(self) -> dict[str, str]:
        """name -> digest of everything added since the last `finish`; waits for the device."""
        if self._waiting:
            found = torch.cat([sums for _, _, sums in self._waiting]).tolist()
            names = [name for part, _, _ in self._waiting for name in part]
            headers = [header for _, part, _ in self._waiting for header in part]
            for name, header, (first, second) in zip(names, headers, found, strict=True):
                self._done[name] = f"mix128:{header}:{first & WORD:016x}{second & WORD:016x}"
            self._waiting, self._waiting_names = [], set()
        return self._done

    def finish(self) -> dict[str, str]:
        """`known`, and nothing is known afterwards."""
        found, self._done = self.known(), {}
        return found


def words_of(content: torch.Tensor) -> torch.Tensor:
    """uint8 [n] -> int32 [ceil(n / 4)], zeros appended; a copy only where length or address is not a multiple of 4."""
    missing = -content.numel() % 4
    if missing:
        content = torch.nn.functional.pad(content, (0, missing))
    elif content.data_ptr() % 4:
        content = content.clone()
    return content.view(torch.int32)


def mix128(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Any tensors of one GPU -> int64 [tensors, 2] there, in one launch and one pass over memory, without waiting. Each row is
    what `mix128_torch` computes of the bytes."""
    from mok.kernels.digest import mix_words

    # What is not contiguous words of 32 bits is copied; the copies live until the launch is queued.
    plain = [tensor if _is_words(tensor) else words_of(bytes_of(tensor)) for tensor in tensors]
    num_bytes = torch.tensor([tensor.nbytes for tensor in tensors])
    num_words = -(-num_bytes // 4)
    num_programs = -(-num_words // WORDS_PER_PROGRAM)
    addresses = torch.tensor([tensor.data_ptr() for tensor in plain])
    last_program = num_programs.cumsum(0)
    table = torch.stack([addresses, num_words, last_program - num_programs, num_programs, num_bytes])
    total = int(last_program[-1])
    table = table.to(tensors[0].device, non_blocking=True)
    sums = torch.zeros(len(plain), 2, dtype=torch.int64, device=table.device)
    if total:
        owners = torch.arange(len(plain), dtype=torch.int32, device=table.device)
        owner_of_program = owners.repeat_interleave(table[3], output_size=total)
        mix_words[(total,)](table[0], table[1], table[2], owner_of_program, sums, BLOCK=WORDS_PER_PROGRAM)
    return sums + table[4].unsqueeze(1)


def _is_words(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor, as it is, is a row of whole 32-bit words that start on a word."""
    lazy = tensor.is_complex() or tensor.is_neg()
    return tensor.is_contiguous() and not lazy and not tensor.nbytes % 4 and not tensor.data_ptr() % 4


def mix128_torch(content: torch.Tensor) -> torch.Tensor:
    """uint8 [n] -> int64 [2]: s_k = n + sum over words i of mix(i * 2^32 + word_i + increment_k), modulo 2^64.

    mix(z): z = (z ^ z >> 30) * MULTIPLIER_1; z = (z ^ z >> 27) * MULTIPLIER_2; z ^ z >> 31, shifts without sign.
    """
    words = words_of(content)
    position = torch.arange(words.numel(), dtype=torch.int64, device=content.device)
    keyed = (position << 32) + (words.to(torch.int64) & 0xFFFFFFFF)
    # The length is added because zero padding would hide it.
    return torch.stack([mix(keyed + signed(increment)).sum() for increment in INCREMENTS]) + content.numel()


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
