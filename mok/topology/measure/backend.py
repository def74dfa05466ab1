"""Transfers between the GPUs of one process: CUDA copies through torch, peer loads and stores by the kernels beside it.

Owns buffers, timing by CUDA events, and the check of what arrived. Data are a function of (seed, source, target, position),
made again on the receiving GPU for the check, so that a broken link cannot also break the check. Never uses multicast.
"""

from __future__ import annotations

import os
import statistics
import time

import torch

__all__ = ["POISON", "WORD_BYTES", "CudaBackend", "pattern", "wrong_words"]

WORD_BYTES = 8
POISON = -1

BLOCK_WORDS = 2048
PROGRAMS_PER_SM = 4

CHASE_STEPS = 2000
CHAIN_STRIDE_WORDS = 64
CHAIN_SLOTS = 4096

SMALL_COPIES = 20

EXCHANGES_PER_TIMING = 4
"""Launching on many GPUs one after the other skews their starts; so many exchanges in a row make that small."""


def pattern(seed: int, start: int, count: int, device: torch.device | str) -> torch.Tensor:
    """`count` random int64 words from position `start` of the stream `seed`: the same on every device, never POISON."""
    words = torch.arange(start, start + count, dtype=torch.int64, device=device)
    words = words * 6364136223846793005 + (seed * 1442695040888963407 + 1) % (1 << 62)
    words ^= words >> 29
    words = words * 3202034522624059733
    words ^= words >> 32
    return words.bitwise_and_(0x7FFFFFFFFFFFFFFF)


def wrong_words(received: torch.Tensor, expected: torch.Tensor) -> str:
    """What differs, in words; "" if nothing does."""
    if torch.equal(received, expected):
        return ""
    different = received != expected
    first = int(different.to(torch.uint8).argmax())
    return f"{int(different.sum())} of {received.numel()} words are wrong, the first at byte {first * WORD_BYTES}"


class CudaBackend:
    """All visible GPUs, by ordinal. Building it compiles every kernel and enables peer access where the driver has it."""

    def __init__(self) -> None:
        self.num_gpus = torch.cuda.device_count()
        self._buffers: dict[tuple[int, str], torch.Tensor] = {}
        self._why_not_kernels = (
            "TRITON_INTERPRET=1 keeps kernels off the GPU" if os.environ.get("TRITON_INTERPRET") == "1" else ""
        )
        try:
            from mok.topology.measure import kernels

            self._kernels = kernels
        except ImportError as error:
            self._why_not_kernels = f"Triton cannot be imported: {error}"
        for source in range(self.num_gpus):
            for target in range(self.num_gpus):
                # torch enables peer access from `source` to `target` at its first copy between them.
                self.transfer("copy", source, target, 1024, seed=0)
        for gpu in range(self.num_gpus) if not self._why_not_kernels else ():
            for method in ("load", "store"):
                self.transfer(method, gpu, gpu, BLOCK_WORDS * WORD_BYTES, seed=0)
                self.latency(method, gpu, gpu)
        if not self._why_not_kernels:
            self.exchange(
                "load", [[8 if i == j else 0 for j in range(self.num_gpus)] for i in range(self.num_gpus)], 256, seed=0
            )

    def why_not(self, method: str) -> str:
        return "" if method == "copy" else self._why_not_kernels

    def capable(self, source: int, target: int) -> bool:
        return source == target or all(
            torch.cuda.can_device_access_peer(*pair) for pair in ((source, target), (target, source))
        )

    def transfer(self, method: str, source: int, target: int, num_bytes: int, seed: int) -> tuple[float, str]:
        num_words = num_bytes // WORD_BYTES
        stream = self._stream(seed, source, target)
        sent = self._buffer(source, "sent", num_words)
        received = self._buffer(target, "received", num_words)
        sent.copy_(pattern(stream, 0, num_words, sent.device))
        received.fill_(POISON)
        # The side that works: the reader for loads, the writer for stores; torch copies on the source's stream.
        worker = target if method == "load" else source
        self._synchronize(source, target)
        with torch.cuda.device(worker):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            if method == "copy":
                received.copy_(sent, non_blocking=True)
            else:
                grid = (PROGRAMS_PER_SM * torch.cuda.get_device_properties(worker).multi_processor_count,)
                self._kernels.copy_words[grid](sent.data_ptr(), received.data_ptr(), num_words, BLOCK=BLOCK_WORDS, num_warps=8)
            end.record()
        self._synchronize(source, target)
        return start.elapsed_time(end) / 1e3, wrong_words(received, pattern(stream, 0, num_words, received.device))

    def latency(self, method: str, source: int, target: int) -> float:
        if method == "copy":
            return self._copy_latency(source, target)
        worker, home = (target, source) if method == "load" else (source, target)
        memory = self._buffer(home, "chain", CHAIN_STRIDE_WORDS * CHAIN_SLOTS)
        slots = torch.arange(CHAIN_SLOTS, device=memory.device)
        memory[slots * CHAIN_STRIDE_WORDS] = (slots + 1) % CHAIN_SLOTS * CHAIN_STRIDE_WORDS
        self._synchronize(source, target)
        with torch.cuda.device(worker):
            result = torch.full((1,), POISON, dtype=torch.int64, device=f"cuda:{worker}")
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            if method == "load":
                self._kernels.chase[(1,)](memory.data_ptr(), CHASE_STEPS, result, num_warps=1)
                expected = CHASE_STEPS % CHAIN_SLOTS * CHAIN_STRIDE_WORDS
            else:
                sizes = {"STRIDE": CHAIN_STRIDE_WORDS, "SLOTS": CHAIN_SLOTS}
                self._kernels.store_and_read[(1,)](memory.data_ptr(), CHASE_STEPS, result, **sizes, num_warps=1)
                expected = CHASE_STEPS
            end.record()
        self._synchronize(source, target)
        if int(result) != expected:
            raise RuntimeError(f"the latency walk ended at {int(result)}, not at {expected}")
        return start.elapsed_time(end) / 1e3 / CHASE_STEPS

    def exchange(self, method: str, rows: list[list[int]], row_bytes: int, seed: int) -> tuple[float, str]:
        gpus = range(self.num_gpus)
        words = [[count * row_bytes // WORD_BYTES for count in counts] for counts in rows]
        sent = [self._buffer(i, "sent", sum(words[i])) for i in gpus]
        received = [self._buffer(j, "received", sum(words[i][j] for i in gpus)) for j in gpus]
        for i in gpus:
            sent[i].copy_(pattern(self._stream(seed, i, self.num_gpus), 0, sent[i].numel(), sent[i].device))
            received[i].fill_(POISON)
        self._synchronize(*gpus)
        seconds = self._pull(words, sent, received) if method == "load" else self._push(words, sent, received)
        for j in gpus:
            start = 0
            for i in gpus:
                expected = pattern(self._stream(seed, i, self.num_gpus), sum(words[i][:j]), words[i][j], received[j].device)
                if wrong := wrong_words(received[j][start : start + words[i][j]], expected):
                    return seconds, f"rows from {i} to {j}: {wrong}"
                start += words[i][j]
        return seconds, ""

    def _pull(self, words: list[list[int]], sent: list[torch.Tensor], received: list[torch.Tensor]) -> float:
        """Every GPU reads its rows from all others by one kernel; seconds of the slowest."""
        gpus = range(self.num_gpus)
        tables = []
        for j in gpus:
            entries = []
            for i in gpus:
                address = sent[i].data_ptr() + sum(words[i][:j]) * WORD_BYTES
                entries.append([address, words[i][j], sum(words[k][j] for k in range(i))])
            tables.append(torch.tensor(entries, dtype=torch.int64, device=f"cuda:{j}"))
        self._synchronize(*gpus)
        events = []
        for j in gpus:
            with torch.cuda.device(j):
                programs = PROGRAMS_PER_SM * torch.cuda.get_device_properties(j).multi_processor_count
                grid = (max(1, programs // self.num_gpus) * self.num_gpus,)
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                for _ in range(EXCHANGES_PER_TIMING):
                    self._kernels.pull_chunks[grid](tables[j], received[j], self.num_gpus, BLOCK=BLOCK_WORDS, num_warps=8)
                end.record()
                events.append((start, end))
        self._synchronize(*gpus)
        return max(start.elapsed_time(end) for start, end in events) / 1e3 / EXCHANGES_PER_TIMING

    def _push(self, words: list[list[int]], sent: list[torch.Tensor], received: list[torch.Tensor]) -> float:
        """Every GPU copies its rows to all others through torch; seconds until all are there, launches included."""
        gpus = range(self.num_gpus)
        begin = time.perf_counter()
        for step in gpus:
            for i in gpus:
                j = (i + step) % self.num_gpus
                start, offset = sum(words[i][:j]), sum(words[k][j] for k in range(i))
                received[j][offset : offset + words[i][j]].copy_(sent[i][start : start + words[i][j]], non_blocking=True)
        self._synchronize(*gpus)
        return time.perf_counter() - begin

    def _copy_latency(self, source: int, target: int) -> float:
        """Seconds from the call of a 16-byte copy until the host knows that it is done; median."""
        sent, received = self._buffer(source, "sent", 2), self._buffer(target, "received", 2)
        times = []
        for _ in range(SMALL_COPIES):
            self._synchronize(source, target)
            begin = time.perf_counter()
            received.copy_(sent, non_blocking=True)
            self._synchronize(source, target)
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    def _stream(self, seed: int, source: int, target: int) -> int:
        """A number of its own for the data of each repeat, source and target."""
        return (seed * (self.num_gpus + 1) + source) * (self.num_gpus + 1) + target

    def _buffer(self, gpu: int, role: str, num_words: int) -> torch.Tensor:
        """The first `num_words` words of a buffer that is kept and grown as needed."""
        kept = self._buffers.get((gpu, role))
        if kept is None or kept.numel() < num_words:
            self._buffers.pop((gpu, role), None)
            kept = torch.empty(num_words, dtype=torch.int64, device=f"cuda:{gpu}")
            self._buffers[gpu, role] = kept
        return kept[:num_words]

    def _synchronize(self, *gpus: int) -> None:
        for gpu in dict.fromkeys(gpus):
            torch.cuda.synchronize(gpu)
