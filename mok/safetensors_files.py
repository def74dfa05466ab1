"""Folders of safetensors files: reading them tensor by tensor with everything checked first, and writing them as a stream.

Owns the file format on both sides: headers, shards, the index, and memory that stays at a few tensors whatever the size of the
model. Only safetensors are opened; pickled weights could run code. Knows nothing of models.
Read next: `mok/hf_import.py`, `mok/export.py`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mok.checkpoint import tensor_bytes
from mok.errors import CheckpointError

__all__ = ["DTYPES", "INDEX", "SafetensorsFolder", "TensorEntry", "listed", "load_json", "shard_entries", "write_shards"]

INDEX = "model.safetensors.index.json"

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""The dtypes that weights may have, by their names in the files."""

MAPPED_BYTES = 128 << 20
"""A file is mapped anew after this much was read from it, so that pages already read leave the process's memory."""

HEADER_ALIGNMENT = 64
"""Tensor data starts at a multiple of this many bytes."""


class SafetensorsFolder:
    """The tensors of `model.safetensors`, or of the shards that `model.safetensors.index.json` lists.

    shapes, dtypes: by tensor name, dtypes as safetensors spells them. Raises CheckpointError for missing, damaged or
    disagreeing files, and before opening anything for shard names that are not plain file names inside the folder.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: no such folder; give one with config.json and model.safetensors")
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._file_of: dict[str, Path] = {}
        self._opened: tuple[Path, Any] | None = None
        self._mapped_bytes = 0
        self._checksums = self._own_checksums()
        index = folder / INDEX
        if index.is_file():
            self._read_index(index)
        elif (folder / "model.safetensors").is_file():
            self._read_header(folder / "model.safetensors")
        else:
            pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
            also = (
                f" ({', '.join(pickles)} may run code when opened and is refused; convert it to safetensors)" if pickles else ""
            )
            raise CheckpointError(f"{folder}: no model.safetensors and no {INDEX}{also}; check the path")

    def read(self, name: str, part: tuple[Any, ...] | None = None) -> Tensor:
        """Tensor `name`, or the slices `part` of it, in the dtype it is stored in."""
        if self._mapped_bytes > MAPPED_BYTES:
            self._opened, self._mapped_bytes = None, 0
        opened = self._open(self._file_of[name])
        try:
            tensor: Tensor = opened.get_tensor(name) if part is None else opened.get_slice(name)[part]
        except SafetensorError as error:
            raise CheckpointError(f"{self._file_of[name]}: {name} cannot be read ({error}); copy the file again") from error
        self._mapped_bytes += tensor.nbytes
        if part is None and name in self._checksums and sha256(tensor_bytes(tensor)).hexdigest() != self._checksums[name]:
            raise CheckpointError(
                f"{self._file_of[name]}: {name} is damaged (SHA-256 is not that of mok_export.json); copy the file again"
            )
        return tensor

    def _open(self, path: Path) -> Any:
        if self._opened is None or self._opened[0] != path:
            try:
                self._opened = (path, safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: not a whole safetensors file ({error}); copy it again") from error
        return self._opened[1]

    def _read_index(self, index: Path) -> None:
        weight_map = load_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"{index}: no weight_map from tensor to file; copy it again")
        files = sorted(set(weight_map.values()))
        if unsafe := [file for file in files if not re.fullmatch(r"[\w.-]+\.safetensors", file)]:
            raise CheckpointError(
                f"{index}: {unsafe[0]!r} is not the plain name of a .safetensors file inside the folder; refused"
            )
        if missing := [file for file in files if not (self.folder / file).is_file()]:
            count = sum(file in missing for file in weight_map.values())
            raise CheckpointError(
                f"{self.folder}: missing {', '.join(missing)}, which {count} tensors of the index lie in; copy it"
            )
        for file in files:
            self._read_header(self.folder / file)
        wrong = [
            f"{name} is not in {file}" for name, file in weight_map.items() if self._file_of.get(name) != self.folder / file
        ] + [f"{name} is in {self._file_of[name].name} but not in the index" for name in self.shapes if name not in weight_map]
        if wrong:
            raise CheckpointError(listed(f"{index}: index and files disagree", wrong))

    def _read_header(self, path: Path) -> None:
        _refuse_repeated_names(path)
        opened = self._open(path)
        for name in opened.keys():  # noqa: SIM118 (not a dict)
            if name in self._file_of:
                raise CheckpointError(f"{path}: {name} is in {self._file_of[name].name} too; only one of them can be right")
            entry = opened.get_slice(name)
            self._file_of[name] = path
            self.shapes[name] = tuple(entry.get_shape())
            self.dtypes[name] = entry.get_dtype()

    def _own_checksums(self) -> dict[str, str]:
        """SHA-256 by tensor name where `mok export` wrote the folder."""
        file = self.folder / "mok_export.json"
        if not file.is_file():
            return {}
        try:
            return {name: entry["sha256"] for name, entry in load_json(file)["tensors"].items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{file}: damaged ({error!r}); copy it again") from error


@dataclass(frozen=True)
class TensorEntry:
    """A tensor to write: its name in the file, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    @property
    def num_elements(self) -> int:
        return torch.Size(self.shape).numel()


def shard_entries(entries: Sequence[TensorEntry], max_shard_bytes: int) -> list[list[TensorEntry]]:
    """Cut a list of tensors, in order, into shards of at most `max_shard_bytes`; a larger tensor has a shard of its own."""
    shards: list[list[TensorEntry]] = []
    room = 0
    for entry in entries:
        if entry.num_bytes > room or not shards:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(entry)
        room -= entry.num_bytes
    return shards


def write_shards(
    folder: Path,
    shards: Sequence[Sequence[TensorEntry]],
    read: Callable[[str], Tensor],
    wrote: Callable[[TensorEntry], None],
) -> dict[str, dict[str, str]]:
    """Write `model.safetensors`, or numbered shards and their index, one tensor in memory at a time.

    read(name) gives a tensor when its turn comes; wrote(entry) is called after each. Returns, for every tensor by name, its
    file and the SHA-256 of its bytes. Files get the permissions that the process's umask leaves, and are on disk at the end.
    """
    facts: dict[str, dict[str, str]] = {}
    for number, shard in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with open(folder / file, "wb") as out, ThreadPoolExecutor(1) as hasher:
            out.write(_header(shard))
            for entry in shard:
                tensor = read(entry.name)
                if tensor.dtype != entry.dtype or tuple(tensor.shape) != entry.shape:
                    raise CheckpointError(f"{entry.name}: {tensor.dtype} {list(tensor.shape)}, but {entry} was announced")
                data = tensor_bytes(tensor)
                digest = hasher.submit(sha256, data)
                out.write(data)
                facts[entry.name] = {"file": file, "sha256": digest.result().hexdigest()}
                wrote(entry)
            out.flush()
            os.fsync(out.fileno())
    if len(shards) > 1:
        entries = [entry for shard in shards for entry in shard]
        metadata = {
            "total_parameters": sum(entry.num_elements for entry in entries),
            "total_size": sum(entry.num_bytes for entry in entries),
        }
        weight_map = {name: facts[name]["file"] for name in sorted(facts)}
        (folder / INDEX).write_text(
            json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2) + "\n", encoding="utf-8"
        )
    return facts


def _header(shard: Sequence[TensorEntry]) -> bytes:
    """Length and JSON of a header, with spaces behind it so that data starts on a multiple of `HEADER_ALIGNMENT`."""
    spelled = {dtype: name for name, dtype in DTYPES.items()}
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in shard:
        offsets = [start, start + entry.num_bytes]
        described[entry.name] = {"dtype": spelled[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
        start = offsets[1]
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def load_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError if it is none, or names a key twice."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_repeats)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: damaged ({error}); copy it again") from error
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path}: not a JSON object; copy it again")
    return loaded


class _RepeatedNameError(ValueError):
    """A JSON object with two values of one name, which JSON readers drop silently."""


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _RepeatedNameError(f"{next(name for name in names if names.count(name) > 1)!r} appears twice")
    return found


def _refuse_repeated_names(path: Path) -> None:
    """Raise if a header names a tensor twice. What else may be wrong with it is for safetensors to say."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = file.read(min(size, path.stat().st_size))
    try:
        json.loads(header, object_pairs_hook=_without_repeats)
    except _RepeatedNameError as error:
        raise CheckpointError(f"{path}: {error}; only one of them can be right, so write the file again") from None
    except ValueError:
        return


def listed(title: str, problems: list[str], limit: int = 20) -> str:
    """A title and its problems, one a line, the first `limit` of them."""
    shown = problems[:limit] + ([f"... and {len(problems) - limit} more"] if len(problems) > limit else [])
    return "\n  ".join([title, *shown])
