"""What a run is: frozen dataclasses, one per recipe section, each field with its meaning, unit and range.

Owns every recipe key, its type, default and the rule for one value on its own, and the rules that span sections
(`Recipe.problems`). Knows nothing of TOML (`mok.recipe` does), torch or files. `docs/recipes.md` is generated from here.
Read next: `mok/recipe.py`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from mok.quantization import FORMATS, Quantization

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "DistributedConfig",
    "EvalConfig",
    "LogConfig",
    "MoEConfig",
    "ModelConfig",
    "OptimConfig",
    "Recipe",
    "SampleConfig",
    "TrainConfig",
]

MOST_BPE_IDS = 1 << 20
"""Ids of the largest tokenizer that can be asked for: the library takes memory for all of them at once."""


def key(
    default: Any,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] | None = None,
    multiple_of: int | None = None,
) -> Any:
    """A recipe key: `low`/`high` are inclusive bounds, `above`/`below` exclusive ones, `choices` the allowed strings."""
    rule = {
        name: value
        for name, value in {
            "low": low,
            "high": high,
            "above": above,
            "below": below,
            "choices": choices,
            "multiple_of": multiple_of,
        }.items()
        if value is not None
    }
    metadata = {"doc": doc, **rule}
    if isinstance(default, tuple):
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ModelConfig:
    """The decoder around the MoE layers."""

    hidden_size: int = key(128, "width H of the residual stream", low=16, multiple_of=16)
    num_layers: int = key(3, "decoder blocks", low=1, high=1024)
    num_heads: int = key(2, "query heads A", low=1)
    num_kv_heads: int = key(1, "key and value heads; divides num_heads", low=1)
    head_dim: int = key(64, "width D of one head", low=2, multiple_of=2)
    vocab_size: int = key(0, "rows of the embedding; 0 takes the tokenizer's size", low=0)
    num_dense_layers: int = key(0, "leading blocks with one dense feed-forward layer instead of experts", low=0)
    dense_intermediate_size: int = key(
        0, "width of the dense feed-forward layers; 0 where there are none", low=0, multiple_of=16
    )
    qk_norm: str = key(
        "head", "RMSNorm of queries and keys: none, per head, or over the whole width", choices=("none", "head", "full")
    )
    attention_bias: bool = key(False, "bias on the query, key and value projections")
    norm_eps: float = key(1e-6, "epsilon of every RMSNorm", above=0.0, below=1.0)
    rope_theta: float = key(10000.0, "base of the rotary embedding", above=0.0)
    rotary_fraction: float = key(1.0, "share of head_dim that is rotated", above=0.0, high=1.0)
    max_positions: int = key(0, "longest sequence the model is meant for; 0 takes train.sequence_length", low=0)
    tie_embeddings: bool = key(False, "one matrix for the embedding and the output head")
    init: str = key("random", "random, or hf:DIR to start from a Hugging Face checkpoint folder")
    init_std: float = key(0.02, "standard deviation of random initial weights", above=0.0)


@dataclass(frozen=True)
class MoEConfig:
    """Router, experts, and how their work is done."""

    num_experts: int = key(8, "routed experts E of each MoE layer", low=1, high=512)
    top_k: int = key(2, "experts K that each token is sent to", low=1)
    intermediate_size: int = key(128, "width I of one expert", low=16, multiple_of=16)
    num_shared_experts: int = key(0, "experts that see every token", low=0)
    shared_intermediate_size: int = key(0, "width of one shared expert; 0 takes intermediate_size", low=0, multiple_of=16)
    shared_gate: bool = key(False, "multiply the shared experts' output by a learned sigmoid gate")
    clamp: float = key(0.0, "limit on SwiGLU's inputs: gate at most clamp, up within +-clamp; 0 for none", low=0.0)
    score: str = key("softmax", "how router logits become scores", choices=("softmax", "sigmoid"))
    score_order: str = key(
        "before_top_k", "softmax over all experts, or over the chosen ones only", choices=("before_top_k", "after_top_k")
    )
    normalize_weights: bool = key(True, "divide the chosen scores by their sum")
    scaling_factor: float = key(1.0, "factor on the router weights", above=0.0)
    correction_bias: bool = key(False, "fp32 bias added to the scores for choosing only (aux-loss-free balancing)")
    bias_update_rate: float = key(0.001, "step of the correction bias, once per optimizer step", low=0.0)
    num_groups: int = key(1, "expert groups, for group-limited routing; divides num_experts", low=1)
    top_groups: int = key(1, "groups a token may choose from", low=1)
    balance_loss: float = key(0.01, "coefficient of the load-balancing loss", low=0.0)
    z_loss: float = key(0.0, "coefficient of the router z-loss", low=0.0)
    force_routing: str = key("none", "ignore the router, for benchmarks", choices=("none", "balanced", "skewed", "one-hot"))
    backend: str = key("auto", "who computes the experts", choices=("auto", "reference", "torch", "staged", "mega"))
    transport: str = key("auto", "how rows travel between ranks", choices=("auto", "collective", "peer"))
    peer_rows: float = key(
        2.0,
        "through peer memory, room for the rows of a rank's experts, in multiples of the mean; more rows end the run with an "
        "error; 0 makes room for any routing",
        low=0.0,
    )
    ep: int | str = key(1, "ranks R that share the experts of a layer; a number, or auto", low=1, choices=("auto",))
    recompute: str = key("none", "what the expert layer computes again in the backward", choices=("none", "activations", "all"))
    quantize_weight_gradients: bool = key(
        False, "with an 8-bit train.dtype, 8-bit operands for the routed experts' weight gradients too; else they are bf16"
    )
    quantize_dispatch: bool = key(
        False,
        "with an 8-bit train.dtype, rows go to their experts in 8 bits, forward and backward; they come back in bf16",
    )
    quantize_shared_experts: bool = key(
        False, "with an 8-bit train.dtype, 8-bit operands for the shared experts too, but for their weight gradients"
    )


@dataclass(frozen=True)
class DataConfig:
    """Where text comes from and how it becomes tokens."""

    path: str = key(
        "stdlib", "file or folder of text, .jsonl(.gz), .parquet or .u16/.u32 tokens; stdlib is Python's own source"
    )
    tokenizer: str = key("bpe:512", "bytes, bpe:SIZE trained on the data, or the path of a tokenizer.json")
    cache: str = key("", "folder of tokenized shards; empty takes the user's cache folder")
    validation_fraction: float = key(0.02, "share of documents kept for validation", above=0.0, below=1.0)
    invalid_utf8: str = key("error", "error, or replace and count", choices=("error", "replace"))


@dataclass(frozen=True)
class TrainConfig:
    """Steps, shapes and precision."""

    steps: int = key(100, "optimizer steps", low=1)
    batch_size: int = key(16, "sequences per step over all ranks", low=1, high=1 << 24)
    sequence_length: int = key(128, "tokens per sequence", low=2)
    dtype: str = key(
        "fp32",
        "dtype of weights and activations; mxfp8 and fp8_block: bf16, with 8-bit operands for the experts' products",
        choices=("fp32", "bf16", *FORMATS),
    )
    recompute: str = key("none", "blocks computed again in the backward", choices=("none", "blocks"))
    threads: int = key(0, "CPU threads; 0 leaves torch's default. No choice changes a bit", low=0, high=1024)
    freeze: tuple[str, ...] = key((), "tensor names (shell patterns) that are not trained")
    cuda_graph: bool = key(
        True, "on one GPU with experts by mega or staged: record the second step and replay it from then on; changes no bit"
    )


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = key(3e-3, "peak learning rate", low=0.0)
    min_lr_ratio: float = key(0.1, "last learning rate over the peak", low=0.0, high=1.0)
    schedule: str = key("cosine", "shape after warm-up", choices=("constant", "cosine", "wsd"))
    warmup_steps: int = key(10, "steps of linear warm-up", low=0)
    decay_fraction: float = key(0.2, "share of the steps that wsd decays over", above=0.0, high=1.0)
    beta1: float = key(0.9, "decay of the first moment", low=0.0, below=1.0)
    beta2: float = key(0.95, "decay of the second moment", low=0.0, below=1.0)
    eps: float = key(1e-8, "term in the denominator", above=0.0)
    weight_decay: float = key(0.1, "decoupled decay of matrices; norms and biases have none", low=0.0)
    clip_norm: float = key(1.0, "limit on the global gradient norm; 0 for none", low=0.0)
    moment_dtype: str = key("fp32", "dtype of the stored moments", choices=("fp32", "bf16"))


@dataclass(frozen=True)
class CheckpointConfig:
    """When state is saved."""

    every: int = key(100, "steps between checkpoints; the last step is always saved; 0 for only that", low=0)
    keep_last: int = key(2, "checkpoints kept; 0 keeps all", low=0)


@dataclass(frozen=True)
class EvalConfig:
    """Validation during training."""

    every: int = key(100, "steps between evaluations; 0 for only the last", low=0)
    batches: int = key(8, "batches of the training shape per evaluation", low=1)


@dataclass(frozen=True)
class SampleConfig:
    """Text samples during training."""

    every: int = key(0, "steps between samples; 0 for only the last", low=0)
    prompt: str = key("def ", "text to continue")
    tokens: int = key(120, "tokens to write", low=1)
    temperature: float = key(0.7, "0 takes the likeliest token", low=0.0)


@dataclass(frozen=True)
class LogConfig:
    """Console and metrics."""

    every: int = key(10, "steps between console lines; metrics.jsonl has every step", low=1)
    tensorboard: bool = key(False, "also write TensorBoard events, if it is installed")
    trace: str = key(
        "none",
        "digests of every step's tensors in the run folder, for verify-determinism --compare; activations: block outputs too",
        choices=("none", "steps", "activations"),
    )


@dataclass(frozen=True)
class DistributedConfig:
    """The grid of a step (docs/numerics.md) and how long ranks wait for one another."""

    lanes: int = key(0, "lanes the slices of a step are dealt to; 0 takes the replicas of the first launch", low=0)
    slices: int = key(0, "positions within a lane; 0 takes the expert-parallel size of the first launch", low=0)
    segment: int = key(0, "slices whose rows lie together in an expert; divides slices; 0 takes slices", low=0)
    slice_sequences: int = key(0, "sequences in one slice; 0 takes batch_size / (lanes * slices)", low=0)
    slices_per_call: int = key(
        0, "slices of a lane that a rank takes at once; 0 for all on a CPU, the fewest on a GPU. No choice changes a bit", low=0
    )
    timeout_s: float = key(600.0, "seconds a rank waits for the others", above=0.0, high=31536000.0)


@dataclass(frozen=True)
class Recipe:
    """A whole run. Build one with `mok.recipe.load`; every field has a default, the defaults are the `toy` model."""

    seed: int = key(0, "seed of initial weights, data order and samples", low=0, high=2**63 - 1)
    model: ModelConfig = field(default_factory=ModelConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    log: LogConfig = field(default_factory=LogConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    @property
    def quantization(self) -> Quantization | None:
        """What of the expert layers is quantised; None in fp32 and bf16."""
        if self.train.dtype not in FORMATS:
            return None
        moe = self.moe
        return Quantization(self.train.dtype, moe.quantize_weight_gradients, moe.quantize_shared_experts, moe.quantize_dispatch)

    def problems(self) -> list[tuple[str, str, str]]:
        """(key, what, fix) for each rule across keys that does not hold; rules of one key are `mok.recipe`'s."""
        found: list[tuple[str, str, str]] = []
        model, moe, distributed = self.model, self.moe, self.distributed
        if model.num_heads % model.num_kv_heads:
            found.append(
                (
                    "model.num_kv_heads",
                    f"{model.num_kv_heads} does not divide model.num_heads = {model.num_heads}",
                    "use a divisor of num_heads",
                )
            )
        if model.num_dense_layers > model.num_layers:
            found.append(
                (
                    "model.num_dense_layers",
                    f"{model.num_dense_layers} is more than model.num_layers = {model.num_layers}",
                    "use at most num_layers",
                )
            )
        if model.num_dense_layers and not model.dense_intermediate_size:
            found.append(
                (
                    "model.dense_intermediate_size",
                    "is 0 but model.num_dense_layers asks for dense blocks",
                    "set the width of the dense blocks",
                )
            )
        if moe.top_k > moe.num_experts:
            found.append(
                (
                    "moe.top_k",
                    f"{moe.top_k} is more than moe.num_experts = {moe.num_experts}",
                    "a token can be sent to at most num_experts experts",
                )
            )
        if moe.num_experts % moe.num_groups:
            found.append(
                (
                    "moe.num_groups",
                    f"{moe.num_groups} does not divide moe.num_experts = {moe.num_experts}",
                    "use a divisor of num_experts",
                )
            )
        elif moe.top_groups * (moe.num_experts // moe.num_groups) < moe.top_k <= moe.num_experts:
            found.append(
                (
                    "moe.top_groups",
                    f"{moe.top_groups} groups hold fewer experts than moe.top_k = {moe.top_k}",
                    "raise top_groups",
                )
            )
        if moe.top_groups > moe.num_groups:
            found.append(
                ("moe.top_groups", f"{moe.top_groups} is more than moe.num_groups = {moe.num_groups}", "use at most num_groups")
            )
        if moe.score == "sigmoid" and moe.score_order == "after_top_k":
            found.append(
                ("moe.score_order", "after_top_k is defined for softmax only", "use before_top_k, or moe.score = softmax")
            )
        if isinstance(moe.ep, int) and moe.num_experts % moe.ep:
            found.append(
                (
                    "moe.ep",
                    f"{moe.ep} ranks cannot share moe.num_experts = {moe.num_experts} evenly",
                    "use a divisor of num_experts",
                )
            )
        if distributed.segment and distributed.slices and distributed.slices % distributed.segment:
            found.append(
                (
                    "distributed.segment",
                    f"{distributed.segment} does not divide distributed.slices = {distributed.slices}",
                    "use a divisor of slices",
                )
            )
        if distributed.lanes and distributed.slices:
            cells = distributed.lanes * distributed.slices * max(distributed.slice_sequences, 1)
            if self.train.batch_size % cells:
                found.append(
                    (
                        "train.batch_size",
                        f"{self.train.batch_size} is not a multiple of lanes * slices * slice_sequences = {cells}",
                        "change batch_size or the grid in [distributed]",
                    )
                )
        kind, _, size = self.data.tokenizer.partition(":")
        if kind == "bpe" and not (size.isascii() and size.isdigit() and len(size) <= 7 and 257 <= int(size) <= MOST_BPE_IDS):
            found.append(
                (
                    "data.tokenizer",
                    f'"{self.data.tokenizer}" has no size from 257 (256 bytes and the end of a document) to {MOST_BPE_IDS}',
                    "write for example bpe:512",
                )
            )
        if model.init != "random" and not (model.init.startswith("hf:") and model.init != "hf:"):
            found.append(("model.init", f'"{model.init}" is neither random nor hf:DIR', "write random, or hf: and a folder"))
        if model.init.startswith("hf:") and self.data.tokenizer.startswith("bpe:"):
            found.append(
                (
                    "data.tokenizer",
                    "a tokenizer trained on the data has other ids than the weights of model.init",
                    f"use {model.init.removeprefix('hf:')}/tokenizer.json",
                )
            )
        found += [
            (f"data.{name}", "is empty", f"write {meant}")
            for name, meant in (("path", "a file, a folder or stdlib"), ("tokenizer", "bytes, bpe:SIZE or a tokenizer.json"))
            if not getattr(self.data, name)
        ]
        if model.max_positions and model.max_positions < self.train.sequence_length:
            found.append(
                (
                    "model.max_positions",
                    f"{model.max_positions} is less than train.sequence_length = {self.train.sequence_length}",
                    "raise it, or use 0 for the sequence length",
                )
            )
        rotated = int(model.head_dim * model.rotary_fraction)
        if rotated < 2 or rotated % 2:
            found.append(
                (
                    "model.rotary_fraction",
                    f"{model.rotary_fraction} rotates {rotated} of model.head_dim = {model.head_dim}, which come in pairs",
                    "use a fraction that gives an even number",
                )
            )
        found += self._quantization_problems()
        if moe.shared_gate and not moe.num_shared_experts:
            found.append(("moe.shared_gate", "is set but moe.num_shared_experts is 0", "set num_shared_experts"))
        return found

    def _quantization_problems(self) -> list[tuple[str, str, str]]:
        moe, quantization = self.moe, self.quantization
        if quantization is None:
            switches = ("quantize_weight_gradients", "quantize_dispatch", "quantize_shared_experts")
            what = f"is set but train.dtype = {self.train.dtype} quantises nothing"
            fix = f"set train.dtype to {' or '.join(FORMATS)}"
            return [(f"moe.{name}", what, fix) for name in switches if getattr(moe, name)]
        sizes = {"model.hidden_size": self.model.hidden_size, "moe.intermediate_size": moe.intermediate_size}
        if quantization.shared_experts and moe.num_shared_experts and moe.shared_intermediate_size:
            sizes["moe.shared_intermediate_size"] = moe.shared_intermediate_size
        form = quantization.of_blocks
        what, fix = f"is not a multiple of {form.block}, the block of {form.name}", f"use a multiple of {form.block}"
        return [(name, f"{size} {what}", fix) for name, size in sizes.items() if size % form.block]

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, tuples as lists, in declaration order."""
        plain = dataclasses.asdict(self)
        plain["train"]["freeze"] = list(self.train.freeze)
        return plain
