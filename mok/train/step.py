"""One training step: forward and backward of every call, the ordered sums, clipping, the optimizer.

Owns what a step computes and in what order its sums are made (docs/numerics.md). A step is queued as a whole before anybody
waits for the device: what went wrong makes the optimizer leave everything as it is, and the report, read afterwards, says it.
Knows nothing of files, consoles or how often anything happens. Read next: `mok/train/state.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from mok.errors import NonFiniteError, RunError
from mok.grid import Call
from mok.launch.status import check_status, explain, forget_status, status_word
from mok.model.loss import IGNORED, head_loss, head_loss_and_gradient
from mok.train.batches import Batches, send
from mok.train.optim import gradient_norm
from mok.train.schedules import learning_rate
from mok.train.state import TrainState

__all__ = [
    "Observer",
    "StepGraph",
    "StepInputs",
    "StepReport",
    "StepResults",
    "begin_step",
    "can_record",
    "evaluate",
    "finish_step",
    "queue_step",
    "train_step",
]


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


@dataclass(frozen=True)
class StepInputs:
    """What a step starts from. calls: (inputs, targets), int64 [B, S], of each call. numbers: float64, one over the valid
    targets of the step, then `AdamW.factors`. Both on the device: a replayed graph of the step reads the same tensors again."""

    step: int
    tokens: int
    lr: float
    calls: list[tuple[Tensor, Tensor]]
    numbers: Tensor


@dataclass(frozen=True)
class StepResults:
    """What every rank leaves behind on the device: float64 [R, N], one after the other the parts named in `sizes`; and the
    gradient norm, float64."""

    numbers_RN: Tensor
    sizes: dict[str, int]
    grad_norm: Tensor

    def part(self, name: str) -> Tensor:
        """[R, size of the part]."""
        return self.numbers_RN.split(list(self.sizes.values()), dim=1)[list(self.sizes).index(name)]

    def cpu(self) -> StepResults:
        """The same on the host; waits for the device."""
        return replace(self, numbers_RN=self.numbers_RN.cpu(), grad_norm=self.grad_norm.cpu())


class Observer(Protocol):
    """Sees what a step computes, in order. Whatever it is given must not be changed or kept.

    can_be_recorded: whether the calls between `begin` and `end` may happen while a CUDA graph of the step is recorded, and not
    when it is replayed.
    """

    @property
    def can_be_recorded(self) -> bool: ...

    def recorded(self) -> None:
        """The graph is recorded; replays follow, each between `begin` and `end`."""

    def begin(self, step: int) -> None: ...

    def call(self, call: Call, inputs: Tensor, targets: Tensor) -> None:
        """A call begins; [B, S] ids of this rank's slices."""

    def losses(self, losses_C: Tensor) -> None:
        """The forward of the call is over: the sum of the token losses of each slice."""

    def reduced(self, gradients: Mapping[str, Tensor]) -> None:
        """The gradients of the step are complete, not clipped yet."""

    def updated(self, tensors: Mapping[str, Tensor]) -> None:
        """The optimizer is done."""

    def end(self, report: StepReport) -> None:
        """The step was waited for, and counts."""


class StepGraph:
    """A step recorded once as a CUDA graph: `queue` does what `queue_step` does, without the host's part of it.

    All that differs from step to step is in the tensors of `StepInputs`, which keep their place. Record after a step that was
    queued the usual way: kernels are compiled by then.
    """

    def __init__(self) -> None:
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: StepInputs
        self._results: StepResults

    def queue(self, state: TrainState, inputs: StepInputs, observer: Observer | None = None) -> StepResults:
        """Compute the step, recording it the first time, always with the same observer; the results are overwritten by the
        next."""
        if self._graph is None:
            self._inputs, self._graph = inputs, torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._results = queue_step(state, inputs, observer)
            if observer is not None:
                observer.recorded()
        new = (inputs.numbers, *(values for call in inputs.calls for values in call))
        old = (self._inputs.numbers, *(values for call in self._inputs.calls for values in call))
        for place, values in zip(old, new, strict=True):
            place.copy_(values)
        self._graph.replay()
        return self._results


def can_record(state: TrainState, observer: Observer | None = None) -> bool:
    """Whether nothing in a step needs the host: one rank on a GPU, experts planned on the device."""
    if state.device.type != "cuda" or state.ranks.layout.world_size > 1:
        return False
    if observer is not None and not observer.can_be_recorded:
        return False
    slices = len(state.calls[0].slices)
    tokens = slices * state.ranks.layout.grid.slice_sequences * state.recipe.train.sequence_length
    return all(layer.plans_on_device(tokens) for layer in state.model.moe_layers)


def train_step(
    state: TrainState, batches: Batches, observer: Observer | None = None, graph: StepGraph | None = None
) -> StepReport:
    """Make the next step, from `graph` if there is one. Raises NonFiniteError if loss, router or gradients are not finite, and
    RunError if a kernel gave up; weights, moments and counters are then what they were."""
    inputs = begin_step(state, batches)
    if inputs is None:
        state.step, state.samples = state.step + 1, state.samples + state.recipe.train.batch_size
        return StepReport(0.0, None, None, 0.0, learning_rate(state.recipe.optim, state.step, state.recipe.train.steps), 0, ())
    if observer is not None:
        observer.begin(inputs.step)
    queue = queue_step if graph is None else graph.queue
    report = finish_step(state, inputs, queue(state, inputs, observer))
    if observer is not None:
        observer.end(report)
    return report


def begin_step(state: TrainState, batches: Batches) -> StepInputs | None:
    """Load the next step's batch and send it to the device; None if no target of the step is valid."""
    step = state.step + 1
    state.ranks.enter("data", step)
    loaded = [batches.of(state.samples, call) for call in state.calls]
    tokens = sum(state.ranks.gather(sum(int((targets != IGNORED).sum()) for _, targets in loaded)))
    if tokens == 0:
        return None
    lr = learning_rate(state.recipe.optim, step, state.recipe.train.steps)
    numbers = torch.tensor([1.0 / tokens, *state.optimizer.factors(step, lr)], dtype=torch.float64)
    calls = [(send(inputs, state.device), send(targets, state.device)) for inputs, targets in loaded]
    return StepInputs(step, tokens, lr, calls, send(numbers, state.device))


def queue_step(state: TrainState, inputs: StepInputs, observer: Observer | None = None) -> StepResults:
    """Compute the step. With backends that plan on the device nothing here waits for a GPU: a CUDA graph can record it."""
    recipe, model, store = state.recipe, state.model, state.store
    num_slices = state.ranks.layout.grid.num_slices
    left: dict[str, list[Tensor]] = {"losses": [], "balance": [], "z": [], "counts": []}
    store.begin_step()
    state.ranks.enter("layers")
    model.weights_changed()  # an observer may have planted a fault in them
    for call, (ids, targets) in zip(state.calls, inputs.calls, strict=True):
        store.begin_call(call)
        if observer is not None:
            observer.call(call, ids, targets)
        hidden_TH, stats = model(ids, call.grid)
        losses_T, dhidden_TH, _ = head_loss_and_gradient(
            hidden_TH.detach(), model.w_head, model.vocab_size, targets.view(-1), inputs.numbers[0], len(call.slices)
        )
        left["losses"].append(losses_T.view(len(call.slices), -1).sum(1))
        if observer is not None:
            observer.losses(left["losses"][-1])
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
            left["balance"].append(torch.stack([layer.balance_loss_C.detach() for layer in stats]))
            left["z"].append(torch.stack([layer.z_loss_C.detach() for layer in stats]))
            left["counts"].append(torch.stack([layer.counts_CE.sum(0) for layer in stats]))
    state.ranks.enter("gradients")
    store.finish(state.ranks.exchange)
    state.clear_frozen_gradients()
    results = _gather_results(state, left)
    if observer is not None:
        observer.reduced(state.gradients())
    state.ranks.enter("optimizer")
    fine = results.grad_norm.isfinite() & results.part("losses").sum().isfinite() & ~results.part("problems").any()
    clip = recipe.optim.clip_norm
    scale = torch.where(results.grad_norm > clip, clip / results.grad_norm, 1.0) if clip else torch.ones_like(results.grad_norm)
    state.optimizer.step(inputs.numbers[1:], torch.where(fine, scale, torch.nan))
    state.gather_weights()
    state.restore_frozen_values()
    if recipe.moe.correction_bias:
        rate = torch.where(fine, recipe.moe.bias_update_rate, 0.0)
        counts_LE = results.part("counts").sum(0).long().view(len(model.moe_layers), recipe.moe.num_experts)
        for layer, counts_E in zip(model.moe_layers, counts_LE, strict=True):
            layer.router.update_bias(counts_E, rate)
    if observer is not None:
        observer.updated(state.tensors())
    return results


def finish_step(state: TrainState, inputs: StepInputs, results: StepResults) -> StepReport:
    """Wait for the step, count it and return its report; or raise what went wrong, see `train_step`."""
    state.model.weights_changed()  # here and not where they are queued: a replayed graph of the step runs no Python
    results = results.cpu()
    report = _report(state, inputs, results)
    layers = state.model.moe_layers
    for rank, (bits, bad_rows) in enumerate(results.part("problems").long().unflatten(1, (2, len(layers))).tolist()):
        for i, router in enumerate(layer.router for layer in layers):
            if bits[i]:
                forget_status(state.device)
                raise RunError(f"layer {router.layer} on rank {rank}: {explain(bits[i])}; nothing was updated")
            if bad_rows[i]:
                router.num_bad_rows.zero_()
                raise router.not_finite(str(bad_rows[i]), rank)
    if not math.isfinite(report.loss) or not math.isfinite(report.grad_norm):
        what = "loss" if not math.isfinite(report.loss) else "gradient norm"
        raise NonFiniteError(f"the {what} is not finite; nothing was updated; lower optim.lr, or look at the saved batch")
    state.step, state.samples = inputs.step, state.samples + state.recipe.train.batch_size
    return report


def _gather_results(state: TrainState, left: dict[str, list[Tensor]]) -> StepResults:
    """Show every rank what the others found out, and add up the norm. problems: the status words of the MoE layers, then how
    many rows of router logits were not finite."""
    routers = [layer.router for layer in state.model.moe_layers]
    nothing = torch.zeros(0, dtype=torch.float64, device=state.device)
    dense, experts = state.square_sums()
    parts = {
        "losses": torch.cat(left["losses"]),
        "balance": torch.cat(left["balance"], 1) if routers else nothing,
        "z": torch.cat(left["z"], 1) if routers else nothing,
        "counts": torch.stack(left["counts"]).sum(0) if routers else nothing,
        "dense": dense,
        "experts": experts,
        "problems": torch.cat(
            [
                nothing,
                *(status_word(state.device, router.layer) for router in routers),
                *(router.num_bad_rows.view(1) for router in routers),
            ]
        ),
    }
    numbers_RN = state.ranks.gather_numbers(torch.cat([part.reshape(-1).double() for part in parts.values()]))
    results = StepResults(numbers_RN, {name: part.numel() for name, part in parts.items()}, nothing)
    # All ranks have the dense tensors, and replicas the same experts: the first of them speaks for all.
    squares = torch.cat([results.part("dense")[0], results.part("experts")[: state.ranks.layout.ep].reshape(-1)])
    return replace(results, grad_norm=gradient_norm(squares))


def _report(state: TrainState, inputs: StepInputs, results: StepResults) -> StepReport:
    losses, balance, z = (results.part(name).flatten().tolist() for name in ("losses", "balance", "z"))
    counts_LE = results.part("counts").sum(0).view(len(state.model.moe_layers), state.recipe.moe.num_experts)
    terms = len(counts_LE) * state.ranks.layout.grid.num_slices
    return StepReport(
        loss=_exact_sum(losses) / inputs.tokens,
        balance_loss=_exact_sum(balance) / terms if terms else None,
        z_loss=_exact_sum(z) / terms if terms else None,
        grad_norm=float(results.grad_norm),
        lr=inputs.lr,
        tokens=inputs.tokens,
        counts_LE=tuple(tuple(map(int, counts)) for counts in counts_LE.tolist()),
    )


def _exact_sum(values: list[float]) -> float:
    """The exactly rounded sum of per-slice values, so that neither ranks nor calls show; NaN if any value is not finite."""
    return math.fsum(values) if all(map(math.isfinite, values)) else math.nan


@torch.no_grad()
def evaluate(state: TrainState, batches: Batches, num_batches: int) -> tuple[float, int, Tensor]:
    """(mean cross-entropy in nats, valid targets, those targets of this rank) over the first `num_batches` batches.

    Language-model loss only; nothing of the state changes. Raises what `train_step` raises.
    """
    losses, kept = [], []
    for index in range(num_batches):
        for call in state.calls:
            inputs, targets = batches.of(index * batches.grid.sequences, call)
            hidden_TH, _ = state.model(send(inputs, state.device), call.grid)
            there = send(targets, state.device).view(-1)
            losses_T = head_loss(hidden_TH, state.model.w_head, state.model.vocab_size, there, len(call.slices))
            losses += losses_T.view(len(call.slices), -1).sum(1).tolist()
            kept.append(targets[targets != IGNORED])
    check_status(state.device)
    for layer in state.model.moe_layers:
        layer.router.raise_for_bad_rows()
    mine = torch.cat(kept)
    every = state.ranks.gather((losses, mine.numel()))
    tokens = sum(count for _, count in every)
    return _exact_sum([loss for part, _ in every for loss in part]) / max(tokens, 1), tokens, mine
