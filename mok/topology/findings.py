"""What is wrong or surprising in a picture, where, and what to do about it.

Owns every judgement that is not about one model: links, fabric, IMEX, peer access, NUMA binding, environment variables,
sources that did not answer, transfers that failed. A finding never stops anything; `gate.py` does. Read next: `advice.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mok.topology.domains import multi_host_obstacle
from mok.topology.fabric import judge
from mok.topology.model import Gpu, Host, Topology
from mok.topology.probe import reason_for_no_gpu
from mok.topology.speeds import outliers
from mok.topology.sysfs import cpu_set

__all__ = ["Finding", "findings"]


@dataclass(frozen=True)
class Finding:
    """severity: error (something does not work), warning (slower or smaller than it could be), note.

    code: a stable name for scripts. where: host, GPU or rank. fix: what to do, one sentence.
    """

    severity: str
    code: str
    where: str
    what: str
    fix: str


# variable -> (value that matters or None for any, severity, what it does, what to do)
VARIABLES: dict[str, tuple[str | None, str, str, str]] = {
    "NCCL_P2P_DISABLE": ("1", "warning", "NCCL does not use peer access, NVLink included", "unset it"),
    "NCCL_P2P_LEVEL": (None, "warning", "NCCL uses peer access only up to this distance", "unset it, or set it to SYS"),
    "NCCL_SHM_DISABLE": ("1", "note", "NCCL does not use shared memory within a host", "unset it"),
    "NCCL_MNNVL_ENABLE": ("0", "warning", "NVLink is not used across hosts", "unset it"),
    "NCCL_CUMEM_ENABLE": ("0", "note", "NCCL cannot share memory across hosts over NVLink", "unset it"),
    "NCCL_NVLS_ENABLE": ("0", "note", "NVLink multicast is off by policy", "nothing: mok never uses multicast"),
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": ("1", "note", "NVLink multicast is off by policy", "nothing: mok never uses multicast"),
}


def findings(topology: Topology, expect_gpus: int | None = None) -> list[Finding]:
    """All findings, errors first."""
    found = [
        *(finding for host in topology.hosts for finding in _of_host(host)),
        *_of_ranks(topology),
        *_of_measurement(topology),
    ]
    if expect_gpus is not None and topology.num_visible_gpus != expect_gpus:
        found.append(_missing_gpus(topology, expect_gpus))
    return sorted(found, key=lambda finding: ("error", "warning", "note").index(finding.severity))


def _of_host(host: Host) -> Iterator[Finding]:
    if not host.gpus:
        fix = "nothing on a CPU machine; else see why each source has no answer"
        yield Finding("note", "no-gpu", host.name, "no GPUs found: CPU only", fix)
    elif reason := reason_for_no_gpu(host):
        fix = "change CUDA_VISIBLE_DEVICES, or see why CUDA has no answer"
        yield Finding("warning", "no-gpu", host.name, f"no GPU can be used: {reason}", fix)
    for gpu in host.gpus:
        yield from _of_gpu(host, gpu)
    visible = [i for i, gpu in enumerate(host.gpus) if gpu.visible]
    hidden = [gpu.label for gpu in host.gpus if not gpu.visible]
    if hidden and visible:
        text = f"{len(hidden)} of {len(host.gpus)} GPUs are hidden from CUDA"
        yield Finding("note", "hidden-gpus", host.name, text, "change CUDA_VISIBLE_DEVICES if that is not meant")
    refused = [(i, j) for i in visible for j in visible if i != j and host.pair(i, j).capable is False]
    if refused:
        first, second = refused[0]
        pair = host.pair(first, second)
        why = next((word for word in (pair.read, pair.write) if word not in ("", "ok")), "refused by CUDA")
        yield Finding(
            "warning",
            "p2p-off",
            host.name,
            f"no peer access in {len(refused)} ordered pairs, as {host.gpus[first].label} to {host.gpus[second].label}: {why}",
            "turn off ACS and IOMMU in the BIOS, or pass the GPUs through to the virtual machine as one group",
        )
    if any(judge(gpu.fabric).usable_across_hosts for gpu in host.gpus) and host.imex != "ready":
        yield Finding(
            "warning",
            f"imex-{host.imex}",
            host.name,
            f"NVLink fabric is up but IMEX channel {host.imex}: cross-node NVLink unavailable; groups stay within the host",
            "start nvidia-imex and give the container /dev/nvidia-caps-imex-channels/channel0",
        )
    elif any(judge(gpu.fabric).usable_across_hosts for gpu in host.gpus) and (obstacle := multi_host_obstacle(host)):
        yield Finding("warning", "mnnvl-off", host.name, f"{obstacle}: groups stay within the host", "unset it to span hosts")
    for name, (value, severity, what, fix) in VARIABLES.items():
        if name in host.environment and value in (None, host.environment[name]):
            yield Finding(severity, "environment", host.name, f"{name}={host.environment[name]}: {what}", fix)
    if host.gpus:
        for source in host.sources:
            if not source.ok and source.name == "cuda":
                what = f"CUDA cannot be used by this process: {source.detail}; its ordinals are assumed"
                fix = "install a torch built for CUDA, and give the container compute access to the driver"
                yield Finding("warning", "cuda-failed", host.name, what, fix)
            elif not source.ok and source.name != "nvidia-smi":
                yield Finding(
                    "note", "source-failed", host.name, f"{source.name}: {source.detail}", "see docs/topology.md, Sources"
                )


def _of_gpu(host: Host, gpu: Gpu) -> Iterator[Finding]:
    where = f"{host.name} {gpu.label}"
    verdict = judge(gpu.fabric)
    if verdict.kind == "not ready":
        fix = "wait for the fabric manager (`--wait 120`); if it stays so, restart nvidia-fabricmanager"
        yield Finding("error", "fabric-not-ready", where, f"not ready: {gpu.label} {gpu.fabric.state}", fix)
    elif verdict.kind == "unhealthy":
        fix = "restart the fabric manager or drain the host; no rank on this GPU can share experts over NVLink"
        yield Finding("error", "fabric-unhealthy", where, verdict.words, fix)
    elif verdict.kind == "degraded":
        yield Finding("warning", "fabric-degraded", where, f"fabric {verdict.words}", "check the switch trays and cables")
    elif verdict.kind == "unknown" and gpu.fabric.reason:
        yield Finding("note", "fabric-unknown", where, f"fabric {verdict.words}", "update the driver to know the NVLink domain")
    if gpu.links_up is not None and gpu.links_up == 0:
        total = f" of {gpu.links_total}" if gpu.links_total else ""
        fix = "reset the GPU or drain the host; on a card without NVLink bridges this is normal"
        yield Finding("error" if gpu.links_total else "warning", "links-down", where, f"NVLink down: 0{total} links up", fix)
    elif gpu.links_up is not None and gpu.links_total is not None and gpu.links_up < gpu.links_total:
        speed = f", {gpu.nvlink_gb_per_s:g} GB/s nominal" if gpu.nvlink_gb_per_s is not None else ""
        what = f"NVLink degraded: {gpu.links_up}/{gpu.links_total} links up{speed}"
        yield Finding(
            "warning", "links-degraded", where, what, "look for Xid 74 in the kernel log; drain the host to replace the part"
        )
    if gpu.mig_enabled:
        what = f"MIG is on ({len(gpu.mig_devices)} instances): no peer access, one instance a rank"
        yield Finding("warning", "mig", where, what, "use moe.ep = 1, or turn MIG off with `nvidia-smi -mig 0`")


def _of_ranks(topology: Topology) -> Iterator[Finding]:
    for silent in topology.silent:
        yield Finding(
            "error", "rank-silent", silent.partition(":")[0], silent, "look at that rank's host; raise --timeout if it is slow"
        )
    users: dict[tuple[int, int], list[int]] = {}
    for rank in topology.ranks:
        host = topology.hosts[rank.host]
        if rank.gpu is None:
            continue
        users.setdefault((rank.host, rank.gpu), []).append(rank.rank)
        gpu = host.gpus[rank.gpu]
        local, bound = cpu_set(gpu.cpus), cpu_set(rank.cpus)
        if local and bound and len(host.numa_nodes) > 1 and not local & bound:
            what = f"runs on CPUs {rank.cpus}, {gpu.label} is local to {gpu.cpus}"
            fix = f"bind it: `numactl --cpunodebind={gpu.numa_node} --membind={gpu.numa_node}`"
            yield Finding("warning", "numa-binding", f"rank {rank.rank}", what, fix)
    for (host_index, gpu_index), ranks in users.items():
        if len(ranks) > 1 and not topology.hosts[host_index].gpus[gpu_index].mig_enabled:
            what = f"shared by ranks {', '.join(map(str, ranks))}"
            where = f"{topology.hosts[host_index].name} {topology.hosts[host_index].gpus[gpu_index].label}"
            yield Finding("warning", "gpu-shared", where, what, "start one process a GPU")
    if not topology.ranks:
        yield from _of_own_binding(topology)


def _of_own_binding(topology: Topology) -> Iterator[Finding]:
    """One process that looks at several NUMA nodes is not bound wrongly; one that sees a single GPU may be."""
    for host in topology.hosts:
        visible = [gpu for gpu in host.gpus if gpu.visible]
        if len(visible) != 1 or len(host.numa_nodes) < 2 or not visible[0].cpus or not host.cpus:
            continue
        if not cpu_set(visible[0].cpus) & cpu_set(host.cpus):
            what = f"this process runs on CPUs {host.cpus}, {visible[0].label} is local to {visible[0].cpus}"
            fix = f"bind it: `numactl --cpunodebind={visible[0].numa_node} --membind={visible[0].numa_node}`"
            yield Finding("warning", "numa-binding", host.name, what, fix)


def _of_measurement(topology: Topology) -> Iterator[Finding]:
    measurement = topology.measurement
    if measurement is None:
        return
    for record in measurement.transfers:
        if record.verdict == "FAILED":
            where = f"rank {record.source} to rank {record.target}"
            what = f"{record.method}: {record.detail}"
            fix = (
                'do not train on this pair: turn off IOMMU and ACS, or set moe.transport = "collective" with NCCL_P2P_DISABLE=1'
            )
            yield Finding("error", "transfer-failed", where, what, fix)
    for exchange in measurement.exchanges:
        if exchange.verdict == "FAILED":
            what = f"{exchange.routing} all-to-all by {exchange.method}: {exchange.detail}"
            yield Finding("error", "transfer-failed", f"{len(exchange.ranks)} ranks", what, "look for a failed pair above")
    for record, usual in outliers(topology):
        where = f"rank {record.source} to rank {record.target}"
        what = f"{record.method} at {record.gb_per_s:.0f} GB/s, pairs with the same link reach {usual:.0f}"
        yield Finding("warning", "slow-pair", where, what, "compare NVLink error counters of both GPUs; run again when idle")
    if measurement.unfinished:
        yield Finding(
            "warning", "measure-unfinished", "measurement", measurement.unfinished, "what is missing here is not measured"
        )


def _missing_gpus(topology: Topology, expect_gpus: int) -> Finding:
    counts = {host.name: sum(gpu.visible for gpu in host.gpus) for host in topology.hosts}
    most = max(counts.values(), default=0)
    short = [f"{name} has {count}" for name, count in counts.items() if count < most]
    hidden = sum(len(host.gpus) for host in topology.hosts) - topology.num_visible_gpus
    extra = [*short, *([f"{hidden} hidden"] if hidden else [])]
    what = f"{topology.num_visible_gpus} GPUs where {expect_gpus} are expected" + (f" ({', '.join(extra)})" if extra else "")
    return Finding("error", "gpu-count", "all hosts", what, "look for a GPU that fell off the bus: `dmesg | grep -i xid`")
