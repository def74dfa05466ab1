"""Expert layers of others, and ours, behind one interface: forward on given routes, backward to every gradient by name.

Owns how each is built from the same weights. A peer's own package is imported only when it is asked for. Read next:
`mok/bench/layer.py`, which times them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import silu

from mok.backends.interface import Options
from mok.backends.quantization import WeightCache
from mok.bench.peers.absent import Absent
from mok.errors import UsageError
from mok.grid import CallGrid
from mok.layer import moe_layer
from mok.transport.interface import Transport

__all__ = ["PEERS", "Contestant", "Fused", "Mok", "find", "mok_with"]


class Contestant(Protocol):
    """One layer. `name` is that of its row."""

    name: str

    def forward(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """y_TH, with what a backward needs."""

    def backward(self, y_TH: Tensor, dy_TH: Tensor) -> dict[str, Tensor]:
        """Gradients dx, dweights, gate, up, down."""


class Mok:
    """Ours. Expert gradients are written to fp32, as the first call of a training step does. kernel, recompute: see
    `mok.backends.interface.Options`. weights: of a layer with 8-bit operands "quantised" in each call, as in the first of a
    step; "kept" from call to call, as in its other calls; or "bf16", with operands as they are. transport, grid: of a rank
    that holds part of the experts."""

    def __init__(
        self,
        problem: Any,
        backend: str,
        kernel: Any = None,
        recompute: str = "none",
        weights: str = "quantised",
        transport: Transport | None = None,
        grid: CallGrid | None = None,
    ) -> None:
        notes = ("" if recompute == "none" else f", recompute {recompute}", "" if weights == "quantised" else f", {weights}")
        self.name = f"mok {backend}" + "".join(notes)
        self._backend = backend
        quantization = None if weights == "bf16" else problem.quantization
        cache = WeightCache() if weights == "kept" else None
        self._grid = grid or CallGrid()
        self._options = Options(
            recompute=recompute, kernel=kernel, quantization=quantization, weight_cache=cache, transport=transport
        )
        self._weights = [weight.detach().requires_grad_() for weight in (problem.gate_EIH, problem.up_EIH, problem.down_EHI)]
        for weight in self._weights:
            weight.lane_grads = torch.empty((1, *weight.shape), dtype=torch.float32, device=weight.device)

    def forward(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        self._inputs = x_TH.detach().requires_grad_(), weights_TK.detach().requires_grad_()
        x, weights = self._inputs
        for weight in self._weights:
            weight.lanes_started = [False]
        arguments = (x, ids_TK, weights, tuple(self._weights))
        y_TH, _ = moe_layer(*arguments, options=self._options, backend=self._backend, grid=self._grid)
        return y_TH

    def backward(self, y_TH: Tensor, dy_TH: Tensor) -> dict[str, Tensor]:
        dx, dweights = torch.autograd.grad(y_TH, self._inputs, dy_TH)
        gate, up, down = (weight.lane_grads[0] for weight in self._weights)
        return {"dx": dx, "dweights": dweights, "gate": gate, "up": up, "down": down}


class Fused:
    """A peer with gate and up in one parameter [E, 2I, H]; `compute(x, ids, weights, gate_up, down)` is differentiable."""

    def __init__(self, name: str, problem: Any, compute: Callable[..., Tensor]) -> None:
        self.name, self._compute = name, compute
        self._gate_up = torch.cat((problem.gate_EIH, problem.up_EIH), dim=1).requires_grad_()
        self._down = problem.down_EHI.detach().requires_grad_()

    def forward(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        self._inputs = x_TH.detach().requires_grad_(), weights_TK.detach().requires_grad_()
        x, weights = self._inputs
        return self._compute(x, ids_TK, weights, self._gate_up, self._down)

    def backward(self, y_TH: Tensor, dy_TH: Tensor) -> dict[str, Tensor]:
        leaves = [*self._inputs, self._gate_up, self._down]
        dx, dweights, gate_up, down = torch.autograd.grad(y_TH, leaves, dy_TH)
        gate, up = gate_up.chunk(2, dim=1)
        return {"dx": dx, "dweights": dweights, "gate": gate, "up": up, "down": down}


def torch_loop(problem: Any) -> Contestant:
    """A Python loop over experts, as people write it first."""

    def compute(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        y = torch.zeros_like(x, dtype=torch.float32)
        for e in range(gate_up.shape[0]):
            token, slot = torch.where(ids == e)
            gate, up = (x[token] @ gate_up[e].t()).chunk(2, dim=1)
            y = y.index_add(0, token, ((silu(gate) * up) @ down[e].t()).float() * weights[token, slot].unsqueeze(1))
        return y.to(x.dtype)

    return Fused("torch loop", problem, compute)


def grouped_mm(problem: Any) -> Contestant:
    """Sort, gather, torch's grouped matrix products, and a sum over slots."""

    def compute(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        top_k = ids.shape[1]
        sorted_ids, order = ids.reshape(-1).sort(stable=True)
        ends = torch.searchsorted(sorted_ids, torch.arange(gate_up.shape[0], device=x.device, dtype=ids.dtype), right=True).to(
            torch.int32
        )
        product = torch.nn.functional.grouped_mm
        gate, up = product(x[order // top_k], gate_up.transpose(1, 2), offs=ends).chunk(2, dim=1)
        rows = product(silu(gate) * up, down.transpose(1, 2), offs=ends)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=x.device))
        y = (rows[place].view(*ids.shape, -1) * weights.unsqueeze(2)).sum(1)
        return y.to(x.dtype)

    return Fused("torch grouped_mm", problem, compute)


def hf(problem: Any) -> Contestant:
    """transformers' own experts module, with its grouped_mm implementation."""
    try:
        from transformers import OlmoeConfig
        from transformers.models.olmoe.modeling_olmoe import OlmoeExperts
    except ImportError as error:
        raise Absent(f"transformers 5 with OlmoeExperts is not installed: pip install 'transformers>=5' ({error})") from error
    shape = problem.shape
    config = OlmoeConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        module = OlmoeExperts(config)

    def compute(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        leaves = {"gate_up_proj": gate_up, "down_proj": down}
        return torch.func.functional_call(module, leaves, (x, ids.long(), weights))

    return Fused("transformers grouped_mm", problem, compute)


PEERS = ("torch", "grouped_mm", "hf", "torchtitan", "scattermoe", "sonicmoe")


def find(name: str) -> Callable[[Any], Contestant]:
    """The maker of peer `name`, which raises Absent where the peer is not installed; UsageError if there is no such peer."""
    if name not in PEERS:
        raise UsageError(f"--against {name}: mok bench layer knows {', '.join(PEERS)}")
    here: dict[str, Callable[[Any], Contestant]] = {"torch": torch_loop, "grouped_mm": grouped_mm, "hf": hf}
    if name in here:
        return here[name]
    maker: Callable[[Any], Contestant] = getattr(import_module(f"mok.bench.peers.{name}"), name)
    return maker


def mok_with(backend: str, recompute: str = "none", weights: str = "quantised") -> Callable[[Any], Contestant]:
    """The maker of our layer on `backend`."""
    return lambda problem: Mok(problem, backend, recompute=recompute, weights=weights)
