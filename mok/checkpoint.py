"""Checkpoints: complete or absent, verified on load, never overwritten.

Owns the checkpoint folder of a run: writing beside and renaming, the `latest` pointer, keeping the last few, checksums, and the
errors a user reads when something is wrong. The tensors of a checkpoint have the project's one name each (docs/numerics.md), so
any layout can read what another wrote. The state itself (weights, moments, counters) is `mok/train/state.py`.

    checkpoints/step_000100/    safetensors files (no pickle anywhere), one per rank that wrote, and
                 manifest.json  step, state_sha256, one SHA-256, dtype and shape per tensor, the resolved recipe, counters
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mok.ahead import ahead
from mok.errors import CheckpointError
from mok.safetensors_files import SafetensorsFolder, TensorEntry, shard_name, tensor_bytes, write_file, write_index

__all__ = [
    "FORMAT",
    "Checkpoint",
    "Writers",
    "latest",
    "open_checkpoint",
    "read_some",
    "read_tensor",
    "read_tensors",
    "save",
    "shared_checksums",
    "state_sha256",
    "tensor_checksums",
]

FORMAT = 1
"""Version of the folder's content. It rises when an older reader would misunderstand a newer checkpoint."""

MANIFEST = "manifest.json"
_NAME = re.compile(r"step_\d{6,}")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk. manifest: what `save` wrote beside the tensors."""

    path: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.manifest["step"])


def _entry_of(name: str, tensor: Tensor) -> TensorEntry:
    return TensorEntry(name, tensor.dtype, tuple(tensor.shape))


def _sha256(entry: TensorEntry, data: memoryview) -> str:
    digest = hashlib.sha256(f"{entry.name}\0{str(entry.dtype).removeprefix('torch.')}\0{list(entry.shape)}\0".encode())
    digest.update(data)
    return digest.hexdigest()


def _tensor_sha256(named: tuple[str, Tensor]) -> str:
    name, tensor = named
    return _sha256(_entry_of(name, tensor), tensor_bytes(_on_host(tensor)))


def state_sha256(checksums: Mapping[str, str]) -> str:
    """One SHA-256 over the SHA-256 of every tensor (name, dtype, shape, bytes), in the order of their names."""
    return hashlib.sha256("".join(checksums[name] for name in sorted(checksums)).encode()).hexdigest()


def tensor_checksums(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """SHA-256 of each tensor over name, dtype, shape and bytes."""
    return _checksums(tensors.items())


def _checksums(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    names = []

    def noted() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named:
            names.append(name)
            yield name, tensor

    return dict(zip(names, list(ahead(_tensor_sha256, noted(), torch.get_num_threads())), strict=True))


def shared_checksums(tensors: Mapping[str, Tensor], writers: Writers) -> dict[str, str]:
    """`tensor_checksums` of the tensors of all ranks, on every rank; each is made by one of the ranks that have it."""
    maker_of = _share_names(writers.gather(list(tensors)))
    mine = _checksums((name, tensor) for name, tensor in tensors.items() if maker_of[name] == writers.rank)
    return {name: sha256 for part in writers.gather(mine) for name, sha256 in part.items()}


@dataclass(frozen=True)
class Writers:
    """The ranks that write one checkpoint together.

    rank: this one; rank 0 makes and publishes the folder. gather: value -> the values of all ranks, in rank order, on every
    rank.
    """

    rank: int = 0
    gather: Callable[[Any], list[Any]] = lambda value: [value]


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    keep_last: int,
    writers: Writers | None = None,
) -> Checkpoint:
    """Write checkpoint `step` under `folder` (a run's `checkpoints`) and make it the latest. Called by every rank.

    tensors: name -> tensor; what several ranks hold is the same on all of them and written by one, a few at a time in host
    memory. facts: JSON values that go into the manifest. keep_last: older complete checkpoints beyond this number are removed,
    after the new one is safe; 0 keeps all. writers: the ranks of the launch, one by default.
    Raises CheckpointError, on every rank, where the disk is full (with path and bytes) or the folder cannot be written, having
    removed the unfinished files; an existing checkpoint of this step is never overwritten.
    """
    writers = writers or Writers()
    path = folder / f"step_{step:06d}"
    unfinished = folder / f".unfinished-{path.name}"
    all_entries = writers.gather([_entry_of(name, tensor) for name, tensor in tensors.items()])
    names = [[entry.name for entry in entries] for entries in all_entries]
    writer_of = _share_names(names)
    mine = [entry for entry in all_entries[writers.rank] if writer_of[entry.name] == writers.rank]
    needed = sum(writers.gather(sum(entry.num_bytes for entry in mine)))

    def together(work: Callable[[], None]) -> None:
        """Do `work`, and fail on all ranks if it fails on one."""
        problem: CheckpointError | None = None
        try:
            work()
        except Exception as error:
            problem = error if isinstance(error, CheckpointError) else _save_error(error, path, needed)
        problems = [found for found in writers.gather(str(problem) if problem else "") if found]
        if problems:
            if writers.rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise CheckpointError(problems[0]) from problem

    def prepare() -> None:
        if writers.rank == 0:
            if path.exists():
                raise CheckpointError(f"{path}: exists already and is never overwritten; choose another --out, or --resume it")
            folder.mkdir(parents=True, exist_ok=True)
            _remove_unfinished(folder)
            unfinished.mkdir()
            _check_space(unfinished, needed)

    checksums: dict[str, str] = {}

    def write() -> None:
        file = unfinished / shard_name(writers.rank + 1, len(names))
        checksums.update(write_file(file, mine, (tensors[entry.name] for entry in mine), _on_host, _sha256))
        if writers.rank == 0 and len(names) > 1:
            entries = {entry.name: entry for entries in all_entries for entry in entries}
            write_index(unfinished, {entries[name]: shard_name(rank + 1, len(names)) for name, rank in writer_of.items()})

    together(prepare)
    together(write)
    found = {
        entry.name: {
            "sha256": checksums[entry.name],
            "dtype": str(entry.dtype).removeprefix("torch."),
            "shape": list(entry.shape),
        }
        for entry in mine
    }
    merged = {name: entry for part in writers.gather(found) for name, entry in part.items()}
    order = dict.fromkeys(name for part in names for name in part)
    manifest = {
        "format": FORMAT,
        "step": step,
        "state_sha256": state_sha256({name: entry["sha256"] for name, entry in merged.items()}),
        **facts,
        "tensors": {name: merged[name] for name in order},
    }

    def publish() -> None:
        if writers.rank == 0:
            for file in unfinished.iterdir():
                _sync(file)
            _write_synced(unfinished / MANIFEST, json.dumps(manifest, indent=1) + "\n")
            _sync(unfinished)
            os.rename(unfinished, path)
            _sync(folder)
            _point_latest(folder, path.name)
            _prune(folder, keep_last, path.name)

    together(publish)
    return Checkpoint(path, manifest)


def _on_host(tensor: Tensor) -> Tensor:
    """On a CPU and contiguous. From a GPU by way of pinned memory, several times as fast."""
    if not tensor.is_cuda:
        return tensor.detach().contiguous()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor.detach())


def _share_names(names: list[list[str]]) -> dict[str, int]:
    """Who writes each tensor: the ranks that hold it take turns, in the order of the names."""
    holders: dict[str, list[int]] = {}
    for rank, held in enumerate(names):
        for name in held:
            holders.setdefault(name, []).append(rank)
    return {name: ranks[turn % len(ranks)] for turn, (name, ranks) in enumerate(holders.items())}


def latest(folder: Path) -> Checkpoint | None:
    """The newest complete checkpoint under `folder`, or None. Leftovers of saves that never finished are ignored.

    A kill between the renaming and the moving of the pointer leaves a complete checkpoint that `latest` does not name yet; it
    is taken all the same.
    """
    complete = _complete(folder)
    return open_checkpoint(folder / complete[-1]) if complete else None


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in folder `path`. Raises CheckpointError where there is none, or none this version can read."""
    file = path / MANIFEST
    if not file.is_file():
        raise CheckpointError(f"{path}: no checkpoint here ({MANIFEST} is missing); give a run folder or a checkpoint in one")
    try:
        manifest = json.loads(file.read_text())
        version = manifest["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file}: damaged ({error}); use another checkpoint of the run") from error
    if version != FORMAT:
        raise CheckpointError(f"{file}: format {version}, this version of mok reads {FORMAT}; use the version that wrote it")
    try:
        int(manifest["step"])
        for entry in manifest["tensors"].values():
            (*entry["shape"], entry["dtype"], entry["sha256"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: damaged ({error!r}); use another checkpoint of the run") from error
    return Checkpoint(path, manifest)


def read_tensors(
    checkpoint: Checkpoint, tensors: Mapping[str, Tensor], elsewhere: Collection[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint, on the CPU, one after the other; it must hold exactly the names, dtypes and shapes of
    `tensors`.

    tensors: on any device, meta included. elsewhere: names that other ranks take from it; the layout that wrote it does not
    matter.

    Raises CheckpointError that lists every missing, unknown or differing tensor, or every tensor whose checksum is wrong,
    before it gives any; so every tensor is read twice. No code in the files is run: only raw tensor data is read.
    """
    path, stored = checkpoint.path, checkpoint.manifest["tensors"]
    problems = [f"missing: {name}" for name in tensors if name not in stored]
    problems += [f"unknown: {name}" for name in stored if name not in tensors and name not in elsewhere]
    for name, tensor in tensors.items():
        if name in stored:
            here = (str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
            there = (stored[name]["dtype"], stored[name]["shape"])
            if here != there:
                problems.append(f"{name}: {there[0]} {there[1]} in the checkpoint, {here[0]} {here[1]} in the model")
    if problems:
        raise CheckpointError(_listed(f"{path}: does not fit this recipe", problems))
    try:
        files = SafetensorsFolder(path)
        differs = [name for name, tensor in tensors.items() if files.shapes.get(name) != tuple(tensor.shape)]
        if differs:
            raise CheckpointError(f"{differs[0]} is not in the files as the manifest has it")
        found = _checksums((name, tensor) for name, tensor in _read(files, tensors))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); use another checkpoint of the run") from error
    wrong = [name for name, sha256 in found.items() if sha256 != stored[name]["sha256"]]
    if wrong:
        raise CheckpointError(_listed(f"{path}: damaged, checksums differ; use another checkpoint of the run", wrong))
    return _read(files, tensors)


def _read(files: SafetensorsFolder, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    return zip(names, ahead(files.read, names, torch.get_num_threads()), strict=True)


def read_tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    """One tensor of a checkpoint. Raises CheckpointError if it is not there or its checksum is wrong."""
    return next(read_some(checkpoint, [name]))[1]


def read_some(checkpoint: Checkpoint, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """The named ones among the tensors of a checkpoint, see `read_tensors`."""
    stored = checkpoint.manifest["tensors"]
    wanted = {}
    for name in names:
        if name not in stored:
            raise CheckpointError(f"{checkpoint.path}: has no tensor {name}")
        dtype = getattr(torch, stored[name]["dtype"])
        wanted[name] = torch.empty(stored[name]["shape"], dtype=dtype, device="meta")
    return read_tensors(checkpoint, wanted, elsewhere=stored)


def _complete(folder: Path) -> list[str]:
    """Names of the complete checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    names = [entry.name for entry in folder.iterdir() if _NAME.fullmatch(entry.name) and (entry / MANIFEST).is_file()]
    return sorted(names, key=lambda name: int(name.removeprefix("step_")))


def _prune(folder: Path, keep_last: int, newest: str) -> None:
    older = [name for name in _complete(folder) if name != newest]
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


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _save_error(error: BaseException, path: Path, needed: int) -> CheckpointError:
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or "No space" in str(error) or "File too large" in str(error):
        free = shutil.disk_usage(path.parent).free
        return CheckpointError(
            f"{path}: no space for the checkpoint, {needed} bytes needed, {free} bytes free; the unfinished files were "
            "removed and earlier checkpoints are intact; free space and resume"
        )
    return CheckpointError(f"{path}: cannot be written ({error}); earlier checkpoints are intact")


def _listed(title: str, problems: list[str]) -> str:
    return "\n  ".join([f"{title} ({len(problems)})", *problems])
