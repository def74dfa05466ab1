"""What people put together for experts on several ranks: sort, all-to-all, torch's grouped products, all-to-all, sum.

Owns one contestant of `mok/bench/layer_ranks.py`. The host learns how many rows go where before they can, as with any
all-to-all of tensors.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import silu

from mok.transport.collective import all_to_all_rows

__all__ = ["GroupedOverRanks"]


class _Exchange(torch.autograd.Function):
    """Rows to the ranks that want them; their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.counts, ctx.group = (sent, received), group
        return all_to_all_rows(rows.contiguous(), sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.counts
        return all_to_all_rows(gradients[0].contiguous(), received, sent, ctx.group), None, None, None


class GroupedOverRanks:
    """See `mok.bench.peers.layer.Contestant`. problem: this rank's tokens, global ids; weights of its own experts."""

    def __init__(self, problem: Any, group: dist.ProcessGroup) -> None:
        self.name = "all-to-all, grouped_mm"
        self._group = group
        self._gate_up = torch.cat((problem.gate_EIH, problem.up_EIH), dim=1).requires_grad_()
        self._down = problem.down_EHI.detach().requires_grad_()

    def forward(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        self._inputs = x_TH.detach().requires_grad_(), weights_TK.detach().requires_grad_()
        x, weights = self._inputs
        ranks, local, top_k = self._group.size(), self._gate_up.shape[0], ids_TK.shape[1]
        sorted_ids, order = ids_TK.reshape(-1).sort(stable=True)
        counts = torch.bincount(sorted_ids, minlength=ranks * local)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self._group)
        by_rank = arriving.view(ranks, local)
        sent, received = counts.view(ranks, local).sum(1).tolist(), by_rank.sum(1).tolist()
        rows = _Exchange.apply(x[order // top_k], sent, received, self._group)
        expert = torch.arange(local, device=x.device).repeat(ranks).repeat_interleave(by_rank.reshape(-1))
        to_expert = expert.argsort(stable=True)
        ends = by_rank.sum(0).cumsum(0).to(torch.int32)
        product = torch.nn.functional.grouped_mm
        gate, up = product(rows[to_expert], self._gate_up.transpose(1, 2), offs=ends).chunk(2, dim=1)
        done = product(silu(gate) * up, self._down.transpose(1, 2), offs=ends)
        back = _Exchange.apply(done[to_expert.argsort()], received, sent, self._group)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=x.device))
        y = (back[place].view(*ids_TK.shape, -1) * weights.unsqueeze(2)).sum(1)
        return y.to(x.dtype)

    def backward(self, y_TH: Tensor, dy_TH: Tensor) -> dict[str, Tensor]:
        leaves = [*self._inputs, self._gate_up, self._down]
        dx, dweights, gate_up, down = torch.autograd.grad(y_TH, leaves, dy_TH)
        gate, up = gate_up.chunk(2, dim=1)
        return {"dx": dx, "dweights": dweights, "gate": gate, "up": up, "down": down}
