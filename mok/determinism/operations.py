"""Finds the first operation that turns equal inputs into unequal outputs, and names the cause where it is a known one.

Works on any PyTorch code, with no knowledge of the model: a dispatch mode sees every operation, forward and backward, and
notes digests of what goes in and comes out. Slow, so it runs only after a divergence was found.
Read next: `mok/determinism/step.py`, which uses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mok.determinism.digest import digest

__all__ = ["Cause", "Operation", "OperationTrace", "cause_of", "first_operation"]


@dataclass(frozen=True)
class Operation:
    """One call of an operation. name: "aten.index_add_.default"; inputs, outputs: digests of its tensors."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def base(self) -> str:
        """ "index_add_" of "aten.index_add_.default"."""
        return self.name.split(".")[1]


@dataclass(frozen=True)
class Cause:
    """A known reason for unequal bits. name: short, for tables; advice: what to do about it."""

    name: str
    advice: str


ATOMICS = Cause(
    "atomics",
    "sums in the order in which threads arrive; gather rows by an explicit map and add them in a fixed order instead",
)
THREAD_SUM = Cause(
    "thread-dependent sum",
    "the tensor is cut into one part per thread; sum fixed blocks and add them as a tree, or pin the thread count",
)
RANDOM = Cause("random numbers", "the generator was in another state; draw from a generator made of (seed, name, index)")
PRODUCT = Cause(
    "matrix product",
    "the library chose another kernel: threads, alignment of operands, few rows, or autotuning; fix shapes and alignment",
)
CHOICE = Cause("another operation", "the code took another path: a choice made by a clock, a timing or a random number")

ATOMIC_OPERATIONS = """
    index_add_ index_add scatter_add_ scatter_add scatter_reduce_ scatter_reduce index_put_ index_put _index_put_impl_
    _unsafe_index_put put_ index_reduce_ index_reduce embedding_dense_backward _embedding_bag_dense_backward bincount histc
    segment_reduce _scaled_dot_product_flash_attention_backward _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_cudnn_attention_backward
"""
SUMS = """
    sum mean dot vdot prod std var var_mean std_mean norm linalg_vector_norm logsumexp nansum cumsum
    native_layer_norm_backward native_batch_norm native_batch_norm_backward native_group_norm_backward
    _fused_rms_norm_backward
"""
DRAWS = """
    rand randn randint rand_like randn_like randperm bernoulli bernoulli_ normal normal_ uniform_ random_ multinomial
    native_dropout exponential_ log_normal_ geometric_ cauchy_ poisson
"""
PRODUCTS = """
    mm addmm bmm baddbmm mv addmv convolution convolution_backward _grouped_mm linear mkldnn_linear _scaled_mm
"""
CAUSES = {
    base: cause
    for cause, bases in ((ATOMICS, ATOMIC_OPERATIONS), (THREAD_SUM, SUMS), (RANDOM, DRAWS), (PRODUCT, PRODUCTS))
    for base in bases.split()
}

# Their outputs are whatever was in memory before.
UNINITIALISED = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"))
# What these write over is not an input.
OVERWRITING = frozenset(("copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"))


def cause_of(base: str) -> Cause | None:
    """The known cause behind an operation called `base`, or None."""
    return CAUSES.get(base)


class OperationTrace(TorchDispatchMode):
    """Use as a context manager around a step; `operations` holds what ran, views and allocations left out."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        namespace, _, rest = name.partition(".")
        base = rest.partition(".")[0]
        if func.is_view or base in UNINITIALISED or base in ("detach", "alias"):
            return func(*args, **kwargs)
        inputs = tuple(map(digest, tensors_in(args[1:] if base in OVERWRITING else args)))
        given = {key: value for key, value in kwargs.items() if key not in ("out", "generator")}
        inputs += tuple(map(digest, tensors_in(given)))
        result = func(*args, **kwargs)
        outputs = list(tensors_in(result))
        if namespace == "c10d":
            outputs = []  # not there yet: a collective is waited for later, and its work object is no tensor
        self.operations.append(Operation(name, inputs, tuple(map(digest, outputs))))
        return result


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided and not value.is_meta:
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def first_operation(left: Sequence[Operation], right: Sequence[Operation]) -> tuple[Operation, Cause | None, int] | None:
    """(operation, its known cause, its place) of the first operation with equal inputs and unequal outputs, or the first
    place where the two ran different operations; None if there is neither."""
    for place, (mine, other) in enumerate(zip(left, right, strict=False)):
        if mine.name != other.name:
            return mine, CHOICE, place
        if mine.inputs == other.inputs and mine.outputs != other.outputs:
            return mine, cause_of(mine.base), place
    if len(left) != len(right):
        longer = left if len(left) > len(right) else right
        place = min(len(left), len(right))
        return longer[place], CHOICE, place
    return None
