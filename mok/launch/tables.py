"""The measured tables: which settings were fastest for a layer on a card, and whether the staged kernels were faster still.

Owns the files in `mok/launch/tables/`, which `mok bench tune` writes and which are read strictly, and the choice of a row: a
pure function of shape, tokens and device. A table changes time, never a bit. Read next: `mok/bench/tune.py`.

    device = "NVIDIA H200"                        the card, as its driver names it
    [[shape]]                                     one row for each layer that was measured
    name = "olmoe-1b-7b"
    tokens, hidden_size, intermediate_size, num_experts, top_k
    mega_ms, staged_ms = [forward, forward and backward]; staged_ms may be missing: not measured
    [shape.settings]                              fields of `mok.launch.config.KernelConfig` that differ from its defaults
    forward_order, backward_order = { group_size = 16, groups_per_phase = 1 }
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from mok.errors import UsageError
from mok.launch.config import DeviceFacts, KernelConfig, bad_settings
from mok.shapes import LayerShape

__all__ = [
    "TABLES",
    "Row",
    "Table",
    "choose_config",
    "config_of",
    "dump_table",
    "nearest_row",
    "read_table",
    "table_name",
    "table_of",
]

TABLES = Path(__file__).parent / "tables"

FALLBACK = "h200"
"""The table of a card that none was measured on: the only generation that the megakernel runs on is this one's."""


@dataclass(frozen=True)
class Row:
    """One measured layer. mega_ms, staged_ms: medians of (forward, forward and backward), None where not measured. settings:
    the fastest ones of the megakernel."""

    name: str
    tokens: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    mega_ms: tuple[float, float]
    settings: KernelConfig
    staged_ms: tuple[float, float] | None = None

    @property
    def staged_is_faster(self) -> bool:
        """Whether forward and backward together took less time staged; equal times go to the single launch."""
        return self.staged_ms is not None and self.staged_ms[1] < self.mega_ms[1]


@dataclass(frozen=True)
class Table:
    """A file: the card's name, and its rows by name."""

    device: str
    rows: tuple[Row, ...]


def table_name(device_name: str) -> str:
    """The name that a table of this card has: NVIDIA H200 and its variants are h200."""
    words = device_name.lower().replace("nvidia", " ").split()
    return "".join(letter for letter in (words[0] if words else "unknown") if letter.isalnum() or letter in "-_")


@cache
def table_of(device_name: str) -> Table:
    """The table measured on this model of card, else the one of its generation. Raises UsageError for a file that is missing,
    broken or of another card."""
    name = table_name(device_name)
    path = TABLES / f"{name}.toml"
    if not path.is_file():
        return read_table(TABLES / f"{FALLBACK}.toml")
    table = read_table(path)
    if table_name(table.device) != name:
        raise UsageError(
            f"{path}: holds figures of {table.device}, and its name says {name}; remove it, or write it with `mok bench tune`"
        )
    return table


def nearest_row(table: Table, shape: LayerShape, tokens: int | None = None) -> Row:
    """The row whose sizes differ least: the ratios of H, of I and of the rows an expert gets on average (T K / E; left out
    where T is not known), each taken as at least 1, are multiplied. The first of equals by name."""

    def distance(row: Row) -> float:
        pairs: list[tuple[float, float]] = [
            (shape.hidden_size, row.hidden_size),
            (shape.intermediate_size, row.intermediate_size),
        ]
        if tokens:
            rows = tokens * shape.top_k / shape.num_experts
            pairs.append((rows, row.tokens * row.top_k / row.num_experts))
        return math.prod(max(mine, its) / min(mine, its) for mine, its in pairs)

    return min(table.rows, key=lambda row: (distance(row), row.name, row.tokens))


def choose_config(shape: LayerShape, device: DeviceFacts, tokens: int | None = None) -> KernelConfig:
    """The settings of the row nearest to a call, with as many stages and pieces as fit on `device`."""
    config = nearest_row(table_of(device.name), shape, tokens).settings
    while config.shared_bytes > device.shared_bytes and config.pieces > 3:
        config = replace(config, pieces=config.pieces - 1)
    while config.shared_bytes > device.shared_bytes and config.stages > 2:
        config = replace(config, stages=config.stages - 1)
    return config


def read_table(path: Path) -> Table:
    """Read a table strictly. Raises UsageError with every problem of the file."""
    try:
        text = path.read_text(encoding="utf-8")
        found = tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); write it with `mok bench tune`") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: is not TOML ({error}); write it anew with `mok bench tune`") from None
    problems: list[str] = []
    check_keys("the file", found, {"device", "shape"}, set(), problems)
    if not isinstance(found.get("device"), str):
        problems.append(f"device = {found.get('device')!r}: must be the card's name")
    entries = found.get("shape")
    if not isinstance(entries, list) or not entries:
        problems.append("has no [[shape]]")
        entries = []
    rows = [row for number, entry in enumerate(entries, 1) if (row := read_row(f"shape {number}", entry, problems))]
    seen = {(row.name, row.tokens) for row in rows}
    if len(seen) < len(rows):
        problems.append("names a shape twice with the same tokens")
    if problems:
        raise UsageError(f"{path}: {'; '.join(problems)}; write it anew with `mok bench tune`")
    return Table(found["device"], tuple(rows))


def read_row(where: str, entry: Any, problems: list[str]) -> Row | None:
    """A row, or None after adding what is wrong with it to `problems`."""
    if not isinstance(entry, dict):
        problems.append(f"{where} is not a table")
        return None
    before = len(problems)
    optional = {"staged_ms"}
    required = {field.name for field in dataclasses.fields(Row)} - optional
    check_keys(where, entry, required, optional, problems)
    for name in sorted((required | optional) & entry.keys()):
        value = entry[name]
        if name == "name":
            fine = isinstance(value, str) and bool(value)
        elif name.endswith("_ms"):
            fine = isinstance(value, list) and len(value) == 2 and all(is_number(x) and x > 0 for x in value)
        elif name == "settings":
            fine = isinstance(value, dict)
        else:
            fine = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if not fine:
            problems.append(f"{where}: {name} = {value!r} cannot be")
    if len(problems) > before:
        return None
    values: dict[str, Any] = {
        name: tuple(map(float, value)) if name.endswith("_ms") else value for name, value in entry.items()
    }
    settings = build(KernelConfig, f"{where} settings", entry["settings"], problems)
    problems += [f"{where} settings: {problem}" for problem in bad_settings(settings)]
    return Row(**(values | {"settings": settings}))


def config_of(settings: Mapping[str, Any]) -> KernelConfig:
    """The defaults with `settings`, written as in a table. Raises UsageError with every problem."""
    problems: list[str] = []
    config = build(KernelConfig, "settings", settings, problems)
    if problems or (problems := bad_settings(config)):
        raise UsageError("; ".join(problems))
    return config


def build(kind: type, where: str, values: Mapping[str, Any], problems: list[str]) -> Any:
    """A dataclass of plain numbers and further such dataclasses, from a mapping that may leave fields out; what is wrong with
    it is added to `problems`."""
    hints = get_type_hints(kind)
    given: dict[str, Any] = {}
    for name, value in values.items():
        if name not in hints:
            problems.append(f"{where}: there is no {name}; there are {', '.join(hints)}")
        elif dataclasses.is_dataclass(hints[name]):
            if isinstance(value, dict):
                given[name] = build(hints[name], f"{where} {name}", value, problems)
            else:
                problems.append(f"{where}: {name} = {value!r} is not a table")
        elif hints[name] is float and is_number(value):
            given[name] = float(value)
        elif hints[name] in (int, bool) and type(value) is hints[name] and value >= 0:
            given[name] = value
        else:
            problems.append(f"{where}: {name} = {value!r} cannot be")
    return kind(**given)


def dump_table(table: Table) -> str:
    """The text that `read_table` reads back."""
    lines = [
        "# Measured settings of the expert kernels, written by `mok bench tune`. They change time, never a bit.",
        f"device = {quoted(table.device)}",
    ]
    for row in table.rows:
        lines += ["", "[[shape]]"]
        values = dataclasses.asdict(row)
        settings, usual = values.pop("settings"), dataclasses.asdict(KernelConfig())
        lines += [f"{name} = {toml(value)}" for name, value in values.items() if value is not None]
        lines += ["[shape.settings]", *(f"{name} = {toml(value)}" for name, value in settings.items() if value != usual[name])]
    return "\n".join(lines) + "\n"


def check_keys(where: str, found: Mapping[str, Any], required: set[str], optional: set[str], problems: list[str]) -> None:
    problems += [f"{where}: there is no {name}" for name in sorted(found.keys() - required - optional)]
    problems += [f"{where}: {name} is missing" for name in sorted(required - found.keys())]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{name} = {toml(inner)}" for name, inner in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    return repr(value)
