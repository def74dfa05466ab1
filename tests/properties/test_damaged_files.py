"""Damaged files of every kind that the project reads, and recipes made up at random: one of its own errors, or a result;
never another exception, never a hang."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import shutil
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mok import checkpoint, dcp, recipe
from mok.data.shards import ShardWriter, TokenStore
from mok.errors import MokError, UsageError
from mok.safetensors_files import SafetensorsFolder
from mok_cli.dry_run import price

SLOWEST_CPU_S = 10.0
SOAK_CASES = 100_000

TOKENS = [
    b"0",
    b"-1",
    b"1e999",
    b"null",
    b"true",
    b"[]",
    b"{}",
    b'""',
    b"NaN",
    b"\x00",
    b"\xff",
    b"99999999999999999999",
    b'"../x"',
]


def damaged(content: bytes, source: random.Random) -> bytes:
    """`content` after one to four of the things that happen to files: flips, cuts, repeats, zeros, foreign pieces."""
    data = bytearray(content)
    for _ in range(source.randint(1, 4)):
        at = source.randrange(len(data) + 1)
        span = slice(at, at + source.choice((1, 1, 2, 8, 64)))
        kind = source.randrange(7)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << source.randrange(8)
        elif kind == 1:
            del data[span]
        elif kind == 2:
            del data[at:]
        elif kind == 3:
            data[at:at] = data[span]
        elif kind == 4:
            data[at:at] = source.choice(TOKENS)
        elif kind == 5:
            data[span] = source.choice(TOKENS)
        else:
            data[span] = bytes(len(data[span]))
    return bytes(data)


VALUES = {
    int: ("0", "1", "2", "3", "4", "6", "8", "16", "48", "64", "100", "1000000007", "9223372036854775807", "-1"),
    float: ("0", "0.0", "1.0", "0.5", "-0.0", "1e-300", "1e300", "inf", "nan"),
    bool: ("true", "false"),
    str: ("''", "'auto'", "'none'", "'bytes'", "'bpe:512'", "'bpe:'", "'x'", "'\\u0000'", "'99999999999999999999'"),
    list: ("[]", "{}", "['*norm*']", "[1, 2]", "1979-05-27", "99999999999999999999"),
}
"""By the type that they suit."""


def made_up(_: bytes, source: random.Random) -> bytes:
    """A recipe of up to eight keys, most of which exist, with values that suit most of them."""
    known = recipe.keys()
    sections: dict[str, list[str]] = {}
    for name in source.choices([*known, "moe.num_expert", "no.such", "train"], k=source.randint(1, 8)):
        section, _, leaf = name.rpartition(".")
        values = [value for kind in VALUES.values() for value in kind]
        if name in known and source.random() < 0.9:
            choices = [f"'{choice}'" for choice in known[name].rule.get("choices", ())]
            values = choices or list(VALUES.get(type(known[name].default), ("[]",)))
        sections.setdefault(section, []).append(f"{leaf} = {source.choice(values)}")
    return "\n".join(line for name in sorted(sections) for line in [f"[{name}]"] * bool(name) + sections[name]).encode()


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of file. make: writes sound files into a folder and returns those to damage. read: uses them. spoil: what is
    done to the content of one."""

    make: Callable[[Path], list[Path]]
    read: Callable[[Path], object]
    spoil: Callable[[bytes, random.Random], bytes] = damaged


def make_recipe(folder: Path) -> list[Path]:
    path = folder / "r.toml"
    path.write_text(recipe.dump_toml(recipe.load("toy")))
    return [path]


def read_recipe(folder: Path) -> None:
    """As `mok train --dry-run` does, for one rank and for some number that follows from the content and may not fit."""
    path = folder / "r.toml"
    found = recipe.load(str(path))
    price(found)
    with contextlib.suppress(UsageError):
        price(found, 2 + zlib.crc32(path.read_bytes()) % 8)


def make_tokens(folder: Path) -> list[Path]:
    (folder / "tokens").mkdir()
    writer = ShardWriter(folder / "tokens", num_ids=300, shard_tokens=64)
    for document in range(4):
        writer.append(np.arange(50, dtype=np.int64) + document)
        writer.end_document(document)
    writer.finish({"made_by": "a test"})
    return sorted((folder / "tokens").iterdir())


def read_tokens(folder: Path) -> None:
    store = TokenStore(folder / "tokens")
    store.read(0, 200)


def make_safetensors(folder: Path) -> list[Path]:
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, folder / "model.safetensors")
    return [folder / "model.safetensors"]


def read_safetensors(folder: Path) -> None:
    weights = SafetensorsFolder(folder)
    for name in weights.shapes:
        weights.read(name)


def make_checkpoint(folder: Path) -> list[Path]:
    saved = dcp.save(folder / "checkpoints", 1, {"w": torch.arange(8.0), "v": torch.ones(2)}, {"samples": 4}, 0)
    return [*sorted(saved.path.iterdir()), folder / "checkpoints" / "latest"]


def read_checkpoint(folder: Path) -> None:
    found = checkpoint.latest(folder / "checkpoints")
    if found is not None:
        values = {"w": torch.zeros(8), "v": torch.zeros(2)}
        dcp.load(found, values)
        assert torch.equal(values["w"], torch.arange(8.0)), "damaged values were taken for sound ones"
        assert (found.step, found.manifest["samples"]) == (1, 4), "damaged facts were taken for sound ones"


KINDS = {
    "damaged recipe": Kind(make_recipe, read_recipe),
    "made-up recipe": Kind(make_recipe, read_recipe, made_up),
    "tokens": Kind(make_tokens, read_tokens),
    "safetensors": Kind(make_safetensors, read_safetensors),
    "checkpoint": Kind(make_checkpoint, read_checkpoint),
}


def damage_and_read(kind: Kind, folder: Path, num_cases: int, seed: int) -> int:
    """Damage one file of the kind at a time and read; returns how many cases were refused."""
    folder.mkdir()
    files = kind.make(folder)
    sound = {path: path.read_bytes() for path in files}
    refused = 0
    for case in range(num_cases):
        source = random.Random(f"{seed}/{case}")
        path = source.choice(files)
        path.write_bytes(kind.spoil(sound[path], source))
        started = time.process_time()
        try:
            kind.read(folder)
        except MokError:
            refused += 1
        except BaseException as error:
            raise AssertionError(f"case {case} of seed {seed}, {path.name}: {type(error).__name__}: {error}") from error
        assert time.process_time() - started < SLOWEST_CPU_S, f"case {case} of seed {seed} took too long"
        path.write_bytes(sound[path])
    kind.read(folder)
    shutil.rmtree(folder)
    return refused


@pytest.mark.parametrize("name", KINDS)
def test_damage_is_refused_with_an_error_of_our_own(name: str, tmp_path: Path) -> None:
    refused = damage_and_read(KINDS[name], tmp_path / name, num_cases=150, seed=0)
    assert refused > 50, "most damage must be seen"


@pytest.mark.soak
@pytest.mark.parametrize("name", KINDS)
def test_much_damage(name: str, tmp_path: Path) -> None:
    """An equal share of 100,000 cases for each kind; prints what docs/determinism.md records."""
    num_cases = SOAK_CASES // len(KINDS)
    refused = damage_and_read(KINDS[name], tmp_path / name, num_cases, seed=1)
    print(f"\n{name}: {num_cases} damaged files, {refused} refused, no other exception, none over {SLOWEST_CPU_S} s of CPU")
