"""Weights of a Hugging Face checkpoint folder under mok's names, each looked up, checked and read on its own.

Owns the reading side of `model.init = "hf:DIR"`: that the folder is of the recipe's model, that every tensor is accounted for
before training starts, and the layouts in which experts are stored (one tensor per expert, or all experts fused). Knows nothing
of modules: `HfWeights.read` hands out plain tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mok.config import Recipe
from mok.errors import CheckpointError, UsageError
from mok.hf_config import family_of_config, recipe_differences
from mok.hf_layout import tensor_shapes
from mok.safetensors_files import DTYPES, SafetensorsFolder, listed, load_json

__all__ = ["HfWeights", "config_folder"]


def config_folder(init: str) -> Path | None:
    """The folder that `model.init` names, or None where weights start at random. Raises UsageError for the home of nobody."""
    try:
        return Path(init.removeprefix("hf:")).expanduser() if init.startswith("hf:") else None
    except RuntimeError as error:
        raise UsageError(f'model.init = "{init}": {error}; write the path without ~') from None


@dataclass(frozen=True)
class _Place:
    """Where a tensor of mok lies: a stored tensor, and which part of it."""

    stored: str
    part: tuple[Any, ...] | None = None


class HfWeights:
    """The weights of a Hugging Face folder for one recipe, checked when made.

    vocab_size: rows of the stored embedding. notices: what a user should know was left out.
    Raises UsageError where config.json says another model than the recipe, CheckpointError that lists every missing, left over
    or differing tensor, every damaged file and every unsafe name.
    """

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self._files = SafetensorsFolder(folder)
        config_file = folder / "config.json"
        if not config_file.is_file():
            raise CheckpointError(f"{config_file}: missing; it says which model the weights are of")
        config = load_json(config_file)
        self._family = family_of_config(config)
        if differences := recipe_differences(recipe, config):
            raise UsageError(f"{config_file}: the recipe describes another model; add {' '.join(differences)}")
        self.vocab_size: int = config["vocab_size"]
        self._num_experts = recipe.moe.num_experts
        self.notices: list[str] = []
        self._places: dict[str, _Place] = {}
        problems = list(self._find(tensor_shapes(recipe, self.vocab_size)))
        problems += self._left_over(recipe, config)
        if problems:
            raise CheckpointError(listed(f"{folder}: does not fit this recipe", problems))

    def read(self, name: str) -> Tensor:
        """The tensor that mok calls `name`, in the dtype it is stored in."""
        place = self._places[name]
        return self._files.read(place.stored, place.part)

    def _find(self, shapes: dict[str, tuple[int, ...]]) -> Iterator[str]:
        for name, shape in shapes.items():
            place = self._place(name, shape)
            if place is None:
                yield f"missing: {self._family.tensor_name(name)} {list(shape)}"
                continue
            self._places[name] = place
            stored = self._files.shapes[place.stored]
            wanted = shape if place.part is None else self._fused_shape(name, shape)
            if stored != wanted:
                yield f"{place.stored}: {list(stored)} in the file, {list(wanted)} in the recipe"
            elif self._files.dtypes[place.stored] not in DTYPES:
                yield f"{place.stored}: {self._files.dtypes[place.stored]}, only {', '.join(DTYPES)} can be read"

    def _place(self, name: str, shape: tuple[int, ...]) -> _Place | None:
        for stored in (self._family.tensor_name(name), name):
            if stored in self._files.shapes:
                return _Place(stored)
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if match is None:
            return None
        experts, expert, job = match[1], int(match[2]), match[3]
        stored = f"{experts}.down_proj" if job == "down" else f"{experts}.gate_up_proj"
        if stored not in self._files.shapes:
            return None
        first = shape[0] if job == "up" else 0
        rows = slice(None) if job == "down" else slice(first, first + shape[0])
        return _Place(stored, (expert, rows))

    def _fused_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the tensor that holds all experts' parts of `shape`."""
        rows = shape[0] if ".down_proj." in name else 2 * shape[0]
        return (self._num_experts, rows, *shape[1:])

    def _left_over(self, recipe: Recipe, config: dict[str, Any]) -> list[str]:
        left = self._files.shapes.keys() - {place.stored for place in self._places.values()}
        if recipe.model.tie_embeddings and "lm_head.weight" in left:
            left.discard("lm_head.weight")
            if not torch.equal(self._files.read("lm_head.weight"), self._files.read("model.embed_tokens.weight")):
                return ["lm_head.weight: differs from model.embed_tokens.weight although config.json ties them"]
        num_predictors = config.get("num_nextn_predict_layers") or 0
        if not isinstance(num_predictors, int):
            raise UsageError(f"config.json: num_nextn_predict_layers is {num_predictors!r}, not a number; copy it again")
        predictors = range(recipe.model.num_layers, recipe.model.num_layers + num_predictors)
        ahead = {
            name for name in left if (found := re.match(r"model\.layers\.(\d{1,9})\.", name)) and int(found[1]) in predictors
        }
        if ahead:
            self.notices.append(f"{len(ahead)} tensors of multi-token prediction layers left out")
        frequencies = {name for name in left if name.endswith(".rotary_emb.inv_freq")}  # computed, in old files stored too
        return [f"left over: {name} {list(self._files.shapes[name])}" for name in sorted(left - ahead - frequencies)]
