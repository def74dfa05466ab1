"""What every backend is given and gives back.

Owns the types that pass between `mok.autograd` and a backend, and nothing that computes. A backend is a module with

    TRANSPORTS: the values of `moe.transport` by which its rows can travel between ranks that share experts
    why_not(shape, dtype, device, quantization) -> list of reasons why it cannot run; empty if it can. Pure.
    forward(x_TH, weights_TK, schedule, experts, options, shared_scale_T) -> (y_TH, saved)
    backward(dy_TH, saved, grads) -> InputGrads; grads is None where the expert weights are frozen

and, if its kernels read a plan of their own on the device instead of a `Schedule`,

    build_schedule(expert_ids_TK, shape, grid, options) -> what it gets as `schedule`, with `grid` and `counts_CE`

and, if its kernels have settings, which must be a pure function of shape, device and tokens of the call (None: unknown),

    settings(shape, device, tokens) -> what they run with, a dataclass

`saved` is a dataclass whose tensors are fields of it; whoever calls keeps them from being changed in between. Where the expert
weights live on several ranks, rows travel through `options.transport`. Read next: `mok/backends/torch.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mok.backends.quantization import WeightCache
from mok.quantization import Quantization
from mok.shapes import LayerShape
from mok.transport.interface import Transport

__all__ = ["ExpertWeights", "InputGrads", "LayerShape", "Options", "SharedGrads", "SharedWeights"]


@dataclass(frozen=True)
class SharedWeights:
    """The shared experts as one expert of their summed width S: gate_up_JH, J = 2S with the gate's rows first, and down_HS."""

    gate_up_JH: Tensor
    down_HS: Tensor


@dataclass(frozen=True)
class ExpertWeights:
    """Weights of this rank's L routed experts, in the dtype of the activations; any strides.

    gate_LIH, up_LIH, down_LHI; shared: the shared experts, or None.
    """

    gate_LIH: Tensor
    up_LIH: Tensor
    down_LHI: Tensor
    shared: SharedWeights | None = None


@dataclass(frozen=True)
class Options:
    """How a layer is computed.

    clamp: SwiGLU takes min(gate, clamp) and up within +-clamp; 0 for no limits.
    recompute: what the backward computes again: none | activations | all.
    transport: None where all experts are on this rank.
    kernel: settings of a Triton backend; None takes its table's choice.
    layer: the index that errors name, and whose status word kernels use.
    quantization: which operands are rounded to 8 bits; None for none of them.
    weight_cache: where rounded weights are kept between calls; None rounds them in every call.
    """

    clamp: float = 0.0
    recompute: str = "none"
    transport: Transport | None = None
    kernel: Any = None
    layer: int = 0
    quantization: Quantization | None = None
    weight_cache: WeightCache | None = None


@dataclass(frozen=True)
class SharedGrads:
    """Operands of the shared experts' weight gradients, over the tokens of this rank, in the dtype of the activations:
    that of gate_up is d_gate_up_TJ^T x, that of down dy^T hidden_TS. Both carry the shared scale."""

    d_gate_up_TJ: Tensor
    hidden_TS: Tensor


@dataclass(frozen=True)
class InputGrads:
    """Gradients of the inputs: dx_TH in the dtype of the activations, the rest fp32. Absent inputs have None."""

    dx_TH: Tensor
    dweights_TK: Tensor
    dshared_scale_T: Tensor | None = None
    shared: SharedGrads | None = None
