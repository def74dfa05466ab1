"""A plain training loop on transformers' model of the recipe: SDPA, cross-entropy of torch, clipping, AdamW.

What somebody would write who has a Hugging Face model and text: eager experts on a CPU, grouped_mm and fused AdamW on a GPU,
the moments in the dtype of the weights. The weights are those that mok starts from, by name, so that losses and gradients can
be compared before anything is timed.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mok.config import Recipe
from mok.errors import UsageError
from mok.hf_layout import choose_family
from mok.model.transformer import DTYPES, Decoder, initial_values

__all__ = ["HfContestant"]


class HfContestant:
    """See `mok.bench.train.Contestant`. Blocks are computed again in the backward where the recipe says so."""

    def __init__(self, recipe: Recipe, vocab_size: int, device: torch.device) -> None:
        try:
            import transformers
        except ImportError:
            raise UsageError("--against hf: transformers is not installed; pip install transformers") from None
        family = choose_family(recipe)
        config: Any = transformers.AutoConfig.for_model(**family.config(recipe, vocab_size, 0, recipe.train.dtype))
        self._recipe = recipe
        with torch.device(device):
            self._model: Any = transformers.AutoModelForCausalLM.from_config(
                config,
                dtype=DTYPES[recipe.train.dtype],
                attn_implementation="sdpa",
                experts_implementation="grouped_mm" if device.type == "cuda" else "eager",
            )
        self._model.train()
        if recipe.train.recompute == "blocks":
            self._model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        _load(self._model, recipe, vocab_size)
        optim = recipe.optim
        parameters = list(self._model.parameters())
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.dim() > 1], "weight_decay": optim.weight_decay},
                {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
            ],
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            fused=device.type == "cuda",
        )

    def step(self, inputs_BS: Tensor, targets_BS: Tensor) -> tuple[float, float]:
        logits = self._model(input_ids=inputs_BS, use_cache=False).logits
        loss = F.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets_BS.reshape(-1))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._recipe.optim.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.item(), norm.item()

    def tensors(self) -> dict[str, Tensor]:
        return dict(self._model.state_dict())


@torch.no_grad()
def _load(model: Any, recipe: Recipe, vocab_size: int) -> None:
    """Give `model` mok's initial weights. In memory transformers stacks the experts of a layer, gate rows before up rows."""
    places: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    width = recipe.moe.intermediate_size
    source = Decoder(recipe, vocab_size, dtype=torch.float32, device=torch.device("meta"))
    for tensor, value in initial_values(source, recipe.seed, recipe.model.init_std):
        expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", tensor.name)
        if expert is None:
            places[tensor.name].copy_(value)
            continue
        layer, index, job = expert[1], int(expert[2]), expert[3]
        if job == "down":
            places[f"{layer}.down_proj"][index].copy_(value)
        else:
            first = width if job == "up" else 0
            places[f"{layer}.gate_up_proj"][index, first : first + width].copy_(value)
