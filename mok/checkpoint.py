"""Checkpoints on disk: complete or absent, verified when read, never overwritten.

Owns the checkpoint folder of a run: writing beside and renaming, the `latest` pointer, keeping the last few, checksums, and the
errors a user reads when something is wrong. The tensors of a checkpoint have the project's one name each (docs/numerics.md), so
any layout can read what another wrote. Read next: `mok/dcp.py`, through which the ranks of a launch save and load together.

    checkpoints/step_000100/    safetensors files (no pickle anywhere), one per rank that wrote, and
                 manifest.json  step, state_sha256, one SHA-256, dtype and shape per tensor, the resolved recipe, counters,
                                and a SHA-256 of all that
    checkpoints/latest          the name of the newest complete folder
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mok.ahead import ahead
from mok.errors import CheckpointError
from mok.safetensors_files import DTYPES, SafetensorsFolder, TensorEntry, listed, tensor_bytes
from mok.transport.progress import Progress

__all__ = [
    "FORMAT",
    "Checkpoint",
    "Collective",
    "Unfinished",
    "latest",
    "on_host",
    "open_checkpoint",
    "published",
    "read_tensor",
    "read_tensors",
    "shared_checksums",
    "state_sha256",
    "step_of",
    "tensor_checksums",
    "tensor_sha256",
]

FORMAT = 2
"""Version of the folder's content that is written. From 2 on the manifest has a SHA-256 of itself."""

READABLE = (1, FORMAT)

MANIFEST = "manifest.json"
STORED = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
_NAME = re.compile(r"step_\d{6,}")

T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk. manifest: what was written beside the tensors."""

    path: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        return self.fact("step", int)

    def fact(self, name: str, kind: type[T]) -> T:
        """What the run noted under `name` beside the tensors. Raises CheckpointError where it is missing or no `kind`."""
        value = self.manifest.get(name)
        if not isinstance(value, kind):
            what = "is missing" if value is None else f"is {type(value).__name__}, not {kind.__name__}"
            raise CheckpointError(f"{self.path / MANIFEST}: {name!r} {what}; use another checkpoint of the run")
        return value

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """What is stored, by name."""
        stored = self.manifest["tensors"].items()
        return {name: TensorEntry(name, STORED[entry["dtype"]], tuple(entry["shape"])) for name, entry in stored}


@dataclass(frozen=True)
class Collective:
    """The ranks that save and load a checkpoint together: all of a launch.

    group: carries their plans, None for one rank. progress: of this rank.
    """

    group: dist.ProcessGroup | None = None
    progress: Progress = field(default_factory=Progress)


def tensor_sha256(entry: TensorEntry, data: memoryview) -> str:
    """SHA-256 over name, dtype, shape and bytes of a tensor."""
    digest = hashlib.sha256(f"{entry.name}\0{_dtype_name(entry.dtype)}\0{list(entry.shape)}\0".encode())
    digest.update(data)
    return digest.hexdigest()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sha256_of(named: tuple[str, Tensor]) -> str:
    name, tensor = named
    return tensor_sha256(TensorEntry(name, tensor.dtype, tuple(tensor.shape)), tensor_bytes(on_host(tensor)))


def state_sha256(checksums: Mapping[str, str]) -> str:
    """One SHA-256 over the SHA-256 of every tensor (name, dtype, shape, bytes), in the order of their names."""
    return hashlib.sha256("".join(checksums[name] for name in sorted(checksums)).encode()).hexdigest()


def tensor_checksums(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """`tensor_sha256` of each tensor."""
    return _checksums(tensors.items())


def _checksums(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    names = []

    def noted() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named:
            names.append(name)
            yield name, tensor

    return dict(zip(names, list(ahead(_sha256_of, noted(), torch.get_num_threads())), strict=True))


def shared_checksums(
    tensors: Mapping[str, Tensor], rank: int = 0, gather: Callable[[Any], list[Any]] = lambda value: [value]
) -> dict[str, str]:
    """`tensor_checksums` of the tensors of all ranks, on every rank; each is made by one of the ranks that have it.

    gather: value -> the values of all ranks, in rank order, on every rank.
    """
    maker_of = _share_names(gather(list(tensors)))
    mine = _checksums((name, tensor) for name, tensor in tensors.items() if maker_of[name] == rank)
    return {name: sha256 for part in gather(mine) for name, sha256 in part.items()}


def _share_names(names: list[list[str]]) -> dict[str, int]:
    """Which rank takes each tensor: those that hold it take turns, in the order of the names."""
    holders: dict[str, list[int]] = {}
    for rank, held in enumerate(names):
        for name in held:
            holders.setdefault(name, []).append(rank)
    return {name: ranks[turn % len(ranks)] for turn, (name, ranks) in enumerate(holders.items())}


class Unfinished:
    """A checkpoint while it is written, in a folder beside its place under `folder` (a run's `checkpoints`).

    One rank calls `begin`, `expect` and then `publish` or `abandon`; any rank writes files into `beside` between them.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step
        self.path = folder / f"step_{step:06d}"
        self.beside = folder / f".unfinished-{self.path.name}"

    def begin(self) -> None:
        """Make the folder, and remove those of saves that were killed. An existing checkpoint of this step is an error."""
        if self.path.is_file() or _has_content(self.path):
            raise CheckpointError(f"{self.path}: exists already and is never overwritten; choose another --out, or --resume it")
        self.folder.mkdir(parents=True, exist_ok=True)
        _remove_unfinished(self.folder)
        self.beside.mkdir()

    def expect(self, num_bytes: int) -> None:
        """Raise OSError if there is no room for so many."""
        if shutil.disk_usage(self.beside).free < num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def publish(self, checksums: Mapping[TensorEntry, str], facts: Mapping[str, Any], keep_last: int) -> dict[str, Any]:
        """Write the manifest, move the folder to its place, make it the latest and remove what is older than the last
        `keep_last` (0 keeps all); returns the manifest. Every tensor is in a file by now."""
        stored = {
            entry.name: {"sha256": sha256, "dtype": _dtype_name(entry.dtype), "shape": list(entry.shape)}
            for entry, sha256 in checksums.items()
        }
        digest = state_sha256({entry.name: sha256 for entry, sha256 in checksums.items()})
        manifest = {"format": FORMAT, "step": self.step, "state_sha256": digest, **facts, "tensors": stored}
        manifest["manifest_sha256"] = _manifest_sha256(manifest)
        for file in self.beside.iterdir():
            _sync(file)
        _write_synced(self.beside / MANIFEST, json.dumps(manifest, indent=1) + "\n")
        _sync(self.beside)
        os.rename(self.beside, self.path)
        _sync(self.folder)
        _point_latest(self.folder, self.path.name)
        _prune(self.folder, keep_last, self.path.name)
        return manifest

    def abandon(self) -> None:
        shutil.rmtree(self.beside, ignore_errors=True)

    def explained(self, error: Exception, num_bytes: int) -> CheckpointError:
        """The error that a user reads when `error` ended the writing of `num_bytes`."""
        if isinstance(error, CheckpointError):
            return error
        number = getattr(error, "errno", None)
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or "No space" in str(error) or "File too large" in str(error):
            free = shutil.disk_usage(self.folder).free
            return CheckpointError(
                f"{self.path}: no space for the checkpoint, {num_bytes} bytes needed, {free} bytes free; the unfinished files "
                "were removed and earlier checkpoints are intact; free space and resume"
            )
        return CheckpointError(f"{self.path}: cannot be written ({error}); earlier checkpoints are intact")


def on_host(tensor: Tensor) -> Tensor:
    """On a CPU and contiguous. From a GPU by way of pinned memory, several times as fast."""
    if not tensor.is_cuda:
        return tensor.detach().contiguous()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor.detach())


def latest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint under `folder`, or None. Leftovers of saves that never finished are ignored; CheckpointError where
    the newest is damaged, so that nobody goes on from an older one unawares.

    A kill between the renaming and the moving of the pointer leaves a complete checkpoint that `latest` does not name yet; it
    is taken all the same.
    """
    names = published(folder)
    return open_checkpoint(folder / names[-1]) if names else None


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in folder `path`. Raises CheckpointError where there is none, or none this version can read."""
    file = path / MANIFEST
    if not file.is_file():
        raise CheckpointError(f"{path}: no checkpoint here ({MANIFEST} is missing); give a run folder or a checkpoint in one")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        version = manifest["format"]
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror}); check its permissions") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(file, error) from error
    if version not in READABLE:
        raise CheckpointError(
            f"{file}: format {version}, this version of mok reads up to {FORMAT}; use the version that wrote it"
        )
    try:
        if (version > 1 or "manifest_sha256" in manifest) and _manifest_sha256(manifest) != manifest["manifest_sha256"]:
            raise ValueError("its own checksum differs")
        step = manifest["step"]
        if type(step) is not int or step < 0:
            raise ValueError(f"step is {step!r}")
        for entry in manifest["tensors"].values():
            sizes = [n for n in entry["shape"] if type(n) is int and 0 <= n < 1 << 63]
            if entry["dtype"] not in STORED or not isinstance(entry["sha256"], str) or sizes != entry["shape"]:
                raise ValueError(f"{entry} describes no tensor")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(file, error) from error
    if _NAME.fullmatch(path.name) and step_of(path.name) != step:
        raise CheckpointError(f"{path}: holds step {step} under another step's name; rename or remove this folder")
    return Checkpoint(path, manifest)


def _damaged(file: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{file}: damaged ({error!r}); use another checkpoint of the run")


def _manifest_sha256(manifest: Mapping[str, Any]) -> str:
    """SHA-256 over all of a manifest but this, as JSON without white space, keys in order."""
    rest = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_tensors(checkpoint: Checkpoint, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """The named tensors of a checkpoint, on the CPU, one after the other, each read once and checked before it is given.

    Raises CheckpointError at once where files are missing or cannot be read, and when all are read where the checksums of some
    differ, which it lists; so nobody may rely on what was given before the last. No code in the files is run: only raw tensor
    data is read.
    """
    path, stored, entries = checkpoint.path, checkpoint.manifest["tensors"], checkpoint.entries
    if absent := [name for name in names if name not in stored]:
        raise CheckpointError(listed(f"{path}: has no such tensor", absent))
    damaged = []
    try:
        files = SafetensorsFolder(path)
        if differs := [name for name in names if not _as_announced(files, entries[name])]:
            raise CheckpointError(f"{differs[0]} is not in the files as the manifest has it")

        def read(name: str) -> tuple[Tensor, bool]:
            tensor = files.read(name)
            return tensor, tensor_sha256(entries[name], tensor_bytes(tensor)) == stored[name]["sha256"]

        for name, (tensor, intact) in zip(names, ahead(read, names, torch.get_num_threads()), strict=True):
            if intact:
                yield name, tensor
            else:
                damaged.append(name)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); use another checkpoint of the run") from error
    if damaged:
        raise CheckpointError(listed(f"{path}: damaged, checksums differ; use another checkpoint of the run", damaged))


def _as_announced(files: SafetensorsFolder, entry: TensorEntry) -> bool:
    return files.shapes.get(entry.name) == entry.shape and DTYPES.get(files.dtypes[entry.name]) == entry.dtype


def read_tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    """One tensor of a checkpoint. Raises CheckpointError if it is not there or its checksum is wrong."""
    return next(read_tensors(checkpoint, [name]))[1]


def step_of(name: str) -> int:
    """The step in the name of a checkpoint's folder."""
    return int(name.removeprefix("step_"))


def published(folder: Path) -> list[str]:
    """Names of the checkpoints under `folder`, oldest first: folders with something in them, which is not looked at."""
    if not folder.is_dir():
        return []
    names = [entry.name for entry in folder.iterdir() if _NAME.fullmatch(entry.name) and _has_content(entry)]
    return sorted(names, key=step_of)


def _has_content(path: Path) -> bool:
    return path.is_dir() and any(path.iterdir())


def _prune(folder: Path, keep_last: int, newest: str) -> None:
    older = [name for name in published(folder) if name != newest]
    for name in older[: len(older) - keep_last + 1] if keep_last else []:
        # Renamed first: a kill in the middle of the removal must not leave a folder that looks complete.
        doomed = folder / f".unfinished-{name}"
        os.rename(folder / name, doomed)
        shutil.rmtree(doomed)


def _remove_unfinished(folder: Path) -> None:
    """Folders of saves and removals that were killed, and the pointer that one of them was about to move."""
    for entry in folder.glob(".unfinished-*"):
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _point_latest(folder: Path, name: str) -> None:
    beside = folder / ".unfinished-latest"
    _write_synced(beside, name + "\n")
    os.replace(beside, folder / "latest")
    _sync(folder)


def _write_synced(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Make a file's content, or a folder's entries, safe against a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
