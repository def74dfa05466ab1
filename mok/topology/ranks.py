"""One picture of many hosts: every rank reports, rank 0 (or the process that started them) puts the reports together.

Owns the gathering with its time limit, and the merging. A rank that stays silent is named; it never makes the others wait
longer than the limit. Read next: `probe.py`, for one host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass

from mok.errors import RankError
from mok.shapes import LayerShape
from mok.topology.advice import advise
from mok.topology.fabric import judge
from mok.topology.model import Host, Rank, Topology, from_plain, to_plain
from mok.topology.probe import probe_host
from mok.topology.sources import child_environment

__all__ = ["Report", "agree_on_ep", "gather", "in_launch", "merge", "probe_alone", "probe_ranks", "spawn"]


@dataclass(frozen=True)
class Report:
    """What one rank says; `local_rank` picks its GPU among those it sees."""

    rank: int
    local_rank: int
    host: Host


def in_launch() -> bool:
    """This process is one rank of a launch by torchrun or the like."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(os.environ)


def own_report() -> Report:
    rank = int(os.environ.get("RANK", "0"))
    return Report(rank, int(os.environ.get("LOCAL_RANK", "0")), probe_host())


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def probe_alone(wait_s: float = 0.0) -> Topology:
    """This host as one process sees it; with `wait_s`, look again until every fabric is ready or the time is over."""
    deadline = time.monotonic() + wait_s
    while True:
        topology = Topology((probe_host(),), captured_at=now())
        ready = all(judge(gpu.fabric).kind != "not ready" for gpu in topology.hosts[0].gpus)
        if ready or time.monotonic() >= deadline:
            return topology
        time.sleep(min(2.0, wait_s))


def connect(limit_s: float):  # type: ignore[no-untyped-def]
    """The launch's key-value store, joined without waiting for ranks that may never come."""
    from torch.distributed import TCPStore

    # torchrun's agent already serves a store at this address; other launchers leave that to rank 0.
    serves = os.environ["RANK"] == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        return TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=serves,
            timeout=datetime.timedelta(seconds=limit_s),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise RankError(
            f"rank {os.environ['RANK']}: no store at {address} within {limit_s:g} s ({error}); is rank 0 up?"
        ) from None


def probe_ranks(limit_s: float) -> Topology | None:
    """Under a launcher: report, and on rank 0 gather all reports within `limit_s`; None on the other ranks."""
    return gather(connect(limit_s), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), own_report(), limit_s)


def gather(store, rank: int, world_size: int, report: Report, limit_s: float) -> Topology | None:  # type: ignore[no-untyped-def]
    """Exchange reports through `store`, a `torch.distributed` key-value store.

    Rank 0 returns the picture with silent ranks named after at most `limit_s`; the others return None once it has been
    put together or the time is over. No collective is used: one lost rank must not cost the other reports.
    """
    deadline = time.monotonic() + limit_s
    store.set(f"mok/topology/report/{rank}", json.dumps(to_plain(report)))
    if rank != 0:
        # Rank 0 may serve the store and be gone already.
        with contextlib.suppress(RuntimeError):
            _wait(store, "mok/topology/done", deadline)
        return None
    reports, silent = [], []
    for other in range(world_size):
        key = f"mok/topology/report/{other}"
        if _wait(store, key, deadline):
            reports.append(from_plain(Report, json.loads(store.get(key)), f"rank {other}"))
        else:
            silent.append(f"rank {other}: no report within {limit_s:g} s")
    store.set("mok/topology/done", "1")
    return merge(reports, silent)


def agree_on_ep(shape: LayerShape, store=None, rank: int = 0, world_size: int = 1, limit_s: float = 60.0) -> int:  # type: ignore[no-untyped-def]
    """The expert-parallel size of `moe.ep = "auto"`, the same on every rank; all ranks of the launch must call it.

    RankError, on every rank, if one of them stays silent: the ranks that are left cannot train together anyway.
    """
    if store is None:
        return advise(merge([own_report()]), shape, every_rank=True).ep
    topology = gather(store, rank, world_size, own_report(), limit_s)
    if topology is not None:
        silent = "; ".join(topology.silent)
        store.set("mok/topology/ep", f"!{silent}" if silent else str(advise(topology, shape, every_rank=True).ep))
    if not _wait(store, "mok/topology/ep", time.monotonic() + limit_s):
        raise RankError(f"rank 0: no expert-parallel size within {limit_s:g} s; set moe.ep to a number")
    answer = store.get("mok/topology/ep").decode()
    if answer.startswith("!"):
        raise RankError(f"moe.ep = auto: {answer[1:]}")
    return int(answer)


def _wait(store, key: str, deadline: float) -> bool:  # type: ignore[no-untyped-def]
    """Whether `key` appeared before `deadline`; a key that is there is seen even after it."""
    while not store.check([key]):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


def spawn(num_ranks: int, limit_s: float, command: tuple[str, ...] = (sys.executable, "-m", "mok.topology.ranks")) -> Topology:
    """Start `num_ranks` processes on this host, each reporting as a rank, and put their reports together."""
    deadline = time.monotonic() + limit_s
    children = []
    for rank in range(num_ranks):
        numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
        environment = {**child_environment(), **numbers}
        children.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment))
    reports, silent = [], []
    for rank, child in enumerate(children):
        try:
            output, errors = child.communicate(timeout=max(deadline - time.monotonic(), 0.01))
            reports.append(from_plain(Report, json.loads(output), f"rank {rank}"))
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            silent.append(f"rank {rank}: no report within {limit_s:g} s")
        except ValueError:
            lines = errors.decode(errors="replace").strip().splitlines()
            silent.append(f"rank {rank}: ended with code {child.returncode}" + (f": {lines[-1]}" if lines else ""))
    return merge(reports, silent)


def merge(reports: Iterable[Report], silent: Iterable[str] = ()) -> Topology:
    """One picture: ranks of one running kernel share a host, whose GPUs are all that any of them sees."""
    hosts: list[Host] = []
    position: dict[str, int] = {}
    placed: list[tuple[Report, int]] = []
    for report in sorted(reports, key=lambda report: report.rank):
        key = report.host.boot_id or report.host.name
        if key not in position:
            position[key] = len(hosts)
            hosts.append(report.host)
        else:
            hosts[position[key]] = _union(hosts[position[key]], report.host)
        placed.append((report, position[key]))
    hosts = [_numbered(host) for host in hosts]
    ranks = tuple(
        Rank(
            report.rank,
            index,
            _gpu_of(report, hosts[index]),
            report.host.cpus,
            {name: value for name, value in report.host.environment.items() if hosts[index].environment.get(name) != value},
        )
        for report, index in placed
    )
    return Topology(tuple(hosts), ranks, tuple(silent), captured_at=now())


def _gpu_of(report: Report, host: Host) -> int | None:
    """Position in `host.gpus` of the rank's GPU: the only one it sees, else the one of its local rank."""
    seen = [gpu for gpu in report.host.gpus if gpu.visible]
    if not seen:
        return None
    mine = seen[0] if len(seen) == 1 else seen[report.local_rank % len(seen)]
    return next(i for i, gpu in enumerate(host.gpus) if gpu.uuid == mine.uuid)


def _union(known: Host, other: Host) -> Host:
    """A host with the GPUs of two ranks' reports, for launchers that show each rank its own GPU."""
    uuids = [gpu.uuid for gpu in known.gpus]
    gpus = list(known.gpus)
    for gpu in other.gpus:
        if gpu.uuid not in uuids:
            gpus.append(gpu)
        elif gpu.visible and not gpus[uuids.index(gpu.uuid)].visible:
            gpus[uuids.index(gpu.uuid)] = gpu
    if gpus == list(known.gpus):
        return known
    places = {gpu.uuid: i for i, gpu in enumerate(gpus)}
    pairs = {(pair.first, pair.second): pair for pair in known.pairs}
    for pair in other.pairs:
        key = (places[other.gpus[pair.first].uuid], places[other.gpus[pair.second].uuid])
        pairs.setdefault(key, dataclasses.replace(pair, first=key[0], second=key[1]))
    return dataclasses.replace(known, gpus=tuple(gpus), pairs=tuple(pairs[key] for key in sorted(pairs)))


def _numbered(host: Host) -> Host:
    """Where each rank sees its own GPU 0, number the GPUs of the host in rank order instead."""
    ordinals = [gpu.ordinal for gpu in host.gpus if gpu.ordinal is not None]
    if len(set(ordinals)) == len(ordinals):
        return host
    numbers = iter(range(len(ordinals)))
    gpus = (dataclasses.replace(gpu, ordinal=next(numbers)) if gpu.ordinal is not None else gpu for gpu in host.gpus)
    return dataclasses.replace(host, gpus=tuple(gpus))


def main() -> None:
    sys.stdout.write(json.dumps(to_plain(own_report())))


if __name__ == "__main__":
    main()
