"""How much to measure: bytes, repeats and limits, from the number of GPUs and a time budget.

Owns arithmetic only.
"""

from __future__ import annotations

from dataclasses import dataclass

from mok.shapes import LayerShape

__all__ = ["METHODS", "ROUTINGS", "Plan", "busiest_bytes", "make_plan", "rows_between"]

METHODS = ("copy", "load", "store")

ROUTINGS = ("even", "skewed", "one-hot")

REPEATS = 5

LARGEST_TRANSFER = 64 << 20
SMALLEST_TRANSFER = 1 << 20

LARGEST_EXCHANGE = 2 << 30
"""Bytes that the busiest rank of an all-to-all receives at most, so that buffers fit beside other users of the GPU."""

ROW_VALUE_BYTES = 2

SLOW_GB_PER_S = 5.0
"""What a link is taken to carry when time is planned: a copy through host memory of an old machine."""


@dataclass(frozen=True)
class Plan:
    """num_bytes: of one transfer. limit_s: for one record, all repeats. budget_s: after it nothing new is started.

    tokens: of one rank in an all-to-all, by routing, in the order of ROUTINGS.
    """

    num_ranks: int
    num_bytes: int
    repeats: int
    tokens: tuple[int, ...]
    hidden_size: int
    top_k: int
    limit_s: float = 20.0
    budget_s: float = 40.0

    @property
    def row_bytes(self) -> int:
        return self.hidden_size * ROW_VALUE_BYTES

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Ordered pairs; a single GPU is measured with itself."""
        ranks = range(self.num_ranks)
        return [(0, 0)] if self.num_ranks == 1 else [(i, j) for i in ranks for j in ranks if i != j]

    @property
    def expected_s(self) -> float:
        """Time on links as slow as SLOW_GB_PER_S."""
        moved = len(self.pairs) * len(METHODS) * (self.repeats + 1) * self.num_bytes
        for routing, tokens in zip(ROUTINGS, self.tokens, strict=True):
            moved += (self.repeats + 1) * busiest_bytes(
                rows_between(routing, self.num_ranks, tokens * self.top_k), self.row_bytes
            )
        return moved / SLOW_GB_PER_S / 1e9


def make_plan(
    num_ranks: int,
    shape: LayerShape,
    *,
    tokens: int = 4096,
    budget_s: float = 40.0,
    largest_exchange: int = LARGEST_EXCHANGE,
) -> Plan:
    """The largest transfers and exchanges that stay within `budget_s` even on slow links.

    tokens: of one rank, halved until the busiest rank receives at most `largest_exchange` bytes.
    """
    repeats_in_all = max(1, num_ranks * (num_ranks - 1)) * len(METHODS) * (REPEATS + 1)
    affordable = int(budget_s * 0.6 * SLOW_GB_PER_S * 1e9 / repeats_in_all)
    num_bytes = max(SMALLEST_TRANSFER, min(LARGEST_TRANSFER, affordable >> 20 << 20))
    row_bytes = shape.hidden_size * ROW_VALUE_BYTES
    largest = min(largest_exchange, int(budget_s * 0.3 * SLOW_GB_PER_S * 1e9 / (len(ROUTINGS) * (REPEATS + 1))))
    sizes = []
    for routing in ROUTINGS:
        size = tokens
        while size > 1 and busiest_bytes(rows_between(routing, num_ranks, size * shape.top_k), row_bytes) > largest:
            size //= 2
        sizes.append(size)
    return Plan(num_ranks, num_bytes, REPEATS, tuple(sizes), shape.hidden_size, shape.top_k, budget_s=budget_s)


def rows_between(routing: str, num_ranks: int, rows: int) -> list[list[int]]:
    """[source][target] -> rows sent, `rows` by each source.

    even: as equal as can be. skewed: rank 0 receives twice what another does. one-hot: rank 0 receives all.
    Worked example: skewed, 3 ranks, 8 rows -> each source sends [4, 2, 2].
    """
    weights = {"even": [1] * num_ranks, "skewed": [2] + [1] * (num_ranks - 1), "one-hot": [1] + [0] * (num_ranks - 1)}[routing]
    total = sum(weights)
    borders = [rows * sum(weights[:i]) // total for i in range(num_ranks + 1)]
    return [[borders[i + 1] - borders[i] for i in range(num_ranks)] for _ in range(num_ranks)]


def busiest_bytes(rows: list[list[int]], row_bytes: int) -> int:
    """The most that enters or leaves one rank; what a rank sends itself counts only when it is alone."""
    ranks = range(len(rows))
    if len(rows) == 1:
        return rows[0][0] * row_bytes
    sent = [sum(rows[i][j] for j in ranks if j != i) for i in ranks]
    received = [sum(rows[i][j] for i in ranks if i != j) for j in ranks]
    return max(*sent, *received) * row_bytes
