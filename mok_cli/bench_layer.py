"""`mok bench layer`: one expert layer, ours beside others', checked before it is timed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mok.errors import CheckFailed, UsageError
from mok_cli.output import FileToWrite, Output, examples, json_option

if TYPE_CHECKING:
    from mok.bench.layer import LayerRow
    from mok.shapes import LayerShape

__all__ = ["layer", "problems_of"]

KEYS = ("name", "shape", "direction", "tokens", "routing")
"""What two rows must have in common to be compared."""

CONDITIONS = ("device", "card", "dtype", "threads")
"""What two reports must have in common in their environment, where both say it."""

SLOWER = 1.1
"""Times an old median that a new one may be before `--compare` calls it a regression; equal runs differ by up to 5 %."""


@click.command(epilog=examples("mok bench layer --shape toy --against torch", "mok bench layer --shape all --json layer.json"))
@click.option("--shape", default="toy", show_default=True, metavar="NAME", help="A layer by name, several with commas, or all.")
@click.option("--tokens", type=click.IntRange(min=0), help="Tokens of a call; by default the layer's own number.")
@click.option("--routing", type=click.Choice(["balanced", "skewed", "one-hot"]), default="balanced", show_default=True)
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp32", "mxfp8", "fp8_block"]),
    default="bf16",
    show_default=True,
    help="As train.dtype; an 8-bit layer is timed beside ours in bf16, and with weights kept quantised. Peers compute in bf16.",
)
@click.option("--backend", default="auto", show_default=True, help="Who computes our side, as moe.backend.")
@click.option(
    "--against", default="", metavar="NAME,...", help="Peers: torch, grouped_mm, hf, torchtitan, scattermoe, sonicmoe."
)
@click.option("--recompute", default="none", show_default=True, metavar="NAME,...", help="Ours with none, activations, all.")
@click.option("--calls", type=click.IntRange(min=2), default=24, show_default=True, help="Timed calls of each.")
@click.option("--check/--no-check", default=True, show_default=True, help="Compare with float64 before timing.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--nproc", type=click.IntRange(min=1), default=1, metavar="N", help="Ranks of this machine, TOKENS on each.")
@click.option("--ep", type=click.IntRange(min=1), metavar="R", help="Ranks that share the experts; by default all of them.")
@click.option("--plot", type=FileToWrite(), help="Write a bar chart (needs matplotlib).")
@click.option("--trace", type=FileToWrite(), help="Write a timeline of mega's tasks (Chrome trace).")
@click.option("--compare", type=click.Path(exists=True, dir_okay=False), help="An older --json report to compare with.")
@json_option
def layer(
    shape: str,
    tokens: int | None,
    routing: str,
    dtype: str,
    backend: str,
    against: str,
    recompute: str,
    calls: int,
    check: bool,
    device: str,
    nproc: int,
    ep: int | None,
    plot: Path | None,
    trace: Path | None,
    compare: str | None,
    output: Output,
) -> None:
    """One layer of experts: forward, and forward with backward.

    Expert ids and weights are given, so no router is timed; the plan of our kernels is. A result of ours that is wrong ends the
    run before any figure. A peer that is not installed, fails or is wrong is left out, with a line that says why. With --nproc,
    over ranks that share the experts: ours by each way that rows can travel, beside all-to-all with torch's grouped products.
    """
    if nproc > 1:
        unused = {
            "--against": against,
            "--plot": plot,
            "--trace": trace,
            "--compare": compare,
            "--recompute": recompute != "none",
        }
        if given := [name for name, value in unused.items() if value]:
            raise UsageError(f"{', '.join(given)}: for one rank only; leave out what goes with --nproc {nproc}")
        if dtype not in ("bf16", "fp32"):
            raise UsageError(f"--dtype {dtype}: over ranks a layer is timed in bf16 or fp32")
        _over_ranks(problems_of(shape, tokens), nproc, ep or nproc, routing, dtype, backend, calls, check, device, output)
        return
    if ep is not None:
        raise UsageError(f"--ep {ep}: needs as many ranks or more; add --nproc N")
    import dataclasses

    import torch

    from mok.bench.layer import bench_layer
    from mok.quantization import FORMATS, Quantization

    problems = problems_of(shape, tokens)
    place = torch.device("cuda" if device == "auto" and torch.cuda.is_available() else device.replace("auto", "cpu"))
    if place.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA device; use --device cpu")
    # Before minutes of measuring, not after them.
    if plot and find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install matplotlib")
    if trace and place.type != "cuda":
        raise UsageError("--trace: the megakernel needs a CUDA device of compute capability 9.0")
    old, conditions = _old_report(compare) if compare else ([], {})
    output.line(
        f"{'':<30}{'ms':>9}{'spread':>8}{'steady':>9}{'TFLOP/s':>9}{'dense':>7}{'repeats':>9}{'error':>9}{'saved':>7}{'peak':>7}"
    )
    quantization = Quantization(dtype) if dtype in FORMATS else None
    report = bench_layer(
        problems,
        routing=routing,
        backend=backend,
        against=[name for name in against.split(",") if name],
        check=check,
        device=place,
        dtype=torch.float32 if dtype == "fp32" else torch.bfloat16,
        quantization=quantization,
        recompute=tuple(recompute.split(",")),
        calls=calls,
        report_row=lambda row: output.line(_line(row)),
        say=output.line,
    )
    for row in report.rows:
        for name, ratio in row.ratio_to.items():
            output.line(f"{row.shape} {row.direction}: {row.name} is {ratio:.2f} times as fast as {name}")
    for row in report.rows:
        output.line(_steady_line(row))
    for name, (before, after) in report.environment["dense_tflops"].items():
        output.line(f"{name}: a dense product ran at {_rates(before)} TFLOP/s before, {_rates(after)} after (burst, steady)")
    rows = [dataclasses.asdict(row) for row in report.rows]
    output.report({"rows": rows, "environment": report.environment})
    if plot:
        _plot(report.rows, plot)
    if trace:
        from mok.bench.trace import trace_layer

        name, (layer_shape, count) = next(iter(problems.items()))
        timeline = trace_layer(name, layer_shape, count, routing, place, quantization)
        trace.write_text(json.dumps(timeline), encoding="utf-8")
        output.line(f"timeline of one forward and backward of {name}: {trace}")
    if report.wrong:
        raise CheckFailed("; ".join(report.wrong))
    if compare:
        differing = [
            f"{key} {conditions[key]!r} then, {report.environment[key]!r} now"
            for key in CONDITIONS
            if key in conditions and conditions[key] != report.environment.get(key)
        ]
        if differing:
            raise CheckFailed(
                f"--compare {compare}: measured under other conditions ({'; '.join(differing)}); measure it again"
            )
        _compare(rows, old, output)


def _over_ranks(
    problems: dict[str, tuple[LayerShape, int]],
    nproc: int,
    ep: int,
    routing: str,
    dtype: str,
    backend: str,
    calls: int,
    check: bool,
    device: str,
    output: Output,
) -> None:
    import dataclasses

    import torch

    from mok.bench.layer_ranks import bench_layer_over_ranks

    output.line(f"{'':<46}{'ms':>9}{'spread':>8}{'TFLOP/s':>9}{'error':>9}")
    reports, wrong = {}, []
    for name, (shape, tokens) in problems.items():
        found = bench_layer_over_ranks(
            dataclasses.replace(shape, shared_size=0),
            tokens=tokens,
            nproc=nproc,
            ep=ep,
            routing=routing,
            backend=backend,
            calls=calls,
            check=check,
            device=device,
            dtype=torch.float32 if dtype == "fp32" else torch.bfloat16,
            say=output.line,
        )
        for row in found.rows:
            error = "" if row.relative_error is None else f"{row.relative_error:.1e}"
            label = f"{name} {row.name} {row.direction}"
            output.line(f"{label:<46}{row.median_ms:>9.3f}{row.spread_ms:>8.3f}{row.tflops:>9.2f}{error:>9}")
        for who, why in found.left_out.items():
            output.line(f"{name} {who}: not measured, {why}")
        reports[name] = dataclasses.asdict(found)
        wrong += found.wrong
    output.report(reports)
    if wrong:
        raise CheckFailed("; ".join(wrong))


def _old_report(path: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of an older report, and its environment."""
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
        rows = [{key: row[key] for key in (*KEYS, "median_ms")} for row in report["rows"]]
        for row in rows:
            if not all(isinstance(row[key], str | int) for key in KEYS) or not row["median_ms"] > 0:
                raise ValueError(f"{row} is no row")
        return rows, dict(report["environment"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(
            f"--compare {path}: is no report of `mok bench layer --json` ({type(error).__name__}: {error})"
        ) from None


def problems_of(names: str, tokens: int | None) -> dict[str, tuple[Any, int]]:
    """Layers to time: name -> (shape, tokens)."""
    from mok.bench.layer import TABLE
    from mok.shapes import LAYER_SHAPES

    if names == "all":
        return {name: (shape, count if tokens is None else tokens) for name, (shape, count) in TABLE.items()}
    known = {name: (shape, 512 if name == "toy" else 8192) for name, shape in LAYER_SHAPES.items()} | TABLE
    found = {}
    for name in names.split(","):
        if name not in known:
            raise UsageError(f"--shape {name}: must be all or one of {', '.join(known)}")
        shape, count = known[name]
        found[name] = (shape, count if tokens is None else tokens)
    return found


def _line(row: LayerRow) -> str:
    def mib(count: int | None) -> str:
        return "-" if count is None else f"{count / 2**20:,.0f}"

    what = f"{row.name} {'fwd' if row.direction == 'forward' else 'fwd+bwd'}"
    steady = "-" if row.sustained_ms is None else f"{row.sustained_ms:.3f}"
    error = "-" if row.relative_error is None else f"{row.relative_error:.1e}"
    return (
        f"{row.shape[:9]:<10}{what[:29]:<30}{row.median_ms:>8.3f}{row.spread_ms:>8.3f}{steady:>9}{row.tflops:>9.1f}"
        f"{row.fraction_of_dense:>7.2f}{'yes' if row.bitwise_repeatable else 'NO':>9}{error:>9}"
        f"{mib(row.saved_bytes):>7}{mib(row.peak_bytes):>7}"
    )


def _steady_line(row: LayerRow) -> str:
    """What calls back to back reached, and what the card did meanwhile."""
    if row.sustained_ms is None or row.fraction_of_sustained_dense is None:
        return f"{row.shape} {row.name} {row.direction}: steady not measured"
    card = ""
    if row.sustained_clock_mhz is not None and row.sustained_power_w is not None and row.clock_mhz is not None:
        card = (
            f"; {row.clock_mhz:.0f} MHz in the burst, then {row.sustained_clock_mhz:.0f} MHz at {row.sustained_power_w:.0f} W"
        )
    steady = f"{row.sustained_ms:.3f} ms steady, {row.fraction_of_sustained_dense:.2f} of dense kept up as long"
    return f"{row.shape} {row.name} {row.direction}: {steady}{card}"


def _rates(rate: dict[str, float | None]) -> str:
    sustained = rate["sustained"]
    return f"{rate['burst']:.3g}, {'-' if sustained is None else f'{sustained:.3g}'}"


def _plot(rows: Sequence[LayerRow], path: Path) -> None:
    """Bars of TFLOP/s by shape and direction, one colour for each contestant."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    places = list(dict.fromkeys((row.shape, row.direction) for row in rows))
    names = list(dict.fromkeys(row.name for row in rows))
    figure, axes = pyplot.subplots(figsize=(2 + 1.6 * len(places), 4))
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        chosen = {(row.shape, row.direction): row.tflops for row in rows if row.name == name}
        heights = [chosen.get(place, 0.0) for place in places]
        axes.bar([x + index * width for x in range(len(places))], heights, width, label=name)
    axes.set_xticks(
        [x + 0.4 - width / 2 for x in range(len(places))], [f"{shape}\n{what}" for shape, what in places], fontsize=7
    )
    axes.set_ylabel("TFLOP/s")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)


def _compare(rows: list[dict[str, Any]], old_rows: list[dict[str, Any]], output: Output) -> None:
    """New medians over old ones, row by row; CheckFailed if one is slower than it may be."""
    old = {tuple(row[key] for key in KEYS): row["median_ms"] for row in old_rows}
    slower, num_compared = [], 0
    for row in rows:
        was = old.get(tuple(row[key] for key in KEYS))
        if was is None:
            output.line(f"{row['shape']} {row['direction']} {row['name']}: not in the old report")
            continue
        num_compared += 1
        ratio = row["median_ms"] / was
        output.line(f"{row['shape']} {row['direction']} {row['name']}: {was:.3f} -> {row['median_ms']:.3f} ms ({ratio:.2f})")
        if ratio > SLOWER:
            slower.append(f"{row['shape']} {row['direction']} {row['name']} takes {ratio:.2f} times as long")
    if not num_compared:
        raise CheckFailed("nothing was compared: the old report has none of these rows; name one of the same layers and tokens")
    if slower:
        raise CheckFailed("slower than the old report: " + "; ".join(slower))
