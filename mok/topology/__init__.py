"""What the machine can do: GPUs, links, NVLink domains, measured bandwidth, and which ranks should share experts.

One picture (`model.Topology`) is read by `probe`/`ranks` or loaded by `snapshot`; `domains`, `findings`, `advice` and `gate`
judge it; `measure` adds figures. Nothing here imports torch before it needs CUDA. Read next: `model.py`.
"""

from __future__ import annotations

from mok.topology.advice import Advice, advise
from mok.topology.domains import Domain, domains
from mok.topology.findings import Finding, findings
from mok.topology.gate import unmet
from mok.topology.model import Topology

__all__ = ["Advice", "Domain", "Finding", "Topology", "advise", "domains", "findings", "unmet"]
