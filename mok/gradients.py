"""fp32 main gradients, added in the order of the contract (docs/numerics.md, rules 5 and 7) whatever the layout.

Owns where the parts of a gradient wait and how they are summed: one term per slice for dense weights, one buffer per lane for
expert weights, halving trees above both. Layers reach it through their parameters: `GradStore` hangs a `grad_sink` on dense
parameters, `lane_grads` or `lane_sum` on expert parameters and `main_grad` on both. Knows nothing of models, optimizers or
processes. Read next: `mok/grid.py` for the words, `mok/model/linear.py` for the main user.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from mok.grid import Call, Layout

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "ALIGNMENT",
    "GEMM_MULTIPLE",
    "Bank",
    "Exchange",
    "GradBuffers",
    "GradSink",
    "GradStore",
    "add_gradient",
    "add_product",
    "halving_tree",
    "slices_of",
]

# Elements. Every tensor of a bank starts on a multiple of it, so that blocks of a reduction never straddle two tensors
# (an expert's matrix, I x H with both multiples of 16, fills whole blocks) and every GEMM operand is aligned.
ALIGNMENT = 256

WAITING_ELEMENTS = 1 << 18
"""Elements of all terms of a bank up to which they wait for one another instead of being summed parameter by parameter: for
norms and biases calls cost more than sums."""

GEMM_MULTIPLE = 16
"""Rows and columns of every product come in multiples of this: with others a row's bits depend, on a CPU, on where in the
matrix it is and on how many products are made at once (docs/numerics.md)."""


def halving_tree(terms: Tensor, out: Tensor | None = None) -> Tensor:
    """Sum of `terms` over dim 0 in the order of the contract: term i and term i + h, h = n/2 rounded up, and so on.

    Works in place: the terms are destroyed. The sum is returned in `out`, or in `terms[0]`.

    Example: five terms are added as (((0+3) + 2) + (1+4)).
    """
    count = terms.shape[0]
    while count > (1 if out is None else 2):
        half = (count + 1) // 2
        terms[: count - half].add_(terms[half:count])
        count = half
    if out is None:
        return terms[0]
    return out.copy_(terms[0]) if count == 1 else torch.add(terms[0], terms[1], out=out)


class Exchange(Protocol):
    """What the ranks of a launch do together with flat tensors of a bank, which each of them keeps a shard of."""

    def over_positions(self, parts_LN: Tensor) -> Tensor:
        """[L, N] to [L, N / R]: this rank's piece of the halving tree of each row (one per owned lane) over the ranks of the
        group, in rank order."""

    def over_lanes(self, part_N: Tensor) -> Tensor:
        """[N] to [N / replicas]: this rank's piece of the halving tree over the replicas, in replica order."""

    def gather_shards(self, flat_N: Tensor, experts: bool) -> None:
        """Fill `flat_N`, of a bank of experts or of dense parameters, with every rank's shard; this rank's is in place."""

    def fetch(self, values_N: Tensor, start: int, sharded: DTensor) -> None:
        """Fill `values_N`, which are elements `start` and following of `sharded`, with what each rank keeps of them; what this
        rank keeps is in place."""


@dataclass
class GradBuffers:
    """Where the backward of one MoE layer leaves its expert weight gradients.

    gate, up [lanes, E_local, I, H], down [lanes, E_local, H, I]: fp32, any strides. started: for each lane, whether the
    buffers already hold the chain of earlier calls and must be continued; otherwise every element is written. fresh: nobody
    else holds the tensors, so a backend may put others in their place.
    """

    gate: Tensor
    up: Tensor
    down: Tensor
    started: tuple[bool, ...]
    fresh: bool = False


class Bank:
    """Parameters that are treated alike, laid one after the other in flat tensors.

    parameters: in the order of the bank. `flat(dtype)` makes a flat tensor of zeros, `views(flat)` cuts it into tensors of
    the parameters' shapes, each starting on a multiple of `ALIGNMENT` elements; what lies between stays zero.

    A flat tensor is also cut, anywhere, into equal shards, one for each rank that trains these parameters: all ranks of
    `layout` for dense ones; for a member's experts those that hold the same in other replicas. `shard` is this rank's range.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], layout: Layout | None = None, *, experts: bool = False) -> None:
        self.parameters = list(parameters)
        self.experts = experts
        self.starts: list[int] = []
        end = 0
        for parameter in self.parameters:
            self.starts.append(end)
            end += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        self.num_shards, index = 1, 0
        if layout is not None:
            self.num_shards, index = (layout.replicas, layout.replica) if experts else (layout.world_size, layout.dense_shard)
        size = -(-end // (ALIGNMENT * self.num_shards)) * ALIGNMENT
        self.numel = size * self.num_shards
        self.shard = slice(index * size, (index + 1) * size)

    @property
    def shard_size(self) -> int:
        return self.shard.stop - self.shard.start

    def flat(self, dtype: torch.dtype, *leading: int) -> Tensor:
        return self.zeros(dtype, *leading, self.numel)

    def flat_shard(self, dtype: torch.dtype) -> Tensor:
        """Zeros for this rank's shard alone."""
        return self.zeros(dtype, self.shard_size)

    def zeros(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """Where the parameters are."""
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        return torch.zeros(*shape, dtype=dtype, device=device)

    def views(self, flat: Tensor) -> list[Tensor]:
        """`flat` [..., numel] as one tensor [..., *shape] per parameter, sharing memory."""
        leading = flat.shape[:-1]
        return [
            flat[..., start : start + parameter.numel()].view(*leading, *parameter.shape)
            for start, parameter in zip(self.starts, self.parameters, strict=True)
        ]


def _hang(parameter: nn.Parameter, **attributes: object) -> None:
    for name, value in attributes.items():
        setattr(parameter, name, value)


class GradSink:
    """Takes the gradient terms of one use of one dense parameter, one term per slice of the call, in call order.

    rows: where the sums go. waiting: where the terms wait for `GradStore.finish`, if they do.
    """

    def __init__(self, store: GradStore, rows: Tensor, waiting: Tensor | None = None) -> None:
        self._store = store
        self._rows = rows
        self._waiting = waiting
        self._started = [False] * rows.shape[0]

    @property
    def num_slices(self) -> int:
        """Terms that each call of the methods below stands for: this rank's slices of the current call."""
        return self._store.num_slices

    def product(self, dy_TN: Tensor, x_TK: Tensor) -> None:
        """Add dy^T x of each slice: the weight gradient [N, K] of a linear layer, contracted over the tokens of the slice."""
        if padding := -dy_TN.shape[-1] % GEMM_MULTIPLE:
            dy_TN = pad(dy_TN, (0, padding))
        slices = self.num_slices
        dy_CsN, x_CsK = dy_TN.view(slices, -1, dy_TN.shape[-1]), x_TK.view(slices, -1, x_TK.shape[-1])
        if slices == 1 and not padding and self._takes_store(0):
            _matmul_fp32(dy_CsN[0].t(), x_CsK[0], self._rows[0])
            self._started[0] = True
            return
        terms = self._store.scratch(slices, dy_TN.shape[-1], x_TK.shape[-1])
        for i in range(slices) if dy_TN.is_cuda else ():
            # cuBLAS may choose another kernel for another batch count; one product per slice keeps the shape fixed.
            _matmul_fp32(dy_CsN[i].t(), x_CsK[i], terms[i])
        if not dy_TN.is_cuda:
            torch.bmm(dy_CsN.float().transpose(1, 2), x_CsK.float(), out=terms)
        self.add(terms[:, : self._rows.shape[1]])

    def add(self, terms: Tensor) -> None:
        """Add `terms` [slices, *shape], fp32, which are destroyed."""
        store = self._store
        if self._waiting is not None:
            self._waiting.copy_(terms)
            return
        if store.one_call:
            store.sum_call(terms, self._rows)
            return
        for term, cell in zip(terms, store.call.cells, strict=True):
            if self._started[cell]:
                self._rows[cell].add_(term)
            else:
                self._rows[cell].copy_(term)
                self._started[cell] = True

    def begin_step(self) -> None:
        self._started = [False] * len(self._started)

    def _takes_store(self, cell: int) -> bool:
        """Whether the only term of this call is the first of its cell and may be written there directly."""
        return self._store.call.cells == (cell,) and not self._started[cell] and self._rows.shape[0] == 1


def _matmul_fp32(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a @ b in fp32, whatever the operands' dtype (float64 stays), in `out` or new memory. On the CPU they are widened:
    oneDNN's bf16 weight gradients depend on the number of threads for contractions of 2048 and more."""
    if a.is_cuda and a.dtype not in (torch.float32, torch.float64):
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    return torch.mm(a.to(wide), b.to(wide), out=out)


def slices_of(weight: Tensor) -> int:
    """How many slices the gradient of a weight is summed up in: those of the call, or one where no trainer asks for more."""
    sink = getattr(weight, "grad_sink", None)
    return 1 if sink is None else sink.num_slices


def add_gradient(weight: Tensor, terms: Tensor) -> Tensor | None:
    """Put a gradient where it belongs: into the `grad_sink` of `weight`, into its `main_grad`, or, returned in the weight's
    dtype, into `.grad`. Every layer's weight gradients but those of routed experts come this way.

    terms: [slices, *shape], fp32 or float64, one for each of `slices_of(weight)`; destroyed. None is returned where autograd
    has nothing left to do, for weights that are not trained too.
    """
    if not weight.requires_grad:
        return None
    sink = getattr(weight, "grad_sink", None)
    if sink is not None:
        sink.add(terms)
        return None
    total = terms.sum(0)
    main = getattr(weight, "main_grad", None)
    if main is None:
        return total.to(weight.dtype)
    main.add_(total)
    return None


def add_product(weight: Tensor, dy_TN: Tensor, x_TK: Tensor) -> Tensor | None:
    """`add_gradient` of dy^T x, contracted over the tokens of each slice in fp32: the gradient [N, K] of a linear layer."""
    if not weight.requires_grad:
        return None
    sink = getattr(weight, "grad_sink", None)
    if sink is None:
        return add_gradient(weight, _matmul_fp32(dy_TN.t(), x_TK).unsqueeze(0))
    sink.product(dy_TN, x_TK)
    return None


class GradStore:
    """The fp32 gradients of one model on one rank.

    banks: of the trained parameters. embedding: the parameter that the input embedding shares with the output head, where it
    does: its two uses are summed apart, then added (head + embedding); it needs a bank of its own.
    layout, calls: the launch and the calls of each of its steps.

    While a step runs, `begin_call` names the call whose terms arrive. After `finish`, this rank's shard of the flat `grads` of
    each bank holds the step's gradient; `parameter.main_grad` (fp32, the parameter's shape) is a view of `grads`. Where a rank
    owns one lane and one position and a call is one slice, terms are written straight into `main_grad`; where a step is one
    call, they are summed at once and no parts are kept: an expert parameter then has `lane_sum`, where the tree over the lanes
    of the call goes, instead of `lane_grads`.
    """

    def __init__(
        self,
        banks: Sequence[Bank],
        layout: Layout,
        calls: Sequence[Call],
        embedding: nn.Parameter | None = None,
    ) -> None:
        self.num_lanes, self.num_positions = len(layout.lanes), len(layout.positions)
        self.one_call = len(calls) == 1
        self.call = calls[0]
        if not self.one_call:
            rows = self.num_lanes * self.num_positions
        elif layout.ep > 1:
            rows = self.num_lanes
        else:
            rows = 1
        self._banks = list(banks)
        expert_rows = 1 if self.one_call else self.num_lanes
        self._parts = [bank.flat(torch.float32, expert_rows if bank.experts else rows) for bank in banks]
        self.grads = [flat[0] for flat in self._parts]
        self._sinks: list[GradSink] = []
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._expert_parameters = [parameter for bank in banks if bank.experts for parameter in bank.parameters]
        for bank, flat in zip(banks, self._parts, strict=True):
            places = self._waiting_places(bank, flat)
            for parameter, view, place in zip(bank.parameters, bank.views(flat), places, strict=True):
                hung: dict[str, object]
                if not bank.experts:
                    hung = {"grad_sink": self._sink(view, place)}
                elif expert_rows < self.num_lanes:
                    hung = {"lane_sum": view[0]}
                else:
                    hung = {"lane_grads": view}
                _hang(parameter, **hung, main_grad=view[0])
        self._apart: dict[int, Tensor] = {}
        if embedding is not None and hasattr(embedding, "grad_sink"):
            index = next(i for i, bank in enumerate(banks) if bank.parameters == [embedding])
            self._apart[index] = banks[index].flat(torch.float32, rows)
            _hang(embedding, embedding_sink=self._sink(banks[index].views(self._apart[index])[0]))
        self._scratch = torch.empty(0)
        self.begin_step()

    def begin_step(self) -> None:
        for sink in self._sinks:
            sink.begin_step()
        for parameter in self._expert_parameters:
            _hang(parameter, lanes_started=[False] * self.num_lanes)

    def begin_call(self, call: Call) -> None:
        self.call = call

    @property
    def num_slices(self) -> int:
        """Slices of the current call on this rank."""
        return len(self.call.slices)

    def scratch(self, *shape: int) -> Tensor:
        """fp32 memory for terms that are used up before the next call of this method."""
        size = torch.Size(shape).numel()
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, device=self.grads[0].device)
        return self._scratch[:size].view(shape)

    def sum_call(self, terms: Tensor, rows: Tensor) -> None:
        """Sum the terms [slices, *shape] of a step that is one call; they are destroyed. rows [lanes, *shape] gets the sum of
        each lane, or that of all, if it has one row only."""
        lanes, positions = self.num_lanes, self.num_positions
        terms = terms.view(lanes, -1, positions, *terms.shape[1:])
        for time in range(1, terms.shape[1]):
            terms[:, 0].add_(terms[:, time])
        terms = terms[:, 0].transpose(0, 1)
        if rows.shape[0] == 1:
            halving_tree(halving_tree(terms), rows[0])
        else:
            halving_tree(terms, rows)

    def finish(self, exchange: Exchange | None = None) -> None:
        """Add the parts of the step. `exchange` is needed where the layout has more than one rank."""
        for terms, parts in self._waiting:
            self.sum_call(terms, parts)
        for i, (bank, grads) in enumerate(zip(self._banks, self.grads, strict=True)):
            shard = self._summed(self._parts[i], bank.experts, exchange)
            if i in self._apart:
                shard.add_(self._summed(self._apart[i], bank.experts, exchange))
            if exchange is not None:
                grads[bank.shard].copy_(shard)

    def _summed(self, parts: Tensor, experts: bool, exchange: Exchange | None) -> Tensor:
        """The trees over what this rank has of a bank, and over ranks: this rank's shard of the sum."""
        if not experts:
            if not self.one_call:
                parts = halving_tree(parts.view(self.num_lanes, self.num_positions, -1).transpose(0, 1))
            if exchange is not None:
                parts = exchange.over_positions(parts)
        part = halving_tree(parts)
        return part if exchange is None else exchange.over_lanes(part)

    def _waiting_places(self, bank: Bank, parts: Tensor) -> Sequence[Tensor | None]:
        """For each parameter of `bank` where its terms [slices, *shape] wait, if they do."""
        slices = self.num_slices
        if bank.experts or not self.one_call or slices == 1 or slices * bank.numel > WAITING_ELEMENTS:
            return [None] * len(bank.parameters)
        terms = bank.flat(torch.float32, slices)
        self._waiting.append((terms, parts))
        return bank.views(terms)

    def _sink(self, rows: Tensor, waiting: Tensor | None = None) -> GradSink:
        sink = GradSink(self, rows, waiting)
        self._sinks.append(sink)
        return sink
