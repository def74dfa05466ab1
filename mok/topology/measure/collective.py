"""All-to-all among the ranks of a launch, by the collective that `moe.transport = "collective"` would use: NCCL or gloo.

Owns the agreement of all ranks to take part, so that nobody waits for one that cannot; then the same sizes and checks as
within one process. Read next: `ranks.py`, which calls it.
"""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Callable
from typing import Any

from mok.topology.measure.plan import Plan
from mok.topology.measure.runner import exchanges
from mok.topology.measurement import Exchange

__all__ = ["measure_collective", "verdict_of"]


def measure_collective(
    store: Any, rank: int, world_size: int, device: str, identity: str, plan: Plan, wait: Callable[[str], bool]
) -> tuple[list[Exchange], str]:
    """The exchanges of `plan` as seen by all ranks together, and why there are none.

    device: "cpu" or "cuda:N". identity: of the device, so that ranks sharing a GPU are noticed. wait(key): whether `key`
    appeared in `store` in time. Every rank of the launch calls it; a collective is started only if all of them did.
    """
    kind = device.partition(":")[0]
    store.set(f"mok/exchange/here/{rank}", f"{kind} {identity}")
    if rank == 0:
        store.set("mok/exchange/verdict", verdict_of(store, world_size, wait))
    if not wait("mok/exchange/verdict"):
        return [], "rank 0 did not answer in time"
    if reason := store.get("mok/exchange/verdict").decode().partition(":")[2]:
        return [], reason
    try:
        return _exchange(store, rank, world_size, device, plan), ""
    except RuntimeError as error:
        return [], f"the exchange raised: {str(error).splitlines()[0]}"


def verdict_of(store: Any, world_size: int, wait: Callable[[str], bool]) -> str:
    """ "go:" if every rank is there on a device of its own, else "no:" and the reason."""
    devices = []
    for other in range(world_size):
        if not wait(f"mok/exchange/here/{other}"):
            return f"no:rank {other} did not come to the exchange"
        devices.append(store.get(f"mok/exchange/here/{other}").decode())
    if len({device.split()[0] for device in devices}) > 1:
        return "no:some ranks have a GPU and some have none"
    if devices[0].startswith("cuda") and len(set(devices)) < world_size:
        return "no:ranks share a GPU, which NCCL refuses"
    return "go:"


def _exchange(store: Any, rank: int, world_size: int, device: str, plan: Plan) -> list[Exchange]:
    import torch
    from torch import distributed

    from mok.topology.measure.backend import POISON, WORD_BYTES, pattern, wrong_words

    method = "nccl" if device.startswith("cuda") else "gloo"
    if method == "nccl":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        method,
        store=distributed.PrefixStore("mok/exchange", store),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=plan.limit_s),
    )
    everyone = range(world_size)

    def exchange(_: str, rows: list[list[int]], row_bytes: int, seed: int) -> tuple[float, str]:
        words = [[count * row_bytes // WORD_BYTES for count in counts] for counts in rows]
        streams = [seed * world_size + source for source in everyone]
        sent = pattern(streams[rank], 0, sum(words[rank]), device)
        incoming = [words[source][rank] for source in everyone]
        received = torch.full((sum(incoming),), POISON, dtype=torch.int64, device=device)
        _synchronize(device)
        distributed.barrier()
        begin = time.perf_counter()
        distributed.all_to_all_single(received, sent, incoming, words[rank])
        _synchronize(device)
        seconds = time.perf_counter() - begin
        wrong, start = "", 0
        for source, count in enumerate(incoming):
            expected = pattern(streams[source], sum(words[source][:rank]), count, device)
            wrong = wrong or wrong_words(received[start : start + count], expected)
            start += count
        slowest_and_wrong = torch.tensor([seconds, float(bool(wrong))], dtype=torch.float64, device=device)
        distributed.all_reduce(slowest_and_wrong, distributed.ReduceOp.MAX)
        slowest, anywhere = slowest_and_wrong.tolist()
        return slowest, wrong or ("rows of another rank are wrong" if anywhere else "")

    try:
        # No rank may stop on its own clock: the others would wait in the next collective.
        records = [record for event, record in exchanges(plan, method, exchange) if event == "end"]
    finally:
        distributed.destroy_process_group()
    return [dataclasses.replace(record, ranks=tuple(everyone)) for record in records]


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize(device)
