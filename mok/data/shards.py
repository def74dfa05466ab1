"""Token shards: how ids lie on disk, and reading them back through memory maps.

Owns the folder format: `tokens_00000.u16` (or .u32) files of equal length but the last, `documents.u64` with one row (exclusive
end in tokens, 64-bit hash of the content) per document, and `manifest.json` with sizes and SHA-256 sums. A folder is
complete once it has its manifest. Must not know where text came from. Read next: `mok/data/loader.py`.
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mok.errors import DataError

__all__ = ["MANIFEST", "ShardWriter", "TokenStore"]

SHARD_TOKENS = 1 << 25
"""Tokens of a full shard: 64 or 128 MiB, hashed in about a tenth of a second when first read."""

MANIFEST = "manifest.json"
DOCUMENTS = "documents.u64"


class ShardWriter:
    """Writes the shards of one corpus into an empty folder; `finish` writes the manifest.

    num_ids: ids are below this; the width of an id on disk follows from it.
    """

    def __init__(self, folder: Path, num_ids: int, shard_tokens: int = SHARD_TOKENS) -> None:
        self.folder = folder
        self.dtype = np.dtype("<u2") if num_ids <= 1 << 16 else np.dtype("<u4")
        self.shard_tokens = shard_tokens
        self.num_tokens = 0
        self._shards: list[dict[str, Any]] = []
        self._documents: list[tuple[int, int]] = []
        self._file: BinaryIO | None = None
        self._digest = sha256()

    def append(self, ids: np.ndarray) -> None:
        """Add ids to the document that is being written."""
        data = ids.astype(self.dtype)
        while len(data):
            room = self.shard_tokens - self.num_tokens % self.shard_tokens
            if self._file is None:
                name = f"tokens_{len(self._shards):05d}.u{8 * self.dtype.itemsize}"
                self._shards.append({"file": name})
                self._file = open(self.folder / name, "wb")  # noqa: SIM115
                self._digest = sha256()
            raw = data[:room].tobytes()
            self._file.write(raw)
            self._digest.update(raw)
            self.num_tokens += min(room, len(data))
            data = data[room:]
            if self.num_tokens % self.shard_tokens == 0:
                self._close_shard()

    def end_document(self, content_hash: int) -> None:
        """Close the current document; one without tokens is forgotten."""
        if self.num_tokens > (self._documents[-1][0] if self._documents else 0):
            self._documents.append((self.num_tokens, content_hash))

    def finish(self, facts: dict[str, Any]) -> None:
        """Write `documents.u64` and the manifest, which carries `facts` too."""
        if self._file is not None:
            self._close_shard()
        documents = np.array(self._documents, dtype="<u8").reshape(-1, 2).tobytes()
        (self.folder / DOCUMENTS).write_bytes(documents)
        manifest = {
            "format": "mok-tokens-1",
            "num_tokens": self.num_tokens,
            "shard_tokens": self.shard_tokens,
            "shards": self._shards,
            "documents": {"file": DOCUMENTS, "bytes": len(documents), "sha256": sha256(documents).hexdigest()},
            **facts,
        }
        (self.folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")

    def _close_shard(self) -> None:
        assert self._file is not None
        self._file.close()
        self._file = None
        first = (len(self._shards) - 1) * self.shard_tokens
        size = (self.num_tokens - first) * self.dtype.itemsize
        self._shards[-1] |= {"bytes": size, "sha256": self._digest.hexdigest()}


class TokenStore:
    """Tokens of a finished folder by their place in the corpus.

    document_ends: int64 [documents], exclusive, in tokens. document_hashes: uint64 [documents]. Sizes are checked on opening,
    the hash of a shard when it is first read, so that neither a truncated nor an altered file is ever trained on. Raises
    DataError naming the file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            self._shards = self.manifest["shards"]
            self.num_tokens: int = self.manifest["num_tokens"]
            self.shard_tokens: int = self.manifest["shard_tokens"]
            for entry in [*self._shards, self.manifest["documents"]]:
                self._check_size(entry)
                str(entry["sha256"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{folder / MANIFEST}: damaged ({error}); {self.remedy}") from error
        documents = self._verified(self.manifest["documents"], np.dtype("<u8")).reshape(-1, 2)
        self.document_ends = documents[:, 0].astype(np.int64)
        self.document_hashes = documents[:, 1].copy()
        self._maps: list[np.ndarray | None] = [None] * len(self._shards)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the hashes of all shards and documents: which data this is."""
        hashes = [entry["sha256"] for entry in [*self._shards, self.manifest["documents"]]]
        return sha256("\n".join(hashes).encode()).hexdigest()

    def read(self, start: int, stop: int) -> np.ndarray:
        """int64 ids of tokens start..stop-1."""
        parts = []
        while start < stop:
            shard, offset = divmod(start, self.shard_tokens)
            taken = min(stop - start, self.shard_tokens - offset)
            parts.append(self._shard(shard)[offset : offset + taken])
            start += taken
        return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, dtype=np.int64)

    def _shard(self, shard: int) -> np.ndarray:
        mapped = self._maps[shard]
        if mapped is None:
            entry = self._shards[shard]
            mapped = self._maps[shard] = self._verified(
                entry, np.dtype("<u" + str(int(entry["file"].rpartition(".u")[2]) // 8))
            )
        return mapped

    def _verified(self, entry: dict[str, Any], dtype: np.dtype) -> np.ndarray:
        if entry["bytes"] == 0:
            return np.empty(0, dtype=dtype)
        path = self.folder / entry["file"]
        mapped = np.memmap(path, dtype=dtype, mode="r")
        if sha256(mapped.data).hexdigest() != entry["sha256"]:
            raise DataError(f"{path}: its bytes are not those that were written (SHA-256 differs); {self.remedy}")
        return mapped

    def _check_size(self, entry: dict[str, Any]) -> None:
        path = self.folder / entry["file"]
        if not path.is_file():
            raise DataError(f"{path}: missing; {self.remedy}")
        if (size := path.stat().st_size) != entry["bytes"]:
            raise DataError(f"{path}: {size} bytes instead of {entry['bytes']}; {self.remedy}")

    @property
    def remedy(self) -> str:
        """How to get a sound folder again, for error messages."""
        return f"remove the folder {self.folder}, the next run makes it again"
