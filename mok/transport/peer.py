"""Rows that travel through memory which the GPUs of a group have opened to one another (torch symmetric memory).

Owns the workspace of a rank: its memory, where the others' is, and how long to wait for them. Plain loads and stores only:
NVLink multicast is switched off before the memory is made. Moves nothing itself. Read next: `mok/launch/peer.py`, which does,
and `mok/kernels/peer.py` for the protocol.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mok.errors import UsageError
from mok.shapes import WorkspaceShape

__all__ = ["PeerTransport"]


class PeerTransport:
    """One rank's workspace, shared by all layers of a model, which use it one after the other.

    shape: the same on all ranks. rank: this one's place in the group. buffer: uint8 [shape.bytes], zeroed, this rank's memory.
    bases: where the memory of each rank starts, as this rank's GPU sees it. row_room: rows of this rank's experts that there is
    room for, in multiples of the mean; 0 for all that may come. timeout_s: how long kernels wait for another rank.
    """

    name = "peer"

    def __init__(
        self, shape: WorkspaceShape, rank: int, buffer: Tensor, bases: list[int], *, row_room: float, timeout_s: float
    ) -> None:
        self.shape, self.rank, self.ranks = shape, rank, shape.ranks
        self.row_room, self.limit_ns = row_room, int(timeout_s * 1e9)
        self.buffer = buffer
        self.bases = torch.tensor(bases, dtype=torch.int64, device=buffer.device)
        # How many times this rank has met the others; and whether it has given up waiting for them.
        self.epoch, self.given_up = torch.zeros(2, 4, dtype=torch.int32, device=buffer.device)
        self.start = {name: start for name, (start, _) in shape.regions().items()}
        # In the order of `mok.kernels.peer_mover`'s FACT_ places.
        facts = [rank, self.limit_ns, *(self.start[name] for name in ("row_flags", "returned", "partials", "x", "dy"))]
        self.facts = torch.tensor(facts, dtype=torch.int64, device=buffer.device)
        self.keep: Any = None

    @property
    def ids_stride(self) -> int:
        """Bytes from the routes of one parity to those of the other."""
        return self.shape.regions()["ids"][1] // 2

    def view(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """The first elements of a region of this rank's memory."""
        start = self.start[name]
        size = torch.Size(shape).numel() * dtype.itemsize
        return self.buffer[start : start + size].view(dtype).view(shape)

    def check(self, tokens: int, top_k: int, hidden_size: int, intermediate_size: int) -> None:
        """UsageError if a call does not fit."""
        room = self.shape
        if tokens > room.tokens:
            raise UsageError(
                f"rank {self.rank} has {tokens} tokens in a call and its workspace room for {room.tokens}: "
                "make it for as many (train.batch_size, train.sequence_length, distributed.slices_per_call)"
            )
        sizes, expected = (top_k, hidden_size, intermediate_size), (room.top_k, room.hidden_size, room.intermediate_size)
        if sizes != expected:
            raise UsageError(f"K, H, I = {sizes}: the workspace was made for layers of {expected}")

    @classmethod
    def allocate(
        cls,
        shape: WorkspaceShape,
        group: dist.ProcessGroup,
        device: torch.device,
        agree: Callable[[str], None],
        *,
        row_room: float,
        timeout_s: float,
    ) -> PeerTransport:
        """Make the memory of this rank and open it to the group; a collective call.

        agree: returns on every rank once all have called it, and raises on every rank if one gave a reason; so that no rank
        waits in the second half of the set-up for one that failed in the first.
        """
        # Sums and copies inside the switch are not used, and memory for them must not be made.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        import torch.distributed._symmetric_memory as symmetric

        problem, buffer, handle = "", None, None
        try:
            buffer = symmetric.empty(shape.bytes, dtype=torch.uint8, device=device)
            buffer.zero_()
            torch.cuda.synchronize(device)
        except (RuntimeError, OSError) as error:
            problem = f"symmetric memory of {shape.bytes} bytes could not be made: {_first_line(error)}"
        agree(problem)
        assert buffer is not None
        try:
            handle = symmetric.rendezvous(buffer, group.group_name)
        except (RuntimeError, OSError) as error:
            problem = (
                f"memory could not be opened to the other GPUs: {_first_line(error)} (on one host: is peer access allowed? "
                "over several: fabric handles need IMEX; mok probe-topology says what is wrong)"
            )
        agree(problem)
        assert handle is not None
        transport = cls(shape, group.rank(), buffer, list(handle.buffer_ptrs), row_room=row_room, timeout_s=timeout_s)
        transport.keep = handle
        return transport


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
