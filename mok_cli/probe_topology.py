"""`mok probe-topology`: what the fabric can do, measured if asked, and which ranks should share experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from mok.errors import CheckFailed, UsageError
from mok_cli.output import FileToWrite, FiniteFloat, Output, examples, json_option

if TYPE_CHECKING:
    from pathlib import Path

    from mok.shapes import LayerShape
    from mok.topology.model import Topology

__all__ = ["probe_topology"]

MEASURED_SHAPE = "qwen3-30b-a3b"
"""Whose rows are exchanged by --measure when --shape names no model."""


@click.command(
    "probe-topology",
    epilog=examples(
        "mok probe-topology",
        "mok probe-topology --measure --shape kimi-k2.7 --ep auto",
        "mok probe-topology --require nvlink --expect-gpus 8",
        "torchrun --nproc-per-node 4 -m mok_cli probe-topology",
    ),
)
@click.option("--measure", is_flag=True, help="Measure links and all-to-all, within about a minute.")
@click.option("--nproc", type=click.IntRange(min=1), metavar="N", help="Report from N processes of this host.")
@click.option("--expect-gpus", type=click.IntRange(min=0), metavar="N", help="Exit 3 unless N GPUs are visible.")
@click.option("--require", type=click.Choice(("p2p", "nvlink", "nvl72")), help="Exit 3 unless the GPUs have this.")
@click.option("--shape", metavar="NAME", help="Advise on groups for this model's MoE layer.")
@click.option("--ep", metavar="R|auto", help="Group size to advise on; auto chooses one.")
@click.option("--save", type=FileToWrite(), metavar="FILE", help="Save the picture as a snapshot.")
@click.option("--from", "source", metavar="FILE", help="Look at a snapshot instead of this machine.")
@click.option("--wait", type=FiniteFloat(min=0), default=0.0, metavar="S", help="Wait up to S seconds for the fabric.")
@click.option(
    "--timeout",
    type=FiniteFloat(min=0, min_open=True),
    default=120.0,
    show_default=True,
    metavar="S",
    help="Seconds to wait for other ranks.",
)
@json_option
def probe_topology(
    measure: bool,
    nproc: int | None,
    expect_gpus: int | None,
    require: str | None,
    shape: str | None,
    ep: str | None,
    save: Path | None,
    source: str | None,
    wait: float,
    timeout: float,
    output: Output,
) -> None:
    """Show GPUs and links; advise on expert groups.

    Findings come with fixes and leave the exit code at 0; a requirement that does not hold, or data that did not
    arrive, makes it 3. docs/topology.md explains every line and the JSON.
    """
    if source is not None and (measure or nproc is not None or wait):
        raise UsageError("--from: shows a saved machine, which --measure, --nproc and --wait cannot reach; leave them out")
    layer = _layer(shape, ep)
    topology = _picture(source, nproc, measure, wait, timeout, layer)
    if topology is None:
        return  # another rank of this launch prints
    _report(topology, output, require, expect_gpus, shape, layer, _size(ep), save)


def _layer(shape: str | None, ep: str | None) -> LayerShape | None:
    from mok.shapes import LAYER_SHAPES

    if shape is None:
        if ep is not None:
            raise UsageError(f"--ep {ep}: needs --shape NAME, one of {', '.join(LAYER_SHAPES)}")
        return None
    if shape not in LAYER_SHAPES:
        raise UsageError(f"--shape {shape}: is not known; use one of {', '.join(LAYER_SHAPES)}")
    _size(ep)
    return LAYER_SHAPES[shape]


def _size(ep: str | None) -> int | str:
    if ep in (None, "auto"):
        return "auto"
    if not (ep.isascii() and ep.isdigit()) or int(ep) < 1:
        raise UsageError(f"--ep {ep}: a number of ranks or auto is expected")
    return int(ep)


def _picture(
    source: str | None, nproc: int | None, measure: bool, wait: float, timeout: float, layer: LayerShape | None
) -> Topology | None:
    """The machine asked for: a snapshot, the ranks of a launch, N processes, or this process alone."""
    from mok.shapes import LAYER_SHAPES
    from mok.topology import ranks
    from mok.topology.snapshot import load

    if source is not None:
        return load(source)
    measured = (layer or LAYER_SHAPES[MEASURED_SHAPE]) if measure else None
    if nproc is not None:
        return ranks.spawn(nproc, timeout, measured)
    if ranks.in_launch():
        return ranks.probe_ranks(timeout, measured)
    return ranks.probe_alone(wait, measured)


def _report(
    topology: Topology,
    output: Output,
    require: str | None,
    expect_gpus: int | None,
    shape: str | None,
    layer: LayerShape | None,
    ep: int | str,
    save: Path | None,
) -> None:
    from mok.topology.advice import advise
    from mok.topology.findings import findings
    from mok.topology.gate import unmet
    from mok.topology.snapshot import save as save_snapshot
    from mok.topology.summary import summary
    from mok_cli.topology_tables import show

    advice = advise(topology, layer, ep) if layer is not None else None
    found = findings(topology, expect_gpus)
    missing = unmet(topology, require, expect_gpus)
    show(output.console(), topology, found, shape, layer, advice)
    output.report(summary(topology, found, advice, require, expect_gpus, missing))
    if save is not None:
        save_snapshot(topology, save)
        output.line(f"Saved: {save}")
    if missing:
        raise CheckFailed(missing)
    if topology.measurement is not None and topology.measurement.failed:
        raise CheckFailed(f"{len(topology.measurement.failed)} transfers did not arrive intact, see the findings")
