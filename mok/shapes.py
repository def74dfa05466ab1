"""Sizes, operations and bytes, derived from a recipe or from the letters of one MoE layer.

Owns arithmetic only: it allocates nothing, measures nothing and imports no torch, so that a run can be priced on any
machine. The letters: T tokens of a rank, H hidden width, I width of one expert, E experts, K experts per token, R ranks
that share the experts, V vocabulary, A attention heads, D head width, S sequence length. Read next: `mok/config.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from mok.config import Recipe
from mok.errors import UsageError
from mok.quantization import FORMATS

__all__ = [
    "DTYPE_BYTES",
    "LAYER_SHAPES",
    "LayerShape",
    "WorkspaceShape",
    "activation_choices",
    "active_parameters",
    "checkpoint_bytes",
    "exchange_bytes",
    "flops_per_token",
    "has_room_for_any_routing",
    "layer_shape",
    "parameters",
    "rank_bytes",
    "vocabulary",
    "workspace_shape",
]

DTYPE_BYTES = {"fp32": 4, "bf16": 2, **dict.fromkeys(FORMATS, 2)}
"""Of weights and activations as a run keeps them: with 8-bit products both stay in bf16."""


@dataclass(frozen=True)
class LayerShape:
    """One MoE layer: hidden width H, expert width I, experts E, experts per token K, ranks R that share the experts.

    shared_size: width of all shared experts together, 0 for none.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    ranks: int = 1
    shared_size: int = 0

    @property
    def expert_parameters(self) -> int:
        """Parameters of all routed experts: gate, up and down of each."""
        return 3 * self.num_experts * self.hidden_size * self.intermediate_size

    @property
    def shared_parameters(self) -> int:
        return 3 * self.hidden_size * self.shared_size

    def flops(self, tokens: int) -> int:
        """Operations of one forward over `tokens` tokens, experts only; the backward takes twice as many."""
        return 2 * tokens * 3 * self.hidden_size * (self.top_k * self.intermediate_size + self.shared_size)


@dataclass(frozen=True)
class WorkspaceShape:
    """The memory that each rank of a group opens to the others, for rows that travel through it: one for all layers of a model.

    tokens: T of a call, at most. top_k, hidden_size, intermediate_size: K, H and I of the layers. ranks: R.
    """

    tokens: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    ranks: int

    def regions(self) -> dict[str, tuple[int, int]]:
        """(first byte, bytes) by name, in order; each starts on 256 bytes.

        flags: 32 bytes for each rank. ids: routes of two calls, int32, each after 8 of their own. row_flags, weights: 4 bytes
        for each route. x, dy: T rows. returned: T * K rows, where a token's rows come back; with each, fp32, `partials`: the
        sums over blocks of 128 columns that the router weight's gradient is made of.
        """
        routes, row = self.tokens * self.top_k, 2 * self.hidden_size
        sizes = {
            "flags": 32 * self.ranks,
            "ids": 2 * _aligned(4 * (8 + routes)),
            "row_flags": 4 * routes,
            "weights": 4 * routes,
            "partials": 4 * routes * self.num_partials,
            "x": self.tokens * row,
            "dy": self.tokens * row,
            "returned": routes * row,
        }
        found, start = {}, 0
        for name, size in sizes.items():
            found[name] = (start, size)
            start += _aligned(size)
        return found

    @property
    def num_partials(self) -> int:
        return -(-self.intermediate_size // 128)

    @property
    def bytes(self) -> int:
        """Of all regions."""
        start, size = self.regions()["returned"]
        return start + _aligned(size)


def _aligned(size: int) -> int:
    return -(-size // 256) * 256


LAYER_SHAPES = {
    "toy": LayerShape(128, 128, 8, 2),
    "olmoe-1b-7b": LayerShape(2048, 1024, 64, 8),
    "qwen3-30b-a3b": LayerShape(2048, 768, 128, 8),
    "mixtral-8x7b": LayerShape(4096, 14336, 8, 2),
    "qwen3.5-397b-a17b": LayerShape(4096, 1024, 512, 10, shared_size=1024),
    "glm-5.2": LayerShape(6144, 2048, 256, 8, shared_size=2048),
    "deepseek-v3": LayerShape(7168, 2048, 256, 8, shared_size=2048),
    "kimi-k2.7": LayerShape(7168, 2048, 384, 8, shared_size=2048),
    "deepseek-v4-pro": LayerShape(7168, 3072, 384, 6, shared_size=3072),
}
"""The MoE layers of well-known models, for `--shape`; their shared expert is as wide as a routed one."""


def layer_shape(recipe: Recipe) -> LayerShape:
    """The MoE layer of `recipe`."""
    moe = recipe.moe
    shared_size = moe.num_shared_experts * (moe.shared_intermediate_size or moe.intermediate_size)
    return LayerShape(recipe.model.hidden_size, moe.intermediate_size, moe.num_experts, moe.top_k, shared_size=shared_size)


def workspace_shape(recipe: Recipe, ep: int, tokens: int) -> WorkspaceShape:
    """The memory that a rank opens to the others of its group with `moe.transport = "peer"`. tokens: of the rank in one call; a
    text sample, padded to 16 tokens, must fit too."""
    longest = -(-recipe.train.sequence_length // 16) * 16
    moe = recipe.moe
    return WorkspaceShape(max(tokens, longest), moe.top_k, recipe.model.hidden_size, moe.intermediate_size, ep)


def may_open_memory(recipe: Recipe, ep: int) -> bool:
    """Whether rows of `recipe` could travel through peer memory, if its ranks have GPUs that are joined."""
    able = recipe.train.dtype == "bf16" and recipe.moe.backend in ("auto", "staged", "mega")
    wanted = recipe.moe.transport == "peer" or (recipe.moe.transport == "auto" and has_room_for_any_routing(recipe, ep))
    return ep > 1 and able and wanted


def has_room_for_any_routing(recipe: Recipe, ep: int) -> bool:
    """Whether `moe.peer_rows` lets all routes of a call go to one of `ep` ranks, which is then `ep` times the mean."""
    return not 0 < recipe.moe.peer_rows < ep


def vocabulary(recipe: Recipe) -> int:
    """Rows V of the embedding, as far as a recipe tells without its data; a trained tokenizer may come out smaller.

    Raises UsageError where `data.tokenizer` names a file that is no tokenizer.
    """
    tokenizer = recipe.data.tokenizer
    if recipe.model.vocab_size:
        return recipe.model.vocab_size
    if tokenizer == "bytes":
        return 257  # every byte and the end of a document
    if tokenizer.startswith("bpe:"):
        return int(tokenizer.removeprefix("bpe:"))
    try:
        contents = json.loads(Path(tokenizer).read_text(encoding="utf-8"))
        ids = [*contents["model"]["vocab"].values(), *(token["id"] for token in contents.get("added_tokens", []))]
        return max(ids) + 1
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(
            f'data.tokenizer = "{tokenizer}": is no readable tokenizer.json ({error}); use bytes, bpe:SIZE or such a file'
        ) from None


def parameters(recipe: Recipe, vocab_size: int) -> dict[str, int]:
    """Trained parameters by kind."""
    model, shape = recipe.model, layer_shape(recipe)
    width, layers = model.hidden_size, model.num_layers
    moe_layers = layers - model.num_dense_layers
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = width * (queries + 2 * keys) + queries * width + (queries + 2 * keys if model.attention_bias else 0)
    qk_norm = {"none": 0, "head": 2 * model.head_dim, "full": queries + keys}[model.qk_norm]
    return {
        "embedding": vocab_size * width,
        "attention": layers * attention,
        "norms": layers * (2 * width + qk_norm) + width,
        "dense": model.num_dense_layers * 3 * width * model.dense_intermediate_size,
        "router": moe_layers * shape.num_experts * width,
        "experts": moe_layers * shape.expert_parameters,
        "shared experts": moe_layers * (shape.shared_parameters + (width if recipe.moe.shared_gate else 0)),
        "head": 0 if model.tie_embeddings else vocab_size * width,
    }


def active_parameters(recipe: Recipe, vocab_size: int) -> int:
    """Parameters that one token uses: everything but the experts it is not sent to."""
    counts = parameters(recipe, vocab_size)
    idle = counts["experts"] * (recipe.moe.num_experts - recipe.moe.top_k) // recipe.moe.num_experts
    return sum(counts.values()) - idle


def flops_per_token(recipe: Recipe, vocab_size: int) -> int:
    """Operations of forward and backward for one token of a full sequence, nothing counted twice for recomputation.

    Two per matrix parameter in the forward, and for causal attention two products over (S + 1) / 2 positions on average;
    the backward takes twice the forward.
    """
    counts, model = parameters(recipe, vocab_size), recipe.model
    # Looking up an embedding multiplies nothing, but a tied head does; norms are not matrices.
    matrices = active_parameters(recipe, vocab_size) - counts["norms"] - (0 if model.tie_embeddings else counts["embedding"])
    attention = model.num_layers * 2 * model.num_heads * model.head_dim * (recipe.train.sequence_length + 1)
    return 3 * (2 * matrices + attention)


def exchange_bytes(recipe: Recipe, tokens: int, ep: int) -> int:
    """Bytes that one rank sends in one MoE layer per step, forward and backward, for `tokens` tokens of its own.

    A row of H values goes out and comes back for each route to another rank, and so do the gradients; routes are taken to
    be spread evenly. With `moe.quantize_dispatch` rows go out in 8 bits, with a byte for the scale of each block.
    """
    hidden_size = recipe.model.hidden_size
    out_bytes = back_bytes = hidden_size * DTYPE_BYTES[recipe.train.dtype]
    if recipe.quantization is not None and recipe.quantization.dispatch:
        out_bytes = hidden_size + hidden_size // recipe.quantization.of_blocks.block
    return tokens * recipe.moe.top_k * (ep - 1) // ep * (out_bytes + back_bytes) * 2


def rank_bytes(
    recipe: Recipe, vocab_size: int, *, ep: int, replicas: int, lanes: int, positions: int, tokens: int
) -> dict[str, int]:
    """Bytes that one rank holds, by kind; "activations" and "exchange rows" are estimates.

    Weights are whole on each rank that computes with them; of master weights and moments each rank keeps a shard. Exchange rows
    are those that a rank receives in one layer and those that come back to it, spread evenly. The peer workspace is where they
    come from and come back to, if the GPUs turn out to be joined.

    ep: ranks R that share the experts. replicas: groups of them. lanes, positions: cells of the step's grid that the rank owns;
    each has its own sum of dense gradients, each lane one of expert gradients. tokens: tokens of the rank in one call.
    """
    counts = parameters(recipe, vocab_size)
    experts = counts["experts"] // ep
    dense = sum(counts.values()) - counts["experts"]
    held, shard = dense + experts, dense // (ep * replicas) + experts // replicas
    low_precision, width = recipe.train.dtype != "fp32", recipe.model.hidden_size
    return {
        "weights": held * DTYPE_BYTES[recipe.train.dtype],
        "rounded weights": _rounded_bytes(recipe, experts, counts["shared experts"]),
        "master weights": shard * 4 if low_precision else 0,
        "moments": shard * 2 * DTYPE_BYTES[recipe.optim.moment_dtype],
        "gradients": 4 * (dense * lanes * positions + experts * lanes),
        "activations": _activation_bytes(recipe, vocab_size, tokens),
        "peer workspace": workspace_shape(recipe, ep, tokens).bytes if may_open_memory(recipe, ep) else 0,
        "exchange rows": 0 if ep == 1 else 2 * tokens * recipe.moe.top_k * width * DTYPE_BYTES[recipe.train.dtype],
    }


def _rounded_bytes(recipe: Recipe, experts: int, shared: int) -> int:
    """What is kept of weights for 8-bit products: dequantised in bf16, once or for each orientation (docs/numerics.md)."""
    quantization = recipe.quantization
    if quantization is None:
        return 0
    orientations = 1 if quantization.of_blocks.square_weights else 2
    return (experts + (shared if quantization.shared_experts else 0)) * orientations * DTYPE_BYTES[recipe.train.dtype]


def activation_choices(recipe: Recipe, vocab_size: int, tokens: int) -> dict[str, int]:
    """The estimate of "activations" in `rank_bytes` for each choice of `moe.recompute`, and for blocks computed again."""
    choices = {
        name: replace(recipe, moe=replace(recipe.moe, recompute=name), train=replace(recipe.train, recompute="none"))
        for name in ("none", "activations", "all")
    }
    choices["blocks"] = replace(recipe, train=replace(recipe.train, recompute="blocks"))
    return {name: _activation_bytes(choice, vocab_size, tokens) for name, choice in choices.items()}


def checkpoint_bytes(recipe: Recipe, vocab_size: int) -> int:
    """Bytes of one checkpoint: weights, master weights and moments of the whole model."""
    sizes = rank_bytes(recipe, vocab_size, ep=1, replicas=1, lanes=1, positions=1, tokens=0)
    return sizes["weights"] + sizes["master weights"] + sizes["moments"]


def _activation_bytes(recipe: Recipe, vocab_size: int, tokens: int) -> int:
    """An estimate of what a call keeps for its backward, and of what is in use beside it at the peak.

    In 16 bits, as on a GPU: a block keeps its input and the sum in its middle, each before and after its norm; its projected,
    rotated and attended heads; and the pre-activations of each route. At the peak there are also the logits, or what the
    backward of one expert layer works in. In fp32, as on a CPU, values per token are what the process of a toy model grew by.
    """
    model, moe, shape = recipe.model, recipe.moe, layer_shape(recipe)
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    width, inner, shared = shape.hidden_size, shape.intermediate_size, 2 * shape.shared_size
    if recipe.train.dtype != "fp32":
        dense = 4 * width + 3 * queries + 3 * keys
        experts = {"none": moe.top_k * 2 * inner + shared, "activations": 0, "all": 0}[moe.recompute]
        again = 0 if moe.recompute == "none" else moe.top_k * 2 * inner + shared
        beside = max(vocab_size, moe.top_k * (3 * width + inner) + again)
    else:
        dense = 5 * width + 3 * queries + 2 * keys
        kept = {"none": 2 * width + 3 * inner, "activations": width + inner, "all": 0}[moe.recompute]
        experts = moe.top_k * kept + (0 if moe.recompute == "all" else shared)
        beside = vocab_size
    if recipe.train.recompute == "blocks":  # each block keeps its input, and one at a time is computed again
        values = model.num_layers * width + dense + experts
    else:
        values = model.num_layers * (dense + experts)
    return tokens * (values + beside) * DTYPE_BYTES[recipe.train.dtype]
