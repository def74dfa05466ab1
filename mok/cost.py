"""What a layer and a step should take on machines that nobody has at hand: operations and bytes over rates.

Owns the rates, each with where it comes from, and the arithmetic; it measures nothing, so whatever it says is computed, not
measured. docs/scaling.md has its tables and says what is left out. Needs no torch. Read next: `mok/shapes.py`, which counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

from mok import shapes
from mok.config import Recipe
from mok.quantization import FORMATS
from mok.shapes import LayerShape

__all__ = ["MACHINES", "LayerTime", "Machine", "PassTime", "layer_time", "step_time"]

ROW_BYTES = 2
"""Of one value of a row between ranks and in memory: bf16, also where products are 8-bit."""


@dataclass(frozen=True)
class Machine:
    """A GPU and what joins it to others.

    flops: dense bf16 operations a second by the data sheet; 8-bit ones are twice as many. reach: the share of them that expert
    products get. link_bytes: a second in one direction, by the data sheet; link_reach: the share that is taken to arrive.
    memory_bytes: a second, by the data sheet. domain: GPUs that the link joins.
    """

    name: str
    flops: float
    reach: float
    link_bytes: float
    link_reach: float
    memory_bytes: float
    domain: int

    def products_s(self, flops: float, dtype: str = "bf16") -> float:
        return flops / (self.flops * self.reach * (2 if dtype in FORMATS else 1))

    def link_s(self, num_bytes: float) -> float:
        return num_bytes / (self.link_bytes * self.link_reach)


MACHINES = {
    "h200": Machine("H200", 989e12, 0.58, 450e9, 0.8, 4.8e12, 8),
    "gb300": Machine("GB300 NVL72", 2500e12, 0.58, 900e9, 0.8, 8e12, 72),
}
"""reach: measured on one H200, the mean of the four steady forward passes of docs/benchmarks.md at commit c0f0ccff (504 to 628
TFLOP/s), and taken to be the same on GB300. link_reach: what a healthy link is known to give (docs/topology.md)."""


@dataclass(frozen=True)
class PassTime:
    """One pass of one MoE layer on the rank with the most experts, seconds for each thing that takes time by itself."""

    products_s: float
    dispatch_s: float
    combine_s: float
    memory_s: float

    @property
    def link_s(self) -> float:
        return self.dispatch_s + self.combine_s

    @property
    def overlapped_s(self) -> float:
        """If everything ran at once: the slowest of them."""
        return max(self.products_s, self.link_s, self.memory_s)

    @property
    def in_turn_s(self) -> float:
        """If rows travelled first, and nothing else meanwhile."""
        return max(self.products_s, self.memory_s) + self.link_s


@dataclass(frozen=True)
class LayerTime:
    """Forward and backward of one MoE layer. fullest: rows of the fullest rank over the mean, 1 where R divides E."""

    forward: PassTime
    backward: PassTime
    fullest: float


def layer_time(shape: LayerShape, tokens: int, machine: Machine, dtype: str = "bf16", *, once: bool = False) -> LayerTime:
    """Of `tokens` tokens on each of `shape.ranks` ranks, routes spread evenly over the experts.

    Experts are dealt out as evenly as they go, so that ranks need not divide them (mok itself wants that they do).
    Per route: a row of H to the expert's rank and one back; products of 6 H I operations forward, twice as many backward.
    once: a token goes out once to each rank that has any of its experts, as through peer memory.
    Memory: every weight read once per pass; rows of x and y written and read (4 H), gate, up and hidden (4 I); backward in
    addition the fp32 gradients read and written, and rows of dy, x and dx (6 H), d(gate), d(up), hidden (8 I).
    """
    hidden, width, ranks = shape.hidden_size, shape.intermediate_size, shape.ranks
    local = -(-shape.num_experts // ranks)
    fullest = local * ranks / shape.num_experts
    rows = tokens * shape.top_k * fullest
    flops = 6 * hidden * (rows * width + tokens * shape.shared_size)
    back_s = out_s = machine.link_s(rows * (ranks - 1) / ranks * hidden * ROW_BYTES)
    if once:
        # How likely a rank has none of the K experts of a token, drawn from E without replacement.
        none = comb(shape.num_experts - local, shape.top_k) / comb(shape.num_experts, shape.top_k)
        out_s = machine.link_s(tokens * (ranks - 1) * (1 - none) * hidden * ROW_BYTES)
    weights = 3 * local * hidden * width + shape.shared_parameters

    def memory_s(bytes_per_weight: float, values_per_row: int) -> float:
        return (weights * bytes_per_weight + rows * values_per_row * ROW_BYTES) / machine.memory_bytes

    weight_bytes = 1 if dtype in FORMATS else 2
    forward = PassTime(machine.products_s(flops, dtype), out_s, back_s, memory_s(weight_bytes, 4 * hidden + 4 * width))
    backward = PassTime(machine.products_s(2 * flops, dtype), out_s, back_s, memory_s(weight_bytes + 8, 6 * hidden + 8 * width))
    return LayerTime(forward, backward, fullest)


def step_time(recipe: Recipe, vocab_size: int, machine: Machine, *, replicas: int, ep: int) -> dict[str, float]:
    """Seconds of one optimizer step by what takes them, one after another, as mok works today. Raises nothing; what is not
    counted: the time between kernels, attention beyond its products, norms, data, and links between domains.

    Empty where an expert-parallel group does not fit into one domain of the machine.
    """
    if ep > machine.domain:
        return {}
    world, train = replicas * ep, recipe.train
    tokens = train.batch_size * train.sequence_length // world
    shape = shapes.layer_shape(recipe)
    layer = layer_time(
        LayerShape(shape.hidden_size, shape.intermediate_size, shape.num_experts, shape.top_k, ep, shape.shared_size),
        tokens,
        machine,
        train.dtype,
        once=recipe.moe.transport == "peer",
    )
    layers = recipe.model.num_layers - recipe.model.num_dense_layers
    counts = shapes.parameters(recipe, vocab_size)
    experts_s = layers * sum(max(part.products_s, part.memory_s) for part in (layer.forward, layer.backward))
    flops = shapes.flops_per_token(recipe, vocab_size) * tokens - 3 * layers * shape.flops(tokens)
    again = 4 / 3 if train.recompute == "blocks" else 1.0
    dense = sum(counts.values()) - counts["experts"]
    experts = counts["experts"] / ep
    # Of its shard a rank reads and writes master weights and moments, reads gradients, writes weights.
    weight_bytes = shapes.DTYPE_BYTES[train.dtype]
    moved = (dense / world + experts / replicas) * (8 + 4 * shapes.DTYPE_BYTES[recipe.optim.moment_dtype] + 4 + weight_bytes)
    # fp32 gradients go to the shards' owners, updated weights come back.
    shared = (dense * (world - 1) / world + experts * (replicas - 1) / replicas) * (4 + weight_bytes)
    return {
        "experts": experts_s * again,
        "rows between ranks": layers * (layer.forward.link_s + layer.backward.link_s),
        "everything dense": machine.products_s(flops) * again,
        "gradients between ranks": machine.link_s(shared) if world <= machine.domain else 0.0,
        "optimizer": moved / machine.memory_bytes,
    }
