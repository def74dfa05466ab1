"""`mok verify-determinism`: the same bytes again, after a kill, and on other layouts; proved, or the first difference named."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from mok.determinism.names import AXES, LAYER_AXES
from mok.errors import CheckFailed, UsageError
from mok_cli.output import FileToWrite, Output, examples, json_option

if TYPE_CHECKING:
    from mok.config import Recipe
    from mok.determinism.report import Report

__all__ = ["verify_determinism"]

DEFAULT_STEPS = 20


@click.command(
    epilog=examples(
        "mok verify-determinism toy",
        "mok verify-determinism toy --steps 5 --inject 3:lm_head.weight:7",
    )
)
@click.argument("recipe", default="toy")
@click.option(
    "--axis",
    "axes",
    multiple=True,
    type=click.Choice(AXES),
    metavar="NAME",
    help=f"What to change, by default all that can run: {', '.join(AXES)}.",
)
@click.option("--target", type=click.Choice(["recipe", "layer"]), default="recipe", help="A training run, or one MoE layer.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a recipe key.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Where to compute.")
@click.option("--runs", type=click.IntRange(min=2), metavar="N", help="Runs of the axis rerun. [2; layer: 30]")
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="Steps of each run. [20; layer: 2]")
@click.option("--trace", is_flag=True, help="Record the output of every block too.")
@click.option("--inject", metavar="FAULT", default="", help="Plant STEP:TENSOR:BIT, order or clock; it must be found.")
@click.option("--compare", nargs=2, metavar="RUN RUN", type=click.Path(path_type=Path), help="Compare two finished runs.")
@click.option("--baseline", type=FileToWrite(), metavar="FILE", help="Compare with this manifest, or write it.")
@click.option("--force", is_flag=True, help="Compare with a manifest of another environment.")
@click.option("--junit", type=FileToWrite(), metavar="FILE", help="Write JUnit XML too.")
@click.option("--keep", type=click.Path(file_okay=False, path_type=Path), help="Keep the runs in this empty folder.")
@json_option
def verify_determinism(
    recipe: str,
    axes: tuple[str, ...],
    target: str,
    overrides: tuple[str, ...],
    device: str,
    runs: int | None,
    steps: int | None,
    trace: bool,
    inject: str,
    compare: tuple[Path, Path] | None,
    baseline: Path | None,
    force: bool,
    junit: Path | None,
    keep: Path | None,
    output: Output,
) -> None:
    """Prove that RECIPE gives the same bytes.

    Every axis runs in fresh processes and is compared, tensor by tensor and step by step, with one reference run. The first
    divergence is named: step, phase, tensor, index, both values. Exit code 3 means that something diverged.
    """
    from mok import recipe as recipes

    if compare is not None:
        _refuse_unused("--compare", used={"compare", "junit", "output"})
        from mok.determinism.runs import compare_runs

        report = compare_runs(*compare)
    elif target == "layer":
        _refuse_unused("--target layer", unused={"trace", "baseline", "force", "keep"})
        resolved = recipes.load(recipe, overrides)
        import torch

        from mok.determinism.layer import verify_layer
        from mok.determinism.step import DEFAULT_RUNS

        report = verify_layer(
            resolved,
            axes or LAYER_AXES,
            device=torch.device(device_of(device)),
            runs=runs or DEFAULT_RUNS,
            steps=steps or 2,
            inject=inject,
        )
    else:
        if force and baseline is None:
            raise UsageError("--force: is about a --baseline, and none is given; leave it out")
        report = verify_training(
            recipes.load(recipe, overrides, steps=steps or DEFAULT_STEPS),
            axes or (("rerun",) if inject else AXES),
            device=device_of(device),
            runs=runs or 2,
            activations=trace,
            inject=inject,
            baseline=baseline,
            force=force,
            keep=keep,
            output=output,
        )
    show(report, output)
    output.report(report.to_dict())
    if junit is not None:
        report.write_junit(junit)
    if report.diverged:
        raise CheckFailed(f"diverged: {', '.join(axis.axis for axis in report.diverged)}")


def _refuse_unused(mode: str, *, used: Collection[str] | None = None, unused: Collection[str] = ()) -> None:
    """UsageError for what was given and would make no difference in this mode."""
    context = click.get_current_context()
    given = [
        parameter.opts[0] if isinstance(parameter, click.Option) else parameter.human_readable_name
        for parameter in context.command.params
        if parameter.name and (parameter.name in unused if used is None else parameter.name not in used)
        if context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    ]
    if given:
        raise UsageError(f"{mode}: makes no use of {', '.join(given)}; leave that out")


def verify_training(
    recipe: Recipe,
    axes: Sequence[str],
    *,
    device: str,
    runs: int,
    activations: bool,
    inject: str,
    baseline: Path | None,
    force: bool,
    keep: Path | None,
    output: Output,
) -> Report:
    from mok.determinism.axes import Workshop, verify_recipe
    from mok.determinism.report import add_baseline, read_baseline

    if baseline is not None and baseline.exists():
        read_baseline(baseline, recipe.to_dict())  # what cannot be compared is refused before the runs
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise UsageError(f"--keep {keep}: is not empty; name a new folder")
    folder = keep or Path(tempfile.mkdtemp(prefix="mok-verify-"))
    try:
        shop = Workshop(folder, recipe, device, activations, lambda text: output.line(f"running {text}"))
        report, trace = verify_recipe(shop, axes, runs=runs, inject=inject)
        if baseline is not None:
            add_baseline(report, baseline, trace, recipe.to_dict(), force=force)
        return report
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def device_of(name: str) -> str:
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: no CUDA device on this machine; use --device cpu")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"


def show(report: Report, output: Output) -> None:
    """A table of the axes, then what diverged, then where this was run."""
    from rich.table import Table

    table = Table("axis", "verdict", "steps", "tensors", "bytes", "seconds", "what", box=None, pad_edge=False)
    for axis in report.axes:
        counts = (
            ("", "", "")
            if axis.status == "not run"
            else (f"{axis.num_steps:,}", f"{axis.num_tensors:,}", f"{axis.num_bytes:,}")
        )
        what = axis.reason or ", ".join(axis.arms[1:])
        table.add_row(axis.axis, axis.status, *counts, f"{axis.seconds:.1f}", what)
    console = output.console()
    console.print(table, soft_wrap=False)
    for axis in report.diverged:
        output.line(f"\n{axis.axis}: first divergence\n{axis.finding}")
    for note in report.notes:
        output.line(note)
    if report.state_sha256:
        output.line(f"state_sha256 {report.state_sha256}")
    output.line(
        "environment " + ", ".join(f"{name} {value}" for name, value in report.fingerprint.items() if value not in ("", []))
    )
