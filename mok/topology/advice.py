"""Which ranks should share the experts of a model, over what transport, at what expected price.

Owns the choice of the expert-parallel size R and of the groups. `mok probe-topology --shape` prints it and `moe.ep = "auto"`
uses it. Must not measure: a time that was not measured is not given. Read next: `docs/topology.md`, Advice.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import permutations

from mok.errors import UsageError
from mok.shapes import LayerShape
from mok.topology.domains import Domain, domains
from mok.topology.model import Topology

__all__ = ["Advice", "Candidate", "Group", "advise"]

COMFORTABLE_EP = 8
"""A group of this size is large enough that no GPU should idle for a larger one."""

IDLE_SHARE = 1 / 8
"""GPUs that may stay out of all groups for the sake of reaching COMFORTABLE_EP."""

EXCHANGES_PER_STEP = 4
"""Rows cross the links four times a layer and step: out and back forward, out and back backward."""

ROW_VALUE_BYTES = 2


@dataclass(frozen=True)
class Group:
    """Ranks that share experts, and why these."""

    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Candidate:
    """One R: how many groups, ranks left over, and what it costs. `refused` says why it cannot be chosen, "" if it can:
    "no divisor" of the experts, or "domain of N": larger than any NVLink domain.

    exchange_bytes: what one rank sends in one layer and step. exchange_ms: that over the measured bandwidth, None if there
    is no measurement.
    """

    ep: int
    num_groups: int
    idle_ranks: int
    experts_per_rank: int
    exchange_bytes: int
    exchange_ms: float | None
    refused: str = ""


@dataclass(frozen=True)
class Advice:
    """The recommendation for one MoE layer.

    tokens: tokens of a rank in one step, which the exchange figures are for. measured_from: which figure gives the time,
    "" if none does. recipe: lines to paste into a recipe.
    """

    ep: int
    reason: str
    transport: str
    transport_reason: str
    groups: tuple[Group, ...]
    spare_ranks: tuple[int, ...]
    spare_reason: str
    tokens: int
    exchange_bytes: int
    exchange_ms: float | None
    measured_from: str
    recipe: tuple[str, ...]
    candidates: tuple[Candidate, ...]


def advise(
    topology: Topology, shape: LayerShape, ep: int | str = "auto", *, tokens: int = 4096, every_rank: bool = False
) -> Advice:
    """Recommend groups for a layer of `shape`.

    ep: a size to check, or "auto": of the R that divide the experts and fit NVLink domains, the largest of those that leave
    the fewest ranks idle, where sizes of 8 and more may idle up to an eighth of the ranks.
    tokens: tokens of a rank in one step. every_rank: no rank may stay out, because all are running already.
    UsageError for an `ep` that cannot be: it does not divide the experts, exceeds them, or exceeds the ranks.
    """
    ranks = [place.rank for place in topology.places()] or [0]
    found = domains(topology) or [Domain("cpu", (0,), (topology.hosts[0].name,), f"one process on {topology.hosts[0].name}")]
    shareable = [domain for domain in found if domain.kind in ("nvlink", "cpu")]
    if ep != "auto":
        _check(int(ep), shape, len(ranks))
    chosen = int(ep) if ep != "auto" else _choose(_sizes(shape, len(ranks)), found, shareable, every_rank)
    groups = _groups(chosen, found if chosen == 1 else shareable)
    reason = _reason(ep, chosen, shape, found, len(ranks) - chosen * len(groups))
    if ep != "auto" and (not groups or (every_rank and len(groups) * chosen < len(ranks))):
        groups = _spanning_groups(chosen, ranks, found)
        reason = f"asked for, but no NVLink domain holds {chosen} ranks for every group: rows leave the domain"
    used = {rank for group in groups for rank in group.ranks}
    spare = tuple(rank for rank in ranks if rank not in used)
    transport, transport_reason = _transport(topology, chosen, groups, found)
    figure = _measured_gb_per_s(topology, groups)
    sent = _exchange_bytes(shape, tokens, chosen)
    return Advice(
        ep=chosen,
        reason=reason,
        transport=transport,
        transport_reason=transport_reason,
        groups=tuple(groups),
        spare_ranks=spare,
        spare_reason=_spare_reason(spare, found, chosen),
        tokens=tokens,
        exchange_bytes=sent,
        exchange_ms=_milliseconds(sent, figure[0]),
        measured_from=figure[1],
        # Peer memory is advice about the fabric; training over it has not been run between GPUs, so `auto` decides.
        recipe=("[moe]", f"ep = {chosen}", f'transport = "{transport if transport != "peer" else "auto"}"'),
        candidates=tuple(
            _candidate(topology, shape, size, tokens, found, shareable, len(ranks)) for size in _listed(shape, len(ranks))
        ),
    )


def _check(ep: int, shape: LayerShape, num_ranks: int) -> None:
    if ep < 1:
        raise UsageError(f"ep = {ep}: at least 1 is expected")
    divisors = [size for size in range(1, shape.num_experts + 1) if shape.num_experts % size == 0]
    if ep > shape.num_experts:
        raise UsageError(
            f"ep = {ep}: {ep} ranks cannot share {shape.num_experts} experts, some would have none; use {_list(divisors)}"
        )
    if shape.num_experts % ep:
        raise UsageError(f"ep = {ep}: does not divide {shape.num_experts} experts; use {_list(divisors)}")
    if ep > num_ranks:
        raise UsageError(f"ep = {ep}: this picture has {num_ranks} ranks; probe under torchrun on all hosts, or lower ep")


def _list(sizes: list[int]) -> str:
    return f"{', '.join(map(str, sizes[:-1]))} or {sizes[-1]}" if len(sizes) > 1 else str(sizes[0])


def _sizes(shape: LayerShape, num_ranks: int) -> list[int]:
    return [size for size in range(1, min(shape.num_experts, num_ranks) + 1) if shape.num_experts % size == 0]


def _listed(shape: LayerShape, num_ranks: int) -> list[int]:
    """Sizes for the table of candidates: every divisor of the experts up to the ranks, and the number of ranks itself."""
    return sorted({*_sizes(shape, num_ranks), num_ranks})


def _choose(sizes: list[int], found: list[Domain], shareable: list[Domain], every_rank: bool) -> int:
    usable = sum(domain.size for domain in found if not _broken(domain))
    idle = {size: usable - _used(size, found, shareable) for size in sizes}
    if every_rank:
        total = sum(domain.size for domain in found)
        return max(size for size in sizes if size == 1 or _used(size, found, shareable) == total)
    large = [size for size in sizes if size >= COMFORTABLE_EP and 0 <= idle[size] <= usable * IDLE_SHARE]
    possible = large or [size for size in sizes if size == 1 or _used(size, found, shareable)]
    return min(possible, key=lambda size: (idle[size], -size))


def _used(size: int, found: list[Domain], shareable: list[Domain]) -> int:
    if size == 1:
        return sum(domain.size for domain in found if not _broken(domain))
    return sum(domain.size // size * size for domain in shareable)


def _broken(domain: Domain) -> bool:
    return domain.kind == "alone" and domain.reason.startswith(("fabric unhealthy", "not ready"))


def _groups(size: int, shareable: list[Domain]) -> list[Group]:
    """Consecutive ranks of one domain, as many whole groups as it holds."""
    groups = []
    for domain in shareable:
        if size == 1 and _broken(domain):
            continue
        for start in range(0, domain.size // size * size, size):
            reason = "one rank holds all experts" if size == 1 else domain.reason
            groups.append(Group(domain.ranks[start : start + size], reason))
    return sorted(groups, key=lambda group: group.ranks)


def _spanning_groups(size: int, ranks: list[int], found: list[Domain]) -> list[Group]:
    """Groups over the borders of domains, for a size that was asked for; broken GPUs stay out."""
    broken = {rank for domain in found if _broken(domain) for rank in domain.ranks}
    usable = [rank for rank in ranks if rank not in broken] if len(ranks) - len(broken) >= size else ranks
    return [
        Group(tuple(usable[start : start + size]), "several NVLink domains")
        for start in range(0, len(usable) // size * size, size)
    ]


def _reason(ep: int | str, chosen: int, shape: LayerShape, found: list[Domain], idle: int) -> str:
    largest = max((domain.size for domain in found if domain.kind in ("nvlink", "cpu")), default=1)
    if ep != "auto":
        return "asked for"
    if chosen == 1 and largest == 1:
        return "one rank" if sum(domain.size for domain in found) == 1 else "no two GPUs share NVLink"
    what = "CPU processes of one host" if all(domain.kind == "cpu" for domain in found) else "the NVLink domain"
    left = f"leaves the fewest ranks out ({idle})" if idle else "leaves no rank out"
    return f"largest divisor of {shape.num_experts} experts that fits {what} ({largest} ranks) and {left}"


def _spare_reason(spare: tuple[int, ...], found: list[Domain], chosen: int) -> str:
    if not spare:
        return ""
    broken = {rank: domain.reason for domain in found if _broken(domain) for rank in domain.ranks}
    parts = [f"rank {rank}: {broken[rank]}" for rank in spare if rank in broken]
    if rest := len(spare) - len(parts):
        parts.append(f"{rest} left over by groups of {chosen}")
    return "; ".join(parts)


def _transport(topology: Topology, ep: int, groups: list[Group], found: list[Domain]) -> tuple[str, str]:
    if ep == 1:
        return "auto", "no rows leave a rank"
    if not all(any(set(group.ranks) <= set(domain.ranks) for domain in found) for group in groups):
        return "collective", "groups leave the NVLink domain"
    if all(domain.kind == "cpu" for domain in found):
        return "collective", "CPU processes exchange through gloo"
    if failed := _failed_pairs(topology, groups):
        return "collective", f"transfers between {failed} pairs of a group did not arrive intact"
    if refused := _refused_pair(topology, groups):
        return "collective", f"no peer access from rank {refused[0]} to rank {refused[1]}"
    return "peer", "every pair of a group is in one NVLink domain; multicast is not used"


def _refused_pair(topology: Topology, groups: list[Group]) -> tuple[int, int] | None:
    """The first two ranks of a group and host whose GPUs have no peer access, says the driver."""
    for group in groups:
        for a, b in permutations((topology.place_of[rank] for rank in group.ranks), 2):
            if a.host != b.host or a.gpu is None or b.gpu is None or a.gpu == b.gpu:
                continue
            if topology.hosts[a.host].pair(a.gpu, b.gpu).capable is False:
                return a.rank, b.rank
    return None


def _failed_pairs(topology: Topology, groups: list[Group]) -> int:
    if topology.measurement is None:
        return 0
    group_of = {rank: i for i, group in enumerate(groups) for rank in group.ranks}
    return len(
        {
            (record.source, record.target)
            for record in topology.measurement.transfers
            if record.verdict == "FAILED" and group_of.get(record.source, -1) == group_of.get(record.target, -2)
        }
    )


def _exchange_bytes(shape: LayerShape, tokens: int, ep: int) -> int:
    """What one rank sends in one layer and step: the routes to other ranks, taken to be spread evenly."""
    return tokens * shape.top_k * (ep - 1) // ep * shape.hidden_size * ROW_VALUE_BYTES * EXCHANGES_PER_STEP


def _measured_gb_per_s(topology: Topology, groups: list[Group]) -> tuple[float | None, str]:
    """The even all-to-all measured among the fewest ranks that hold a whole group; else the slowest verified pair."""
    measurement = topology.measurement
    if measurement is None or not groups or len(groups[0].ranks) == 1:
        return None, ""
    exchanges = [
        exchange
        for exchange in measurement.exchanges
        if exchange.routing == "even"
        and exchange.verdict == "verified"
        and any(set(group.ranks) <= set(exchange.ranks) for group in groups)
    ]
    if exchanges:
        best = min(exchanges, key=lambda exchange: (len(exchange.ranks), exchange.median_ms))
        return best.gb_per_s, f"even all-to-all among {len(best.ranks)} ranks"
    members = {rank: i for i, group in enumerate(groups) for rank in group.ranks}
    by_pair: dict[tuple[int, int], list[float]] = {}
    for record in measurement.transfers:
        inside = members.get(record.source, -1) == members.get(record.target, -2) and record.source != record.target
        if inside and record.gb_per_s is not None and record.verdict == "verified":
            by_pair.setdefault((record.source, record.target), []).append(record.gb_per_s)
    if not by_pair:
        return None, ""
    return min(statistics.median(speeds) for speeds in by_pair.values()), "slowest pair of a group"


def _milliseconds(num_bytes: int, gb_per_s: float | None) -> float | None:
    return num_bytes / gb_per_s / 1e6 if gb_per_s else None


def _candidate(
    topology: Topology, shape: LayerShape, size: int, tokens: int, found: list[Domain], shareable: list[Domain], num_ranks: int
) -> Candidate:
    groups = [] if shape.num_experts % size else _groups(size, found if size == 1 else shareable)
    refused = ""
    if shape.num_experts % size:
        refused = "no divisor"
    elif not groups:
        refused = f"domain of {max((domain.size for domain in shareable), default=1)}"
    sent = _exchange_bytes(shape, tokens, size)
    return Candidate(
        ep=size,
        num_groups=len(groups),
        idle_ranks=num_ranks - len(groups) * size,
        experts_per_rank=shape.num_experts // size if shape.num_experts % size == 0 else 0,
        exchange_bytes=sent,
        exchange_ms=_milliseconds(sent, _measured_gb_per_s(topology, groups)[0]),
        refused=refused,
    )
