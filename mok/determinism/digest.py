"""Digests of tensors: equal digests mean equal bytes, dtype and shape; names, files, strides and devices do not enter.

On the CPU a digest is SHA-256. On a GPU it is `mix128`, computed there so that only 16 bytes per tensor travel: the sums, over
all 32-bit words, of two 64-bit bijections of (position, word). Integer sums do not depend on order, so no schedule of threads
can change it, and a single changed word always changes it. It detects faults, it does not resist forgery.
The two kinds are never compared with each other: each digest starts with the name of its kind.

Read next: `mok/determinism/trace.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from operator import add

import torch

__all__ = ["Digester", "Mixer", "bytes_of", "digest", "digest_of_state", "mix128", "mix128_torch"]

# Of rounds z = (z ^ z >> 32) * multiplier, bijections of 64-bit words and cheap on a GPU: two for one sum, three for the other.
INCREMENT = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD1B54A32D192ED03)
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
    """Digests many tensors with one transfer from the device: `add` starts the work, `finish` waits and returns all.

    What is added while a CUDA graph is recorded is digested again by each replay, so every later `finish` has it too. That must
    be what was added before the last `finish`, in the same order: its tables are used again, in memory that no graph owns.
    """

    def __init__(self) -> None:
        self._done: dict[str, str] = {}
        self._waiting: list[_Group] = []
        self._recorded: list[_Group] = []
        self._places: list[torch.Tensor] = []  # of the tables before the last `finish`
        self._names: set[str] = set()  # of the two lists
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Of all that the next `finish` returns."""
        return self._num_bytes + sum(group.num_bytes for group in self._recorded)

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Note the bytes that `tensors` have now; later changes to them do not matter. A second tensor of one name is an error.
        Those on a GPU take one launch together."""
        if used := next((name for name in tensors if name in self._done or name in self._names), None):
            raise ValueError(f"two tensors are called {used!r} in one record; every tensor needs its own name")
        on_device: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if tensor.device.type == "cpu":
                content = bytes_of(tensor)
                self._num_bytes += content.numel()
                sha = hashlib.sha256(header_of(tensor).encode())
                sha.update(content.numpy().data)
                self._done[name] = f"sha256:{sha.hexdigest()}"
            else:
                on_device[name] = tensor
        if not on_device:
            return
        recording = torch.cuda.is_current_stream_capturing()
        if recording and len(self._recorded) == len(self._places):
            raise RuntimeError("a graph records what the record before it had: take one the usual way first")
        group = _Group(on_device, self._places[len(self._recorded)] if recording else None)
        self._names.update(on_device)
        if recording:
            self._recorded.append(group)
        else:
            group.mixer.send_table()
            self._waiting.append(group)
            self._num_bytes += group.num_bytes
        group.sums = group.mixer.run()

    def recorded(self) -> None:
        """The graph is recorded: to be called before its first replay, which needs what could not be sent meanwhile."""
        for group in self._recorded:
            group.mixer.send_table()

    def known(self) -> dict[str, str]:
        """name -> digest of everything added since the last `finish`, outside graphs; waits for the device."""
        self._done.update(_read(self._waiting))
        for group in self._waiting:
            self._names.difference_update(group.names)
        self._waiting = []
        return self._done

    def finish(self) -> dict[str, str]:
        """name -> digest of all that was added or replayed since the last `finish`; waits for the device."""
        if self._waiting:
            self._places = [group.mixer.place for group in self._waiting]
        found = self.known()
        found.update(_read(self._recorded))
        self._done, self._num_bytes = {}, 0
        return found


class _Group:
    """Tensors that were added together. sums: int64 [tensors, 2], on the device, once the work is queued."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], place: torch.Tensor | None) -> None:
        self.names = list(tensors)
        self.prefixes = [f"mix128:{header_of(tensor)}:" for tensor in tensors.values()]
        self.num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self.mixer = Mixer(list(tensors.values()), place)
        self.sums: torch.Tensor


def _read(groups: Sequence[_Group]) -> dict[str, str]:
    if not groups:
        return {}
    sums = torch.cat([group.sums for group in groups]).cpu().numpy()
    digits = sums.astype(">i8").tobytes().hex()
    names = chain.from_iterable(group.names for group in groups)
    prefixes = chain.from_iterable(group.prefixes for group in groups)
    parts = [digits[start : start + 32] for start in range(0, len(digits), 32)]
    return dict(zip(names, map(add, prefixes, parts), strict=True))


def words_of(content: torch.Tensor) -> torch.Tensor:
    """uint8 [n] -> int32 [ceil(n / 4)], zeros appended; a copy only where length or address is not a multiple of 4."""
    missing = -content.numel() % 4
    if missing:
        content = torch.nn.functional.pad(content, (0, missing))
    elif content.data_ptr() % 4:
        content = content.clone()
    return content.view(torch.int32)


def mix128(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Any tensors of one GPU -> int64 [tensors, 2] there, in one pass over memory, without waiting. Each row is what
    `mix128_torch` computes of the bytes."""
    mixer = Mixer(tensors)
    mixer.send_table()
    return mixer.run()


class Mixer:
    """`mix128` in two halves, since nothing can be sent to a GPU while a CUDA graph is recorded: `run` there, `send_table`
    before the first replay.

    place: where the table goes, the `place` of a mixer of as many tensors of the same sizes; new memory by default. While a
    graph is recorded it must be given: what is allocated then belongs to the graph, which writes other things there as well.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], place: torch.Tensor | None = None) -> None:
        # What is not contiguous words of 32 bits is copied; the copies live until the launch is queued.
        self._plain: list[torch.Tensor] | None = [t if _is_words(t) else words_of(bytes_of(t)) for t in tensors]
        num_bytes = torch.tensor([tensor.nbytes for tensor in tensors])
        num_words = -(-num_bytes // 4)
        num_programs = -(-num_words // WORDS_PER_PROGRAM)
        addresses = torch.tensor([tensor.data_ptr() for tensor in self._plain])
        last_program = num_programs.cumsum(0)
        owners = torch.arange(len(tensors)).repeat_interleave(num_programs)
        parts = [addresses, num_words, last_program - num_programs, num_bytes, owners]
        self._sizes = [part.numel() for part in parts]
        self._table = torch.cat(parts)
        self.place = torch.empty_like(self._table, device=tensors[0].device) if place is None else place
        if self.place.shape != self._table.shape:
            raise ValueError(f"a table of {self._table.numel()} numbers does not fit a place for {self.place.numel()}")

    def send_table(self) -> None:
        self.place.copy_(self._table)

    def run(self) -> torch.Tensor:
        """Queue the work, once; returns the sums."""
        from mok.kernels.digest import mix_words

        addresses, num_words, first_program, num_bytes, owners = self.place.split(self._sizes)
        # The length is added because zero padding would hide it.
        sums = num_bytes.unsqueeze(1).repeat(1, 2)
        if owners.numel():
            mix_words[(owners.numel(),)](addresses, num_words, first_program, owners, sums, BLOCK=WORDS_PER_PROGRAM)
        self._plain = None
        return sums


def _is_words(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor, as it is, is a row of whole 32-bit words that start on a word."""
    lazy = tensor.is_complex() or tensor.is_neg()
    return tensor.is_contiguous() and not lazy and not tensor.nbytes % 4 and not tensor.data_ptr() % 4


def mix128_torch(content: torch.Tensor) -> torch.Tensor:
    """uint8 [n] -> int64 [2]: n + the sums over all words of y_i and of z_i, modulo 2^64. Words are 32 bits; with
    x_i = i * 2^32 + word_i + INCREMENT, y_i = x_i after two rounds, z_i = y_i after the third.

    Round k: z = (z ^ z >> 32) * MULTIPLIERS[k], the shift without sign.
    """
    words = words_of(content)
    position = torch.arange(words.numel(), dtype=torch.int64, device=content.device)
    mixed = [(position << 32) + (words.to(torch.int64) & 0xFFFFFFFF) + signed(INCREMENT)]
    for multiplier in MULTIPLIERS:
        z = mixed[-1]
        # torch's shift of int64 repeats the sign bit.
        mixed.append((z ^ (z >> 32 & 0xFFFFFFFF)) * signed(multiplier))
    # The length is added because zero padding would hide it.
    return torch.stack([mixed[2].sum(), mixed[3].sum()]) + content.numel()


def signed(constant: int) -> int:
    """The int64 with the same 64 bits."""
    return constant - (1 << 64) if constant >> 63 else constant
