"""What a run would take, from its recipe alone: no GPU, no data, no torch, for any number of ranks.

Owns the report of `mok train --dry-run` and of `mok recipes check`. The arithmetic is `mok.shapes`'s, the mapping of ranks
`mok.grid`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mok import cost, shapes
from mok.config import Recipe
from mok.grid import Grid, Layout, split_ranks
from mok.recipe import Resolved
from mok_cli.output import Output

__all__ = ["RUN_FILES", "Price", "price", "show_price"]

RUN_FILES = (
    "recipe.toml",
    "environment.json",
    "metrics.jsonl",
    "train.log",
    "samples.jsonl",
    "tokenizer.json",
    "tokenizer_config.json",
    ".lock",
)
"""What a run folder holds besides checkpoints."""


@dataclass(frozen=True)
class Price:
    """One run, priced. Bytes are per rank where not said otherwise.

    activation_bytes: by what is computed again, whatever the recipe chose.
    parameters: trained parameters by kind. active_parameters: those one token uses. rank_bytes: by kind, activations
    estimated. flops_per_token: forward and backward. exchange_bytes: sent by one rank per MoE layer and step.
    checkpoint_steps: after which steps one is written. checkpoints_kept: how many stay. step_s: seconds of a step by
    machine and by what takes them, see `mok.cost.step_time`.
    """

    recipe: Recipe
    layout: Layout
    vocab_size: int
    parameters: dict[str, int]
    active_parameters: int
    rank_bytes: dict[str, int]
    activation_bytes: dict[str, int]
    flops_per_token: int
    tokens_per_step: int
    exchange_bytes: int
    checkpoint_bytes: int
    checkpoints_written: int
    checkpoints_kept: int
    step_s: dict[str, dict[str, float]]


def price(recipe: Recipe, world_size: int | None = None) -> Price:
    """Price `recipe` on `world_size` ranks; by default on one expert-parallel group.

    Raises UsageError where the ranks do not fit the recipe.
    """
    # Without a number of ranks: one group, which moe.ep = auto makes one rank.
    ep = recipe.moe.ep
    replicas, ep = split_ranks(recipe, world_size or (ep if isinstance(ep, int) else 1))
    layout = Layout(Grid.of(recipe, replicas, ep), replicas, ep)
    vocab_size = shapes.vocabulary(recipe)
    steps, every = recipe.train.steps, recipe.checkpoint.every
    written = -(-steps // every) if every else 1
    call_tokens = layout.tokens_of_call(recipe)
    step_tokens = layout.num_slices * layout.grid.slice_sequences * recipe.train.sequence_length
    return Price(
        recipe=recipe,
        layout=layout,
        vocab_size=vocab_size,
        parameters=shapes.parameters(recipe, vocab_size),
        active_parameters=shapes.active_parameters(recipe, vocab_size),
        rank_bytes=shapes.rank_bytes(
            recipe,
            vocab_size,
            ep=ep,
            replicas=replicas,
            lanes=len(layout.lanes),
            positions=len(layout.positions),
            tokens=call_tokens,
        ),
        activation_bytes=shapes.activation_choices(recipe, vocab_size, call_tokens),
        flops_per_token=shapes.flops_per_token(recipe, vocab_size),
        tokens_per_step=recipe.train.batch_size * recipe.train.sequence_length,
        exchange_bytes=shapes.exchange_bytes(recipe, step_tokens, ep),
        checkpoint_bytes=shapes.checkpoint_bytes(recipe, vocab_size),
        checkpoints_written=written,
        checkpoints_kept=min(written, recipe.checkpoint.keep_last or written),
        step_s={
            name: cost.step_time(recipe, vocab_size, machine, replicas=replicas, ep=ep)
            for name, machine in cost.MACHINES.items()
        },
    )


def show_price(resolved: Resolved, price: Price, output: Output) -> None:
    """Print `price` for people and report it as JSON."""
    layout, grid, recipe = price.layout, price.layout.grid, price.recipe
    ranks = f"{_plural(layout.world_size, 'rank')}: {_plural(layout.replicas, 'replica')} of {layout.ep} expert-parallel"
    cells = f"{_plural(grid.lanes, 'lane')} x {_plural(grid.slices, 'position')}, segments of {grid.segment}"
    slices = f"{_plural(grid.num_slices, 'slice')} of {grid.slice_sequences} x {recipe.train.sequence_length} tokens"
    saved = f"{_bytes(price.checkpoint_bytes)}; {price.checkpoints_written} written, {price.checkpoints_kept} kept"
    for label, text in [
        ("recipe", f"{resolved.name} ({resolved.path})"),
        ("ranks", ranks),
        ("grid of a step", cells),
        ("", slices),
        ("tokens per step", f"{price.tokens_per_step:,}; {price.tokens_per_step * recipe.train.steps:,} in all"),
        ("parameters", f"{sum(price.parameters.values()):,}; {price.active_parameters:,} active per token"),
        *((f"  {kind}", f"{count:,}") for kind, count in price.parameters.items() if count),
        ("experts", f"{recipe.moe.num_experts} in a layer, {recipe.moe.num_experts // layout.ep} on a rank"),
        ("bytes per rank", f"{_bytes(sum(price.rank_bytes.values()))}, activations and exchange rows estimated"),
        *((f"  {kind}", _bytes(size)) for kind, size in price.rank_bytes.items() if size),
        ("recompute", "activations by moe.recompute, or train.recompute = blocks"),
        *((f"  {choice}", _bytes(size)) for choice, size in price.activation_bytes.items()),
        ("FLOPs per token", f"{price.flops_per_token:,}, forward and backward"),
        ("exchange", f"{_bytes(price.exchange_bytes)} sent by a rank per MoE layer and step"),
        ("step time", "computed, not measured (docs/scaling.md)"),
        *((f"  {cost.MACHINES[name].name}", _step(parts, recipe)) for name, parts in price.step_s.items()),
        ("files", " ".join(RUN_FILES[:4])),
        ("", " ".join(RUN_FILES[4:])),
        ("", f"checkpoints/step_{recipe.train.steps:06d}: {saved}"),
    ]:
        output.line(f"{label:<17} {text}".rstrip())
    output.report(_as_json(resolved, price))


def _as_json(resolved: Resolved, price: Price) -> dict[str, Any]:
    layout, grid = price.layout, price.layout.grid
    return {
        "recipe": resolved.name,
        "path": str(resolved.path),
        "world_size": layout.world_size,
        "replicas": layout.replicas,
        "ep": layout.ep,
        "grid": {
            "lanes": grid.lanes,
            "slices": grid.slices,
            "segment": grid.segment,
            "num_slices": grid.num_slices,
            "slice_sequences": grid.slice_sequences,
        },
        "vocab_size": price.vocab_size,
        "parameters": {**price.parameters, "total": sum(price.parameters.values()), "active": price.active_parameters},
        "activation_bytes_by_recompute": price.activation_bytes,
        "bytes_per_rank": {**price.rank_bytes, "total": sum(price.rank_bytes.values())},
        "flops_per_token": price.flops_per_token,
        "tokens_per_step": price.tokens_per_step,
        "exchange_bytes_per_layer": price.exchange_bytes,
        "computed_step_s": {name: {**parts, "total": sum(parts.values())} for name, parts in price.step_s.items() if parts},
        "files": {
            "names": list(RUN_FILES),
            "checkpoint_bytes": price.checkpoint_bytes,
            "checkpoints_written": price.checkpoints_written,
            "checkpoints_kept": price.checkpoints_kept,
        },
    }


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _step(parts: dict[str, float], recipe: Recipe) -> str:
    """Seconds of a step and tokens a second of all ranks."""
    if not parts:
        return "the ranks of a group are more than one NVLink domain joins"
    total_s = sum(parts.values())
    pace = recipe.train.batch_size * recipe.train.sequence_length / total_s
    return f"{total_s:.3g} s, {pace:,.0f} tokens/s; {parts['experts'] / total_s:.0%} experts"


def _bytes(count: int) -> str:
    """A size for people: 1023 B, 5.6 MiB."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.1f} {units[0]}"
