"""Compile kernels for a GPU that is not there, and say what the compiler made of them.

    python -m tests.kernels.cross_compile ARCH MODULE

imports MODULE, calls its `launch_all(arch)` with a stand-in driver active, and prints one JSON line per kernel launched:
its registers, spilled bytes, shared memory and how often each kind of instruction occurs. The launches are the product's
own, on CPU tensors: everything is compiled as it would be on that GPU, then nothing runs. One process per architecture:
Triton's cache of compiled kernels is keyed by device, not by target, and an instruction that LLVM cannot select aborts.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SHARED_MEMORY_BYTES = {80: 166912, 89: 101376, 90: 232448, 100: 232448, 103: 232448, 120: 101376}
"""Opt-in shared memory of one block (CUDA C++ programming guide, technical specifications per compute capability)."""

NUM_SMS = {80: 108, 89: 142, 90: 132, 100: 148, 103: 152, 120: 170}
"""Multiprocessors of the card of that architecture which people have most of."""

INSTRUCTIONS = {
    "wgmma": r"wgmma\.mma_async",
    "wgmma_8_bit": r"wgmma\.mma_async\S*\.e4m3\.e4m3",
    "tcgen05": r"tcgen05\.mma",
    "tcgen05_scaled": r"tcgen05\.mma\S*\.kind::mxf8f6f4\.block_scale",
    "tensor_memory_load": r"tcgen05\.ld",
    "tensor_memory_store": r"tcgen05\.st",
    "mma": r"mma\.sync",
    "bulk_load": r"cp\.async\.bulk\.tensor\S*\.shared::\w+\.global",
    "bulk_store": r"cp\.async\.bulk\.tensor\S*\.global\.shared::cta",
    "async_copy": r"cp\.async\.c[ag]\.",
    "fused_multiply_add": r"\bfma\.rn\.f32\b",
}


class Recorder:
    """Stands for `driver.utils`: answers what Triton asks about the device and keeps each kernel that was 'loaded'."""

    def __init__(self, arch: int) -> None:
        self.arch = arch
        self.loaded: list[str] = []

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": SHARED_MEMORY_BYTES[self.arch],
            "multiprocessor_count": NUM_SMS[self.arch],
            "max_num_regs": 65536,
            "warpSize": 32,
        }

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        self.loaded.append(name)
        return 0, 0, 0, 0, 1024


class NoLaunch:
    """Stands for the launcher: accepts every launch and does nothing."""

    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(self, *args: Any) -> None:
        pass


class StandInDriver:
    """A CUDA driver of architecture `arch` without a device."""

    launcher_cls = NoLaunch

    def __init__(self, arch: int) -> None:
        self.arch = arch
        self.utils = Recorder(arch)

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind


def compiled_kernels(arch: int, module: str) -> Iterator[Any]:
    """Every kernel that `module.launch_all(arch)` launches, compiled for `arch`, each variant once."""
    from triton import knobs
    from triton.compiler import CompiledKernel
    from triton.runtime import driver

    driver.set_active(StandInDriver(arch))
    kernels: list[Any] = []
    init = CompiledKernel._init_handles

    @functools.wraps(init)
    def keep(self: Any) -> None:
        if self.module is None:
            kernels.append(self)
        init(self)

    CompiledKernel._init_handles = keep
    knobs.runtime.interpret = False
    importlib.import_module(module).launch_all(arch)
    return iter(kernels)


def report(kernel: Any) -> dict[str, Any]:
    """Name, shared memory, registers, spills and instruction counts of one compiled kernel."""
    ptx = kernel.asm["ptx"]
    arch = kernel.metadata.target.arch
    assembler = "ptxas-blackwell" if arch >= 100 else "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        target = re.search(r"^\.target (sm_\w+)", ptx, re.MULTILINE)
        run = subprocess.run(
            [assembler_path(assembler), "-v", f"--gpu-name={target[1]}", str(source), "-o", os.devnull],
            capture_output=True,
            text=True,
            check=True,
        )
    return {
        "kernel": kernel.metadata.name,
        "arch": arch,
        "num_warps": kernel.metadata.num_warps,
        "shared_bytes": kernel.metadata.shared,
        "registers": max((int(n) for n in re.findall(r"Used (\d+) registers", run.stderr)), default=0),
        "spill_bytes": sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", run.stderr)),
        "warnings": re.findall(r"\(C75\d\d\)[^\n]*", run.stderr),
        "instructions": {name: len(re.findall(pattern, ptx)) for name, pattern in INSTRUCTIONS.items()},
    }


def assembler_path(name: str) -> str:
    """Where the Triton wheel keeps `name`, one of its ptxas programs."""
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def reports(arch: int, module: str, timeout_s: float = 1200.0) -> list[dict[str, Any]]:
    """Compile `module`'s kernels for `arch` in a process of their own; raises AssertionError with its output if that fails."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.cross_compile", str(arch), module],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    assert run.returncode == 0, f"compiling {module} for sm_{arch} ended with {run.returncode}:\n{run.stderr[-4000:]}"
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def main() -> None:
    arch, module = int(sys.argv[1]), sys.argv[2]
    for kernel in compiled_kernels(arch, module):
        print(json.dumps(report(kernel)), flush=True)


if __name__ == "__main__":
    main()
