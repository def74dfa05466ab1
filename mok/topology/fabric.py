"""What a GPU's NVLink fabric registration means.

Owns the driver's numbers and their words, and the verdict on one GPU. Must not know how the numbers were read.
Read next: `domains.py`, which groups GPUs by what is decided here.
"""

from __future__ import annotations

from typing import NamedTuple

from mok.topology.model import Fabric

__all__ = ["HEALTH_FIELDS", "STATES", "SUMMARIES", "Verdict", "decode_health", "driver_too_old", "judge"]

STATES = ("not supported", "not started", "in progress", "completed")
SUMMARIES = ("not supported", "healthy", "unhealthy", "limited capacity")

NO_YES = ("not supported", "yes", "no")

# name, first bit, bits, words by value: the layout of nvmlGpuFabricInfo healthMask.
HEALTH_FIELDS: tuple[tuple[str, int, int, tuple[str, ...]], ...] = (
    ("degraded bandwidth", 0, 2, NO_YES),
    ("route recovery", 2, 2, NO_YES),
    ("route unhealthy", 4, 2, NO_YES),
    ("access timeout recovery", 6, 2, NO_YES),
    (
        "incorrect configuration",
        8,
        4,
        (
            "not supported",
            "none",
            "incorrect system GUID",
            "incorrect chassis serial number",
            "no partition",
            "insufficient NVLinks",
            "incompatible GPU firmware",
            "invalid location",
            "invalid GPU state",
        ),
    ),
    ("partition assigned", 12, 2, NO_YES),
    ("fabric manager", 14, 2, ("not supported", "connected", "disconnected")),
)


class Verdict(NamedTuple):
    """kind: healthy, degraded, single host, unhealthy, not ready, not supported or unknown. words: for people."""

    kind: str
    words: str

    @property
    def usable_across_hosts(self) -> bool:
        """The GPU belongs to a fabric that can span hosts, and works in it."""
        return self.kind in ("healthy", "degraded")

    @property
    def broken(self) -> bool:
        """The GPU should be in a fabric and is not (yet): its NVLinks cannot be relied on."""
        return self.kind in ("unhealthy", "not ready")


def driver_too_old() -> Fabric:
    """The answer of a driver whose library lacks every form of the fabric query."""
    return Fabric(reason="driver too old (needs 550)")


def decode_health(mask: int) -> dict[str, str]:
    """The words of each field of a health mask: 0xaa -> {"degraded bandwidth": "no", ...}."""
    words = {}
    for name, shift, bits, values in HEALTH_FIELDS:
        value = mask >> shift & (1 << bits) - 1
        words[name] = values[value] if value < len(values) else f"unknown ({value})"
    return words


def judge(fabric: Fabric) -> Verdict:
    """Healthy takes all of: state completed, status success, a real cluster id and clique, and no bad health field."""
    if fabric.state == "unknown":
        return Verdict("unknown", f"unknown: {fabric.reason}" if fabric.reason else "unknown")
    if fabric.state == "not supported":
        return Verdict("not supported", "not supported")
    if fabric.state != "completed":
        return Verdict("not ready", f"not ready: {fabric.state}")
    if fabric.status.lower() != "success":
        return Verdict("unhealthy", f"fabric unhealthy: {fabric.status or 'no status'}")
    health = decode_health(fabric.health_mask or 0)
    wrong = [
        f"{name}: {health[name]}"
        for name, good in (
            ("route unhealthy", ("not supported", "no")),
            ("incorrect configuration", ("not supported", "none")),
            ("partition assigned", ("not supported", "yes")),
            ("fabric manager", ("not supported", "connected")),
        )
        if health[name] not in good
    ]
    if fabric.summary == "unhealthy":
        wrong.append("summary: unhealthy")
    if wrong:
        return Verdict("unhealthy", f"fabric unhealthy: {', '.join(wrong)}")
    if not fabric.cluster_uuid:
        return Verdict("single host", "this host only (no cluster id)")
    if not fabric.clique_id:
        return Verdict("unhealthy", "fabric unhealthy: no clique id")
    slow = [name for name in ("degraded bandwidth", "route recovery", "access timeout recovery") if health[name] == "yes"]
    if fabric.summary == "limited capacity":
        slow.append(fabric.summary)
    if slow:
        return Verdict("degraded", f"degraded: {', '.join(slow)}")
    return Verdict("healthy", "healthy")
