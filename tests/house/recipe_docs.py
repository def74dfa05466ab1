"""Writes docs/recipes.md from the recipe dataclasses: `python -m tests.house.recipe_docs`, after any change of a key."""

from __future__ import annotations

import typing
from pathlib import Path

from mok.config import Recipe
from mok.recipe import Key, dump_toml, keys

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"

OPENING = """\
# Recipes

A recipe is a TOML file that says what a run is. It states only what differs from the defaults below, which are those of a
toy model. Print every value of a recipe and where it came from with `mok recipes show NAME`, check one with
`mok recipes check PATH`, start from a shipped one with `mok recipes copy NAME DIR`.

`--set KEY=VALUE` overrides one key, for instance `--set moe.num_experts=16`. The command line beats the file, the file beats
the default, also where the value is false, 0 or empty. A value is typed by its key: `1e-4` is a number wherever a number is
wanted, `010` is one nowhere; text is taken as it is, a list of strings is `a,b` or `["a", "b"]`, and a boolean is true, yes,
on, 1 or false, no, off, 0 in any case. Unknown or repeated keys, wrong types, values out of range and sizes that do not go
together are errors, all reported at once.

This page is generated from `mok/config.py`.
"""


def render() -> str:
    """The whole page."""
    written = [line.partition(" = ")[2] for line in dump_toml(Recipe()).splitlines() if " = " in line]
    defaults = dict(zip(keys(), written, strict=True))
    parts = [OPENING]
    section = None
    for key in keys().values():
        head = key.name.rpartition(".")[0]
        if head != section:
            section = head
            parts.append(_heading(section))
        parts.append(f"| `{key.leaf}` | {_kind(key)} | `{defaults[key.name]}` | {key.rule['doc']} |\n")
    return "".join(parts)


def _heading(section: str) -> str:
    table = "| key | value | default | meaning |\n|---|---|---|---|\n"
    if not section:
        return f"\n## At the top\n\n{table}"
    kind = typing.get_type_hints(Recipe)[section]
    return f"\n## [{section}]\n\n{kind.__doc__}\n\n{table}"


def _kind(key: Key) -> str:
    """The type and range of a key in words."""
    rule = key.rule
    kinds = typing.get_args(key.kind) or (key.kind,)
    words = {bool: "true or false", int: "integer", float: "number", str: "text"}
    if typing.get_origin(key.kind) is tuple:
        return "list of texts"
    if "choices" in rule:
        choices = ", ".join(f"`{choice}`" for choice in rule["choices"])
        text = choices if kinds == (str,) else f"integer, or {choices}"
    else:
        text = " or ".join(words[kind] for kind in kinds)
    bounds = {"low": "from", "above": "above", "high": "to", "below": "below", "multiple_of": "multiple of"}
    limits = [f"{word} {rule[name]}" for name, word in bounds.items() if name in rule]
    return ", ".join([text, *limits])


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
