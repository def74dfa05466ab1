"""`mok bench exchange`: rows between the ranks that share experts, out and back."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import click

from mok.errors import UsageError
from mok_cli.output import FileToWrite, Output, examples, json_option

__all__ = ["exchange"]


@click.command(
    epilog=examples(
        "mok bench exchange --shape toy --nproc 2 --tokens 256", "mok bench exchange --shape qwen3-30b-a3b --nproc 4 --json"
    )
)
@click.option("--shape", default="toy", show_default=True, metavar="NAME", help="A layer by name.")
@click.option("--tokens", type=click.IntRange(min=1), default=2048, show_default=True, help="Tokens of each rank.")
@click.option("--nproc", type=click.IntRange(min=2), default=2, show_default=True, metavar="N", help="Ranks of this machine.")
@click.option("--routing", type=click.Choice(["balanced", "skewed", "one-hot"]), default="balanced", show_default=True)
@click.option("--calls", type=click.IntRange(min=2), default=12, show_default=True, help="Timed calls of each.")
@click.option("--device", default="auto", show_default=True, metavar="NAME", help="auto, cpu or cuda.")
@click.option("--trace", type=FileToWrite(), help="Write a timeline of mega's tasks and movers on all ranks (Chrome trace).")
@json_option
def exchange(
    shape: str, tokens: int, nproc: int, routing: str, calls: int, device: str, trace: Path | None, output: Output
) -> None:
    """Dispatch and combine between ranks, alone and inside a layer's passes.

    Peer memory beside all-to-all by NCCL (gloo on a CPU), each checked first: rows that come back untouched must be the bytes
    that left. Times are those of the slowest rank; GB/s counts what the busiest rank receives from others.
    """
    from mok.bench.exchange import bench_exchange
    from mok.shapes import LAYER_SHAPES

    if shape not in LAYER_SHAPES:
        raise UsageError(f"--shape {shape}: must be one of {', '.join(LAYER_SHAPES)}")
    routed = replace(LAYER_SHAPES[shape], shared_size=0)
    report = bench_exchange(
        routed,
        tokens=tokens,
        nproc=nproc,
        routing=routing,
        calls=calls,
        device=device,
        trace=trace is not None,
        say=output.line,
    )
    output.line(f"{'':<28}{'':<10}{'ms':>9}{'spread':>9}{'MB':>9}{'GB/s':>8}")
    for row in report.rows:
        sent = f"{row.link_bytes / 1e6:>9.1f}{row.gb_per_s:>8.2f}" if row.link_bytes else f"{'':>17}"
        output.line(f"{row.name:<28}{row.what:<10}{row.median_ms:>9.3f}{row.spread_ms:>9.3f}{sent}")
    for name, reason in report.left_out.items():
        output.line(f"{name}: not measured, {reason}")
    if trace is not None and report.trace is not None:
        trace.write_text(json.dumps(report.trace), encoding="utf-8")
        output.line(f"timeline of one forward and backward on {nproc} ranks: {trace}")
    output.report({name: value for name, value in asdict(report).items() if name != "trace"})
    if trace is not None and report.trace is None:
        raise UsageError(f"--trace: nothing to show, since mega was not measured (see above); {trace} was not written")
