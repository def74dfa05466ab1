"""Everything that was found out about a machine, as plain values for JSON.

Owns the keys of `mok probe-topology --json`, which docs/topology.md lists. Judges nothing itself.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from mok.topology.advice import Advice
from mok.topology.domains import domains
from mok.topology.fabric import decode_health, judge
from mok.topology.findings import Finding
from mok.topology.model import Topology
from mok.topology.probe import reason_for_no_gpu
from mok.topology.snapshot import to_document
from mok.topology.speeds import measured_rows

__all__ = ["summary"]


def summary(
    topology: Topology,
    found: list[Finding],
    advice: Advice | None,
    require: str | None,
    expect_gpus: int | None,
    missing: str,
) -> dict[str, Any]:
    """The `--json` report: the snapshot, and everything derived from it. docs/topology.md lists the keys."""
    rank_of = {(place.host, place.gpu): place.rank for place in reversed(topology.places())}
    return {
        **to_document(topology),
        "gpus": [
            {
                "rank": rank_of.get((h, g)),
                "host": host.name,
                "label": gpu.label,
                "ordinal": gpu.ordinal,
                "visible": gpu.visible,
                "uuid": gpu.uuid,
                "bus_id": gpu.bus_id,
                "nvlinks": None if gpu.links_up is None else f"{gpu.links_up}/{gpu.links_total or '?'}",
                "nvlink_gb_per_s": gpu.nvlink_gb_per_s,
                "fabric": judge(gpu.fabric).words,
                "fabric_health": decode_health(gpu.fabric.health_mask) if gpu.fabric.health_mask else {},
            }
            for h, host in enumerate(topology.hosts)
            for g, gpu in enumerate(host.gpus)
        ],
        "no_gpu_reason": "; ".join(filter(None, map(reason_for_no_gpu, topology.hosts))),
        "gpus_per_host": {host.name: sum(gpu.visible for gpu in host.gpus) for host in topology.hosts},
        "domains": [{**dataclasses.asdict(domain), "size": domain.size} for domain in domains(topology)],
        "findings": [dataclasses.asdict(finding) for finding in found],
        "measured": measured_rows(topology),
        "advice": None if advice is None else dataclasses.asdict(advice),
        "requirement": {"require": require, "expect_gpus": expect_gpus, "unmet": missing},
    }
