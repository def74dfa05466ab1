"""From a run to a folder that transformers, vLLM and others load: `mok export`.

Owns what is written beside the weights, the conversion of dtypes, and that the target is complete or absent. Names and config
are `mok/hf_layout.py`, the files themselves `mok/safetensors_files.py`. One tensor is in memory at a time.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mok.checkpoint import Checkpoint, latest, open_checkpoint, tensor_checksums
from mok.config import Recipe
from mok.data.tokenizer import Tokenizer
from mok.errors import CheckpointError, DataError, NonFiniteError, RunError, UsageError
from mok.hf_layout import KEPT_FP32, Family, choose_family, tensor_shapes
from mok.recipe import load
from mok.safetensors_files import INDEX, SafetensorsFolder, TensorEntry, listed, load_json, shard_entries, write_shards

__all__ = ["ExportReport", "Run", "export", "open_run"]

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
EXPORT_RECORD = "mok_export.json"


@dataclass(frozen=True)
class Run:
    """What is exported: a checkpoint, the recipe of its run, and the run's tokenizer."""

    folder: Path
    checkpoint: Checkpoint
    recipe: Recipe
    tokenizer: Tokenizer


@dataclass(frozen=True)
class ExportReport:
    """What was written. notices: what a user should read. kept_fp32: names of tensors that stayed fp32 in a bf16 export."""

    folder: Path
    family: str
    dtype: str
    step: int
    num_shards: int
    num_tensors: int
    num_parameters: int
    num_bytes: int
    kept_fp32: list[str]
    notices: list[str]


def open_run(path: Path) -> Run:
    """The run in folder `path` at its newest checkpoint, or the checkpoint in folder `path` with the run around it."""
    if not path.is_dir():
        raise UsageError(f"{path}: no such folder; give a run folder, or a checkpoint in one")
    if (path / "manifest.json").is_file():
        folder, checkpoint = path.resolve().parent.parent, open_checkpoint(path)
    else:
        found = latest(path / "checkpoints")
        if found is None:
            raise CheckpointError(f"{path}: no complete checkpoint in {path / 'checkpoints'}; give another run, or train on")
        folder, checkpoint = path, found
    if not (folder / "recipe.toml").is_file():
        raise CheckpointError(f"{folder}: no recipe.toml, so this is not a run folder; give the folder that mok train wrote")
    return Run(folder, checkpoint, load(str(folder / "recipe.toml")), Tokenizer.load(folder))


def export(
    run: Run,
    to: Path,
    *,
    family: str | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
    allow_nan: bool = False,
    wrote: Callable[[int, int], None] = lambda done, total: None,
) -> ExportReport:
    """Write `run` to the folder `to` as safetensors, config, tokenizer and card; nothing is left there if it fails.

    family: a name of `FAMILIES`; None takes the first that can express the recipe. dtype: bf16 or fp32; None takes that of
    the recipe's weights. Weights in fp32 are the master weights. wrote(done, total): called with bytes after each tensor.
    Raises UsageError for a recipe no family can express and for a target that exists and is not empty, NonFiniteError for
    NaN or infinite weights unless `allow_nan`, CheckpointError for a damaged checkpoint, RunError where the disk is full.
    """
    chosen = choose_family(run.recipe, family)
    dtype = dtype or ("fp32" if run.recipe.train.dtype == "fp32" else "bf16")
    weights = _Weights(run, chosen, dtype, allow_nan=allow_nan)
    shards = shard_entries(weights.entries, max_shard_bytes)
    total = sum(entry.num_bytes for entry in weights.entries)
    done = 0

    def count(entry: TensorEntry) -> None:
        nonlocal done
        done += entry.num_bytes
        wrote(done, total)

    with _complete_or_absent(to, total) as folder:
        facts = write_shards(folder, shards, weights.read, count)
        kept = [entry.name for entry in weights.entries if entry.dtype != DTYPES[dtype]]
        _write_texts(folder, run, chosen, dtype, weights, kept)
        _write_record(folder, run, chosen, dtype, weights.entries, facts)
        _check(folder, weights.entries)
    return ExportReport(
        folder=to,
        family=chosen.name,
        dtype=dtype,
        step=run.checkpoint.step,
        num_shards=len(shards),
        num_tensors=len(weights.entries),
        num_parameters=sum(entry.num_elements for entry in weights.entries),
        num_bytes=total,
        kept_fp32=kept,
        notices=weights.notices,
    )


class _Weights:
    """The weights of a checkpoint under a family's names, in the dtype of the export."""

    def __init__(self, run: Run, family: Family, dtype: str, *, allow_nan: bool) -> None:
        self.notices: list[str] = []
        self._allow_nan = allow_nan
        self._stored = SafetensorsFolder(run.checkpoint.path)
        self._manifest = run.checkpoint.manifest["tensors"]
        self._path = run.checkpoint.path
        embedding = self._stored.shapes.get("model.embed_tokens.weight", (0,))
        self.vocab_size = embedding[0]
        shapes = tensor_shapes(run.recipe, self.vocab_size)
        weights = {name for name in self._stored.shapes if ":" not in name}
        problems = [f"missing: {name}" for name in shapes if name not in weights]
        problems += [f"unknown: {name}" for name in sorted(weights - shapes.keys())]
        problems += [
            f"{name}: {list(self._stored.shapes[name])} in the checkpoint, {list(shape)} by the recipe"
            for name, shape in shapes.items()
            if name in weights and self._stored.shapes[name] != shape
        ]
        if problems:
            raise CheckpointError(listed(f"{self._path}: not the weights of {run.folder / 'recipe.toml'}", problems))
        self._ours: dict[str, str] = {}
        self.entries: list[TensorEntry] = []
        for name, shape in shapes.items():
            theirs = family.tensor_name(name)
            self._ours[theirs] = name
            kept = name.rpartition(".")[2] in KEPT_FP32
            self.entries.append(TensorEntry(theirs, torch.float32 if kept else DTYPES[dtype], shape))
        self._dtypes = {entry.name: entry.dtype for entry in self.entries}

    def read(self, name: str) -> Tensor:
        """The tensor that the family calls `name`, converted; an fp32 export takes the master weight where there is one."""
        ours = self._ours[name]
        stored = f"master:{ours}" if self._dtypes[name] == torch.float32 and f"master:{ours}" in self._stored.shapes else ours
        tensor = self._stored.read(stored)
        if tensor_checksums({stored: tensor})[stored] != self._manifest[stored]["sha256"]:
            raise CheckpointError(f"{self._path}: {stored} is damaged, its checksum differs; use another checkpoint of the run")
        converted = tensor.to(self._dtypes[name])
        if bad := _num_not_finite(converted):
            told = f"{name}: {bad} of {converted.numel()} values are NaN or infinite"
            if not self._allow_nan:
                raise NonFiniteError(f"{told}; use an earlier checkpoint, or --allow-nan to export it all the same")
            self.notices.append(told)
        return converted


def _num_not_finite(tensor: Tensor) -> int:
    """How many values are NaN or infinite. Looks at the extremes first, which takes no memory and a tenth of the time."""
    if tensor.numel() == 0 or torch.stack(torch.aminmax(tensor)).isfinite().all():
        return 0
    return int((~torch.isfinite(tensor)).sum())


@contextlib.contextmanager
def _complete_or_absent(to: Path, num_bytes: int) -> Iterator[Path]:
    """A folder beside `to` that becomes `to` when all went well, and is removed otherwise."""
    if to.is_symlink() or (to.exists() and (not to.is_dir() or any(to.iterdir()))):
        raise UsageError(f"--to {to}: exists and is not an empty folder; name another, or remove it")
    unfinished = to.absolute().with_name(f".{to.absolute().name}.unfinished-{os.getpid()}")
    try:
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        unfinished.mkdir()
        if (free := shutil.disk_usage(unfinished).free) < num_bytes:
            raise OSError(errno.ENOSPC, f"{num_bytes} bytes needed, {free} bytes free")
        yield unfinished
        os.rename(unfinished, to.absolute())
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise RunError(f"{to}: no space for the export ({error.strerror}); free some, or name another place") from error
        raise RunError(f"{to}: cannot be written ({error}); name a place that is writable") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_texts(folder: Path, run: Run, family: Family, dtype: str, weights: _Weights, kept: list[str]) -> None:
    end = run.tokenizer.end_id
    if end >= weights.vocab_size:
        raise DataError(f"{run.folder}: end token {end} is outside of the {weights.vocab_size} rows of the embedding")
    config = family.config(run.recipe, weights.vocab_size, end, dtype)
    generation = {
        "bos_token_id": end,
        "eos_token_id": end,
        "do_sample": True,
        "temperature": run.recipe.sample.temperature or 1.0,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation)
    run.tokenizer.save(folder)
    (folder / "README.md").write_text(_card(run, family, dtype, weights.entries, kept), encoding="utf-8")


def _card(run: Run, family: Family, dtype: str, entries: Sequence[TensorEntry], kept: list[str]) -> str:
    recipe, train = run.recipe, run.recipe.train
    parameters = sum(entry.num_elements for entry in entries)
    fp32 = f"; kept in fp32: {len(kept)} tensors named *.{', *.'.join(KEPT_FP32)}" if kept else ""
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- mixture-of-experts
- mok
---
# {run.folder.resolve().name}

A Mixture-of-Experts language model trained with mok (mok-toolkit), step {run.checkpoint.step}.

| | |
|---|---|
| architecture | {family.architecture} |
| parameters | {parameters:,} |
| layers, hidden width | {recipe.model.num_layers}, {recipe.model.hidden_size} |
| experts per layer, per token, width | {recipe.moe.num_experts}, {recipe.moe.top_k}, {recipe.moe.intermediate_size} |
| weights | {dtype}{fp32} |
| router | {_routing(recipe)} |
| training | {train.steps} steps of {train.batch_size} x {train.sequence_length} tokens, seed {recipe.seed} |

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = AutoModelForCausalLM.from_pretrained("FOLDER")
```

`{EXPORT_RECORD}` has the SHA-256 of every tensor.
"""


def _routing(recipe: Recipe) -> str:
    moe = recipe.moe
    if moe.score_order == "after_top_k":
        return f"softmax over the {moe.top_k} chosen experts"
    normalized = "divided by their sum" if moe.normalize_weights else "not divided by their sum"
    return f"{moe.score} over all experts, the {moe.top_k} chosen weights {normalized}"


def _write_record(
    folder: Path, run: Run, family: Family, dtype: str, entries: Sequence[TensorEntry], facts: dict[str, dict[str, str]]
) -> None:
    record = {
        "format": 1,
        "run": run.folder.resolve().name,
        "step": run.checkpoint.step,
        "state_sha256": run.checkpoint.fact("state_sha256", str),
        "architecture": family.name,
        "dtype": dtype,
        "kept_fp32": list(KEPT_FP32),
        "router": _routing(run.recipe),
        "total_bytes": sum(entry.num_bytes for entry in entries),
        "total_parameters": sum(entry.num_elements for entry in entries),
        "tensors": {
            entry.name: {
                **facts[entry.name],
                "dtype": str(entry.dtype).removeprefix("torch."),
                "shape": list(entry.shape),
            }
            for entry in entries
        },
    }
    _write_json(folder / EXPORT_RECORD, record)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _check(folder: Path, entries: Sequence[TensorEntry]) -> None:
    """Read the index and every header back with the library that users have, and compare with what was meant."""
    written = SafetensorsFolder(folder)
    wanted = {entry.name: entry.shape for entry in entries}
    total = sum(entry.num_bytes for entry in entries)
    stated = load_json(folder / INDEX)["metadata"]["total_size"] if (folder / INDEX).is_file() else total
    if written.shapes != wanted or stated != total:
        raise CheckpointError(f"{folder}: index, headers and model disagree after writing; export again to another disk")
