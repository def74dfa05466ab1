"""The decoder: embedding, blocks of attention and experts (or a dense layer), a final norm and the output head.

Owns the order of operations of a forward pass, which is that of the Hugging Face families it can express (Qwen3-MoE, OLMoE,
Mixtral, GLM-4-MoE), and the one name that each logical tensor has in checkpoints, digests and exports. Initial weights are a
function of (seed, name). Knows nothing of optimizers, data or ranks. Read next: `mok/model/attention.py`, `mok/model/moe.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mok.ahead import ahead
from mok.config import Recipe
from mok.gradients import GEMM_MULTIPLE
from mok.grid import CallGrid
from mok.model.attention import Attention, Rotary
from mok.model.dense import DenseMLP
from mok.model.linear import embedding, matmul_rows
from mok.model.moe import MoE, MoEStats
from mok.model.norm import RMSNorm
from mok.quantization import FORMATS
from mok.transport.interface import Transport

__all__ = ["DTYPES", "Block", "Decoder", "Group", "LogicalTensor", "initial_values", "moe_of"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, **dict.fromkeys(FORMATS, torch.bfloat16)}
"""Of weights and activations, by `train.dtype`."""


@dataclass(frozen=True)
class LogicalTensor:
    """One tensor as the outside knows it: a part of a parameter or buffer.

    name: its Hugging Face per-expert name. owner: the parameter or buffer that holds it. index: which part of it; applied to
    anything of the owner's shape (a gradient, a moment) it gives the same part there.
    """

    name: str
    owner: Tensor
    index: tuple[Any, ...] = ()

    def of(self, tensor: Tensor) -> Tensor:
        """This tensor's part, a view, of something that has the owner's shape."""
        return tensor[self.index]


@dataclass(frozen=True)
class Group:
    """The expert-parallel group this rank is a member of: its size, this rank's place in it, how rows travel, and why so where
    that had to be found out."""

    ranks: int = 1
    rank: int = 0
    transport: Transport | None = None
    transport_reason: str = ""


class Block(nn.Module):
    """x + attention(norm(x)), then that + experts or dense layer(norm of it)."""

    def __init__(self, recipe: Recipe, layer: int, group: Group, dtype: torch.dtype, device: torch.device | None) -> None:
        super().__init__()
        model = recipe.model
        self.input_norm = RMSNorm(model.hidden_size, model.norm_eps, dtype=dtype, device=device)
        self.attention = Attention(model, dtype=dtype, device=device)
        self.post_attention_norm = RMSNorm(model.hidden_size, model.norm_eps, dtype=dtype, device=device)
        self.mlp: MoE | DenseMLP
        if layer < model.num_dense_layers:
            self.mlp = DenseMLP(model.hidden_size, model.dense_intermediate_size, dtype=dtype, device=device)
        else:
            self.mlp = moe_of(recipe, layer, group, dtype, device)

    def forward(self, x_TH: Tensor, batch: int, rotary: Rotary, grid: CallGrid) -> tuple[Tensor, MoEStats | None]:
        x_TH, normed_TH = self.input_norm(x_TH)
        slices = len(grid.local_slices)
        x_TH, normed_TH = self.post_attention_norm(x_TH, self.attention(normed_TH, batch, rotary, slices))
        if isinstance(self.mlp, DenseMLP):
            return self.mlp(normed_TH, slices).add_(x_TH), None
        y_TH, stats = self.mlp.call(normed_TH, grid)
        return y_TH.add_(x_TH), stats


def moe_of(recipe: Recipe, layer: int, group: Group, dtype: torch.dtype, device: torch.device | None) -> MoE:
    """The MoE layer that `recipe` describes, as this member of `group` holds it; `layer` is the index that errors name."""
    moe = recipe.moe
    return MoE(
        recipe.model.hidden_size,
        moe.intermediate_size,
        moe.num_experts,
        moe.top_k,
        num_shared_experts=moe.num_shared_experts,
        shared_intermediate_size=moe.shared_intermediate_size,
        shared_gate=moe.shared_gate,
        clamp=moe.clamp,
        score=moe.score,
        score_order=moe.score_order,
        normalize_weights=moe.normalize_weights,
        scaling_factor=moe.scaling_factor,
        correction_bias=moe.correction_bias,
        num_groups=moe.num_groups,
        top_groups=moe.top_groups,
        force_routing=moe.force_routing,
        backend=moe.backend,
        recompute=moe.recompute,
        quantization=recipe.quantization,
        transport=group.transport,
        ranks=group.ranks,
        layer=layer,
        device=device,
        dtype=dtype,
        initialize=False,
    )


class Decoder(nn.Module):
    """The language model of `recipe` for a vocabulary of `vocab_size` ids.

    The embedding and the head have their rows rounded up to a multiple of 16 (zeros that are never read nor written by
    training); `named_tensors` shows the true rows. With tied embeddings `w_head` is `w_embedding`. Recomputing blocks in the
    backward changes no bit.
    """

    def __init__(
        self,
        recipe: Recipe,
        vocab_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device | None = None,
        group: Group | None = None,
    ) -> None:
        super().__init__()
        model = recipe.model
        self.config, self.vocab_size = model, vocab_size
        self.recompute = recipe.train.recompute == "blocks"
        self.group = group or Group()
        rows = -(-vocab_size // GEMM_MULTIPLE) * GEMM_MULTIPLE
        self.w_embedding = nn.Parameter(torch.zeros(rows, model.hidden_size, dtype=dtype, device=device))
        self.blocks = nn.ModuleList(Block(recipe, layer, self.group, dtype, device) for layer in range(model.num_layers))
        self.norm = RMSNorm(model.hidden_size, model.norm_eps, dtype=dtype, device=device)
        if model.tie_embeddings:
            self.w_head = self.w_embedding
        else:
            self.w_head = nn.Parameter(torch.zeros(rows, model.hidden_size, dtype=dtype, device=device))
        self._rotary: tuple[int, Rotary] | None = None

    def forward(self, ids_BS: Tensor, grid: CallGrid | None = None) -> tuple[Tensor, list[MoEStats]]:
        """Final hidden states [B * S, H] of B sequences of S ids, and what each MoE layer tells."""
        batch, length = ids_BS.shape
        grid = grid or CallGrid()
        rotary = self._rotary_of(length)
        x_TH = embedding(ids_BS.reshape(-1), self.w_embedding)
        stats = []
        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                x_TH, layer_stats = checkpoint(
                    block, x_TH, batch, rotary, grid, use_reentrant=False, preserve_rng_state=False, determinism_check="none"
                )
            else:
                x_TH, layer_stats = block(x_TH, batch, rotary, grid)
            if layer_stats is not None:
                stats.append(layer_stats)
        return self.norm(x_TH)[1], stats

    @torch.no_grad()
    def logits(self, ids_BS: Tensor, grid: CallGrid | None = None) -> Tensor:
        """Logits [B, S, vocab_size] in the model's dtype. Nothing is kept for a backward."""
        hidden_TH, _ = self(ids_BS, grid)
        logits_TV = matmul_rows(hidden_TH, self.w_head.t())
        return logits_TV[:, : self.vocab_size].view(*ids_BS.shape, self.vocab_size)

    def logical_tensors(self) -> Iterator[LogicalTensor]:
        """Every tensor of the model, once, under its Hugging Face per-expert name, in the order of the forward pass."""
        vocabulary = (slice(0, self.vocab_size),)
        yield LogicalTensor("model.embed_tokens.weight", self.w_embedding, vocabulary)
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            yield from _block_tensors(f"model.layers.{layer}.", block, self.group.rank)
        yield LogicalTensor("model.norm.weight", self.norm.weight)
        if self.w_head is not self.w_embedding:
            yield LogicalTensor("lm_head.weight", self.w_head, vocabulary)

    @property
    def moe_layers(self) -> list[MoE]:
        """The MoE layers, in order."""
        return [block.mlp for block in self.blocks if isinstance(block.mlp, MoE)]

    def cache_quantized_weights(self) -> None:
        """Let the MoE layers keep rounded weights from call to call; whoever changes weights then calls `weights_changed`."""
        for layer in self.moe_layers:
            layer.cache_quantized_weights()

    def weights_changed(self) -> None:
        """Make the MoE layers forget the rounded weights they keep."""
        for layer in self.moe_layers:
            layer.weights_changed()

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, view) of every logical tensor."""
        for tensor in self.logical_tensors():
            yield tensor.name, tensor.of(tensor.owner.detach())

    def _rotary_of(self, length: int) -> Rotary:
        weight = self.w_embedding
        if self._rotary is None or self._rotary[0] != length:
            self._rotary = length, Rotary.of(length, self.config, weight.device, weight.dtype)
        return self._rotary[1]


def _block_tensors(prefix: str, block: Block, rank: int) -> Iterator[LogicalTensor]:
    yield LogicalTensor(prefix + "input_layernorm.weight", block.input_norm.weight)
    attention, config = block.attention, block.attention.config
    ends = (config.num_heads, config.num_heads + config.num_kv_heads, config.num_heads + 2 * config.num_kv_heads)
    start = 0
    for letter, end in zip("qkv", ends, strict=True):
        rows = (slice(start * config.head_dim, end * config.head_dim),)
        yield LogicalTensor(f"{prefix}self_attn.{letter}_proj.weight", attention.w_qkv, rows)
        if attention.b_qkv is not None:
            yield LogicalTensor(f"{prefix}self_attn.{letter}_proj.bias", attention.b_qkv, rows)
        start = end
    yield LogicalTensor(prefix + "self_attn.o_proj.weight", attention.w_o)
    if attention.w_q_norm is not None and attention.w_k_norm is not None:
        yield LogicalTensor(prefix + "self_attn.q_norm.weight", attention.w_q_norm)
        yield LogicalTensor(prefix + "self_attn.k_norm.weight", attention.w_k_norm)
    yield LogicalTensor(prefix + "post_attention_layernorm.weight", block.post_attention_norm.weight)
    prefix += "mlp."
    mlp = block.mlp
    if isinstance(mlp, DenseMLP):
        width = mlp.w_down.shape[1]
        yield LogicalTensor(prefix + "gate_proj.weight", mlp.w_gate_up, (slice(0, width),))
        yield LogicalTensor(prefix + "up_proj.weight", mlp.w_gate_up, (slice(width, None),))
        yield LogicalTensor(prefix + "down_proj.weight", mlp.w_down)
        return
    yield LogicalTensor(prefix + "gate.weight", mlp.router.weight)
    if mlp.router.correction_bias is not None:
        yield LogicalTensor(prefix + "gate.e_score_correction_bias", mlp.router.correction_bias)
    local = mlp.w_gate_up.shape[0]
    for expert in range(local):
        name = f"{prefix}experts.{rank * local + expert}."
        yield LogicalTensor(name + "gate_proj.weight", mlp.w_gate_up, (expert, 0))
        yield LogicalTensor(name + "up_proj.weight", mlp.w_gate_up, (expert, 1))
        yield LogicalTensor(name + "down_proj.weight", mlp.w_down, (expert,))
    if mlp.w_shared_gate_up is not None and mlp.w_shared_down is not None:
        width = mlp.w_shared_down.shape[1]
        yield LogicalTensor(prefix + "shared_experts.gate_proj.weight", mlp.w_shared_gate_up, (slice(0, width),))
        yield LogicalTensor(prefix + "shared_experts.up_proj.weight", mlp.w_shared_gate_up, (slice(width, None),))
        yield LogicalTensor(prefix + "shared_experts.down_proj.weight", mlp.w_shared_down)
    if mlp.w_shared_gate is not None:
        yield LogicalTensor(prefix + "shared_expert_gate.weight", mlp.w_shared_gate)


def initial_values(model: Decoder, seed: int, std: float) -> Iterator[tuple[LogicalTensor, Tensor]]:
    """(tensor, fp32 value) of every tensor of a fresh model: norms 1, biases 0, matrices normal with deviation `std`.

    A value depends on (seed, name, shape) alone: not on the rank that asks, nor on which others are made, nor in what order.
    torch draws a tensor on one thread, so several are drawn at a time, a few before they are asked for.
    """
    tensors = list(model.logical_tensors())
    values = ahead(lambda tensor: _initial_value(tensor, seed, std), tensors, torch.get_num_threads())
    return zip(tensors, values, strict=True)


def _initial_value(tensor: LogicalTensor, seed: int, std: float) -> Tensor:
    shape = tensor.of(tensor.owner).shape
    if tensor.name.endswith("norm.weight"):
        return torch.ones(shape)
    if tensor.name.endswith("bias"):
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed}/{tensor.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    return torch.empty(shape).normal_(0.0, std, generator=generator)
