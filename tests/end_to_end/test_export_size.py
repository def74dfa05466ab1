"""Import and export of a 13 GB model: bounded memory, and the speed of the disk. Needs 45 GB of disk and several minutes.

The disk's own rates are measured beside, with plain writes and reads of 4 GiB.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mok.checkpoint import FORMAT, tensor_checksums
from mok.data import Tokenizer
from mok.hf_layout import tensor_shapes
from mok.recipe import dump_toml, load
from mok.safetensors_files import TensorEntry, shard_entries, write_shards

pytestmark = pytest.mark.soak

MEASURED = """
import json, resource, sys, time
from pathlib import Path
{body}
usage = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({{"seconds": seconds, "peak_bytes": usage.ru_maxrss * 1024, "cpu_seconds": usage.ru_utime + usage.ru_stime}}))
"""

EXPORT = """
from mok.export import export, open_run
start = time.perf_counter()
export(open_run(Path(sys.argv[1])), Path(sys.argv[2]))
seconds = time.perf_counter() - start
"""

IMPORT = """
import torch
from mok.ahead import ahead
from mok.hf_import import HfWeights
from mok.hf_layout import tensor_shapes
from mok.recipe import load
recipe = load("olmoe-1b-7b")
start = time.perf_counter()
weights = HfWeights(Path(sys.argv[2]), recipe)
for _ in ahead(weights.read, tensor_shapes(recipe, weights.vocab_size), torch.get_num_threads()):  # as TrainState does
    pass
seconds = time.perf_counter() - start
"""


def write_large_run(folder: Path) -> int:
    """A run of olmoe-1b-7b with a checkpoint of bf16 weights, written as a stream; returns the bytes of its weights."""
    recipe = load("olmoe-1b-7b")
    noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).bfloat16()
    shapes = tensor_shapes(recipe, recipe.model.vocab_size)
    entries = [TensorEntry(name, torch.bfloat16, shape) for name, shape in shapes.items()]
    checksums: dict[str, str] = {}

    def generate(name: str) -> torch.Tensor:
        size = torch.Size(shapes[name]).numel()
        values = noise.roll(len(checksums) * 977).repeat(-(-size // noise.numel()))[:size].view(shapes[name])
        checksums.update(tensor_checksums({name: values}))
        return values

    step = folder / "checkpoints" / "step_000001"
    step.mkdir(parents=True)
    write_shards(step, shard_entries(entries, 5_000_000_000), generate, lambda entry: None)
    tensors = {e.name: {"sha256": checksums[e.name], "dtype": "bfloat16", "shape": list(e.shape)} for e in entries}
    (step / "manifest.json").write_text(json.dumps({"format": FORMAT, "step": 1, "state_sha256": "", "tensors": tensors}))
    (folder / "recipe.toml").write_text(dump_toml(recipe))
    Tokenizer.of_bytes().save(folder)
    return sum(entry.num_bytes for entry in entries)


def measured(body: str, *arguments: str) -> dict[str, float]:
    """Run `body` in a process of its own, with files neither cached nor waiting to be written."""
    os.sync()
    for file in (file for argument in arguments for file in Path(argument).rglob("*.safetensors")):
        forget(file)
    command = [sys.executable, "-c", MEASURED.format(body=body), *arguments]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def forget(file: Path) -> None:
    """Drop a file from the page cache."""
    descriptor = os.open(file, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def disk_rates(folder: Path) -> tuple[float, float]:
    """Bytes per second of writing 4 GiB that are on disk at the end, and of reading them back."""
    block, path = os.urandom(1 << 24), folder / "probe"
    start = time.perf_counter()
    with open(path, "wb") as file:
        for _ in range(256):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    wrote = time.perf_counter() - start
    forget(path)
    start = time.perf_counter()
    with open(path, "rb", buffering=0) as file:
        while file.read(1 << 24):
            pass
    read = time.perf_counter() - start
    path.unlink()
    return (1 << 32) / wrote, (1 << 32) / read


def test_a_13_gb_model_goes_out_and_in_with_bounded_memory_at_half_the_speed_of_the_disk(tmp_path):
    size = write_large_run(tmp_path / "run")
    assert size > 13e9
    recipe = load("olmoe-1b-7b")
    largest = max(2 * torch.Size(shape).numel() for shape in tensor_shapes(recipe, recipe.model.vocab_size).values())
    write_rate, read_rate = disk_rates(tmp_path)
    out = measured(EXPORT, str(tmp_path / "run"), str(tmp_path / "model"))
    back = measured(IMPORT, str(tmp_path / "run"), str(tmp_path / "model"))
    both_ways = 1 / (1 / write_rate + 1 / read_rate)
    report = {
        "bytes": size,
        "disk_write_bytes_per_s": write_rate,
        "disk_read_bytes_per_s": read_rate,
        "export": out,
        "export_fraction_of_disk": size / out["seconds"] / both_ways,
        "import": back,
        "import_fraction_of_disk": size / back["seconds"] / read_rate,
    }
    print(json.dumps(report, indent=1))
    assert out["peak_bytes"] <= 1e9 + 2 * largest
    assert out["seconds"] <= 2 * size / both_ways
    assert back["seconds"] <= 2 * size / read_rate
