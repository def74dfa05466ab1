"""Everything of a run that changes: weights, master weights, moments, gradients and counters.

Owns how parameters are sorted into banks (decayed matrices, other dense tensors, experts), freezing by name, and the name that
each tensor has in a checkpoint and a digest. Weights are whole on every rank that computes with them; master weights, moments
and, after a step's sums, gradients are kept in shards. Knows nothing of files or of what surrounds a step. Read next:
`mok/train/step.py`, which changes it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable

import torch
from torch import Tensor

from mok import checkpoint
from mok.ahead import ahead
from mok.config import Recipe
from mok.errors import UsageError
from mok.gradients import Bank, GradStore
from mok.model.transformer import DTYPES, Decoder, LogicalTensor, initial_values
from mok.train.optim import MOMENT_DTYPES, AdamW, ParameterGroup, tensor_square_sums
from mok.train.places import Place, spoken_for
from mok.train.ranks import Ranks

__all__ = ["TrainState"]


class TrainState:
    """A fresh model of `recipe` with its optimizer, for this rank of a launch.

    weights: gives the initial value of a tensor by its name, from any thread; None for random ones. fill: False leaves every
    value to `load`.
    step: steps done. samples: sequences seen, over all ranks: the position in the data. places: where each of `tensors()` and
    `gradients()` is kept.
    """

    def __init__(
        self,
        recipe: Recipe,
        vocab_size: int,
        ranks: Ranks,
        device: torch.device,
        weights: Callable[[str], Tensor] | None = None,
        *,
        fill: bool = True,
    ) -> None:
        self.recipe = recipe
        self.ranks = ranks
        self.device = device
        self.step = 0
        self.samples = 0
        self.model = Decoder(recipe, vocab_size, dtype=DTYPES[recipe.train.dtype], device=device, group=ranks.group)
        self.model.cache_quantized_weights()
        self.calls = ranks.layout.calls(_slices_per_call(recipe, ranks, device))
        self._logical = list(self.model.logical_tensors())
        self._frozen = self._freeze(recipe.train.freeze)
        self._build_optimizer()
        self.places = self._find_places()
        if fill:
            self._fill(weights)
        self._keep_frozen_values()
        self.model.weights_changed()

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the state that this rank speaks for: weights by their name, then master weights and moments with
        "master:", "exp_avg:" or "exp_avg_sq:" before it. Master weights that are the weights themselves are not repeated.

        Weights are whole on every rank that computes with them; anything else has one speaker. All ranks must call this.
        """
        return spoken_for(self._places_of(gradients=False), self.ranks.exchange)

    def gradients(self) -> dict[str, Tensor]:
        """The main gradients of the last step, with "grad:" before the tensor's name; likewise."""
        return spoken_for(self._places_of(gradients=True), self.ranks.exchange)

    def state_sha256(self) -> str:
        """One SHA-256 over names, dtypes, shapes and bytes of `tensors()` of all ranks."""
        return checkpoint.state_sha256(checkpoint.shared_checksums(self.tensors(), self.ranks.layout.rank, self.ranks.gather))

    def square_sums(self) -> tuple[Tensor, Tensor]:
        """Sum of squares of every logical gradient, float64: of dense tensors, the same on all ranks, and of this rank's
        experts, the same on all replicas."""
        nothing = torch.zeros(0, dtype=torch.float64, device=self.device)
        parts: dict[bool, list[Tensor]] = {False: [nothing], True: [nothing]}
        for group in self.optimizer.groups:
            matrices = [self._stacked[id(parameter)] for parameter in group.bank.parameters]
            parts[group.bank.experts].append(tensor_square_sums(group, matrices, self.ranks.exchange))
        return torch.cat(parts[False]), torch.cat(parts[True])

    def gather_weights(self) -> None:
        """Give every rank the weights that others updated."""
        if self.ranks.exchange is not None:
            for group in self.optimizer.groups:
                self.ranks.exchange.gather_shards(group.weights, group.bank.experts)

    def clear_frozen_gradients(self) -> None:
        """Zero the gradients of tensors that are frozen inside a parameter that is not."""
        for tensor in self._frozen:
            if (place := self.places.get(f"grad:{tensor.name}")) is not None:
                place.kept.zero_()

    def restore_frozen_values(self) -> None:
        """Undo what the optimizer did to such tensors (weight decay)."""
        for name, values in self._frozen_values.items():
            self.places[name].kept.copy_(values)

    def load(self, saved: checkpoint.Checkpoint) -> None:
        """Become the state of a checkpoint, on all ranks. Raises CheckpointError where it does not fit exactly, with nothing
        changed, or is damaged: this state is then of no use any more."""
        from mok import dcp

        dcp.load(saved, self._places_of(gradients=False), self.ranks.collective)
        self.step = saved.step
        self.samples = saved.fact("samples", int)
        self._keep_frozen_values()
        self.model.weights_changed()

    def _fill(self, weights: Callable[[str], Tensor] | None) -> None:
        if weights is None:
            values = initial_values(self.model, self.recipe.seed, self.recipe.model.init_std)
        else:
            names = [tensor.name for tensor in self._logical]
            values = zip(self._logical, ahead(weights, names, torch.get_num_threads()), strict=True)
        for tensor, value in values:
            here = value.to(self.device)
            for kind in ("", "master:"):
                if (place := self.places.get(kind + tensor.name)) is not None:
                    place.put(here)

    def _freeze(self, patterns: tuple[str, ...]) -> list[LogicalTensor]:
        """Switch off the gradients of parameters all of whose tensors are frozen; returns the other frozen tensors."""
        names = [tensor.name for tensor in self._logical]
        for pattern in patterns:
            if not fnmatch.filter(names, pattern):
                raise UsageError(
                    f"train.freeze: {pattern!r} matches no tensor; names look like {names[1]!r}, patterns like *norm*"
                )
        frozen = [tensor for tensor in self._logical if any(fnmatch.fnmatchcase(tensor.name, p) for p in patterns)]
        trained = {id(tensor.owner) for tensor in self._logical} - {id(tensor.owner) for tensor in frozen}
        partly = []
        for tensor in frozen:
            parts = [other for other in self._logical if other.owner is tensor.owner]
            if all(part in frozen for part in parts):
                tensor.owner.requires_grad_(False)
            else:
                partly.append(tensor)
        if not trained and not partly:
            raise UsageError("train.freeze: nothing is left to train; freeze fewer tensors")
        return partly

    def _build_optimizer(self) -> None:
        config = self.recipe.optim
        experts = {id(weight) for layer in self.model.moe_layers for weight in (layer.w_gate_up, layer.w_down)}
        trained = [p for p in self.model.parameters() if p.requires_grad]
        dense = [p for p in trained if id(p) not in experts]
        # A matrix that two uses share has a bank of its own: see GradStore.
        tied = [p for p in dense if self.recipe.model.tie_embeddings and p is self.model.w_embedding]
        layout = self.ranks.layout
        decayed = [
            Bank([p for p in dense if p.dim() > 1 and id(p) not in map(id, tied)], layout),
            Bank(tied, layout),
            Bank([p for p in trained if id(p) in experts], layout, experts=True),
        ]
        other = Bank([p for p in dense if p.dim() == 1], layout)
        banks = [bank for bank in (*decayed, other) if bank.parameters]
        self.store = GradStore(banks, layout, self.calls, embedding=tied[0] if tied else None)
        moment_dtype = MOMENT_DTYPES[config.moment_dtype]
        groups = [
            ParameterGroup.of(bank, grads, 0.0 if bank is other else config.weight_decay, moment_dtype, self.ranks.sharded)
            for bank, grads in zip(banks, self.store.grads, strict=True)
        ]
        self.optimizer = AdamW(groups, config)
        # An expert's matrices lie one after the other; everything else is reduced as a whole.
        self._stacked = {
            id(p): (p.shape[0] * p.shape[1] if p.dim() == 4 else p.shape[0]) if id(p) in experts else 1 for p in trained
        }

    def _find_places(self) -> dict[str, Place]:
        """Name, with its kind before it -> where the tensor is kept. Kind by kind, in the order of the model."""
        groups = {id(parameter): group for group in self.optimizer.groups for parameter in group.bank.parameters}
        found = {}
        for tensor in self._logical:
            view = tensor.of(tensor.owner.detach())
            found[tensor.name] = Place(view.shape, view.view(-1))
        for kind in ("master:", "exp_avg:", "exp_avg_sq:", "grad:"):
            for tensor in self._logical:
                group = groups.get(id(tensor.owner))
                if group is None or (kind == "master:" and not group.has_master):
                    continue
                flat = {"master:": group.master, "exp_avg:": group.exp_avg, "exp_avg_sq:": group.exp_avg_sq}.get(
                    kind, group.grads
                )
                view = tensor.of(tensor.owner.detach())
                start = int(view.storage_offset() - group.weights.storage_offset())
                found[kind + tensor.name] = Place.in_flat(flat, start, view.shape)
        return found

    def _places_of(self, *, gradients: bool) -> dict[str, Place]:
        return {name: place for name, place in self.places.items() if name.startswith("grad:") == gradients}

    def _keep_frozen_values(self) -> None:
        names = [kind + tensor.name for tensor in self._frozen for kind in ("", "master:")]
        self._frozen_values = {name: self.places[name].kept.clone() for name in names if name in self.places}


def _slices_per_call(recipe: Recipe, ranks: Ranks, device: torch.device) -> int:
    """The recipe's choice; else all slices at once on a CPU, and as few as a call may hold on a GPU."""
    if recipe.distributed.slices_per_call or device.type == "cpu":
        return recipe.distributed.slices_per_call
    return ranks.layout.fewest_slices_per_call
