"""A plain training loop on transformers' Qwen3-MoE: eager experts, SDPA, cross-entropy of torch, clipping, AdamW.

What somebody would write who has a Hugging Face model and text. The weights are those that mok starts from, by name, so that
losses and gradients can be compared before anything is timed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mok.config import Recipe
from mok.errors import UsageError
from mok.model.transformer import DTYPES, Decoder, initial_values

__all__ = ["HfContestant"]


class HfContestant:
    """See `mok.bench.train.Contestant`."""

    def __init__(self, recipe: Recipe, vocab_size: int, device: torch.device) -> None:
        try:
            import transformers
        except ImportError:
            raise UsageError("--against hf: transformers is not installed; pip install transformers") from None
        model, moe, dtype = recipe.model, recipe.moe, DTYPES[recipe.train.dtype]
        config: Any = transformers.Qwen3MoeConfig(
            vocab_size=vocab_size,
            hidden_size=model.hidden_size,
            intermediate_size=moe.intermediate_size,
            moe_intermediate_size=moe.intermediate_size,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_heads,
            num_key_value_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            num_experts=moe.num_experts,
            num_experts_per_tok=moe.top_k,
            norm_topk_prob=moe.normalize_weights,
            rms_norm_eps=model.norm_eps,
            max_position_embeddings=recipe.train.sequence_length,
            tie_word_embeddings=model.tie_embeddings,
            attn_implementation="sdpa",
            experts_implementation="eager",
        )
        self._config, self._recipe = config, recipe
        self._model: Any = transformers.Qwen3MoeForCausalLM(config).to(device, dtype)
        self._model.load_state_dict(_fused(recipe, vocab_size), strict=True)
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


def _fused(recipe: Recipe, vocab_size: int) -> dict[str, Tensor]:
    """mok's initial weights under transformers' names in memory, where the experts of a layer are stacked."""
    values = {tensor.name: value for tensor, value in _initial(recipe, vocab_size)}
    for layer in range(recipe.model.num_layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([values.pop(f"{prefix}{expert}.{job}_proj.weight") for expert in range(recipe.moe.num_experts)])
            for job in ("gate", "up", "down")
        )
        values[prefix + "gate_up_proj"], values[prefix + "down_proj"] = torch.cat([gate, up], 1), down
    return values


def _initial(recipe: Recipe, vocab_size: int) -> Any:
    return initial_values(Decoder(recipe, vocab_size, dtype=torch.float32), recipe.seed, recipe.model.init_std)
