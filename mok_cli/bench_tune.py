"""`mok bench tune`: the fastest settings of the expert kernels for a layer on this card, written into a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mok_cli.bench_layer import problems_of
from mok_cli.output import Output, examples, json_option

if TYPE_CHECKING:
    from mok.bench.tune import Trial

__all__ = ["tune"]


@click.command(
    epilog=examples("mok bench tune --shape all", "mok bench tune --shape mixtral-8x7b --tokens 2048 --out mine.toml")
)
@click.option("--shape", default="all", show_default=True, metavar="NAME", help="A layer by name, several with commas, or all.")
@click.option("--tokens", type=click.IntRange(min=1), help="Tokens of a call; by default the layer's own number.")
@click.option("--calls", type=click.IntRange(min=2), default=12, show_default=True, help="Timed calls of each candidate.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The table to write; by default mok's own for this card, which runs then use.",
)
@json_option
def tune(shape: str, tokens: int | None, calls: int, out: Path | None, output: Output) -> None:
    """Measure settings of the megakernel, keep the fastest.

    Settings change time, never a bit: a candidate whose results have other bytes is refused, and so is one that cannot run. The
    row that is written also says how long the staged kernels took; moe.backend = auto takes whichever was faster.
    """
    import torch

    from mok.bench import tune as tuning
    from mok.errors import UsageError
    from mok.launch.tables import TABLES, table_name, table_of

    if not torch.cuda.is_available():
        raise UsageError("mok bench tune needs a CUDA device of compute capability 9.0, and torch sees none")
    device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    path = out or TABLES / f"{table_name(name)}.toml"
    reports = []
    for layer, (layer_shape, count) in problems_of(shape, tokens).items():
        output.line(f"{layer}, {count} tokens, on {name}")
        report = tuning.tune_layer(
            layer, layer_shape, count, device, calls=calls, report=lambda trial: output.line(trial_line(trial))
        )
        tuning.write_row(path, name, report.row)
        table_of.cache_clear()
        row = report.row
        output.line(f"  fastest: {tuning.settings_text(row.settings)}")
        for which, times in (("mega", row.mega_ms), ("staged", row.staged_ms)):
            if times is not None:
                output.line(f"  {which}: {times[0]:.3f} ms forward, {times[1]:.3f} ms with backward")
        output.line(f"  moe.backend = auto takes {'staged' if row.staged_is_faster else 'mega'}")
        reports.append(tuning.as_dict(report))
    output.line(f"written to {path}")
    output.report({"table": str(path), "device": name, "torch": torch.__version__, "layers": reports})


def trial_line(trial: Trial) -> str:
    from mok.bench.tune import settings_text

    result = f"{trial.median_ms:9.3f} ms" if trial.median_ms is not None else f"refused: {trial.refused}"
    return f"  {trial.knob:<15} {settings_text(trial.settings):<48} {result}"
