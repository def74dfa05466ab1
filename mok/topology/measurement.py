"""Records of what `--measure` found: raw figures and whether the data arrived.

Owns only records; `measure/` makes them, `speeds.py` sets them against the nominal figures. Ranks are those of
`Topology.places()`.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Exchange", "Measurement", "Transfer"]


@dataclass(frozen=True)
class Transfer:
    """One ordered pair of ranks and one way to move data from `source`'s memory to `target`'s.

    method: copy (CUDA copy), load (a kernel on the target reads the source's memory), store (a kernel on the source
    writes the target's memory).
    verdict: verified (every repeat arrived bit for bit), FAILED, not capable, or not measured; `detail` says why.
    gb_per_s: median over the repeats, 1e9 bytes a second; low and high are the extremes.
    latency_us: one small transfer (copy), one dependent load, one store read back.
    """

    source: int
    target: int
    method: str
    verdict: str
    detail: str = ""
    num_bytes: int = 0
    repeats: int = 0
    gb_per_s: float | None = None
    low_gb_per_s: float | None = None
    high_gb_per_s: float | None = None
    latency_us: float | None = None


@dataclass(frozen=True)
class Exchange:
    """One all-to-all of expert rows among `ranks`: T tokens a rank, K rows a token, H bf16 values a row.

    routing: even, skewed (one rank receives twice the mean of the others) or one-hot (one rank receives all rows).
    busiest_bytes: the most that enters or leaves one rank. gb_per_s: that over the median time.
    """

    ranks: tuple[int, ...]
    routing: str
    method: str
    tokens: int
    hidden_size: int
    top_k: int
    verdict: str
    detail: str = ""
    busiest_bytes: int = 0
    repeats: int = 0
    median_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None

    @property
    def gb_per_s(self) -> float | None:
        return self.busiest_bytes / self.median_ms / 1e6 if self.median_ms else None


@dataclass(frozen=True)
class Measurement:
    """All figures of one `--measure`; `unfinished` says why it ended early, "" if it did not."""

    transfers: tuple[Transfer, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    seconds: float = 0.0
    unfinished: str = ""

    @property
    def failed(self) -> tuple[Transfer | Exchange, ...]:
        """Everything whose data did not arrive intact."""
        records: list[Transfer | Exchange] = [*self.transfers, *self.exchanges]
        return tuple(record for record in records if record.verdict == "FAILED")
