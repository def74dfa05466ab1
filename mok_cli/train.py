"""`mok train`: one run of a recipe, or what it would take."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from mok_cli.output import FiniteFloat, Output, examples, json_option

if TYPE_CHECKING:
    from mok.config import Recipe

__all__ = ["train"]


@click.command(epilog=examples("mok train toy", "mok train toy --set data.path=my_text --out runs/mine"))
@click.argument("recipe")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a recipe key.")
@click.option("--out", metavar="DIR", help="Folder of the run [default: runs/RECIPE-TIME].")
@click.option("--steps", type=int, metavar="N", help="Short for --set train.steps=N.")
@click.option("--seed", type=int, metavar="N", help="Short for --set seed=N.")
@click.option("--resume", default="never", show_default=True, metavar="never|auto|PATH", help="Go on from a checkpoint.")
@click.option("--allow-changes", is_flag=True, help="Resume although keys that change the training differ.")
@click.option("--nproc", type=click.IntRange(min=1), metavar="N", help="Start N ranks on this machine.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--max-minutes", type=FiniteFloat(min=0), default=0.0, metavar="M", help="Save and stop after about M minutes.")
@click.option("--dry-run", is_flag=True, help="Only say what the run would take; needs no GPU and no data.")
@click.option("--world-size", type=click.IntRange(min=1), metavar="N", help="Ranks to price, with --dry-run.")
@json_option
def train(
    recipe: str,
    overrides: tuple[str, ...],
    out: str | None,
    steps: int | None,
    seed: int | None,
    resume: str,
    allow_changes: bool,
    nproc: int | None,
    device: str,
    max_minutes: float,
    dry_run: bool,
    world_size: int | None,
    output: Output,
) -> None:
    """Train a model from a recipe.

    RECIPE is the name of a shipped recipe or the path of a TOML file.

    Everything is written to the folder of the run: metrics, samples, checkpoints and the recipe with all defaults filled in.
    Ctrl-C finishes the step, saves and exits with 130. With --nproc, or under torchrun, many ranks train the same bytes.
    """
    from mok.errors import Interrupted, UsageError
    from mok.recipe import resolve

    resolved = resolve(recipe, overrides, seed=seed, steps=steps)
    if dry_run:
        from mok_cli.dry_run import price, show_price

        show_price(resolved, price(resolved.recipe, world_size), output)
        return
    if world_size is not None:
        raise UsageError("--world-size is for --dry-run; leave it out to train")
    from mok.grid import Grid, Layout, split_ranks

    settled: list[str] = []
    if isinstance(resolved.recipe.moe.ep, str):
        resolved = replace(resolved, recipe=_with_ep(resolved.recipe, nproc))
        settled = [f"moe.ep={resolved.recipe.moe.ep}"]
    if resume == "never" and nproc is not None:
        replicas, ep = split_ranks(resolved.recipe, nproc)
        Layout(Grid.of(resolved.recipe, replicas, ep), replicas, ep)

    from mok.train.processes import launch, launched_ranks, met
    from mok.train.run_folder import plan_start

    launched = launched_ranks()
    if launched is not None and nproc is not None:
        raise UsageError(f"--nproc {nproc}: a launcher has started {launched[1]} ranks already; leave it out")
    rank, world_size = launched or (0, nproc or 1)
    replicas, ep = split_ranks(resolved.recipe, world_size)
    start = plan_start(resolved.recipe, resolved.name, out, resume, allow_changes, replicas, ep, resolved.origins)
    Layout(start.grid, replicas, ep, rank)
    if launched is None and world_size > 1:
        # The same words for every rank, and the one folder that the clock has given a name.
        words = ["train", recipe, "--out", str(start.folder.path), "--resume", resume, "--device", device]
        words += [word for override in (*overrides, *settled) for word in ("--set", override)]
        words += [f"--{name}={value}" for name, value in (("steps", steps), ("seed", seed)) if value is not None]
        words += ["--allow-changes"] * allow_changes + [f"--max-minutes={max_minutes}"]
        words += [] if output.destination is None else [f"--json={output.destination}"]
        raise SystemExit(launch("mok_cli", words, world_size))
    try:
        with met(start, replicas, ep, device) as (agreed, ranks, chosen):
            from mok.train.loop import train as train_run

            metrics = train_run(agreed, ranks, chosen, output.console(), max_minutes=max_minutes)
    except Interrupted:
        if rank:
            raise SystemExit(Interrupted.exit_code) from None
        raise
    if rank == 0:
        output.report({"out": str(agreed.folder.path), "metrics": metrics})


def _with_ep(recipe: Recipe, nproc: int | None) -> Recipe:
    """`recipe` with the group size that `moe.ep = "auto"` means on this machine, as `mok probe-topology` advises."""
    from mok.shapes import layer_shape
    from mok.topology.ranks import ep_of_launch
    from mok.train.processes import launched_ranks

    _, num_ranks = launched_ranks() or (0, nproc or 1)
    ep = ep_of_launch(layer_shape(recipe), num_ranks, recipe.distributed.timeout_s)
    return replace(recipe, moe=replace(recipe.moe, ep=ep))
