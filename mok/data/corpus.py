"""A corpus ready to train on: sources tokenized once, kept in the user's cache folder, opened in milliseconds after that.

Owns the cache: its key, building beside and renaming, and that several processes may ask at once. Reading formats, tokenizers,
shards and packing are `sources.py`, `tokenizer.py`, `shards.py` and `loader.py` in this folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b, sha256
from pathlib import Path

import numpy as np

from mok.config import DataConfig
from mok.data.loader import TokenView, split_documents
from mok.data.order import permute
from mok.data.shards import MANIFEST, ShardWriter, TokenStore
from mok.data.sources import Source, TextReader, expanded, find_sources, read_token_blocks
from mok.data.tokenizer import Tokenizer
from mok.errors import DataError, UsageError

__all__ = ["Corpus", "open_corpus"]

log = logging.getLogger("mok.data")

BATCH_CHARACTERS = 1 << 22
"""Text is tokenized in batches of about this size, enough to keep every core busy."""

SAY_EVERY_S = 10.0
"""Seconds between two words on how far tokenizing is."""


class Corpus:
    """Tokenizer and token views of one `[data]` section.

    train, validation: disjoint views by document, the same for every seed. everything: all documents.
    fingerprint: SHA-256 of all token ids and document borders. notices: sentences a user should read (files left out, bytes
    replaced).
    """

    def __init__(self, folder: Path, validation_fraction: float) -> None:
        store = TokenStore(folder)
        self.folder = folder
        self.tokenizer = Tokenizer.load(folder)
        if self.tokenizer.sha256 != store.manifest["tokenizer_sha256"]:
            raise DataError(f"{folder / 'tokenizer.json'}: not the tokenizer that made these shards; {store.remedy}")
        self.fingerprint = store.fingerprint
        self.num_tokens = store.num_tokens
        self.num_documents = len(store.document_ends)
        self.text_bytes: int = store.manifest["text_bytes"]
        self.notices: list[str] = store.manifest["notices"]
        train, validation = split_documents(store, validation_fraction)
        self.train = TokenView(store, train, "training")
        self.validation = TokenView(store, validation, "validation")
        self.everything = TokenView(store, np.array([[0, store.num_tokens]]), "whole")


def open_corpus(config: DataConfig, say: Callable[[str], None] = log.info) -> Corpus:
    """The corpus that a recipe's `[data]` section describes, tokenized now if no earlier run left it in the cache.

    say: is told that text is being tokenized, and every `SAY_EVERY_S` how far that is.
    Raises DataError for a missing or empty path, text that cannot be read (file, line and byte), ids outside of the tokenizer
    and a damaged cache; UsageError for a `data.tokenizer` that cannot be meant.
    """
    sources = find_sources(config.path)
    tokenizer = _named_tokenizer(config.tokenizer, sources)
    folder = _cache_folder(config) / f"corpus-{_key(config, sources, tokenizer)}"
    if not (folder / MANIFEST).is_file():
        with _cache_errors(folder), _building_alone(folder) as unfinished:
            if not (folder / MANIFEST).is_file():
                say(f"tokenizing {config.path}, this first time only, into {folder}")
                _build(unfinished, config, sources, tokenizer, say)
                os.rename(unfinished, folder)
    return Corpus(folder, config.validation_fraction)


def _named_tokenizer(spec: str, sources: list[Source]) -> Tokenizer | int:
    """The tokenizer that exists already, or the size of the one to train."""
    if spec == "bytes":
        return Tokenizer.of_bytes()
    if not spec.startswith("bpe:"):
        return Tokenizer.load(spec)
    if not (spec[4:].isascii() and spec[4:].isdigit() and len(spec) < 12):
        raise UsageError(f'data.tokenizer = "{spec}": SIZE must be a whole number; write for example bpe:512')
    if raw := [source.name for source in sources if source.kind == "tokens"]:
        raise UsageError(
            f'data.tokenizer = "{spec}": {raw[0]} holds token ids already; name the tokenizer.json that they were made with'
        )
    return int(spec[4:])


def _cache_folder(config: DataConfig) -> Path:
    if config.cache:
        return expanded(config.cache, "data.cache")
    return expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "data.cache") / "mok"


def _key(config: DataConfig, sources: list[Source], tokenizer: Tokenizer | int) -> str:
    """What the shards depend on, short enough for a folder name. Files count by name, size and time, not by reading them."""
    root = str(sources[0].path.resolve()).removesuffix(sources[0].name)
    described = tokenizer if isinstance(tokenizer, int) else tokenizer.sha256
    facts = [1, root, described, config.invalid_utf8, [source.stamp() for source in sources]]
    return sha256(json.dumps(facts).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _cache_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        cause = "no space is left" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)
        raise DataError(
            f"{folder.parent}: tokens cannot be cached there ({cause}); set data.cache to another folder"
        ) from error


@contextlib.contextmanager
def _building_alone(folder: Path) -> Iterator[Path]:
    """An empty folder beside `folder` to build in, one process at a time; what a killed build left behind is removed.

    The lock only saves work: where a file system has none, each process builds its own and the first rename wins.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
            for stale in folder.parent.glob(f"{folder.name}.building-*"):
                shutil.rmtree(stale, ignore_errors=True)
        unfinished = folder.with_name(f"{folder.name}.building-{uuid.uuid4().hex}")
        unfinished.mkdir()
        try:
            yield unfinished
        except OSError:
            if not (folder / MANIFEST).is_file():
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def _build(
    folder: Path, config: DataConfig, sources: list[Source], tokenizer: Tokenizer | int, say: Callable[[str], None]
) -> None:
    alone = len(sources) == 1 and not expanded(config.path, "data.path").is_dir()
    if isinstance(tokenizer, int):
        sample = _sample(sources, config.invalid_utf8, alone=alone, num_bytes=(4 << 20) + 1024 * tokenizer)
        tokenizer = Tokenizer.train(sample, tokenizer)
    tokenizer.save(folder)
    reader = TextReader(config.invalid_utf8, alone=alone)
    writer = ShardWriter(folder, tokenizer.size)
    text_bytes = 0
    for source in sources:
        if source.kind == "tokens":
            text_bytes += _write_tokens(writer, source, tokenizer)
    documents = (pieces for source in sources for pieces in _text_of(reader, source))
    text_bytes += _write_text(writer, documents, tokenizer, say)
    if writer.num_tokens == 0:
        raise DataError(f'data.path = "{config.path}": no text in {len(sources)} file(s); give files that are not empty')
    writer.finish({"text_bytes": text_bytes, "tokenizer_sha256": tokenizer.sha256, "notices": _notices(reader)})


def _text_of(reader: TextReader, source: Source) -> Iterator[Iterable[str]]:
    if source.kind != "tokens":
        yield from reader.documents(source)


def _sample(sources: list[Source], invalid_utf8: str, *, alone: bool, num_bytes: int) -> Iterator[str]:
    """Text to train a tokenizer on: whole pieces of the files, in an order that mixes the folder, up to a number of bytes."""
    reader = TextReader(invalid_utf8, alone=alone)
    for index in range(len(sources)):
        source = sources[permute(index, len(sources), 0, 0)]
        for pieces in reader.documents(source):
            for piece in pieces:
                yield piece
                num_bytes -= len(piece)
                if num_bytes <= 0:
                    return


def _write_text(
    writer: ShardWriter, documents: Iterable[Iterable[str]], tokenizer: Tokenizer, say: Callable[[str], None]
) -> int:
    """Tokenize documents in order, each closed by the end token; returns the bytes of their text."""
    text_bytes = 0
    batch: list[tuple[str, int | None]] = []
    waiting = 0
    last_said = time.monotonic()
    end = np.array([tokenizer.end_id], dtype=np.uint32)

    def flush() -> None:
        for ids, (_, content_hash) in zip(tokenizer.encode_batch([text for text, _ in batch]), batch, strict=True):
            writer.append(ids)
            if content_hash is not None:
                writer.append(end)
                writer.end_document(content_hash)
        batch.clear()

    for pieces in documents:
        digest = blake2b(digest_size=8)
        size = 0
        for piece in pieces:
            raw = piece.encode()
            digest.update(raw)
            size += len(raw)
            batch.append((piece, None))
            waiting += len(piece)
            if waiting >= BATCH_CHARACTERS:
                flush()
                waiting = 0
                if time.monotonic() - last_said > SAY_EVERY_S:
                    say(f"tokenized {(text_bytes + size) / 1e6:,.0f} MB of text so far")
                    last_said = time.monotonic()
        text_bytes += size
        if size:
            batch.append(("", int.from_bytes(digest.digest(), "little")))
    flush()
    return text_bytes


def _write_tokens(writer: ShardWriter, source: Source, tokenizer: Tokenizer) -> int:
    """Copy ids of a raw file, cut into documents after each end token; returns the bytes of text that they stand for."""
    text_bytes, offset = 0, 0
    digest = blake2b(digest_size=8)
    for ids in read_token_blocks(source):
        if (outside := np.flatnonzero(ids >= tokenizer.size)).size:
            first = int(outside[0])
            raise DataError(
                f"{source.path}: token {offset + first} has id {ids[first]}, but the tokenizer has {tokenizer.size} ids; "
                f"name the tokenizer.json that the file was made with in data.tokenizer"
            )
        text_bytes += int(tokenizer.bytes_of_id[ids].sum())
        for part in np.split(ids, np.flatnonzero(ids == tokenizer.end_id) + 1):
            writer.append(part)
            digest.update(part.tobytes())
            if len(part) and part[-1] == tokenizer.end_id:
                writer.end_document(int.from_bytes(digest.digest(), "little"))
                digest = blake2b(digest_size=8)
        offset += len(ids)
    writer.end_document(int.from_bytes(digest.digest(), "little"))
    return text_bytes


def _notices(reader: TextReader) -> list[str]:
    notices = []
    if reader.skipped:
        shown = ", ".join(reader.skipped[:5]) + (", ..." if len(reader.skipped) > 5 else "")
        notices.append(f"{len(reader.skipped)} left out (binary, a link to a folder, or no file): {shown}")
    if reader.replaced:
        notices.append(f"{reader.replaced} invalid UTF-8 sequence(s) replaced by U+FFFD")
    return notices
