"""How rows travel in a launch: decided once, before the first call, by all ranks together.

Owns the decision behind `moe.transport` and what is said of it. Knows nothing of how rows are moved. Read next:
`mok/transport/peer.py`, `mok/topology/advice.py`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from mok.backends import choose
from mok.config import Recipe
from mok.errors import RankError, UsageError
from mok.grid import Layout
from mok.model.transformer import DTYPES, Group
from mok.shapes import has_room_for_any_routing, layer_shape, workspace_shape
from mok.topology.advice import advise
from mok.topology.ranks import merge, own_report
from mok.transport.peer import PeerTransport

if TYPE_CHECKING:  # which imports this module
    from mok.train.processes import LaunchedRanks

__all__ = ["settle_transport"]


def settle_transport(recipe: Recipe, ranks: LaunchedRanks, device: torch.device) -> Group:
    """This rank's group with the transport that `moe.transport` means here, the same on all ranks, and why.

    A collective call. `auto` takes peer memory where a backend can move rows through it, no routing can overflow it,
    `mok.topology` finds every group inside one NVLink domain, and the memory can be made on every rank; else all-to-all. Raises
    UsageError or RankError, on every rank, where peer memory is asked for and cannot be had.
    """
    layout, group, wanted = ranks.layout, ranks.group, recipe.moe.transport
    if layout.ep == 1 or wanted == "collective" or recipe.model.num_dense_layers == recipe.model.num_layers:
        return group
    reason = _refused(recipe, layout, device)
    if not reason and wanted == "auto":
        reason = _may_overflow(recipe, layout.ep) or _advised_against(recipe, ranks)
    if not reason:
        try:
            opened = _open_memory(recipe, ranks, device)
            return replace(group, transport=opened, transport_reason="every rank opened its memory to its group")
        except RankError as error:
            if wanted == "peer":
                raise
            reason = str(error)
    if wanted == "peer":
        raise UsageError(f'moe.transport = "peer" cannot be had here: {reason}; use "auto" or "collective"')
    return replace(group, transport_reason=reason)


def _refused(recipe: Recipe, layout: Layout, device: torch.device) -> str:
    """Why no rank could move rows through peer memory, whatever joins the GPUs: the same on all of them."""
    if device.type != "cuda":
        return "ranks on CPUs have no memory to open to one another"
    shape = replace(layer_shape(recipe), ranks=layout.ep)
    try:
        choose(recipe.moe.backend, shape, DTYPES[recipe.train.dtype], device, recipe.quantization, transport="peer")
    except UsageError as error:
        return str(error)
    return ""


def _may_overflow(recipe: Recipe, ep: int) -> str:
    """Why peer memory could end a run that all-to-all would not."""
    if has_room_for_any_routing(recipe, ep):
        return ""
    return (
        f"moe.peer_rows = {recipe.moe.peer_rows:g} has room for less than all rows of {ep} ranks, and more would end the run; "
        'set it to 0 for any routing, or moe.transport = "peer"'
    )


def _advised_against(recipe: Recipe, ranks: LaunchedRanks) -> str:
    topology = merge(ranks.gather(own_report()))
    advice = advise(topology, layer_shape(recipe), ranks.layout.ep, every_rank=True)
    return "" if advice.transport == "peer" else advice.transport_reason


def _open_memory(recipe: Recipe, ranks: LaunchedRanks, device: torch.device) -> PeerTransport:
    layout = ranks.layout
    shape = workspace_shape(recipe, layout.ep, layout.tokens_of_call(recipe))
    return PeerTransport.allocate(
        shape,
        ranks.expert_group,
        device,
        partial(ranks.agree, stage="transport"),
        row_room=recipe.moe.peer_rows,
        timeout_s=recipe.distributed.timeout_s,
    )
