"""Folders of safetensors files: reading them tensor by tensor with everything checked first, and writing them as a stream.

Owns the file format on both sides: headers, shards, the index, and memory that stays at a few tensors whatever the size of the
model. Only safetensors are opened; pickled weights could run code. Knows nothing of models.
Read next: `mok/hf_import.py`, `mok/export.py`, `mok/checkpoint.py`.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mok.ahead import ahead
from mok.errors import CheckpointError

__all__ = [
    "DTYPES",
    "INDEX",
    "SafetensorsFolder",
    "TensorEntry",
    "listed",
    "load_json",
    "shard_entries",
    "shard_name",
    "tensor_bytes",
    "write_file",
    "write_index",
    "write_shards",
]

X = TypeVar("X")

INDEX = "model.safetensors.index.json"

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""The dtypes that weights may have, by their names in the files."""

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
        self._starts: dict[str, int] = {}
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
        """Tensor `name`, or the slices `part` of it that lie together, in the dtype it is stored in. Any thread may call."""
        if self.dtypes[name] not in DTYPES:
            raise CheckpointError(f"{self._file_of[name]}: {name} is {self.dtypes[name]}, only {', '.join(DTYPES)} can be read")
        whole = torch.empty(self.shapes[name], dtype=DTYPES[self.dtypes[name]], device="meta")
        wanted = whole if part is None else whole[part]
        assert wanted.is_contiguous(), f"{name}{part}: in several places of the file"
        tensor = torch.empty(wanted.shape, dtype=wanted.dtype)
        start = self._starts[name] + int(wanted.storage_offset()) * wanted.element_size()
        _read_into(tensor_bytes(tensor), self._file_of[name], start)
        if part is None and name in self._checksums and sha256(tensor_bytes(tensor)).hexdigest() != self._checksums[name]:
            raise CheckpointError(
                f"{self._file_of[name]}: {name} is damaged (SHA-256 is not that of mok_export.json); copy the file again"
            )
        return tensor

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
        data_start, header = _header_of(path)
        for name, entry in header.items():
            if name in self._file_of:
                raise CheckpointError(f"{path}: {name} is in {self._file_of[name].name} too; only one of them can be right")
            self._file_of[name] = path
            self.shapes[name] = tuple(entry["shape"])
            self.dtypes[name] = entry["dtype"]
            self._starts[name] = data_start + entry["data_offsets"][0]

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


def write_file(
    path: Path,
    entries: Sequence[TensorEntry],
    sources: Iterable[X],
    read: Callable[[X], Tensor],
    digest: Callable[[TensorEntry, memoryview], str],
    wrote: Callable[[TensorEntry], None] = lambda entry: None,
) -> dict[str, str]:
    """Write one file as a stream; returns what `digest` made of each tensor's bytes, by name.

    sources: one for each entry, taken in order by the calling thread. read(source) gives the tensor, on a CPU; it and `digest`
    are called on threads, a few tensors ahead. wrote(entry) is called after each, in order. The file gets the permissions that
    the process's umask leaves, and is on disk at the end.
    """
    with open(path, "wb", buffering=0) as out:
        header = _header(entries)
        out.write(header)
        starts = itertools.accumulate((entry.num_bytes for entry in entries), initial=len(header))

        def work(job: tuple[TensorEntry, int, X]) -> str:
            entry, start, source = job
            tensor = read(source)
            if tensor.dtype != entry.dtype or tuple(tensor.shape) != entry.shape:
                raise CheckpointError(f"{entry.name}: {tensor.dtype} {list(tensor.shape)}, but {entry} was announced")
            data = tensor_bytes(tensor)
            found = digest(entry, data)
            while data:
                count = os.pwrite(out.fileno(), data, start)
                data, start = data[count:], start + count
            return found

        digests = {}
        jobs = zip(entries, starts, sources, strict=False)  # there is one more start, where the file ends
        for entry, found in zip(entries, ahead(work, jobs, torch.get_num_threads()), strict=True):
            digests[entry.name] = found
            wrote(entry)
        os.fsync(out.fileno())
    return digests


def write_shards(
    folder: Path,
    shards: Sequence[Sequence[TensorEntry]],
    read: Callable[[str], Tensor],
    wrote: Callable[[TensorEntry], None],
) -> dict[str, dict[str, str]]:
    """Write `model.safetensors`, or numbered shards and their index, with a few tensors in memory at a time.

    read(name) gives a tensor, see `write_file`. Returns, for every tensor by name, its file and the SHA-256 of its bytes.
    """
    facts: dict[str, dict[str, str]] = {}
    for number, shard in enumerate(shards, start=1):
        file = shard_name(number, len(shards))
        names = [entry.name for entry in shard]
        digests = write_file(folder / file, shard, names, read, lambda _, data: sha256(data).hexdigest(), wrote)
        facts |= {name: {"file": file, "sha256": digest} for name, digest in digests.items()}
    if len(shards) > 1:
        write_index(folder, {entry: facts[entry.name]["file"] for shard in shards for entry in shard})
    return facts


def shard_name(number: int, count: int) -> str:
    """The file name of shard `number`, from 1, of `count`."""
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def write_index(folder: Path, file_of: Mapping[TensorEntry, str]) -> None:
    """Write `INDEX` for tensors in several files."""
    metadata = {
        "total_parameters": sum(entry.num_elements for entry in file_of),
        "total_size": sum(entry.num_bytes for entry in file_of),
    }
    weight_map = {entry.name: file_of[entry] for entry in sorted(file_of, key=lambda entry: entry.name)}
    text = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2) + "\n"
    (folder / INDEX).write_text(text, encoding="utf-8")


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The raw bytes of a tensor in row-major order, whatever its dtype, strides and device."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


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
    except (OSError, ValueError, RecursionError) as error:
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


LARGEST_HEADER_BYTES = 100_000_000
"""safetensors refuses a longer one."""


def _header_of(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the data of a file starts, and dtype, shape and place of each tensor, checked by safetensors itself."""
    try:
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            text = file.read(min(size, LARGEST_HEADER_BYTES))
        try:
            header = json.loads(text, object_pairs_hook=_without_repeats)
        except _RepeatedNameError as error:
            raise CheckpointError(f"{path}: {error}; only one of them can be right, so write the file again") from None
        except (ValueError, RecursionError):
            header = {}  # damaged, as safetensors will find
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file ({error}); copy it again") from error
    return 8 + size, {name: entry for name, entry in header.items() if name != "__metadata__"}


def _read_into(memory: memoryview, path: Path, start: int) -> None:
    """Fill `memory` from a place in a file."""
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(start)
            while memory:
                count = file.readinto(memory)
                if not count:
                    raise OSError("the file ends early")
                memory = memory[count:]
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); copy the file again") from error


def listed(title: str, problems: list[str], limit: int = 20) -> str:
    """A title and its problems, one a line of at most 400 characters, the first `limit` of them."""
    shown = [problem if len(problem) <= 400 else f"{problem[:400]}..." for problem in problems[:limit]]
    shown += [f"... and {len(problems) - limit} more"] if len(problems) > limit else []
    return "\n  ".join([title, *shown])
