"""Cutting a TOML text into statements loses nothing and keeps the lines."""

from __future__ import annotations

import tomllib

from hypothesis import given
from hypothesis import strategies as st

from mok.recipe import _statements

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
