"""Measured figures against nominal ones: percent reached, usual speed of a kind of link, outliers.

Owns the arithmetic on `measurement` records. Must not measure or print.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from typing import Any

from mok.topology.domains import domains
from mok.topology.measurement import Transfer
from mok.topology.model import Topology

__all__ = ["OUTLIER_SHARE", "link_between", "measured_rows", "nominal_gb_per_s", "outliers"]

OUTLIER_SHARE = 0.85
"""A pair is an outlier below this share of the median of pairs with the same letters and method."""


def link_between(topology: Topology, source: int, target: int) -> str:
    """Letters of the link between two ranks: as `Pair.link` within a host, NVL or NET across hosts, X for the same GPU."""
    first, second = topology.place_of[source], topology.place_of[target]
    if first.gpu is None or second.gpu is None:
        return "CPU" if first.host == second.host else "NET"
    if first.host != second.host:
        together = any({source, target} <= set(domain.ranks) for domain in domains(topology))
        return "NVL" if together else "NET"
    return "X" if first.gpu == second.gpu else topology.hosts[first.host].pair(first.gpu, second.gpu).link or "?"


def nominal_gb_per_s(topology: Topology, source: int, target: int) -> float | None:
    """What the link can carry one way: NVLinks that are up, else PCIe; None if unknown, or for a GPU with itself."""
    first, second = topology.place_of[source], topology.place_of[target]
    letters = link_between(topology, source, target)
    if first.gpu is None or second.gpu is None or letters in ("X", "NET"):
        return None
    gpus = (topology.hosts[first.host].gpus[first.gpu], topology.hosts[second.host].gpus[second.gpu])
    if letters.startswith("NV"):
        speeds = [gpu.nvlink_gb_per_s for gpu in gpus]
        # Without a switch a pair has only its own links, which the letters count.
        if letters[2:].isdigit():
            speeds += [int(letters[2:]) * gpu.link_gb_per_s for gpu in gpus if gpu.link_gb_per_s is not None]
    else:
        speeds = [gpu.pcie_gb_per_s for gpu in gpus]
    known = [speed for speed in speeds if speed is not None]
    return min(known) if len(known) == len(speeds) else None


def outliers(topology: Topology) -> list[tuple[Transfer, float]]:
    """(transfer, usual GB/s) of each pair much slower than pairs with the same letters; needs three such pairs."""
    measurement = topology.measurement
    if measurement is None:
        return []
    alike: dict[tuple[str, str], list[Transfer]] = defaultdict(list)
    for transfer in measurement.transfers:
        if transfer.gb_per_s is not None:
            alike[transfer.method, _kind(link_between(topology, transfer.source, transfer.target))].append(transfer)
    found = []
    for group in alike.values():
        usual = statistics.median(transfer.gb_per_s for transfer in group if transfer.gb_per_s is not None)
        if len(group) >= 3:
            found += [(t, usual) for t in group if t.gb_per_s is not None and t.gb_per_s < OUTLIER_SHARE * usual]
    return found


def measured_rows(topology: Topology) -> list[dict[str, Any]]:
    """Every transfer beside its link and nominal figure; `percent` is null where one of the two is not known."""
    if topology.measurement is None:
        return []
    slow = {id(transfer) for transfer, _ in outliers(topology)}
    rows = []
    for transfer in topology.measurement.transfers:
        nominal = nominal_gb_per_s(topology, transfer.source, transfer.target)
        percent = 100 * transfer.gb_per_s / nominal if nominal and transfer.gb_per_s is not None else None
        rows.append(
            {
                **dataclasses.asdict(transfer),
                "link": link_between(topology, transfer.source, transfer.target),
                "nominal_gb_per_s": nominal,
                "percent": percent,
                "outlier": id(transfer) in slow,
            }
        )
    return rows


def _kind(letters: str) -> str:
    """NV16 and NV18 are alike: a GPU with links down is what should stand out."""
    return "NV" if letters.startswith("NV") else letters
