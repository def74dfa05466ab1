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
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass

from mok.errors import RankError, UsageError
from mok.shapes import LayerShape
from mok.topology.advice import advise
from mok.topology.fabric import judge
from mok.topology.measure.plan import make_plan
from mok.topology.measure.watch import measure
from mok.topology.measurement import Exchange, Measurement, Transfer
from mok.topology.model import Gpu, Host, Rank, Topology, from_plain, to_plain
from mok.topology.probe import probe_host
from mok.topology.sources import child_environment, last_line

__all__ = [
    "Report",
    "agree_on_ep",
    "ep_of_launch",
    "free_port",
    "gather",
    "in_launch",
    "launched_ranks",
    "local_rank",
    "merge",
    "own_report",
    "probe_alone",
    "probe_ranks",
    "spawn",
]


MEASURE_ALLOWANCE_S = 240.0
"""What is added to a time limit when ranks measure before they report."""

CPU_EXCHANGE_BYTES = 32 << 20
"""The most that a CPU rank receives in a measured all-to-all."""


LEAVING_LIMIT_S = 10.0

CHILD_COMMAND = (sys.executable, "-m", "mok.topology.ranks")


@dataclass(frozen=True)
class Report:
    """What one rank says; `local_rank` picks its GPU among those it sees.

    measurement: figures of this host in local ordinals, from its first rank. exchanges: among all ranks, from rank 0.
    """

    rank: int
    local_rank: int
    host: Host
    measurement: Measurement | None = None
    exchanges: tuple[Exchange, ...] = ()
    no_exchange_reason: str = ""


def launched_ranks() -> tuple[int, int] | None:
    """(rank, world size) if a launcher such as torchrun started this process, else None. Raises UsageError for values that no
    launcher sets; empty ones count as absent."""
    rank, world_size = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    if not rank or not world_size:
        return None
    if not (rank.isdecimal() and world_size.isdecimal() and int(rank) < int(world_size)):
        raise UsageError(
            f"RANK={rank} WORLD_SIZE={world_size} in the environment: not a rank and how many there are; a launcher sets both, "
            "so without one unset them"
        )
    return int(rank), int(world_size)


def local_rank() -> int:
    """This process's number among those of its launch on this machine."""
    found = os.environ.get("LOCAL_RANK") or "0"
    if not found.isdecimal():
        raise UsageError(f"LOCAL_RANK={found} in the environment: not a number; a launcher sets it, so without one unset it")
    return int(found)


def in_launch() -> bool:
    """This process is one rank of a launch by torchrun or the like, whose ranks can meet."""
    return launched_ranks() is not None and all(os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))


def own_report(shape: LayerShape | None = None) -> Report:
    """This rank's host; with a `shape`, the first rank of each host measures all GPUs that it sees."""
    here = local_rank()
    rank, _ = launched_ranks() or (0, 1)
    host = probe_host()
    measured = measure_host(host, shape) if shape is not None and here == 0 and _visible(host) else None
    return Report(rank, here, host, measured)


def measure_host(host: Host, shape: LayerShape) -> Measurement:
    """Figures of the visible GPUs of this host, at the sizes of an MoE layer of `shape`."""
    gpus = _visible(host)
    if not gpus:
        return Measurement(unfinished="there is no GPU to measure")
    return measure(make_plan(len(gpus), shape))


def _visible(host: Host) -> list[Gpu]:
    return [gpu for gpu in host.gpus if gpu.visible]


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def probe_alone(wait_s: float = 0.0, shape: LayerShape | None = None) -> Topology:
    """This host as one process sees it, measured if a `shape` is given.

    wait_s: look again until every fabric is ready or the time is over.
    """
    deadline = time.monotonic() + wait_s
    while True:
        topology = Topology((probe_host(),), captured_at=now())
        ready = all(judge(gpu.fabric).kind != "not ready" for gpu in topology.hosts[0].gpus)
        if ready or time.monotonic() >= deadline:
            measured = measure_host(topology.hosts[0], shape) if shape is not None else None
            return dataclasses.replace(topology, measurement=measured)
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
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise RankError(
            f"rank {os.environ['RANK']}: no store at {address} within {limit_s:g} s ({error}); is rank 0 up?"
        ) from None


def probe_ranks(limit_s: float, shape: LayerShape | None = None) -> Topology | None:
    """Under a launcher: report, and on rank 0 gather all reports within `limit_s`; None on the other ranks.

    With a `shape`, measure first: pairs within each host, all-to-all among all ranks.
    """
    limit_s += MEASURE_ALLOWANCE_S if shape is not None else 0.0
    store = connect(limit_s)
    report = own_report(shape)
    if shape is not None:
        report = with_exchanges(report, store, shape, limit_s)
    return gather(store, report.rank, int(os.environ["WORLD_SIZE"]), report, limit_s)


def with_exchanges(report: Report, store, shape: LayerShape, limit_s: float) -> Report:  # type: ignore[no-untyped-def]
    """`report` with the all-to-all that all ranks of the launch have measured together."""
    from mok.topology.measure.collective import measure_collective

    world_size, gpus = int(os.environ["WORLD_SIZE"]), _visible(report.host)
    deadline = time.monotonic() + limit_s
    ordinal = report.local_rank % len(gpus) if gpus else 0
    device = f"cuda:{ordinal}" if gpus else "cpu"
    identity = gpus[ordinal].uuid if gpus else report.host.boot_id
    plan = make_plan(world_size, shape) if gpus else make_plan(world_size, shape, largest_exchange=CPU_EXCHANGE_BYTES)
    done, reason = measure_collective(
        store, report.rank, world_size, device, identity, plan, lambda key: _wait(store, key, deadline)
    )
    return dataclasses.replace(report, exchanges=tuple(done), no_exchange_reason=reason) if report.rank == 0 else report


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


def ep_of_launch(shape: LayerShape, num_ranks: int, limit_s: float) -> int:
    """What `moe.ep = "auto"` means for `num_ranks` ranks: of the launch this process is a rank of (then all of them must call
    it), or else of one that it is about to start on this host.

    Raises RankError as `agree_on_ep` does.
    """
    if num_ranks == 1:
        return 1
    if in_launch():
        return agree_on_ep(shape, connect(limit_s), int(os.environ["RANK"]), num_ranks, limit_s)
    host = probe_host()
    return advise(merge([Report(rank, rank, host) for rank in range(num_ranks)]), shape, every_rank=True).ep


def _wait(store, key: str, deadline: float) -> bool:  # type: ignore[no-untyped-def]
    """Whether `key` appeared before `deadline`; a key that is there is seen even after it."""
    while not store.check([key]):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


def spawn(
    num_ranks: int, limit_s: float, shape: LayerShape | None = None, command: tuple[str, ...] = CHILD_COMMAND
) -> Topology:
    """Start `num_ranks` processes on this host, each reporting as a rank, and put their reports together.

    With a `shape` they measure first, as `probe_ranks` does.
    """
    limit_s += MEASURE_ALLOWANCE_S if shape is not None else 0.0
    deadline = time.monotonic() + limit_s
    arguments = [json.dumps({"shape": to_plain(shape), "limit_s": limit_s})] if shape is not None else []
    port = str(free_port())
    children = []
    for rank in range(num_ranks):
        numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
        environment = {**child_environment(), **numbers, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        children.append(
            subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
        )
    reports, silent = [], []
    for rank, child in enumerate(children):
        try:
            output, errors = child.communicate(timeout=max(deadline - time.monotonic(), 0.01))
            reports.append(from_plain(Report, json.loads(last_line(output)), f"rank {rank}"))
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            silent.append(f"rank {rank}: no report within {limit_s:g} s")
        except ValueError:
            lines = errors.decode(errors="replace").strip().splitlines()
            silent.append(f"rank {rank}: ended with code {child.returncode}" + (f": {lines[-1]}" if lines else ""))
    return merge(reports, silent)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


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
    return Topology(tuple(hosts), ranks, tuple(silent), captured_at=now(), measurement=_measurement(placed, hosts, ranks))


def _measurement(placed: list[tuple[Report, int]], hosts: list[Host], ranks: tuple[Rank, ...]) -> Measurement | None:
    """The figures of all hosts in rank numbers, and the all-to-all of all ranks; None if nobody measured."""
    rank_of = {(rank.host, rank.gpu): rank.rank for rank in reversed(ranks) if rank.gpu is not None}
    transfers: list[Transfer] = []
    exchanges: list[Exchange] = []
    unfinished: list[str] = []
    seconds = 0.0
    for report, index in placed:
        exchanges += report.exchanges
        if report.no_exchange_reason:
            unfinished.append(f"no all-to-all among the ranks: {report.no_exchange_reason}")
        if report.measurement is None:
            continue
        uuids = [gpu.uuid for gpu in hosts[index].gpus]
        names = [rank_of.get((index, uuids.index(gpu.uuid))) for gpu in _visible(report.host)]
        for transfer in report.measurement.transfers:
            source, target = names[transfer.source], names[transfer.target]
            if source is not None and target is not None:
                transfers.append(dataclasses.replace(transfer, source=source, target=target))
        for exchange in report.measurement.exchanges:
            members = [names[ordinal] for ordinal in exchange.ranks]
            if None not in members:
                exchanges.append(dataclasses.replace(exchange, ranks=tuple(m for m in members if m is not None)))
        unfinished += [f"{report.host.name}: {report.measurement.unfinished}"] if report.measurement.unfinished else []
        seconds = max(seconds, report.measurement.seconds)
    if not transfers and not exchanges and not unfinished:
        return None
    return Measurement(tuple(transfers), tuple(exchanges), seconds, "; ".join(unfinished))


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
    """One rank that `spawn` started: print its report; with an argument, measure first."""
    if len(sys.argv) == 1:
        report = own_report()
    else:
        arguments = json.loads(sys.argv[1])
        shape = from_plain(LayerShape, arguments["shape"])
        store = connect(arguments["limit_s"])
        report = with_exchanges(own_report(shape), store, shape, arguments["limit_s"])
        # Rank 0 serves the store: it leaves last.
        store.set(f"mok/topology/left/{report.rank}", "1")
        if report.rank == 0:
            deadline = time.monotonic() + LEAVING_LIMIT_S
            for other in range(int(os.environ["WORLD_SIZE"])):
                _wait(store, f"mok/topology/left/{other}", deadline)
    sys.stdout.write(json.dumps(to_plain(report)))


if __name__ == "__main__":
    main()
