"""Records what a training step of mok computes, under names that say where in the step and the model a tensor belongs.

Owns the translation from a step to a trace: which tensors, in which phase, cut into slices so that no layout shows. Read next:
`mok/train/step.py`, which calls the observer, and `mok/determinism/trace.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mok.determinism.trace import Recorder
from mok.grid import Call
from mok.model.transformer import Decoder

__all__ = ["StepObserver"]


class StepObserver:
    """See `mok.train.step.Observer`. One rank's; the trace of a run is merged from those of all ranks."""

    def __init__(self, recorder: Recorder, model: Decoder) -> None:
        self._recorder = recorder
        self._slices: tuple[int, ...] = ()
        for layer, block in enumerate(model.blocks):
            name = f"model.layers.{layer}"
            router = getattr(block.mlp, "router", None)
            if router is not None:
                router.register_forward_hook(self._routes_hook(f"{name}.mlp.gate"))
            if recorder.wants_activations:
                block.register_forward_hook(self._activation_hook(name))

    @property
    def can_be_recorded(self) -> bool:
        return self._recorder.can_be_recorded

    def recorded(self) -> None:
        self._recorder.recorded()

    def begin(self, step: int) -> None:
        self._recorder.begin(step)
        # Nothing may draw from the global generator: ranks and calls would show.
        self._recorder.see("data", "random state", torch.get_rng_state())

    def call(self, call: Call, inputs: Tensor, targets: Tensor) -> None:
        self._slices = call.slices
        self._see("data", tokens=inputs, targets=targets)

    def losses(self, losses_S: Tensor) -> None:
        """The forward of the call is over: from here on, blocks that run again (recomputation) are not recorded."""
        self._see("forward", loss=losses_S)
        self._slices = ()

    def reduced(self, gradients: Mapping[str, Tensor]) -> None:
        self._recorder.see_all("reduce", gradients)

    def updated(self, tensors: Mapping[str, Tensor]) -> None:
        self._recorder.see_all("optimizer", tensors)

    def end(self, report: Any) -> None:
        for layer, counts in enumerate(report.counts_LE):
            self._recorder.see("router", f"counts of MoE layer {layer}", torch.tensor(counts))
        self._recorder.see("forward", "loss", torch.tensor(report.loss, dtype=torch.float64))
        self._recorder.see("reduce", "gradient norm", torch.tensor(report.grad_norm, dtype=torch.float64))
        self._recorder.end()

    def _see(self, phase: str, **tensors: Tensor) -> None:
        """Record each of this call's slices of `tensors`, whose first dim holds them one after the other."""
        parts = {name: zip(self._slices, values.chunk(len(self._slices)), strict=True) for name, values in tensors.items()}
        self._recorder.see_all(phase, {f"{name}[slice {i}]": part for name, slices in parts.items() for i, part in slices})

    def _routes_hook(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, routes: Any) -> None:
            if self._slices:
                self._see("router", **{f"{name} expert ids": routes.expert_ids_TK, f"{name} weights": routes.weights_TK})

        return hook

    def _activation_hook(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
            if self._slices:
                self._see("forward", **{name: outputs[0]})

        return hook
