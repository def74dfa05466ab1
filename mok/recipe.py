"""From TOML to a `Recipe`, strictly: every mistake is found, all of them are reported at once, each with its place.

Owns the reading of recipe files, `--set` overrides, the origin of every value, and the way back to TOML. The keys, their
types and their rules are `mok.config`'s. Imports no torch. Read next: `mok/config.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import tomllib
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mok.config import Recipe
from mok.errors import Problem, RecipeError

__all__ = ["Key", "Resolved", "dump_toml", "find", "keys", "load", "resolve", "shipped", "shipped_folder"]

BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
"""What `--set` takes for a boolean, in any case. A file has TOML's true and false only."""

SMALLEST_FP32, LARGEST_FP32 = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127
"""Magnitudes that single precision, in which numbers of a recipe are used, can hold in full."""


@dataclass(frozen=True)
class Resolved:
    """A recipe with its history.

    name: the recipe's name, for run folders. path: the file it was read from.
    origins: key -> "default", "toy.toml:14", "--set" or "--steps".
    """

    recipe: Recipe
    name: str
    path: Path
    origins: Mapping[str, str]


@dataclass(frozen=True)
class Key:
    """One recipe key: its type, default and rule, as `mok.config` declares them."""

    name: str
    kind: Any
    default: Any
    rule: Mapping[str, Any]

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class _Given:
    """A value that somebody wrote for a key. `text` marks an override, which is typed here and not by TOML."""

    key: str
    value: Any
    where: str
    origin: str
    text: bool = False


def shipped_folder() -> Path:
    """The folder of the recipes that come with mok: inside the package once installed, at the top of a checkout."""
    package = Path(__file__).parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def shipped() -> dict[str, Path]:
    """Name -> file of each shipped recipe, by name."""
    return {path.stem: path for path in sorted(shipped_folder().glob("*.toml"))}


def find(name_or_path: str) -> Path:
    """The file that a RECIPE argument means. A bare name is a shipped recipe first, then a file. Raises RecipeError."""
    looks_like_path = "/" in name_or_path or name_or_path.endswith(".toml")
    if not looks_like_path and name_or_path in shipped():
        return shipped()[name_or_path]
    path = Path(name_or_path)
    if path.is_file():
        return path
    if path.is_dir():
        raise RecipeError([Problem(name_or_path, "is a folder", "name a recipe file in it")])
    if looks_like_path:
        raise RecipeError([Problem(name_or_path, "there is no such file", "check the path, or see `mok recipes list`")])
    near = _nearest(name_or_path, shipped())
    fix = f"did you mean {near}?" if near else f"shipped are: {', '.join(shipped())}"
    raise RecipeError([Problem(name_or_path, "is neither a shipped recipe nor a file", fix)])


def load(name_or_path: str, overrides: Sequence[str] = (), *, seed: int | None = None, steps: int | None = None) -> Recipe:
    """The recipe that `resolve` finds, without its history."""
    return resolve(name_or_path, overrides, seed=seed, steps=steps).recipe


def resolve(name_or_path: str, overrides: Sequence[str] = (), *, seed: int | None = None, steps: int | None = None) -> Resolved:
    """Read a recipe and lay the overrides over it: command line over file over default, whatever the value.

    name_or_path: a path or the name of a shipped recipe. overrides: "moe.num_experts=16", as `--set` takes them.
    seed, steps: the command line's short forms of `seed` and `train.steps`.
    Raises RecipeError with every problem: unknown and repeated keys, types, ranges, rules across keys.
    """
    path = find(name_or_path)
    problems: list[Problem] = []
    given = list(_read(path, problems))
    flags = [("seed", seed, "--seed"), ("train.steps", steps, "--steps")]
    given_late = [_Given(key, value, flag, flag) for key, value, flag in flags if value is not None]
    given_late += _read_overrides(overrides, problems)
    _refuse_repeats(given, problems)
    _refuse_repeats(given_late, problems)

    values: dict[str, Any] = {}
    chosen: dict[str, _Given] = {}
    bad: set[str] = set()
    for entry in [*given, *given_late]:
        try:
            values[entry.key] = _checked(entry)
            chosen[entry.key] = entry
            bad.discard(entry.key)
        except _Refused as refused:
            bad.add(entry.key)
            problems.append(Problem(entry.where, refused.what, refused.fix))

    recipe = _build(values)
    for name, what, fix in recipe.problems():
        # A rule that compares with a refused value would only repeat that refusal in other words.
        if bad.isdisjoint({name, *re.findall(r"[\w.]+", what)}):
            where = chosen[name].where if name in chosen else f"{path} {name} (default)"
            problems.append(Problem(where, what, fix))
    if problems:
        raise RecipeError(problems)
    origins = {name: chosen[name].origin if name in chosen else "default" for name in keys()}
    return Resolved(recipe, path.stem, path, origins)


@functools.cache
def keys() -> dict[str, Key]:
    """Every recipe key by its full name ("seed", "moe.top_k"), in the order of declaration."""
    found: dict[str, Key] = {}
    for name, kind, field in _fields(Recipe):
        if dataclasses.is_dataclass(kind):
            for leaf, leaf_kind, leaf_field in _fields(kind):
                full = f"{name}.{leaf}"
                found[full] = Key(full, leaf_kind, _default(leaf_field), leaf_field.metadata)
        else:
            found[name] = Key(name, kind, _default(field), field.metadata)
    return found


def dump_toml(recipe: Recipe, origins: Mapping[str, str] | None = None) -> str:
    """The whole recipe as TOML that `load` reads back to an equal one; `origins` become comments."""
    lines: list[str] = []
    section = ""
    for name in keys():
        head, _, leaf = name.rpartition(".")
        if head != section:
            section = head
            lines += ["", f"[{section}]"]
        value = getattr(getattr(recipe, head) if head else recipe, leaf)
        comment = f"  # {origins[name]}" if origins else ""
        lines.append(f"{leaf} = {_toml_value(value)}{comment}")
    return "\n".join(lines) + "\n"


# ---- values -----------------------------------------------------------------------------------------------------------


class _Refused(Exception):
    """A value that its key does not take."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.what, self.fix = what, fix


def _checked(entry: _Given) -> Any:
    """The value of `entry`, typed and in range. Raises _Refused."""
    table = keys()
    if entry.key not in table:
        raise _unknown(entry.key, table)
    key = table[entry.key]
    value = _typed_text(entry.value, key) if entry.text else entry.value
    value = _typed(value, key)
    _in_range(value, key)
    return value


def _typed_text(text: str, key: Key) -> Any:
    """The value that the text of an override means for `key`; still to be typed like one from a file."""
    if key.kind is bool:
        return BOOLEANS.get(text.lower(), text)
    if key.kind is str:
        return text
    if _is_list(key.kind) and not text.startswith("["):
        return [part for part in text.split(",") if part]
    try:
        # TOML's own grammar, so that 010, 1:30 and 1e-4x are not taken for something else.
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if list(parsed) == ["value"] else text


def _typed(value: Any, key: Key) -> Any:
    kind = key.kind
    if _is_list(kind):
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise _Refused(f"{_shown(value)} is not a list of strings", 'write ["a", "b"]')
    accepted = typing.get_args(kind) or (kind,)
    if isinstance(value, bool) and bool not in accepted:
        raise _Refused(f"{_shown(value)} is a boolean, not {_type_words(accepted)}", f"write {_example(key)}")
    if isinstance(value, accepted):
        if isinstance(value, str):
            _refuse_broken_text(value)
        return value
    if float in accepted and isinstance(value, int):
        return float(value)
    what = f"{_shown(value)} is {_type_words((type(value),))}, not {_type_words(accepted)}"
    raise _Refused(what, f"write {_meant(value, accepted) or _example(key)}")


def _meant(value: Any, accepted: tuple[type, ...]) -> str | None:
    """What the writer of a value of the wrong type probably meant, as TOML."""
    if int in accepted and isinstance(value, float) and value.is_integer():
        return str(int(value))
    if bool in accepted:
        return "true or false"
    if isinstance(value, str) and not {int, float}.isdisjoint(accepted):
        number = re.match(r"[+-]?\d[\d_]*(\.\d+)?([eE][+-]?\d+)?", value, re.ASCII)
        if number and number[0] == value and not re.match(r"[+-]?0\d", value):
            return f"{value} without quotes"
    if str in accepted:
        return f'"{value}"'
    return None


def _refuse_broken_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _Refused(f"{text!r} is not valid UTF-8", "use a name that is") from None
    if "\0" in text:
        raise _Refused(f"{text!r} holds a zero character", "leave it out")


def _in_range(value: Any, key: Key) -> None:
    rule = key.rule
    if isinstance(value, str):
        if "choices" in rule and value not in rule["choices"]:
            choices = ", ".join(rule["choices"])
            if int in typing.get_args(key.kind):
                raise _Refused(f"{_shown(value)} is neither a number nor {choices}", f"write {_example(key)}")
            near = _nearest(value, rule["choices"])
            raise _Refused(f"{_shown(value)} is not one of {choices}", f"did you mean {near}?" if near else "use one of these")
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if not math.isfinite(value):
        raise _Refused(f"{value} is not a finite number", f"write {_example(key)}")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise _Refused(f"{value} does not fit in 64 bits", f"write {_example(key)}")
    if isinstance(value, float) and value and not SMALLEST_FP32 <= abs(value) <= LARGEST_FP32:
        raise _Refused(f"{value} is 0 or infinity in fp32", f"write {_example(key)}")
    limits = [
        ("low", lambda limit: value >= limit, "at least"),
        ("above", lambda limit: value > limit, "above"),
        ("high", lambda limit: value <= limit, "at most"),
        ("below", lambda limit: value < limit, "below"),
    ]
    if not all(holds(rule[name]) for name, holds, _ in limits if name in rule):
        words = " and ".join(f"{phrase} {rule[name]:g}" for name, _, phrase in limits if name in rule)
        raise _Refused(f"{value} is out of range", f"use a value {words}")
    step = rule.get("multiple_of")
    if step and value % step:
        below, above = value // step * step, (value // step + 1) * step
        near = f"{above}" if below < rule.get("low", below) else f"{below} or {above}"
        raise _Refused(f"{value} is not a multiple of {step}", f"use {near}")


def _is_list(kind: Any) -> bool:
    return typing.get_origin(kind) is tuple


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool | list | dict) else str(value)


def _type_words(kinds: Iterable[type]) -> str:
    words = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list", dict: "a table"}
    return " or ".join(words.get(kind, f"a {kind.__name__}") for kind in kinds)


def _example(key: Key) -> str:
    return f"a value like {_toml_value(key.default)}"


# ---- names ------------------------------------------------------------------------------------------------------------


def _unknown(name: str, table: Mapping[str, Key]) -> _Refused:
    """Why `name` is no key, with the key that was probably meant."""
    section, _, leaf = name.rpartition(".")
    sections = list(dict.fromkeys(full.rpartition(".")[0] for full in table))
    if re.search(r"capacity|drop", leaf) and "dropout" not in leaf:
        return _Refused("mok is dropless: every token reaches its experts, so nothing has a capacity", "remove the key")
    if name in sections:
        return _Refused("is a section, not a key", f"write [{name}] and its keys below")
    if section and section not in sections:
        near = _nearest(section, [other for other in sections if other])
        listed = ", ".join(other for other in sections if other)
        fix = f"did you mean [{near}]?" if near else f"the sections are: {listed}"
        return _Refused(f"there is no section [{section}]", fix)
    place = f"in [{section}]" if section else "at the top level"
    best = _nearest_key(name, table)
    fix = f"did you mean {best}?" if best else "see `mok recipes show toy` or docs/recipes.md for the keys"
    return _Refused(f"there is no key {leaf} {place}", fix)


def _nearest_key(name: str, table: Mapping[str, Key]) -> str | None:
    """The key most like `name`, by name or, for words like learning_rate, by meaning."""
    import difflib  # only where a mistake was made

    section, _, leaf = name.replace("-", "_").rpartition(".")
    words = leaf.replace("_", " ")

    def likeness(key: Key) -> float:
        here = 0.05 if key.name.rpartition(".")[0] == section else 0.0
        by_name = difflib.SequenceMatcher(None, leaf, key.leaf).ratio()
        by_meaning = difflib.SequenceMatcher(None, words, key.rule["doc"]).ratio()
        return max(by_name, by_meaning) + here

    best = max(table.values(), key=likeness)
    return best.name if likeness(best) >= 0.6 else None


def _nearest(word: str, choices: Iterable[str]) -> str | None:
    import difflib

    return next(iter(difflib.get_close_matches(word.lower(), choices, 1)), None)


# ---- reading ----------------------------------------------------------------------------------------------------------


def _read(path: Path, problems: list[Problem]) -> Iterator[_Given]:
    """Each value of a recipe file with its line; what is not TOML goes to `problems`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError([Problem(str(path), f"cannot be read: {error}", "name a readable TOML file")]) from None
    section = ""
    seen_sections: dict[str, int] = {}
    for line, statement in _statements(text):
        try:
            parsed = tomllib.loads(statement)
        except tomllib.TOMLDecodeError as error:
            problems.append(_not_toml(statement, section, f"{path}:{line}", error))
            continue
        if statement.startswith("[["):
            problems.append(Problem(f"{path}:{line} {statement}", "recipes have no lists of tables", "use [section]"))
        elif statement.startswith("["):
            section = next(_flatten(parsed))[0]
            if section in seen_sections:
                what = f"is given twice, first at {path}:{seen_sections[section]}"
                problems.append(Problem(f"{path}:{line} [{section}]", what, "merge the two"))
            seen_sections.setdefault(section, line)
            if section not in _section_names():
                problems.append(_problem(_unknown(f"{section}.", keys()), f"{path}:{line} [{section}]"))
        elif section == "" or section in _section_names():
            for name, value in _flatten(parsed):
                full = f"{section}.{name}" if section else name
                yield _Given(full, value, f"{path}:{line} {full}", f"{path.name}:{line}")


def _not_toml(statement: str, section: str, place: str, error: tomllib.TOMLDecodeError) -> Problem:
    reason = re.sub(r" \(at .*\)$", "", str(error))
    key, equals, value = statement.partition("=")
    if not equals:
        return Problem(place, f"{statement.splitlines()[0]} is not TOML ({reason})", "write key = value, or [section]")
    name = f"{section}.{key.strip()}" if section else key.strip()
    what = f"{value.strip()} is not a TOML value ({reason})"
    fix = _example(keys()[name]) if name in keys() else 'a number, true, false, or "text in quotes"'
    return Problem(f"{place} {name}", what, f"write {fix}")


def _problem(refused: _Refused, where: str) -> Problem:
    return Problem(where, refused.what, refused.fix)


def _section_names() -> set[str]:
    return {name.rpartition(".")[0] for name in keys()} - {""}


def _read_overrides(overrides: Sequence[str], problems: list[Problem]) -> list[_Given]:
    given = []
    for override in overrides:
        name, equals, text = override.partition("=")
        if equals and name.strip():
            given.append(_Given(name.strip(), text, f"--set {override}", "--set", text=True))
        else:
            problems.append(Problem(f"--set {override}", "has no key and value", "write --set moe.top_k=4"))
    return given


def _refuse_repeats(given: Sequence[_Given], problems: list[Problem]) -> None:
    first: dict[str, _Given] = {}
    for entry in given:
        if entry.key in first:
            problems.append(Problem(entry.where, f"is given twice, first at {first[entry.key].where}", "keep one"))
        first.setdefault(entry.key, entry)


_TOKEN = re.compile(
    r'"""(?:\\.|(?!""").)*"""|'
    r"'''(?:(?!''').)*'''|"
    r'"(?:\\.|[^"\\\n])*"|'
    r"'[^'\n]*'|"
    r"#[^\n]*|"
    r"[\[\]{}\n]|"
    r"[^\[\]{}\n\"'#]+|.",
    re.DOTALL,
)
_CHANGE = {"[": 1, "{": 1, "]": -1, "}": -1}


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """(line, statement) for each table header and each key of a TOML text.

    tomllib neither says where a value stands nor goes on after a mistake, so the text is cut here and each piece parsed
    alone. A statement ends at the first line end outside strings and brackets.
    """
    line, start, depth, statement = 1, 1, 0, ""
    for token in _TOKEN.findall(text.replace("\r\n", "\n") + "\n"):
        if token == "\n" and depth <= 0:
            if statement.strip():
                yield start, statement.strip()
            statement, depth = "", 0
        elif not token.startswith("#"):
            if not statement.strip():
                start = line
            depth += _CHANGE.get(token, 0)
            statement += token
        line += token.count("\n")
    if statement.strip():
        yield start, statement.strip()


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """("a.b", value) for each value of nested tables; an empty table is a value."""
    for name, value in table.items():
        full = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{full}.")
        else:
            yield full, value


# ---- dataclasses ------------------------------------------------------------------------------------------------------


def _fields(cls: Any) -> Iterator[tuple[str, Any, dataclasses.Field[Any]]]:
    kinds = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        yield field.name, kinds[field.name], field


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _build(values: Mapping[str, Any]) -> Recipe:
    """The recipe with `values` (by full key, already checked) and defaults for the rest."""
    arguments: dict[str, Any] = {}
    for name, kind, _ in _fields(Recipe):
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            prefix = f"{name}."
            arguments[name] = kind(
                **{key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
            )
        elif name in values:
            arguments[name] = values[name]
    return Recipe(**arguments)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # A JSON string is a TOML basic string, but for the one control character that JSON leaves as it is.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return repr(value)
