"""Writes the tables of docs/scaling.md from `mok/cost.py`: `python -m tests.house.scaling_docs`, after any change of a rate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mok.cost import MACHINES, LayerTime, layer_time
from mok.shapes import LAYER_SHAPES, LayerShape

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"
TOKENS = 2048
SHAPES = {name: shape for name, shape in LAYER_SHAPES.items() if name != "toy"}


def render(page: str) -> str:
    """`page` with everything between its table markers written anew."""
    for name, rows in {"rates": rates(), "rack-64": rack(64), "rack-72": rack(72), "growth": growth()}.items():
        marker = f"<!-- table: {name} -->\n"
        before, found, rest = page.partition(marker)
        assert found, f"{marker} is missing"
        rule = ["---"] * len(rows[0])
        body = "".join(f"| {' | '.join(row)} |\n" for row in (rows[0], rule, *rows[1:]))
        page = before + marker + body + "<!-- end -->" + rest.partition("<!-- end -->")[2]
    return page


def rates() -> list[list[str]]:
    rows = [["", "dense bf16", "8-bit", "share reached", "link, each way", "share arriving", "memory", "GPUs joined"]]
    for m in MACHINES.values():
        flops = [f"{factor * m.flops / 1e12:.0f} TFLOP/s" for factor in (1, 2)]
        link = [f"{m.link_bytes / 1e9:.0f} GB/s", f"{m.link_reach:.2f}"]
        rows.append([m.name, *flops, f"{m.reach:.2f}", *link, f"{m.memory_bytes / 1e12:.1f} TB/s", str(m.domain)])
    return rows


def rack(ranks: int) -> list[list[str]]:
    """GB300 NVL72, 2048 tokens per GPU: what both passes take."""
    machine = MACHINES["gb300"]
    rows = [["layer", "experts on a GPU", "MB sent", "products bf16", "mxfp8", "rows between GPUs", "memory bf16"]]
    rows[0] += ["at once bf16", "mxfp8", "in turn bf16"]
    for name, shape in SHAPES.items():
        if ranks > shape.num_experts:
            continue
        bf16, mxfp8 = (
            layer_time(replace(shape, ranks=ranks), TOKENS, machine, dtype, once=True) for dtype in ("bf16", "mxfp8")
        )
        sent = bf16.forward.link_s * machine.link_bytes * machine.link_reach / 1e6
        products = [_both(bf16, "products_s"), _both(mxfp8, "products_s")]
        others = [_both(bf16, "link_s"), _both(bf16, "memory_s")]
        ends = [_both(bf16, "overlapped_s"), _both(mxfp8, "overlapped_s"), _both(bf16, "in_turn_s")]
        rows.append([name, _experts(shape, ranks), f"{sent:.0f}", *products, *others, *ends])
    return rows


def growth() -> list[list[str]]:
    """Forward and backward of a layer, all at once, for R ranks of each machine."""
    columns = [("h200", ranks) for ranks in (1, 2, 4, 8)] + [("gb300", ranks) for ranks in (8, 16, 32, 64, 72)]
    rows = [["layer", *(f"{MACHINES[machine].name.split()[0]} {ranks}" for machine, ranks in columns)]]
    for name, shape in SHAPES.items():
        cells = []
        for machine, ranks in columns:
            found = layer_time(replace(shape, ranks=ranks), TOKENS, MACHINES[machine], once=True)
            time_s = found.forward.overlapped_s + found.backward.overlapped_s
            cells.append("" if ranks > shape.num_experts else f"{time_s * 1e3:.2f}")
        rows.append([name, *cells])
    return rows


def _both(time: LayerTime, part: str) -> str:
    """Forward / backward in ms."""
    return " / ".join(f"{getattr(passed, part) * 1e3:.2f}" for passed in (time.forward, time.backward))


def _experts(shape: LayerShape, ranks: int) -> str:
    most, fewest = -(-shape.num_experts // ranks), shape.num_experts // ranks
    return str(most) if most == fewest else f"{fewest} or {most}"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
