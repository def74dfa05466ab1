"""A captured or made-up machine in a file, to look at anywhere.

Owns the file format: JSON with a schema version, `topology` as in `model.py`, further keys ignored (so a `--json` report is
a snapshot too). docs/topology.md documents it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mok.errors import UsageError
from mok.topology.model import SCHEMA_VERSION, Topology, from_plain, to_plain

__all__ = ["load", "save", "to_document"]


def to_document(topology: Topology) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION, "kind": "mok-topology", "topology": to_plain(topology)}


def save(topology: Topology, path: str | Path) -> None:
    """Write a snapshot. UsageError if the file cannot be written."""
    try:
        Path(path).write_text(json.dumps(to_document(topology), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--save {path}: cannot be written ({error.strerror}); name a file in a writable folder") from None


def load(path: str | Path) -> Topology:
    """Read a snapshot. UsageError if it is missing, not JSON, truncated, of a newer schema, or not a snapshot."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--from {path}: cannot be read ({error}); name a file that `--save` wrote") from None
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        end = text.rstrip()
        cut = end.startswith("{") and error.pos >= len(end) - 1
        what = "is cut off" if cut or (end.startswith("{") and not end.endswith("}")) else "is not JSON"
        raise UsageError(f"--from {path}: {what} (line {error.lineno}); save it again with `--save`") from None
    if not isinstance(document, dict) or document.get("kind") != "mok-topology":
        raise UsageError(f"--from {path}: is not a topology snapshot; name a file that `--save` wrote")
    version = document.get("schema_version")
    if not isinstance(version, int) or version < 1:
        raise UsageError(f"--from {path}: schema_version is {version!r}, a number is expected; save it again with `--save`")
    if version > SCHEMA_VERSION:
        raise UsageError(
            f"--from {path}: has schema version {version}, this mok reads up to {SCHEMA_VERSION}; "
            "use a newer mok, or save it again with this one"
        )
    try:
        topology = from_plain(Topology, document.get("topology"), "topology")
    except ValueError as error:
        raise UsageError(f"--from {path}: {error}; save it again with `--save`") from None
    _check_positions(topology, path)
    return topology


def _check_positions(topology: Topology, path: str | Path) -> None:
    """Every position must name something, so that nothing later has to doubt it."""
    for host in topology.hosts:
        if any(max(pair.first, pair.second) >= len(host.gpus) or min(pair.first, pair.second) < 0 for pair in host.pairs):
            raise UsageError(f"--from {path}: a pair of host {host.name} names a GPU that is not in its list")
    for rank in topology.ranks:
        if not 0 <= rank.host < len(topology.hosts) or not (
            rank.gpu is None or 0 <= rank.gpu < len(topology.hosts[rank.host].gpus)
        ):
            raise UsageError(f"--from {path}: rank {rank.rank} names a host or GPU that is not in the file")
