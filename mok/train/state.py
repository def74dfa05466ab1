"""Everything of a run that changes: weights, master weights, moments, gradients and counters.

Owns how parameters are sorted into banks (decayed matrices, other dense tensors, experts), freezing by name, and the name that
each tensor has in a checkpoint and a digest. Knows nothing of files or of what surrounds a step. Read next:
`mok/train/step.py`, which changes it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable

import torch
from torch import Tensor

from mok import checkpoint
from mok.config import Recipe
from mok.errors import UsageError
from mok.gradients import Bank, GradStore
from mok.model.transformer import DTYPES, Decoder, LogicalTensor, initial_values
from mok.train.optim import MOMENT_DTYPES, AdamW, ParameterGroup, tensor_square_sums
from mok.train.ranks import Ranks

__all__ = ["TrainState"]


class TrainState:
    """A fresh model of `recipe` with its optimizer, for this rank of a launch.

    weights: gives the initial value of a tensor by its name; None for random ones.
    step: steps done. samples: sequences seen, over all ranks: the position in the data.
    """

    def __init__(
        self,
        recipe: Recipe,
        vocab_size: int,
        ranks: Ranks,
        device: torch.device,
        weights: Callable[[str], Tensor] | None = None,
    ) -> None:
        self.recipe = recipe
        self.ranks = ranks
        self.device = device
        self.step = 0
        self.samples = 0
        self.model = Decoder(recipe, vocab_size, dtype=DTYPES[recipe.train.dtype], device=device, group=ranks.group)
        self.calls = ranks.layout.calls(_slices_per_call(recipe, ranks, device))
        self._logical = list(self.model.logical_tensors())
        self._frozen = self._freeze(recipe.train.freeze)
        self._build_optimizer()
        self._places = self._find_places()
        if weights is None:
            values = initial_values(self.model, recipe.seed, recipe.model.init_std)
        else:
            values = ((tensor, weights(tensor.name)) for tensor in self._logical)
        for tensor, value in values:
            here = value.to(device)
            for kind in ("", "master:"):
                if (owner := self._owner(kind, tensor)) is not None:
                    tensor.of(owner).copy_(here)
        self._keep_frozen_values()

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the state on this rank, as views: weights by their name, then master weights and moments with
        "master:", "exp_avg:" or "exp_avg_sq:" before it. Master weights that are the weights themselves are not repeated."""
        found = {}
        for kind in ("", "master:", "exp_avg:", "exp_avg_sq:"):
            for tensor in self._logical:
                if (owner := self._owner(kind, tensor)) is not None:
                    found[kind + tensor.name] = tensor.of(owner)
        return found

    def gradients(self) -> dict[str, Tensor]:
        """The main gradients of the last step, as views, with "grad:" before the tensor's name."""
        found = ((tensor, self._owner("grad:", tensor)) for tensor in self._logical)
        return {f"grad:{tensor.name}": tensor.of(owner) for tensor, owner in found if owner is not None}

    def state_sha256(self) -> str:
        """One SHA-256 over names, dtypes, shapes and bytes of `tensors()` of all ranks."""
        merged: dict[str, str] = {}
        for checksums in self.ranks.gather(checkpoint.tensor_checksums(self.tensors())):
            merged.update(checksums)
        return checkpoint.state_sha256(merged)

    def square_sums(self) -> list[float]:
        """Sum of squares of every logical gradient of the model, each once, whichever ranks hold it."""
        parts = [
            tensor_square_sums(group.grads, group.bank, [self._stacked[id(p)] for p in group.bank.parameters])
            for group in self.optimizer.groups
        ]
        sums: list[float] = torch.cat(parts).tolist()  # the only time that the host waits for a device
        experts_from = sum(part.numel() for part in parts[: len(self._dense_banks)])
        dense, experts = sums[:experts_from], sums[experts_from:]
        # Replicas hold the same experts: the first replica speaks for all.
        members = self.ranks.gather(experts)[: self.ranks.layout.ep]
        return dense + [value for member in members for value in member]

    def clear_frozen_gradients(self) -> None:
        """Zero the gradients of tensors that are frozen inside a parameter that is not."""
        for tensor in self._frozen:
            owner = self._owner("grad:", tensor)
            if owner is not None:
                tensor.of(owner).zero_()

    def restore_frozen_values(self) -> None:
        """Undo what the optimizer did to such tensors (weight decay)."""
        for tensor, values in zip(self._frozen, self._frozen_values, strict=True):
            for kind, value in values.items():
                owner = self._owner(kind, tensor)
                assert owner is not None
                tensor.of(owner).copy_(value)

    def load(self, saved: checkpoint.Checkpoint) -> None:
        """Become the state of a checkpoint. Raises CheckpointError, with nothing changed, where it does not fit exactly."""
        tensors = self.tensors()
        everywhere = {name for names in self.ranks.gather(list(tensors)) for name in names}
        checkpoint.load_tensors(saved, tensors, elsewhere=everywhere)
        self.step = saved.step
        self.samples = int(saved.manifest["samples"])
        self._keep_frozen_values()

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
        banks = [
            Bank([p for p in dense if p.dim() > 1]),
            Bank([p for p in dense if p.dim() == 1]),
            Bank([p for p in trained if id(p) in experts]),
        ]
        self._dense_banks = [bank for bank in banks[:2] if bank.parameters]
        expert_banks = [bank for bank in banks[2:] if bank.parameters]
        tied = self.model.w_embedding if self.recipe.model.tie_embeddings else None
        self.store = GradStore(self._dense_banks, expert_banks, self.ranks.layout, self.calls, embedding=tied)
        moment_dtype = MOMENT_DTYPES[config.moment_dtype]
        groups = [
            ParameterGroup.of(bank, grads, 0.0 if bank is banks[1] else config.weight_decay, moment_dtype)
            for bank, grads in zip(self._dense_banks + expert_banks, self.store.grads, strict=True)
        ]
        self.optimizer = AdamW(groups, config)
        # An expert's matrices lie one after the other; everything else is reduced as a whole.
        self._stacked = {
            id(p): (p.shape[0] * p.shape[1] if p.dim() == 4 else p.shape[0]) if id(p) in experts else 1 for p in trained
        }

    def _find_places(self) -> dict[str, dict[int, Tensor]]:
        """kind -> id of a parameter -> the tensor of its shape that holds that kind."""
        places: dict[str, dict[int, Tensor]] = {"master:": {}, "exp_avg:": {}, "exp_avg_sq:": {}, "grad:": {}}
        for group in self.optimizer.groups:
            flats = {"exp_avg:": group.exp_avg, "exp_avg_sq:": group.exp_avg_sq, "grad:": group.grads}
            if group.master is not group.weights:
                flats["master:"] = group.master
            for kind, flat in flats.items():
                for parameter, view in zip(group.bank.parameters, group.bank.views(flat), strict=True):
                    places[kind][id(parameter)] = view
        return places

    def _owner(self, kind: str, tensor: LogicalTensor) -> Tensor | None:
        """What holds `kind` of a tensor, in the shape of its parameter; None for what it does not have."""
        return tensor.owner.detach() if kind == "" else self._places[kind].get(id(tensor.owner))

    def _keep_frozen_values(self) -> None:
        self._frozen_values = [
            {kind: tensor.of(owner).clone() for kind in ("", "master:") if (owner := self._owner(kind, tensor)) is not None}
            for tensor in self._frozen
        ]


def _slices_per_call(recipe: Recipe, ranks: Ranks, device: torch.device) -> int:
    """The recipe's choice; else all slices at once on a CPU, and as few as a call may hold on a GPU."""
    layout = ranks.layout
    if recipe.distributed.slices_per_call or device.type == "cpu":
        return recipe.distributed.slices_per_call
    return next(n for n in range(1, layout.grid.slices_per_lane + 1) if n * layout.ep % layout.grid.segment == 0)
