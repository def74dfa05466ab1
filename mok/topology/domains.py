"""Which GPUs reach one another over NVLink.

Owns the definition of an NVLink domain: the same healthy (cluster UUID, clique), across hosts if those can share memory;
otherwise GPUs of one host that the driver calls NVLink peers. No size is assumed: a domain can be larger or smaller than a
host. Must not know models or ranks' work; see `advice.py`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass

from mok.topology.fabric import judge
from mok.topology.model import Host, Place, Topology

__all__ = ["Domain", "domains", "multi_host_obstacle"]


@dataclass(frozen=True)
class Domain:
    """kind: nvlink, host (GPUs of one host without NVLink between them), alone, or cpu. `ranks` as in `Topology.places`."""

    kind: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    reason: str
    cluster_uuid: str = ""
    clique_id: int | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)


def multi_host_obstacle(host: Host) -> str:
    """Why GPUs of this host cannot share memory with other hosts over NVLink, although its fabric is up; "" if they can."""
    if host.environment.get("NCCL_MNNVL_ENABLE") == "0":
        return "NCCL_MNNVL_ENABLE=0"
    return "" if host.imex == "ready" else f"IMEX channel {host.imex}"


def domains(topology: Topology) -> list[Domain]:
    """Every rank in exactly one NVLink domain, in order of their first rank."""
    groups: dict[tuple[object, ...], list[Place]] = {}
    for place in topology.places():
        groups.setdefault(_key(topology, place), []).append(place)
    found = [_domain(topology, key, places) for key, places in groups.items()]
    return sorted(found, key=lambda domain: domain.ranks[0])


def _key(topology: Topology, place: Place) -> tuple[object, ...]:
    """What the ranks of one domain have in common; its first word is the kind."""
    host = topology.hosts[place.host]
    if place.gpu is None:
        return ("cpu", place.host)
    gpu = host.gpus[place.gpu]
    verdict = judge(gpu.fabric)
    if verdict.broken or gpu.mig_enabled:
        return ("alone", place.host, place.gpu)
    if verdict.usable_across_hosts and not multi_host_obstacle(host):
        return ("nvlink", gpu.fabric.cluster_uuid, gpu.fabric.clique_id)
    peers = _nvlink_island(host, place.gpu)
    if len(peers) > 1:
        return ("nvlink", place.host, peers)
    return ("host", place.host) if sum(other.visible for other in host.gpus) > 1 else ("alone", place.host, place.gpu)


def _nvlink_island(host: Host, start: int) -> frozenset[int]:
    """Positions of the GPUs of a host that NVLink joins with `start`, through others if need be."""
    island, frontier = {start}, [start]
    while frontier:
        here = frontier.pop()
        for there in range(len(host.gpus)):
            usable = not judge(host.gpus[there].fabric).broken and not host.gpus[there].mig_enabled
            if there not in island and usable and host.pair(here, there).nvlinked and host.pair(there, here).nvlinked:
                island.add(there)
                frontier.append(there)
    return frozenset(island)


def _domain(topology: Topology, key: tuple[object, ...], places: list[Place]) -> Domain:
    kind = str(key[0])
    hosts = tuple(dict.fromkeys(topology.hosts[place.host].name for place in places))
    base = Domain(kind, tuple(place.rank for place in places), hosts, "")
    first = places[0]
    host = topology.hosts[first.host]
    if kind == "cpu" or first.gpu is None:
        return dataclasses.replace(base, reason=f"CPU processes of {host.name}")
    gpu = host.gpus[first.gpu]
    if kind == "alone":
        verdict = judge(gpu.fabric)
        why = verdict.words if verdict.broken else "MIG has no peer access" if gpu.mig_enabled else "the only GPU of its host"
        return dataclasses.replace(base, reason=why)
    if kind == "host":
        return dataclasses.replace(base, reason=f"GPUs of {host.name}, no NVLink between them")
    links = _links(topology, places)
    if isinstance(key[1], str):
        reason = f"same cluster and clique {key[2]}, {links}"
        return dataclasses.replace(base, reason=reason, cluster_uuid=key[1], clique_id=gpu.fabric.clique_id)
    verdict = judge(gpu.fabric)
    if verdict.usable_across_hosts:
        return dataclasses.replace(base, reason=f"NVLink within {host.name} only ({multi_host_obstacle(host)}), {links}")
    return dataclasses.replace(base, reason=f"NVLink within {host.name}, {links}")


def _links(topology: Topology, places: list[Place]) -> str:
    """ "18/18 links", "16/18 to 18/18 links", or that the driver does not tell."""
    counts = Counter(
        (gpu.links_up, gpu.links_total)
        for gpu in (topology.hosts[place.host].gpus[place.gpu] for place in places if place.gpu is not None)
    )
    known = sorted(f"{up}/{total}" for up, total in counts if up is not None and total is not None)
    if not known:
        return "link counts not shown by the driver"
    return f"{known[0]} links" if len(known) == 1 else f"{known[0]} to {known[-1]} links"
