"""The picture of a machine as text for people: tables, link matrix, findings, advice, within 80 columns.

Owns layout only; every figure and judgement comes from `mok.topology`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from mok.topology.advice import Advice
from mok.topology.domains import domains
from mok.topology.fabric import judge
from mok.topology.findings import Finding
from mok.topology.measure.plan import METHODS
from mok.topology.model import Gpu, Host, Topology
from mok.topology.speeds import measured_rows

if TYPE_CHECKING:
    from rich.console import Console

    from mok.shapes import LayerShape

__all__ = ["show"]

# More hosts than this are shown one line each.
DETAILED_HOSTS = 3

MATRIX_COLUMNS = 12

SEVERITY_STYLE = {"error": "bold red", "warning": "yellow", "note": "dim"}


def show(
    console: Console,
    topology: Topology,
    found: list[Finding],
    shape: str | None,
    layer: LayerShape | None,
    advice: Advice | None,
) -> None:
    """Print the whole report."""
    if topology.origin != "captured" or topology.note:
        _line(console, f"Snapshot: {topology.origin}{', ' + topology.note if topology.note else ''}")
    if len(topology.hosts) <= DETAILED_HOSTS:
        for host in topology.hosts:
            _host(console, host)
    else:
        _many_hosts(console, topology)
    _domains(console, topology)
    if topology.measurement is not None:
        _transfers(console, topology)
        _exchanges(console, topology)
    _findings(console, found)
    if advice is not None and shape is not None and layer is not None:
        _advice(console, shape, layer, advice)
    elif topology.num_visible_gpus > 1:
        _line(console, "For expert-parallel groups: --shape NAME --ep auto")


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style))


def _heading(console: Console, text: str) -> None:
    _line(console, "")
    _line(console, text, "bold")


def _table(*columns: str, right: Iterable[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _row(table: Table, *cells: str, style: str = "") -> None:
    """Add a row of plain text: a bus id like 0000:ab:00.0 holds what rich would turn into an emoji."""
    table.add_row(*(Text(cell) for cell in cells), style=style)


def _host(console: Console, host: Host) -> None:
    _heading(console, host.name)
    memory = f"{host.memory_bytes / 2**30:.0f} GiB" if host.memory_bytes else "memory unknown"
    _line(console, f"  {host.cpu_model or 'CPU'}, {host.num_cpus} CPUs, {memory}")
    if host.gpus:
        spans_hosts = any(judge(gpu.fabric).usable_across_hosts for gpu in host.gpus)
        imex = f", IMEX channel {host.imex}" if spans_hosts else ""
        _line(console, f"  driver {host.driver or 'unknown'}, CUDA {host.cuda or 'unknown'}{imex}")
    for node in host.numa_nodes:
        size = f", {node.memory_bytes / 2**30:.0f} GiB" if node.memory_bytes else ""
        _line(console, f"  NUMA node {node.node}: CPUs {node.cpus or 'none'}{size}")
    for source in host.sources:
        _line(console, f"  {source.name}: {'' if source.ok else 'no answer: '}{source.detail}", "" if source.ok else "yellow")
    if not host.gpus:
        _line(console, "  no GPUs found: CPU only")
        return
    table = _table("", "name", "bus id", "NUMA", "NVLinks", "GiB", "clique", "fabric", right=("NUMA", "GiB", "clique"))
    for gpu in host.gpus:
        _row(table, *_gpu_cells(gpu))
    console.print(table)
    _matrix(console, host)
    for nic in host.nics:
        nearest = " ".join(
            f"{gpu.label.removeprefix('GPU ')}:{link or '?'}" for gpu, link in zip(host.gpus, nic.links, strict=False)
        )
        _line(console, f"  {nic.name}, NUMA {_known(nic.numa_node)}: {nearest}")


def _gpu_cells(gpu: Gpu) -> list[str]:
    label = gpu.label if gpu.visible else "hidden"
    name = gpu.name.removeprefix("NVIDIA ") + (f", MIG x{len(gpu.mig_devices)}" if gpu.mig_enabled else "")
    memory = f"{gpu.memory_bytes / 2**30:.0f}" if gpu.memory_bytes else "?"
    links = "?" if gpu.links_up is None else f"{gpu.links_up}/{gpu.links_total or '?'}"
    clique = str(gpu.fabric.clique_id) if gpu.fabric.cluster_uuid else "-"
    return [label, name, gpu.bus_id, _known(gpu.numa_node), links, memory, clique, _short(gpu)]


def _short(gpu: Gpu) -> str:
    verdict = judge(gpu.fabric)
    return "this host only" if verdict.kind == "single host" else verdict.words.removeprefix("fabric ")


def _known(value: object) -> str:
    return "?" if value is None else str(value)


def _matrix(console: Console, host: Host) -> None:
    visible = [i for i, gpu in enumerate(host.gpus) if gpu.visible]
    if len(visible) < 2:
        return
    _line(console, "")
    for start in range(0, len(visible), MATRIX_COLUMNS):
        columns = visible[start : start + MATRIX_COLUMNS]
        table = _table("", *(host.gpus[i].label.replace(" ", "") for i in columns))
        for row in visible:
            cells = ["X" if row == column else _link(host, row, column) for column in columns]
            _row(table, host.gpus[row].label.replace(" ", ""), *cells)
        table.padding = (0, 1, 0, 0)
        console.print(table)


def _link(host: Host, first: int, second: int) -> str:
    pair = host.pair(first, second)
    return (pair.link or "?") + ("!" if pair.capable is False else "")


def _many_hosts(console: Console, topology: Topology) -> None:
    _heading(console, f"{len(topology.hosts)} hosts, {topology.num_visible_gpus} GPUs")
    table = _table("hosts", "each", "NVLinks", "IMEX", "fabric")
    for cells, hosts in groupby(topology.hosts, key=_host_cells):
        names = [host.name for host in hosts]
        _row(table, names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})", *cells)
    console.print(table)
    shown: list[tuple[tuple[str, ...], ...]] = []
    for host in topology.hosts:
        letters = tuple(tuple(_link(host, i, j) for j in range(len(host.gpus))) for i in range(len(host.gpus)))
        if letters not in shown:
            shown.append(letters)
            _heading(console, f"Links within {host.name}" + (" and the hosts like it" if len(shown) == 1 else ""))
            _matrix(console, host)


def _host_cells(host: Host) -> tuple[str, ...]:
    visible = [gpu for gpu in host.gpus if gpu.visible]
    names = sorted({gpu.name.removeprefix("NVIDIA ") for gpu in visible})
    links = sorted({"?" if gpu.links_up is None else f"{gpu.links_up}/{gpu.links_total or '?'}" for gpu in visible})
    fabric = sorted({_short(gpu) for gpu in visible})
    return f"{len(visible)} x {', '.join(names) or 'no GPU'}", ", ".join(links), host.imex, ", ".join(fabric)


def _domains(console: Console, topology: Topology) -> None:
    found = domains(topology)
    if not found:
        return
    _heading(console, "NVLink domains" if topology.num_visible_gpus else "Ranks")
    per_host = sorted({sum(gpu.visible for gpu in host.gpus) for host in topology.hosts})
    if topology.num_visible_gpus:
        largest = max((domain.size for domain in found if domain.kind == "nvlink"), default=1)
        _line(console, f"  GPUs per host {' to '.join(map(str, {per_host[0]: 0, per_host[-1]: 0}))}, largest domain {largest}")
    for domain in found:
        _line(console, f"  {_ranks(domain.ranks)}: {domain.reason}")


def _ranks(ranks: tuple[int, ...]) -> str:
    """ "rank 3", "ranks 0-7", "ranks 0-3,8-11"."""
    from mok.topology.sysfs import cpu_list

    return f"rank{'s' if len(ranks) > 1 else ''} {cpu_list(ranks)}"


def _transfers(console: Console, topology: Topology) -> None:
    rows = measured_rows(topology)
    if not rows:
        return
    _heading(console, "Measured pairs, GB/s from row to column")
    _line(console, "  a figure: verified; FAILED: data did not arrive; -: not capable; ?: not measured; *: slow")
    for method in METHODS:
        of_method = [row for row in rows if row["method"] == method]
        # Ranks of one host after another: pairs across hosts are not measured one by one.
        for _, group in groupby(of_method, key=lambda row: topology.place_of[row["source"]].host):
            _speeds(console, method, list(group))


def _speeds(console: Console, method: str, rows: list[dict[str, Any]]) -> None:
    """One matrix of one host, and its summary."""
    speeds = [row["gb_per_s"] for row in rows if row["gb_per_s"] is not None]
    latencies = [row["latency_us"] for row in rows if row["latency_us"] is not None]
    text = f"  {method}: {sum(row['verdict'] == 'verified' for row in rows)} of {len(rows)} pairs verified"
    if speeds:
        percents = [row["percent"] for row in rows if row["percent"] is not None]
        share = f" ({statistics.median(percents):.0f}% of nominal)" if percents else ""
        text += f", median {_speed(statistics.median(speeds))} GB/s{share}, lowest {_speed(min(speeds))}"
        text += f"; latency {statistics.median(latencies):.2f} us, highest {max(latencies):.2f}"
    _line(console, text)
    ranks = sorted({row[side] for row in rows for side in ("source", "target")})
    cells = {(row["source"], row["target"]): _verdict(row) for row in rows}
    for start in range(0, len(ranks), MATRIX_COLUMNS):
        columns = ranks[start : start + MATRIX_COLUMNS]
        table = _table("  ", *map(str, columns), right=tuple(map(str, columns)))
        table.padding = (0, 1, 0, 0)
        for source in ranks:
            _row(table, f"  {source}", *(cells.get((source, target), "") for target in columns))
        console.print(table)


def _verdict(row: dict[str, Any]) -> str:
    if row["verdict"] == "verified":
        return _speed(row["gb_per_s"]) + ("*" if row["outlier"] else "")
    return {"FAILED": "FAILED", "not capable": "-"}.get(row["verdict"], "?")


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _speed(gb_per_s: float | None) -> str:
    return "" if gb_per_s is None else f"{gb_per_s:.0f}" if gb_per_s >= 10 else f"{gb_per_s:.2f}"


def _exchanges(console: Console, topology: Topology) -> None:
    assert topology.measurement is not None
    if not topology.measurement.exchanges:
        return
    first = topology.measurement.exchanges[0]
    _heading(console, f"Measured all-to-all, {first.top_k} rows a token of {first.hidden_size} bf16 values")
    right = ("tokens", "ms", "spread", "GB/s")
    table = _table("ranks", "routing", "tokens", "by", "ms", "spread", "GB/s", "data", right=right)
    for exchange in topology.measurement.exchanges:
        spread = f"{exchange.low_ms:.2f}-{exchange.high_ms:.2f}" if exchange.low_ms is not None else ""
        cells = [
            str(len(exchange.ranks)),
            exchange.routing,
            str(exchange.tokens),
            exchange.method,
            _number(exchange.median_ms, 2),
            spread,
        ]
        _row(table, *cells, _speed(exchange.gb_per_s), exchange.verdict)
    console.print(table)
    _line(console, "  tokens: of each rank; GB/s: bytes of the busiest rank over the median time")


def _findings(console: Console, found: list[Finding]) -> None:
    _heading(console, "Findings")
    if not found:
        _line(console, "  none")
    merged: dict[tuple[str, str, str], list[str]] = {}
    for finding in found:
        merged.setdefault((finding.severity, finding.what, finding.fix), []).append(finding.where)
    for (severity, what, fix), places in merged.items():
        where = ", ".join(places) if len(places) <= 2 else f"{places[0]} and {len(places) - 1} more"
        _line(console, f"  {severity}: {where}: {what}", SEVERITY_STYLE[severity])
        _line(console, f"    -> {fix}")


def _advice(console: Console, shape: str, layer: LayerShape, advice: Advice) -> None:
    _heading(console, f"Advice for {shape}: {layer.num_experts} experts, {layer.top_k} per token")
    _line(console, f"  ep = {advice.ep}: {advice.reason}")
    for reason, groups in groupby(advice.groups, key=lambda group: group.reason):
        members = list(groups)
        names = [_ranks(group.ranks) for group in members]
        which = ", ".join(names) if len(names) <= 3 else f"{names[0]}, {names[1]} .. {names[-1]} ({len(names)} groups)"
        _line(console, f"  {which}: {reason}")
    if advice.spare_ranks:
        _line(console, f"  left out, {_ranks(advice.spare_ranks)}: {advice.spare_reason}")
    _line(console, f"  transport {advice.transport}: {advice.transport_reason}")
    if advice.ep > 1:
        time = (
            f"{advice.exchange_ms:.2f} ms expected from the {advice.measured_from}"
            if advice.exchange_ms
            else "time not measured"
        )
        _line(
            console,
            f"  exchange: {advice.exchange_bytes / 1e6:.0f} MB sent per rank, layer and step of {advice.tokens} tokens, {time}",
        )
    _line(console, "  recipe lines:")
    for text in advice.recipe:
        _line(console, f"    {text}")
    table = _table(
        "  ep",
        "groups",
        "idle",
        "experts/rank",
        "MB/layer",
        "ms/layer",
        "",
        right=("  ep", "groups", "idle", "experts/rank", "MB/layer", "ms/layer"),
    )
    for candidate in advice.candidates:
        _row(
            table,
            str(candidate.ep),
            str(candidate.num_groups),
            str(candidate.idle_ranks),
            str(candidate.experts_per_rank or "-"),
            f"{candidate.exchange_bytes / 1e6:.0f}",
            _number(candidate.exchange_ms, 2) or "-",
            candidate.refused or ("chosen" if candidate.ep == advice.ep else ""),
        )
    console.print(table)
