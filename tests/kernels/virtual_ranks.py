"""Ranks of one group as threads of one process, whose workspaces are ordinary tensors: peer memory without peers.

Owns the stand-ins and the order. On the CPU one thread runs at a time, until it comes to where ranks wait for one another;
there the kernels that wait run for all ranks together, interleaved at random (tests/kernels/interpreter.py). On a GPU every
rank has a stream of its own and the kernels really wait.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from mok.kernels import peer as kernels
from mok.launch import peer as launch
from mok.shapes import WorkspaceShape
from mok.transport.peer import PeerTransport
from tests.kernels.interpreter import interleaved

CPU = torch.device("cpu")


def transports(shape: WorkspaceShape, device: torch.device = CPU, **options: float) -> list[PeerTransport]:
    """A workspace for each rank, filled with what no row may ever show; complete for every stream."""
    buffers = [torch.full((shape.bytes,), 0xFF, dtype=torch.uint8, device=device) for _ in range(shape.ranks)]
    start, end = shape.regions()["flags"][0], shape.regions()["x"][0]
    for buffer in buffers:
        buffer[start:end] = 0  # flags
    bases = [buffer.data_ptr() for buffer in buffers]
    chosen = {"row_room": 0.0, "timeout_s": 10.0} | options
    made = [PeerTransport(shape, rank, buffer, bases, **chosen) for rank, buffer in enumerate(buffers)]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return made


def run_beside_others(kernel: Any, config: Any, *arguments: Any) -> None:
    """In place of `mok.launch.mega.run`, for ranks that share a GPU: not a cooperative launch, of which two might be kept from
    running beside one another. `config.programs` of all ranks must fit at once."""
    kernel[(config.programs,)](*arguments, **LAUNCH)


def load(kernel: Any, config: Any, *arguments: Any) -> None:
    """Compile and load what `run_beside_others` will launch. A module is not loaded while a kernel on the GPU waits for one
    that comes after the load."""
    kernel.warmup(*arguments, grid=(config.programs,), **LAUNCH)._init_handles()


LAUNCH: dict[str, Any] = {"num_warps": 4, "maxnreg": 168, "enable_fp_fusion": False}


@triton.jit
def meet_all(bases_R, epochs, given_up, status, num_ranks, limit_ns, RANKS: tl.constexpr):
    """`raise_and_await` of every rank, one program each."""
    rank = tl.program_id(0)
    kernels.meet(bases_R, epochs + rank, given_up + rank, status + rank, rank, num_ranks, limit_ns, RANKS)


class Lockstep:
    """Runs `rank(r)` for all ranks; see the module. seed: of the interleaving where ranks wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int, seed: int = 0, device: torch.device = CPU) -> None:
        self.ranks, self.seed, self.device = ranks, seed, device
        self.streams = [torch.cuda.Stream(device) for _ in range(ranks)] if device.type == "cuda" else []
        self.turn = threading.Condition()
        self.arrived: dict[int, Any] = {}
        self.waiting = 0
        self.running: int | None = None
        self.local = threading.local()
        self.error: BaseException | None = None
        self.meets = 0
        self.meet_alone = launch.meet
        if self.streams:
            from mok.launch import mega

            monkeypatch.setattr(mega, "run", self.run_mega)
        monkeypatch.setattr(launch, "meet", self.meet)
        self.await_rows = launch.await_rows
        monkeypatch.setattr(launch, "await_rows", self.await_all)

    def run(self, rank: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None] * self.ranks
        threads = [threading.Thread(target=self.body, args=(r, rank, results), daemon=True) for r in range(self.ranks)]
        self.running = 0
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error
        return results

    def body(self, r: int, rank: Callable[[int], Any], results: list[Any]) -> None:
        self.local.rank = r
        torch.set_num_threads(1)
        try:
            self.wait_turn(r)
            stream = torch.cuda.stream(self.streams[r]) if self.streams else contextlib.nullcontext()
            with stream, torch.autograd.set_multithreading_enabled(False):  # the backward of a rank in its own thread
                results[r] = rank(r)
        except BaseException as error:
            self.error = self.error or error
        with self.turn:
            self.running = r + 1 if r + 1 < self.ranks else None
            self.turn.notify_all()

    def wait_turn(self, r: int) -> None:
        with self.turn:
            self.turn.wait_for(lambda: self.running == r or self.error is not None)
        if self.error is not None:
            raise SystemExit

    def all_here(self, what: Any, action: Callable[[list[Any]], None]) -> None:
        """The last rank to come acts for all; then rank 0 goes on."""
        r = self.local.rank
        self.arrived[r] = what
        if r + 1 == self.ranks:
            action([self.arrived[i] for i in range(self.ranks)])
        with self.turn:
            self.running = (r + 1) % self.ranks
            self.turn.notify_all()
        self.wait_turn(r)

    def meet(self, transport: PeerTransport, status: torch.Tensor) -> None:
        self.all_here(transport, lambda all_: self.meet_now(all_, status))

    def meet_now(self, all_: list[PeerTransport], status: torch.Tensor) -> None:
        if self.streams:  # one behind the other, so that no kernel is loaded while one of them waits
            for stream, transport in zip(self.streams, all_, strict=True):
                with torch.cuda.stream(stream):
                    self.meet_alone(transport, status)
            return
        epochs, given_up = (torch.cat([getattr(t, name)[:1] for t in all_]) for name in ("epoch", "given_up"))
        found = torch.zeros(self.ranks, dtype=torch.int32)
        self.meets += 1
        with interleaved(self.seed + self.meets):
            meet_all[(self.ranks,)](
                all_[0].bases, epochs, given_up, found, self.ranks, all_[0].limit_ns, RANKS=1 << (self.ranks - 1).bit_length()
            )
        status.copy_(status | int(found.max()))
        for transport, epoch, lost in zip(all_, epochs, given_up, strict=True):
            transport.epoch[:1], transport.given_up[:1] = epoch, lost

    def run_mega(self, kernel: Any, config: Any, *arguments: Any) -> None:
        """The megakernel of every rank, one behind the other, since they wait for one another."""

        def run_all(all_: list[tuple[Any, ...]]) -> None:
            for given in all_:
                load(kernel, config, *given)
            for stream, given in zip(self.streams, all_, strict=True):
                with torch.cuda.stream(stream):
                    run_beside_others(kernel, config, *given)

        self.all_here(arguments, run_all)

    def await_all(self, plan: launch.PeerPlan) -> torch.Tensor:
        self.all_here(None, lambda _: None)
        return self.await_rows(plan)
