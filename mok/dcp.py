"""Saving and loading by all ranks of a launch together, through torch.distributed.checkpoint.

Its planners decide which rank writes what, and which part of which stored tensor a rank needs, whatever layout wrote it; they
gather their plans over a process group. Owns the storage under it: a writer and a reader of the folder of `mok/checkpoint.py`,
which stream safetensors with a few tensors in memory and a SHA-256 each, so that nothing on disk is a pickle. Whole tensors
are stored, since that is what a digest and an export are made of. Knows nothing of models. Importing it takes half a second;
import it where it is used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.futures import Future

from mok import checkpoint
from mok.checkpoint import Checkpoint, Collective, Unfinished
from mok.errors import CheckpointError
from mok.safetensors_files import TensorEntry, listed, shard_name, write_file, write_index
from mok.transport.progress import Progress

__all__ = ["FittingLoadPlanner", "FolderReader", "FolderWriter", "load", "save"]


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    keep_last: int,
    ranks: Collective | None = None,
) -> Checkpoint:
    """Write checkpoint `step` under `folder` (a run's `checkpoints`) and make it the latest. Called by every rank.

    tensors: name -> whole tensor; what several ranks hold is the same on all of them and written by one, a few at a time in
    host memory. facts: JSON values that go into the manifest. keep_last: older complete checkpoints beyond this number are
    removed, after the new one is safe; 0 keeps all.
    Raises CheckpointError, on every rank, where the disk is full (with path and bytes) or the folder cannot be written, having
    removed the unfinished files; an existing checkpoint of this step is never overwritten.
    """
    ranks = ranks or Collective()
    writer = FolderWriter(Unfinished(folder, step), facts, keep_last, ranks.progress)
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        metadata = _together(ranks, "save", partial(dcp.save, dict(tensors), storage_writer=writer, planner=planner))
    except (CheckpointError, KeyboardInterrupt):
        writer.abandon()
        raise
    return Checkpoint(writer.unfinished.path, metadata.storage_data)


def load(saved: Checkpoint, state: Mapping[str, Any], ranks: Collective | None = None) -> None:
    """Fill `state` from a checkpoint, which must hold exactly the names, dtypes and shapes of all ranks. Called by every rank.

    state: name -> Tensor, DTensor, or anything with `shape` and `dtype` that names its chunks and gives each as DCP's own
    tensors do (`__create_chunk_list__`, `__get_tensor_shard__`). The layout that wrote the checkpoint does not matter.
    Every tensor is read once by each rank that has a part of it, and copied after its checksum was found right.
    Raises CheckpointError on every rank: with a list of all that does not fit, nothing having been read; or of the tensors that
    are damaged, after which `state` holds anything and must not be used.
    """
    ranks = ranks or Collective()
    reader, planner = FolderReader(saved, ranks.progress), FittingLoadPlanner(saved.path)
    _together(ranks, "load", partial(dcp.load, dict(state), storage_reader=reader, planner=planner))


def _together(ranks: Collective, stage: str, work: Callable[..., Any]) -> Any:
    """Do `work` on all ranks; what fails on one of them is raised on all, without DCP's tracebacks of every rank."""
    failed: Mapping[int, tuple[BaseException, Any]] = {}
    done = None
    with ranks.progress.waiting(stage), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is what one rank asks for
        try:
            done = work(process_group=ranks.group, no_dist=ranks.group is None)
        except dcp.CheckpointException as error:
            failed = error.failures
    if failed:
        raise failed[min(failed)][0]
    return done


class FolderWriter(StorageWriter):
    """Writes a folder of `mok/checkpoint.py`: a safetensors file per rank, then index and manifest by the coordinator."""

    def __init__(self, unfinished: Unfinished, facts: Mapping[str, Any], keep_last: int, progress: Progress) -> None:
        self.unfinished, self._facts, self._keep_last, self._progress = unfinished, facts, keep_last, progress
        self._num_bytes = 0
        self._is_coordinator = False

    def abandon(self) -> None:
        """Remove what was written, after a failure that every rank knows of."""
        if self._is_coordinator:
            self.unfinished.abandon()

    def reset(self, checkpoint_id: Any = None) -> None:
        """A writer writes the checkpoint that it was made for."""

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        self._is_coordinator = is_coordinator
        if is_coordinator:
            with self._explained():
                self.unfinished.begin()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        with self._explained():
            self._num_bytes = sum(_entry_of(item).num_bytes for plan in plans for item in plan.items)
            self.unfinished.expect(self._num_bytes)
        files = [shard_name(number, len(plans)) for number in range(1, len(plans) + 1)]
        return [replace(plan, storage_data=(file, self._num_bytes)) for plan, file in zip(plans, files, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        file, self._num_bytes = plan.storage_data
        entries = [_entry_of(item) for item in plan.items]
        with self._explained():
            digests = write_file(
                self.unfinished.beside / file,
                entries,
                plan.items,
                lambda item: checkpoint.on_host(cast(Tensor, planner.resolve_data(item))),
                checkpoint.tensor_sha256,
            )
        return _done(
            [
                WriteResult(item.index, entry.num_bytes, (entry, file, digests[entry.name]))
                for item, entry in zip(plan.items, entries, strict=True)
            ]
        )

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = {result.index.fqn: result.storage_data for part in results for result in part}
        in_order = [written[name] for name in metadata.state_dict_metadata]
        with self._explained():
            if len(results) > 1:
                write_index(self.unfinished.beside, {entry: file for entry, file, _ in in_order})
            checksums = {entry: sha256 for entry, _, sha256 in in_order}
            metadata.storage_data = self.unfinished.publish(checksums, self._facts, self._keep_last)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Around work on the folder."""
        with self._progress.working():
            try:
                yield
            except Exception as error:
                raise self.unfinished.explained(error, self._num_bytes) from error


def _entry_of(item: WriteItem) -> TensorEntry:
    data = item.tensor_data
    if data is None or data.chunk.sizes != data.size:
        raise CheckpointError(f"{item.index.fqn}: only whole tensors are stored in a checkpoint")
    return TensorEntry(item.index.fqn, data.properties.dtype, tuple(data.size))


class FolderReader(StorageReader):
    """Reads a folder of `mok/checkpoint.py` and checks what it reads, for any planner that wants tensors or parts of them."""

    def __init__(self, saved: Checkpoint, progress: Progress | None = None) -> None:
        self._saved, self._progress = saved, progress or Progress()

    def reset(self, checkpoint_id: Any = None) -> None:
        """A reader reads the checkpoint that it was made for."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(entry.dtype),
                    torch.Size(entry.shape),
                    [ChunkStorageMetadata(torch.Size([0] * len(entry.shape)), torch.Size(entry.shape))],
                )
                for name, entry in self._saved.entries.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """There is nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        items_of: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            items_of.setdefault(item.storage_index.fqn, []).append(item)
        with self._progress.working():
            for name, tensor in checkpoint.read_tensors(self._saved, items_of):
                for item in items_of[name]:
                    parts = zip(item.storage_offsets, item.lengths, strict=True)
                    target = planner.resolve_tensor(item)
                    target.copy_(tensor[tuple(slice(start, start + length) for start, length in parts)])
                    planner.commit_tensor(item, target)
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


class FittingLoadPlanner(dcp.DefaultLoadPlanner):
    """DCP's planner for a state that must fit the checkpoint exactly, over all ranks: names all that does not, in one error."""

    def __init__(self, path: Path) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._path = path

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        stored: Mapping[str, Any] = self.metadata.state_dict_metadata
        problems, fitting = [], {}
        for name, value in self.state_dict.items():
            if name not in stored:
                problems.append(f"missing: {name}")
                continue
            there, here = _told(stored[name].properties.dtype, stored[name].size), _told(value.dtype, value.shape)
            if there == here:
                fitting[name] = value
            else:
                problems.append(f"{name}: {there} in the checkpoint, {here} in the model")
        plan = create_default_local_load_plan(fitting, self.metadata)
        return replace(plan, planner_data=(list(self.state_dict), problems))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        assert self.metadata is not None
        known = {name for plan in global_plan for name in plan.planner_data[0]}
        problems = dict.fromkeys(problem for plan in global_plan for problem in plan.planner_data[1])
        problems |= dict.fromkeys(f"unknown: {name}" for name in self.metadata.state_dict_metadata if name not in known)
        if problems:
            raise CheckpointError(listed(f"{self._path}: does not fit this recipe", list(problems)))
        return [replace(plan, planner_data=None) for plan in global_plan]

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return find_tensor_shard(self.state_dict[index.fqn], index)


def _told(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
