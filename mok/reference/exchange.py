"""Experts on several ranks, all of them in one process: who sends which row where, and in which order it lies there.

Written for reading, in loops over every route of every rank. Owns the canonical order of rows that `mok.schedule` must give and
any transport must produce, for every number of ranks. Imports nothing that it checks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mok.reference.moe import combine, expert_hidden, expert_output

__all__ = ["Row", "exchanged_forward", "rows_in_order", "rows_with_padding"]

SEGMENT_ROWS = 16


class Row(NamedTuple):
    """A route that became a row of an expert: it is slot `slot` of token `token` of rank `rank`."""

    expert: int
    segment: int
    slice: int
    rank: int
    token: int
    slot: int


def rows_in_order(ids_of_rank: list[Tensor], num_experts: int, num_slices: int, segment: int) -> list[list[Row]]:
    """For each rank, the rows of its experts in order, without padding.

    ids_of_rank: [T, K] for each rank. Slice i of the call is on rank i % R, its slices lie one after the other in the rank's
    tokens. The order is expert, segment (slice // `segment`), slice, token, slot.

    Example, two ranks with one token each, K = 1, E = 2, two slices in one segment: ids [[[1]], [[1]]] give rank 1 the rows
    (expert 1, slice 0, rank 0), (expert 1, slice 1, rank 1), and rank 0 none.
    """
    ranks = len(ids_of_rank)
    buffers = []
    for owner in range(ranks):
        rows = []
        for expert in range(owner * num_experts // ranks, (owner + 1) * num_experts // ranks):
            for index in range(num_slices):
                rank, ids_TK = index % ranks, ids_of_rank[index % ranks]
                tokens = ids_TK.shape[0] // (num_slices // ranks)
                for token in range(index // ranks * tokens, (index // ranks + 1) * tokens):
                    for slot, e in enumerate(ids_TK[token].tolist()):
                        if e == expert:
                            rows.append(Row(expert, index // segment, index, rank, token, slot))
        buffers.append(rows)
    return buffers


def rows_with_padding(rows: list[Row], experts: range, num_segments: int, tile_rows: int) -> list[Row | None]:
    """A rank's buffer: every (expert, segment) starts on a multiple of 16 rows, every expert on one of `tile_rows`."""
    buffer: list[Row | None] = []
    for expert in experts:
        for segment in range(num_segments):
            buffer += [row for row in rows if (row.expert, row.segment) == (expert, segment)]
            buffer += [None] * (-len(buffer) % SEGMENT_ROWS)
        buffer += [None] * (-len(buffer) % tile_rows)
    return buffer


def exchanged_forward(
    x_of_rank: list[Tensor],
    ids_of_rank: list[Tensor],
    weights_of_rank: list[Tensor],
    w_gate_EIH: Tensor,
    w_up_EIH: Tensor,
    w_down_EHI: Tensor,
    num_slices: int,
    segment: int,
) -> list[Tensor]:
    """The layer's output on every rank: rows go to the owner of their expert, are computed there in order, and go back
    unweighted; the token's rank adds them slot by slot."""
    returned: dict[tuple[int, int, int], Tensor] = {}
    for rows in rows_in_order(ids_of_rank, w_gate_EIH.shape[0], num_slices, segment):
        for row in rows:
            x_H = x_of_rank[row.rank][row.token]
            hidden = expert_hidden(x_H, w_gate_EIH[row.expert], w_up_EIH[row.expert])
            returned[row.rank, row.token, row.slot] = expert_output(hidden, w_down_EHI[row.expert], x_H)
    outputs = []
    for rank, x_TH in enumerate(x_of_rank):
        y_TH = torch.empty_like(x_TH)
        for token, x_H in enumerate(x_TH):
            slots = [k for k, e in enumerate(ids_of_rank[rank][token].tolist()) if e >= 0]
            rows_KH = [returned[rank, token, k] for k in slots]
            y_TH[token] = combine(rows_KH, [weights_of_rank[rank][token, k] for k in slots], x_H)
        outputs.append(y_TH)
    return outputs
