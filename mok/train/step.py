"""One training step: forward and backward of every call, the ordered sums, clipping, the optimizer.

Owns what a step computes and in what order its sums are made (docs/numerics.md). Knows nothing of files, consoles or how often
anything happens. Read next: `mok/train/state.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from mok.errors import NonFiniteError
from mok.grid import Call
from mok.launch.status import check_status
from mok.model.loss import IGNORED, head_loss, head_loss_and_gradient
from mok.model.router import Router
from mok.train.batches import Batches
from mok.train.optim import gradient_norm
from mok.train.schedules import learning_rate
from mok.train.state import TrainState

__all__ = ["Observer", "StepReport", "evaluate", "train_step"]


@dataclass(frozen=True)
class StepReport:
    """What a step tells, the same on every rank.

    loss: mean cross-entropy of the valid tokens, nats. balance_loss, z_loss: means over slices and MoE layers, without their
    coefficients; None without MoE layers. grad_norm: before clipping. tokens: valid targets of the step; 0 means that the step
    was skipped. counts_LE: routes of the step to each expert of each MoE layer.
    """

    loss: float
    balance_loss: float | None
    z_loss: float | None
    grad_norm: float
    lr: float
    tokens: int
    counts_LE: tuple[tuple[int, ...], ...]

    @property
    def max_over_mean(self) -> float | None:
        """Routes of the busiest expert over the mean of its layer, in the worst layer."""
        busy = [max(counts) * len(counts) / sum(counts) for counts in self.counts_LE if sum(counts)]
        return max(busy, default=None)

    @property
    def dead_experts(self) -> int:
        """Experts of all layers that got no route."""
        return sum(count == 0 for counts in self.counts_LE for count in counts)


@dataclass
class _Sums:
    """What the calls of one rank leave behind: per-slice losses [slices] and [MoE layers, slices], counts [MoE layers, E]."""

    losses: list[Tensor] = field(default_factory=list)
    balance: list[Tensor] = field(default_factory=list)
    z: list[Tensor] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)


class Observer(Protocol):
    """Sees what a step computes, in order. Whatever it is given must not be changed or kept."""

    def begin(self, step: int) -> None: ...

    def call(self, call: Call, inputs: Tensor, targets: Tensor) -> None:
        """A call begins; [B, S] ids of this rank's slices."""

    def losses(self, losses_C: Tensor) -> None:
        """The forward of the call is over: the sum of the token losses of each slice."""

    def reduced(self, gradients: Mapping[str, Tensor], report: StepReport) -> None:
        """The gradients of the step are complete, not clipped yet."""

    def updated(self, tensors: Mapping[str, Tensor]) -> None:
        """The optimizer is done."""


def train_step(state: TrainState, batches: Batches, observer: Observer | None = None) -> StepReport:
    """Make the next step. Raises, before anything is changed, NonFiniteError if loss, router or gradients are not finite, and
    RunError if a kernel gave up."""
    recipe, model, store = state.recipe, state.model, state.store
    step = state.step + 1
    lr = learning_rate(recipe.optim, step, recipe.train.steps)
    state.ranks.enter("data", step)
    loaded = [batches.of(state.samples, call) for call in state.calls]
    tokens = sum(state.ranks.gather(sum(int((targets != IGNORED).sum()) for _, targets in loaded)))
    if tokens == 0:
        state.step, state.samples = step, state.samples + recipe.train.batch_size
        return StepReport(0.0, None, None, 0.0, lr, 0, ())
    num_slices = state.ranks.layout.grid.num_slices
    sums = _Sums()
    store.begin_step()
    state.ranks.enter("layers")
    if observer is not None:
        observer.begin(step)
    for call, (inputs, targets) in zip(state.calls, loaded, strict=True):
        store.begin_call(call)
        if observer is not None:
            observer.call(call, inputs, targets)
        hidden_TH, stats = model(inputs, call.grid)
        losses_T, dhidden_TH, _ = head_loss_and_gradient(
            hidden_TH.detach(), model.w_head, model.vocab_size, targets.view(-1), 1.0 / tokens
        )
        sums.losses.append(losses_T.view(len(call.slices), -1).sum(1))
        if observer is not None:
            observer.losses(sums.losses[-1])
        roots, slopes = [hidden_TH], [dhidden_TH]
        for coefficient, losses in (
            (recipe.moe.balance_loss, [layer.balance_loss_C for layer in stats]),
            (recipe.moe.z_loss, [layer.z_loss_C for layer in stats]),
        ):
            if coefficient:
                roots += losses
                slopes += [torch.full_like(loss_C, coefficient / num_slices) for loss_C in losses]
        if hidden_TH.requires_grad:
            torch.autograd.backward(roots, slopes)
        if stats:
            sums.balance.append(torch.stack([layer.balance_loss_C.detach() for layer in stats]))
            sums.z.append(torch.stack([layer.z_loss_C.detach() for layer in stats]))
            sums.counts.append(torch.stack([layer.counts_CE.sum(0) for layer in stats]))
    state.ranks.enter("gradients")
    store.finish(state.ranks.exchange)
    state.clear_frozen_gradients()
    report = _report(state, sums, tokens, lr)
    check_status(sums.losses[-1].device)
    if observer is not None:
        observer.reduced(state.gradients(), report)
    _raise_for_bad_rows([layer.router for layer in model.moe_layers])
    if not math.isfinite(report.loss) or not math.isfinite(report.grad_norm):
        what = "loss" if not math.isfinite(report.loss) else "gradient norm"
        raise NonFiniteError(f"the {what} is not finite; nothing was updated; lower optim.lr, or look at the saved batch")
    clip = recipe.optim.clip_norm
    scale = clip / report.grad_norm if clip and report.grad_norm > clip else 1.0
    state.ranks.enter("optimizer")
    state.optimizer.step(step, lr, scale)
    state.gather_weights()
    state.restore_frozen_values()
    if recipe.moe.correction_bias:
        _update_biases(state, report)
    state.step, state.samples = step, state.samples + recipe.train.batch_size
    if observer is not None:
        observer.updated(state.tensors())
    return report


def _raise_for_bad_rows(routers: list[Router]) -> None:
    """NonFiniteError where a router saw logits that are not finite; waits for the device once."""
    bad = torch.stack([router.num_bad_rows for router in routers]).tolist() if routers else []
    for router, rows in zip(routers, bad, strict=True):
        if rows:
            router.raise_for_bad_rows()


def _report(state: TrainState, sums: _Sums, tokens: int, lr: float) -> StepReport:
    # First, so that a device still has its kernels queued when the host begins to wait for the rest.
    square_sums = state.square_sums()
    mine = {
        "losses": torch.cat(sums.losses).tolist(),
        "balance": torch.cat(sums.balance, 1).flatten().tolist() if sums.balance else [],
        "z": torch.cat(sums.z, 1).flatten().tolist() if sums.z else [],
        "counts": torch.stack(sums.counts).sum(0).tolist() if sums.counts else [],
    }
    every = state.ranks.gather(mine)
    counts = [
        tuple(sum(column) for column in zip(*layers, strict=True))
        for layers in zip(*(rank["counts"] for rank in every), strict=True)
    ]
    terms = len(counts) * state.ranks.layout.grid.num_slices
    return StepReport(
        loss=_exact_sum(rank["losses"] for rank in every) / tokens,
        balance_loss=_exact_sum(rank["balance"] for rank in every) / terms if terms else None,
        z_loss=_exact_sum(rank["z"] for rank in every) / terms if terms else None,
        grad_norm=gradient_norm(square_sums),
        lr=lr,
        tokens=tokens,
        counts_LE=tuple(counts),
    )


def _exact_sum(parts: Iterable[list[float]]) -> float:
    """The exactly rounded sum of per-slice values, so that neither ranks nor calls show; NaN if any value is not finite."""
    values = [value for part in parts for value in part]
    return math.fsum(values) if all(map(math.isfinite, values)) else math.nan


def _update_biases(state: TrainState, report: StepReport) -> None:
    for layer, counts in zip(state.model.moe_layers, report.counts_LE, strict=True):
        layer.router.update_bias(torch.tensor(counts, device=state.device), state.recipe.moe.bias_update_rate)


@torch.no_grad()
def evaluate(state: TrainState, batches: Batches, num_batches: int) -> tuple[float, int, Tensor]:
    """(mean cross-entropy in nats, valid targets, those targets of this rank) over the first `num_batches` batches.

    Language-model loss only; nothing of the state changes.
    """
    losses, kept = [], []
    for index in range(num_batches):
        for call in state.calls:
            inputs, targets = batches.of(index * batches.grid.sequences, call)
            hidden_TH, _ = state.model(inputs, call.grid)
            losses_T = head_loss(hidden_TH, state.model.w_head, state.model.vocab_size, targets.view(-1))
            losses += losses_T.view(len(call.slices), -1).sum(1).tolist()
            kept.append(targets[targets != IGNORED].cpu())
    mine = torch.cat(kept)
    every = state.ranks.gather((losses, mine.numel()))
    tokens = sum(count for _, count in every)
    return _exact_sum(part for part, _ in every) / max(tokens, 1), tokens, mine
