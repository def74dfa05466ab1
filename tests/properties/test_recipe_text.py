"""Recipes as text: cutting TOML into statements keeps values and lines, and what is written reads back equal."""

from __future__ import annotations

import tempfile
import tomllib
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from mok.recipe import _statements, dump_toml, load

words = st.text("abc_", min_size=1, max_size=4)
strings = st.text("ab [](){}#'\",=\\\n", max_size=8)


def basic(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def multiline(text: str) -> str:
    return '"""\n' + text.replace("\\", "\\\\").replace('"', '\\"') + '"""'


scalars = st.one_of(
    st.integers(-9, 999).map(str),
    st.sampled_from(["true", "1e-4", "'lit # [x'", "''", '""', "'''a\n]'b'''"]),
    strings.map(basic),
    strings.map(multiline),
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3).map(lambda items: "[ # ]\n" + ",\n".join(items) + "\n]"), max_leaves=4
)
comments = st.sampled_from(["", "  # note", '  # "unclosed [', "\n\n# alone = 1"])


@given(st.lists(st.tuples(words, values, comments), max_size=5, unique_by=lambda entry: entry[0]))
def test_statements_are_the_keys_of_the_text_with_their_lines(entries):
    text, lines = "", {}
    for name, value, comment in entries:
        lines[name] = text.count("\n") + 1
        text += f"{name} = {value}{comment}\n"
    pieces = [(line, tomllib.loads(piece)) for line, piece in _statements(text)]
    merged = {name: value for _, piece in pieces for name, value in piece.items()}
    assert merged == tomllib.loads(text)
    assert {name: line for line, piece in pieces for name in piece} == lines


any_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
fp32 = st.floats(0, 2.0**127, allow_subnormal=False, width=32)


@given(any_text.filter(bool), fp32, st.lists(any_text, max_size=3), st.integers(0, 2**63 - 1))
def test_a_resolved_recipe_reads_back_equal_and_so_do_its_overrides(text, number, texts, seed):
    overrides = [f"data.path={text}", f"optim.lr={number}", f"seed={seed}"]
    if texts and all(part and "," not in part for part in texts) and not texts[0].startswith("["):
        overrides.append(f"train.freeze={','.join(texts)}")
    recipe = load("toy", overrides)
    assert (recipe.data.path, recipe.optim.lr, recipe.seed) == (text, number, seed)
    assert len(overrides) == 3 or recipe.train.freeze == tuple(texts)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "again.toml")
        path.write_text(dump_toml(recipe), encoding="utf-8", newline="")
        assert load(str(path)) == recipe
