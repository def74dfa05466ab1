"""`mok train`: one run of a recipe, or what it would take."""

from __future__ import annotations

from typing import Any

import click

from mok_cli.output import Output, examples, json_option

__all__ = ["train"]


@click.command(epilog=examples("mok train toy", "mok train toy --set data.path=my_text --out runs/mine"))
@click.argument("recipe")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a recipe key.")
@click.option("--out", metavar="DIR", help="Folder of the run [default: runs/RECIPE-TIME].")
@click.option("--steps", type=int, metavar="N", help="Short for --set train.steps=N.")
@click.option("--seed", type=int, metavar="N", help="Short for --set seed=N.")
@click.option("--resume", default="never", show_default=True, metavar="never|auto|PATH", help="Go on from a checkpoint.")
@click.option("--allow-changes", is_flag=True, help="Resume although keys that change the training differ.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option(
    "--max-minutes", type=click.FloatRange(min=0), default=0.0, metavar="M", help="Save and stop after about M minutes."
)
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
    device: str,
    max_minutes: float,
    dry_run: bool,
    world_size: int | None,
    output: Output,
) -> None:
    """Train RECIPE, the name of a shipped recipe or the path of a TOML file.

    Everything is written to the folder of the run: metrics, samples, checkpoints and the recipe with all defaults filled in.
    Ctrl-C finishes the step, saves and exits with 130.
    """
    from mok.errors import UsageError
    from mok.recipe import resolve

    resolved = resolve(recipe, overrides, seed=seed, steps=steps)
    if dry_run:
        from mok_cli.dry_run import price, show_price

        show_price(resolved, price(resolved.recipe, world_size), output)
        return
    if world_size is not None:
        raise UsageError("--world-size is for --dry-run; leave it out to train")
    ep = resolved.recipe.moe.ep if isinstance(resolved.recipe.moe.ep, int) else 1
    if ep > 1:
        raise UsageError(f"moe.ep = {ep}: the experts are shared by {ep} ranks, but one process was started; set moe.ep = 1")

    from mok.train.run_folder import plan_start

    start = plan_start(resolved.recipe, resolved.name, out, resume, allow_changes, replicas=1, ep=1)
    metrics = _run(start, device, output, max_minutes)
    output.report({"out": str(start.folder.path), "metrics": metrics})


def _run(start: Any, device: str, output: Output, max_minutes: float) -> dict[str, Any]:
    from mok.determinism.fingerprint import prepare_cuda
    from mok.grid import Layout
    from mok.train.device import choose_device
    from mok.train.loop import train as train_run
    from mok.train.ranks import OneRank

    chosen = choose_device(device)
    if chosen.type == "cuda":
        prepare_cuda()
    return train_run(start, OneRank(Layout(start.grid)), chosen, output.console(), max_minutes=max_minutes)
