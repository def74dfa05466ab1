"""Requirements that turn a picture into a gate for a scheduler.

Owns what `--require p2p|nvlink|nvl72` and `--expect-gpus` mean. Each answer is a sentence, "" when the requirement holds.
"""

from __future__ import annotations

from mok.topology.domains import domains, multi_host_obstacle
from mok.topology.fabric import judge
from mok.topology.model import Topology
from mok.topology.probe import reason_for_no_gpu

__all__ = ["REQUIREMENTS", "unmet"]

REQUIREMENTS = ("p2p", "nvlink", "nvl72")


def unmet(topology: Topology, require: str | None = None, expect_gpus: int | None = None) -> str:
    """The first thing that does not hold, as a sentence; "" if all does.

    p2p: CUDA works and sees at least two GPUs, and on each host every ordered pair can read and write; a measured pair must
    have passed.
    nvlink: p2p, and the visible GPUs of each host are in one NVLink domain with all links up.
    nvl72: nvlink, and all GPUs of the picture share one healthy (cluster UUID, clique) that can span hosts.
    Any rank that did not report fails every requirement.
    """
    if expect_gpus is not None and topology.num_visible_gpus != expect_gpus:
        return f"{topology.num_visible_gpus} GPUs are visible, {expect_gpus} are expected"
    if require is None:
        return ""
    if topology.silent:
        return f"{require} is required: {topology.silent[0]}"
    checks = {"p2p": (_p2p,), "nvlink": (_p2p, _nvlink), "nvl72": (_p2p, _nvlink, _nvl72)}[require]
    reason = next((reason for check in checks if (reason := check(topology))), "")
    return f"{require} is required: {reason}" if reason else ""


def _p2p(topology: Topology) -> str:
    if topology.num_visible_gpus == 0:
        return f"no GPU is visible ({'; '.join(reason_for_no_gpu(host) for host in topology.hosts)})"
    if topology.num_visible_gpus == 1:
        return "one GPU is visible, peer access takes two"
    for host in topology.hosts:
        if failed := [source.detail for source in host.sources if source.name == "cuda" and not source.ok]:
            return f"{host.name}: CUDA cannot be used ({failed[0]})"
        visible = [i for i, gpu in enumerate(host.gpus) if gpu.visible]
        for first in visible:
            for second in visible:
                if first != second and host.pair(first, second).capable is not True:
                    known = host.pair(first, second).capable is not None
                    labels = f"{host.gpus[first].label} to {host.gpus[second].label}"
                    return f"{host.name}, {labels}: " + ("no peer access" if known else "the driver does not tell")
        if mig := [gpu.label for gpu in host.gpus if gpu.visible and gpu.mig_enabled]:
            return f"{host.name}, {mig[0]}: MIG has no peer access"
    if topology.measurement is not None:
        for record in topology.measurement.transfers:
            if record.verdict == "FAILED":
                return f"rank {record.source} to rank {record.target}: {record.method} failed ({record.detail})"
    return ""


def _nvlink(topology: Topology) -> str:
    for host_index, host in enumerate(topology.hosts):
        for gpu in host.gpus:
            if gpu.visible and judge(gpu.fabric).broken:
                return f"{host.name}, {gpu.label}: {judge(gpu.fabric).words}"
            if gpu.visible and gpu.links_up is not None and gpu.links_up < (gpu.links_total or 1):
                return f"{host.name}, {gpu.label}: {gpu.links_up} of {gpu.links_total} NVLinks up"
        here = {place.rank for place in topology.places() if place.host == host_index}
        if (
            here
            and not any(domain.kind == "nvlink" and here <= set(domain.ranks) for domain in domains(topology))
            and len(here) > 1
        ):
            return f"{host.name}: its GPUs are not in one NVLink domain"
    return ""


def _nvl72(topology: Topology) -> str:
    for host in topology.hosts:
        for gpu in host.gpus:
            if gpu.visible and not judge(gpu.fabric).usable_across_hosts:
                return f"{host.name}, {gpu.label}: fabric {judge(gpu.fabric).words.removeprefix('fabric ')}"
        if obstacle := multi_host_obstacle(host):
            return f"{host.name}: {obstacle}"
    found = domains(topology)
    if len(found) != 1:
        return f"the GPUs are in {len(found)} NVLink domains: " + ", ".join(f"clique {d.clique_id} of {d.size}" for d in found)
    return ""
