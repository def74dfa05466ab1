"""Triton's CPU interpreter made fit for these tests: right bfloat16, and a grid whose programs are alive together.

Owns the patches and nothing of `mok`. As shipped (3.6 to 3.8) the interpreter computes bfloat16 on raw bit patterns, rounds
fp32 to bfloat16 wrongly, knows no scaled products, and runs the programs of a grid one after another, so a program that waits
for a later one never ends. `install()` cures the first three; inside `interleaved(seed)` every launch runs its programs as
threads that pass one baton, handing it on at each atomic in a seeded random order, so that protocols can be tested for races
and deadlocks. `tests/conftest.py` turns the interpreter on where there is no GPU.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as base

Builder = base.InterpreterBuilder
Handle = base.TensorHandle

ARITHMETIC = ("fadd", "fsub", "fmul", "fdiv", "minimumf", "maximumf", "minnumf", "maxnumf", "fma")
COMPARISONS = tuple(f"fcmp{order}{relation}" for order in "OU" for relation in ("LT", "GT", "LE", "GE", "EQ", "NE"))


class Deadlock(RuntimeError):
    """The programs of a grid kept waiting for one another."""


def widen(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bit patterns (uint16) as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """float32 rounded to nearest even as bfloat16 bit patterns (uint16)."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded).astype(np.uint16)


def install() -> None:
    """Patch the interpreter of this process; idempotent."""
    if getattr(Builder, "_mok_installed", False):
        return
    Builder._mok_installed = True
    convert = base._convert_float

    def convert_float(data: np.ndarray, source: Any, target: Any, rounding_mode: Any) -> np.ndarray:
        if source == tl.bfloat16 and target == tl.float32:
            return widen(data)
        if source == tl.float32 and target == tl.bfloat16:
            return narrow(data)
        return convert(data, source, target, rounding_mode)

    dot = Builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, accumulator: Any, *rest: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            return Handle(np.matmul(widen(a.data), widen(b.data)) + accumulator.data, tl.float32)
        return dot(self, a, b, accumulator, *rest)

    Builder.create_dot_scaled = dot_scaled
    base._convert_float = convert_float
    Builder.create_dot = create_dot
    Builder.create_inline_asm = inline_asm
    Builder.get_bf16 = lambda self, value: Handle(narrow(np.array([value], np.float32)), tl.bfloat16)
    for name in ARITHMETIC + COMPARISONS:
        if hasattr(Builder, f"create_{name}"):
            setattr(Builder, f"create_{name}", refusing_bf16(getattr(Builder, f"create_{name}")))
    for name in ("create_atomic_rmw", "create_atomic_cas"):
        setattr(Builder, name, switching(getattr(Builder, name)))
    base.GridExecutor.__call__ = launch
    base.InterpretedFunction.__call__ = device_call


_milliseconds = itertools.count()


def dot_scaled(self: Any, a: Any, a_scale: Any, a_format: Any, b: Any, b_scale: Any, *rest: Any) -> Any:
    """The product of E4M3 codes [M, K] and [K, N] with E8M0 scales [M, K / 32] and [N, K / 32], which the interpreter lacks."""

    def scaled(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        values = base._convert_float(codes, tl.float8e4nv, tl.float16, None).view(np.float16).astype(np.float32)
        values = np.where((codes & 0x7F) == 0x7F, np.float32(np.nan), values)
        return values * np.repeat(np.exp2(scales.astype(np.float32) - 127), 32, axis=1)

    accumulator = rest[-1]
    return Handle(scaled(a.data, a_scale.data) @ scaled(b.data.T, b_scale.data).T + accumulator.data, tl.float32)


def inline_asm(self: Any, text: str, constraints: str, values: list[Any], types: Any, is_pure: bool, pack: int) -> Any:
    """The instructions that kernels meant for the interpreter spell out: tanh at full precision, four values to the E4M3 codes
    of a word, and a clock that goes on by a millisecond each time somebody looks at it, so that a slow machine changes nothing.
    """
    if text.startswith("tanh.approx.f32"):
        result = Handle(np.tanh(values[0].data), tl.float32)
    elif "cvt.rn.satfinite.e4m3x2.f32" in text:
        codes = [torch.from_numpy(value.data).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8) for value in values]
        result = Handle(torch.stack(codes, dim=-1).numpy().view(np.int32)[..., 0], tl.int32)
    elif "%globaltimer" in text:
        result = Handle(np.array([next(_milliseconds) * 1_000_000], np.int64), tl.int64)
    else:
        raise NotImplementedError(f"inline PTX in the interpreter: {text}")
    return SimpleNamespace(get_result=lambda index: result)


def refusing_bf16(operation: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter would compute on bit patterns: kernels must widen to fp32 first, which is also what they mean."""

    def checked(self: Any, *operands: Any) -> Any:
        if any(operand.dtype.scalar == tl.bfloat16 for operand in operands):
            raise TypeError("arithmetic on bfloat16 in a kernel: convert to tl.float32 first")
        return operation(self, *operands)

    return checked


def switching(operation: Callable[..., Any]) -> Callable[..., Any]:
    """An atomic is where another program may run: before it, so that what it reads may have changed."""

    def switched(self: Any, *operands: Any) -> Any:
        if (programs := Programs.running) is not None:
            programs.switch()
        return operation(self, *operands)

    return switched


class Programs:
    """The programs of one launch as threads with one baton.

    indices: grid index (x, y, z) of each program.
    seed: of the order in which the baton goes round.
    max_switches: hand-overs after which the programs are taken to be deadlocked.
    """

    running: Programs | None = None
    local = threading.local()

    def __init__(self, indices: list[tuple[int, int, int]], seed: int, max_switches: int) -> None:
        self.indices = indices
        self.random = random.Random(seed)
        self.max_switches = max_switches
        self.switches = 0
        self.alive = list(range(len(indices)))
        self.baton = [threading.Event() for _ in indices]
        self.finished = threading.Event()
        self.error: BaseException | None = None

    def run(self, program: Callable[[], None]) -> None:
        """Run `program` once per index; raises what any of them raised."""
        if not self.indices:
            return
        Programs.running = self
        threads = [threading.Thread(target=self.body, args=(i, program), daemon=True) for i in self.alive]
        for thread in threads:
            thread.start()
        self.baton[self.random.choice(self.alive)].set()
        self.finished.wait()
        for thread in threads:
            thread.join()
        Programs.running = None
        if self.error is not None:
            raise self.error

    def body(self, me: int, program: Callable[[], None]) -> None:
        Programs.local.index = me
        self.baton[me].wait()
        if self.error is None:
            base.interpreter_builder.set_grid_idx(*self.indices[me])
            try:
                program()
            except BaseException as error:
                self.stop(error)
        self.alive.remove(me)
        if self.error is None and self.alive:
            self.baton[self.random.choice(self.alive)].set()
        else:
            self.finished.set()

    def stop(self, error: BaseException) -> None:
        """Keep the first error and wake everybody up to leave."""
        if self.error is None:
            self.error = error
            for event in self.baton:
                event.set()

    def switch(self) -> None:
        """Hand the baton to a program picked at random, perhaps the same one."""
        me = Programs.local.index
        self.switches += 1
        if self.switches > self.max_switches:
            raise Deadlock(f"{len(self.alive)} of {len(self.indices)} programs still wait after {self.switches} switches")
        following = self.random.choice(self.alive)
        if following != me:
            self.baton[me].clear()
            self.baton[following].set()
            self.baton[me].wait()
        if self.error is not None:
            raise SystemExit
        base.interpreter_builder.set_grid_idx(*self.indices[me])


def device_call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """One kernel function calling another: `launch` has patched the language for both, and undoes it, which the interpreter's
    own patch at every call does not."""
    return self.rewrite()(*args, **kwargs)


_order: list[tuple[int, int]] = []


@contextlib.contextmanager
def interleaved(seed: int, max_switches: int = 200_000) -> Iterator[None]:
    """Within the block the programs of a launch run together, switching at every atomic in an order drawn from `seed`."""
    _order.append((seed, max_switches))
    try:
        yield
    finally:
        _order.pop()


def launch(self: Any, *args_dev: Any, **kwargs: Any) -> None:
    """`GridExecutor.__call__` with the order of programs left to `interleaved`."""
    names = inspect.getfullargspec(self.fn).args
    kwargs = {name: value for name, value in kwargs.items() if name in names}
    args_host, kwargs_host = self._init_args_hst(args_dev, kwargs)
    scopes = [base._patch_lang(self.fn), base._patch_lang(tl.standard.sum.fn)]  # Triton's own library writes `core`, not `tl`
    old = np.seterr(all="ignore")  # rows and columns that a tile computes and does not store may hold anything
    try:
        given = inspect.getcallargs(self.fn, *args_host, **kwargs_host)
        args = {name: value if name in self.constexprs else base._implicit_cvt(value) for name, value in given.items()}
        grid = self.grid(args) if callable(self.grid) else self.grid
        grid = tuple(grid) + (1,) * (3 - len(grid))
        base.interpreter_builder.set_grid_dim(*grid)
        indices = list(itertools.product(*(range(size) for size in grid)))
        if _order:
            Programs(indices, *_order[-1]).run(lambda: self.fn(**args))
        else:
            for index in indices:
                base.interpreter_builder.set_grid_idx(*index)
                self.fn(**args)
    finally:
        np.seterr(**old)
        for scope in reversed(scopes):
            scope.restore()
    self._restore_args_dev(args_dev, args_host, kwargs, kwargs_host)
