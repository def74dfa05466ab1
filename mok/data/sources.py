"""The files behind `data.path` and the documents in them, as text or as tokens.

Owns which files count, how each format is read and every complaint about their content. Must not know tokenizers, shards or
recipes beyond the two values it is given. Reads in bounded pieces, so a file may be larger than memory.
Read next: `mok/data/tokenizer.py`, then `mok/data/shards.py`.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import json
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mok.errors import DataError

__all__ = ["Source", "TextReader", "expanded", "find_sources", "read_token_blocks"]

PIECE_BYTES = 1 << 20
"""Text is handed on in pieces of about this size, cut after a line."""

STDLIB_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data"}
"""Folders of the standard library that are tests, generated tables, or not the library: about 10 MB of source remain."""

KIND_OF_SUFFIX = {".jsonl": "jsonl", ".jsonl.gz": "jsonl", ".parquet": "parquet", ".u16": "tokens", ".u32": "tokens"}


@dataclass(frozen=True)
class Source:
    """One file: `name` is its path below `data.path` with forward slashes, `kind` is text, jsonl, parquet or tokens,
    or none for what is no file (a link to a folder or to nothing, a pipe), which is left out with a notice."""

    path: Path
    name: str
    kind: str

    def stamp(self) -> tuple[str, int, int]:
        """Name, size in bytes and modification time in ns: what tells a changed file from a known one without reading it."""
        status = self.path.lstat() if self.kind == "none" else self.path.stat()
        return self.name, status.st_size, status.st_mtime_ns


def find_sources(path: str) -> list[Source]:
    """The files that `data.path` names, sorted by name, so that every machine reads them in one order.

    "stdlib" is the source of the running Python's standard library (see `STDLIB_SKIPPED`). In a folder hidden files and
    folders are left out. Raises DataError if there is nothing to read.
    """
    if path == "stdlib":
        return _walk(Path(sysconfig.get_paths()["stdlib"]), path, skipped=STDLIB_SKIPPED, suffix=".py")
    root = expanded(path, "data.path")
    if root.is_dir():
        return _walk(root, path, skipped={"__pycache__"})
    if not root.exists():
        raise DataError(f'data.path = "{path}": there is no such file or folder (looked from {Path.cwd()}); correct the path')
    if not root.is_file():
        raise DataError(f'data.path = "{path}": is a device or pipe, which cannot be read again; give a file or a folder')
    return [Source(root, root.name, _kind(root.name))]


def expanded(path: str, key: str) -> Path:
    """`path` with ~ as the home folder. Raises DataError, naming the recipe's `key`, where there is no such home."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise DataError(f'{key} = "{path}": {error}; write the path without ~') from None


def _walk(root: Path, path: str, *, skipped: set[str], suffix: str = "") -> list[Source]:
    def unreadable(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror}); check its permissions") from error

    found = []
    for folder, folders, files in os.walk(root, onerror=unreadable):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        # A link to a folder may lead in a circle, and is not followed.
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for file in [*files, *links]:
            path_of_file = Path(folder, file)
            if not file.startswith(".") and file.endswith(suffix):
                name = path_of_file.relative_to(root).as_posix()
                found.append(Source(root / name, name, _kind(name) if path_of_file.is_file() else "none"))
    if not any(source.kind != "none" for source in found):
        kind = f"{suffix} " if suffix else ""
        raise DataError(
            f'data.path = "{path}": the folder {root} holds no {kind}files; point it at text, .jsonl, .parquet or .u16'
        )
    return sorted(found, key=lambda source: source.name)


def _kind(name: str) -> str:
    for suffix, kind in KIND_OF_SUFFIX.items():
        if name.lower().endswith(suffix):
            return kind
    return "text"


class TextReader:
    """Reads documents as text, and counts what it had to leave out or replace.

    invalid_utf8: "error" stops at the first byte that is not UTF-8; "replace" puts U+FFFD there and counts it.
    alone: the user named this one file, so a binary file is an error; in a folder it is left out and listed in `skipped`.
    """

    def __init__(self, invalid_utf8: str, *, alone: bool) -> None:
        self.invalid_utf8 = invalid_utf8
        self.alone = alone
        self.replaced = 0
        self.skipped: list[str] = []

    def documents(self, source: Source) -> Iterator[Iterable[str]]:
        """The documents of one file, each as its pieces of text in order; exhaust one before asking for the next."""
        with _readable(source):
            if source.kind == "none":
                self.skipped.append(source.name)
            elif source.kind == "jsonl":
                yield from self._jsonl(source)
            elif source.kind == "parquet":
                yield from self._parquet(source)
            elif not self._is_binary(source):
                yield self._text(source)

    def _is_binary(self, source: Source) -> bool:
        with open(source.path, "rb") as file:
            head = file.read(8192)
        for mark, encoding in ((codecs.BOM_UTF16_LE, "UTF-16"), (codecs.BOM_UTF16_BE, "UTF-16")):
            if head.startswith(mark):
                raise DataError(
                    f"{source.path}: line 1, byte 0: this is {encoding}, not UTF-8; convert it, for example with "
                    f"`iconv -f UTF-16 -t UTF-8`"
                )
        zero = head.find(0)
        if zero < 0:
            return False
        if self.alone:
            line = head.count(b"\n", 0, zero) + 1
            raise DataError(
                f"{source.path}: line {line}, byte {zero}: a zero byte, so this is a binary file; give text or .jsonl"
            )
        self.skipped.append(source.name)
        return True

    def _text(self, source: Source) -> Iterator[str]:
        with _readable(source), open(source.path, "rb") as file:
            offset, line = 0, 1
            while block := file.read(PIECE_BYTES):
                block += file.readline()
                text = self._decode(block, source, offset, line)
                yield text.removeprefix("\ufeff") if offset == 0 else text
                offset += len(block)
                line += block.count(b"\n")

    def _jsonl(self, source: Source) -> Iterator[list[str]]:
        opened = gzip.open(source.path, "rb") if source.name.lower().endswith(".gz") else open(source.path, "rb")  # noqa: SIM115
        offset = 0
        with opened as file:
            for number, line in enumerate(file, start=1):
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if line.strip():
                    yield [self._json_text(self._decode(line, source, offset, number), f"{source.path}: line {number}")]
                offset += len(line)

    def _json_text(self, line: str, where: str) -> str:
        try:
            record = json.loads(line.rstrip())
        except json.JSONDecodeError as error:
            raise DataError(f"{where}, column {error.colno}: not JSON ({error.msg}); correct or remove the line") from None
        except (ValueError, RecursionError) as error:  # an integer of thousands of digits, brackets thousands deep
            raise DataError(f"{where}: cannot be read as JSON ({error}); correct or remove the line") from None
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            raise DataError(f'{where}: no "text" field with a string; every line must look like {{"text": "..."}}')
        text = record["text"]
        try:
            text.encode()
        except UnicodeEncodeError as error:
            if self.invalid_utf8 == "error":
                raise DataError(
                    f"{where}: half of a surrogate pair, \\u{ord(text[error.start]):04x}, is not text; correct it, or set "
                    f'data.invalid_utf8 = "replace"'
                ) from None
            clean = "".join("\ufffd" if "\ud800" <= character <= "\udfff" else character for character in text)
            self.replaced += clean.count("\ufffd") - text.count("\ufffd")
            return clean
        return text

    def _parquet(self, source: Source) -> Iterator[list[str]]:
        pyarrow = _pyarrow(source)
        try:
            file = pyarrow.parquet.ParquetFile(source.path)
            if (names := file.schema_arrow.names).count("text") != 1:
                found = "two" if "text" in names else "no"
                raise DataError(f'{source.path}: {found} "text" column among {", ".join(names)}; rename the right one')
            kind = file.schema_arrow.field("text").type
            kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
            if str(kind) not in ("string", "large_string", "string_view"):
                raise DataError(f'{source.path}: the "text" column is of {kind}, not of strings; convert it')
            row = 0
            for batch in file.iter_batches(batch_size=1024, columns=["text"]):
                for text in batch.column(0).to_pylist():
                    if not isinstance(text, str):
                        raise DataError(
                            f'{source.path}: row {row}: "text" is {type(text).__name__}, not a string; drop the row'
                        )
                    yield [text]
                    row += 1
        except (ValueError, pyarrow.ArrowException) as error:
            raise DataError(f"{source.path}: not a readable parquet file ({error}); write it again") from error

    def _decode(self, block: bytes, source: Source, offset: int, line: int) -> str:
        try:
            return block.decode()
        except UnicodeDecodeError as error:
            if self.invalid_utf8 == "error":
                line += block.count(b"\n", 0, error.start)
                raise DataError(
                    f"{source.path}: line {line}, byte {offset + error.start}: 0x{block[error.start]:02x} is not valid UTF-8; "
                    f'convert the file, or set data.invalid_utf8 = "replace"'
                ) from None
        text = block.decode(errors="replace")
        self.replaced += text.count("\ufffd") - block.count("\ufffd".encode())
        return text


def _pyarrow(source: Source) -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            f"{source.path}: reading parquet needs pyarrow; `pip install pyarrow`, or convert it to .jsonl"
        ) from None
    return pyarrow


def read_token_blocks(source: Source) -> Iterator[np.ndarray]:
    """The ids of a raw token file (.u16 or .u32, little-endian, nothing else in it) in blocks of uint32."""
    item = np.dtype("<u2") if source.name.lower().endswith(".u16") else np.dtype("<u4")
    with _readable(source), open(source.path, "rb") as file:
        while block := file.read(PIECE_BYTES):
            if len(block) % item.itemsize:
                raise DataError(
                    f"{source.path}: not a whole number of {item.itemsize}-byte ids, so it is cut short; copy it again"
                )
            yield np.frombuffer(block, dtype=item).astype(np.uint32)


@contextlib.contextmanager
def _readable(source: Source) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{source.path}: cannot be read ({error}); check its permissions and whether it is complete") from error
