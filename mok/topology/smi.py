"""`nvidia-smi`, the last resort where NVML cannot be used.

Owns the parsing of its text, which is meant for people: escape codes, changing columns, mixed case. Text that is not
understood gives no answer, never an empty healthy one.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import time

from mok.topology.fabric import STATES
from mok.topology.model import Fabric, Gpu, Pair, Reading
from mok.topology.sources import Unavailable, count_of
from mok.topology.sysfs import normalise_bus_id

__all__ = ["parse_fabric", "parse_gpus", "parse_matrix", "parse_nvlinks", "read"]

GPU_FIELDS = "uuid,pci.bus_id,name,memory.total,driver_version,mig.mode.current"

CELL = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS|SOC|PSB|N/A")
ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def read(limit_s: float = 10.0) -> Reading:
    """GPUs, link matrix, NVLink states and fabric, from four calls that together take no longer than `limit_s`."""
    program = shutil.which("nvidia-smi")
    if program is None:
        raise Unavailable("nvidia-smi is not on the PATH")
    deadline = time.monotonic() + limit_s

    def ask(*arguments: str) -> str:
        try:
            done = subprocess.run(
                [program, *arguments],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=max(deadline - time.monotonic(), 0.1),
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            raise Unavailable(f"nvidia-smi gave no answer within {limit_s:g} s") from None
        except OSError as error:
            raise Unavailable(f"nvidia-smi cannot be run: {error}") from None
        if done.returncode:
            lines = (done.stdout + done.stderr).strip().splitlines()
            raise Unavailable(f"nvidia-smi exited with {done.returncode}" + (f": {lines[0]}" if lines else ""))
        return done.stdout

    gpus, driver = parse_gpus(ask(f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader,nounits"))
    gaps: list[str] = []
    pairs: tuple[Pair, ...] = ()
    try:
        pairs = parse_matrix(ask("topo", "-m"), len(gpus))
    except Unavailable as reason:
        gaps.append(str(reason))
    try:
        links = parse_nvlinks(ask("nvlink", "--status"))
        gpus = tuple(
            dataclasses.replace(gpu, links_up=links[gpu.uuid][0], links_total=links[gpu.uuid][1]) if gpu.uuid in links else gpu
            for gpu in gpus
        )
    except Unavailable as reason:
        gaps.append(str(reason))
    try:
        fabrics = parse_fabric(ask("-q"))
        gpus = tuple(dataclasses.replace(gpu, fabric=fabrics.get(gpu.bus_id, Fabric())) for gpu in gpus)
    except Unavailable as reason:
        gaps.append(str(reason))
    return Reading(gpus, pairs, driver, detail="; ".join([count_of(gpus), *gaps]))


def parse_gpus(text: str) -> tuple[tuple[Gpu, ...], str]:
    """GPUs and driver version of `--query-gpu` in CSV; `Unavailable` for anything else."""
    gpus, driver = [], ""
    for line in text.strip().splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(GPU_FIELDS.split(",")) or not cells[0].startswith("GPU-"):
            raise Unavailable(f"nvidia-smi: not a GPU list: {line!r}")
        uuid, bus_id, name, memory, driver, mig = cells
        gpus.append(
            Gpu(
                uuid=uuid,
                bus_id=normalise_bus_id(bus_id),
                name=name,
                memory_bytes=int(memory) << 20 if memory.isdigit() else None,
                mig_enabled=mig.lower() == "enabled",
                found_by=("nvidia-smi",),
            )
        )
    return tuple(gpus), driver


def parse_matrix(text: str, num_gpus: int) -> tuple[Pair, ...]:
    """The GPU part of `topo -m`: NIC rows and columns, affinity columns and legend are left out.

    Worked example: header "GPU0 GPU1 NIC0 CPU Affinity", row "GPU0 X NV18 SYS 0-31" -> Pair(0, 1, "NV18").
    """
    rows: dict[int, list[str]] = {}
    for line in ESCAPE.sub("", text).splitlines():
        words = line.split()
        # The header starts with GPU0 as well, but its second word is another device, not a cell.
        if len(words) > 1 and (match := re.fullmatch(r"GPU(\d+)", words[0])) and CELL.fullmatch(words[1]):
            rows[int(match.group(1))] = words[1 : num_gpus + 1]
    complete = sorted(rows) == list(range(num_gpus)) and all(
        len(row) == num_gpus and all(CELL.fullmatch(cell) for cell in row) and row[i] == "X" for i, row in rows.items()
    )
    if not num_gpus or not complete:
        raise Unavailable("nvidia-smi topo: no matrix in its output")
    return tuple(
        Pair(i, j, "" if rows[i][j] == "N/A" else rows[i][j].replace("PSB", "PIX").replace("SOC", "SYS"))
        for i in range(num_gpus)
        for j in range(num_gpus)
        if i != j
    )


def parse_nvlinks(text: str) -> dict[str, tuple[int, int | None]]:
    """(links up, links in all) by GPU UUID from `nvlink --status`; `Unavailable` if no GPU is in the text.

    A link line has a speed ("Link 3: 26.562 GB/s") or the word inactive, in any case. "All links are inactive" does not say
    how many there are: (0, None).
    """
    found: dict[str, tuple[int, int | None]] = {}
    current = ""
    for line in ESCAPE.sub("", text).splitlines():
        if match := re.match(r"\s*GPU \d+:.*UUID: (GPU-[0-9a-fA-F-]+)", line):
            current = match.group(1)
        elif current and re.match(r"\s*Link \d+:", line):
            up, total = found.get(current, (0, 0))
            found[current] = (up + bool(re.search(r"\d\s*GB/s", line)), (total or 0) + 1)
        elif current and "all links are inactive" in line.lower():
            found[current] = (0, None)
    if not current:
        raise Unavailable("nvidia-smi nvlink: no GPU in its output")
    return found


def parse_fabric(text: str) -> dict[str, Fabric]:
    """Fabric registration by bus id from `nvidia-smi -q`; GPUs without a Fabric part are left out."""
    found: dict[str, Fabric] = {}
    blocks = re.split(r"^GPU ([0-9A-Fa-f:.]+)\s*$", ESCAPE.sub("", text), flags=re.MULTILINE)
    for bus_id, block in zip(blocks[1::2], blocks[2::2], strict=True):
        part = re.search(r"^( +)Fabric\s*\n((?:\1 +.*\n?)+)", block, re.MULTILINE)
        if part is None:
            continue
        values = {
            key.strip().lower(): "" if value.strip() in ("N/A", "") else value.strip()
            # Backwards, so that the first of two equal names stands: parts below, like Health, come later.
            for key, _, value in (line.partition(":") for line in reversed(part.group(2).splitlines()))
        }
        state = values.get("state", "").lower()
        cluster = values.get("clusteruuid", "")
        completed = state == "completed"
        found[normalise_bus_id(bus_id)] = Fabric(
            state=state if state in STATES else "unknown" if state else "not supported",
            status=values.get("status", "") if completed else "",
            cluster_uuid=cluster if completed and cluster.strip("0-") else "",
            clique_id=int(values["cliqueid"]) if completed and values.get("cliqueid", "").isdigit() else None,
            summary=values.get("summary", "").lower(),
            query="nvidia-smi",
        )
    return found
