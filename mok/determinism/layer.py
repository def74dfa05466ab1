"""Checks of the MoE layer alone, at the shape of a recipe: rows among other rows, and odd data pointers.

Everything here happens in one process, on the layer that a recipe describes, with weights and inputs made of its seed.
Read next: `mok/determinism/step.py` for the axes that repeat a whole step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from mok.config import Recipe
from mok.determinism.compare import Difference, compare_tensors
from mok.determinism.digest import bytes_of
from mok.determinism.faults import parse_injection
from mok.determinism.report import AxisResult, Finding, Report, hint_for
from mok.determinism.step import DEFAULT_RUNS, verify_step
from mok.determinism.trace import Divergence, Key
from mok.errors import UsageError
from mok.model.moe import MoE
from mok.model.transformer import DTYPES, Group, moe_of

__all__ = ["LAYER_CHECKS", "LayerCheck", "verify_layer"]

ROW_BATCHES = (1, 2, 3, 16, 17, 64, 257)
"""Numbers of tokens, of which the first is always the same token."""


@dataclass
class LayerCheck:
    """What was compared, and the first difference: (phase, tensor, difference)."""

    num_tensors: int = 0
    num_bytes: int = 0
    divergence: tuple[str, str, Difference] | None = None

    def compare(self, phase: str, name: str, expected: Tensor, found: Tensor) -> None:
        self.num_tensors += 1
        self.num_bytes += bytes_of(expected).numel()
        difference = compare_tensors(name, expected, found)
        if difference is not None and self.divergence is None:
            self.divergence = phase, name, difference


def layer_of(recipe: Recipe, device: torch.device) -> MoE:
    """A MoE layer of the recipe's shape, its weights drawn from torch's global generator seeded with the recipe's seed."""
    # Forced routes depend on where in the batch a row is, which is what these checks vary.
    routed = replace(recipe, moe=replace(recipe.moe, force_routing="none"))
    torch.manual_seed(recipe.seed)
    layer = moe_of(routed, 0, Group(), DTYPES[recipe.train.dtype], device)
    for weight in layer.parameters():
        nn.init.normal_(weight, std=0.02)
    return layer


def layer_inputs(recipe: Recipe, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """x and the gradient of y, [tokens, H]; the first rows are the same for every number of tokens."""
    rows = [torch.randn(2, recipe.model.hidden_size, generator=torch.Generator().manual_seed(i)) for i in range(tokens)]
    both = torch.stack(rows).to(device, DTYPES[recipe.train.dtype])
    return both[:, 0].contiguous(), both[:, 1].contiguous()


def run_layer(layer: MoE, x_TH: Tensor, dy_TH: Tensor) -> dict[str, Tensor]:
    """y, dx and the gradient of every parameter."""
    layer.zero_grad()
    x_TH = x_TH.detach().requires_grad_()
    y_TH = layer(x_TH)
    y_TH.backward(dy_TH)
    assert x_TH.grad is not None
    gradients = {f"grad:{name}": p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {"y": y_TH.detach(), "dx": x_TH.grad, **gradients}


def check_batch(recipe: Recipe, device: torch.device) -> LayerCheck:
    """The first token's output and input gradient, alone and among other tokens."""
    check = LayerCheck()
    layer = layer_of(recipe, device)
    alone = run_layer(layer, *layer_inputs(recipe, 1, device))
    for tokens in ROW_BATCHES[1:]:
        among = run_layer(layer, *layer_inputs(recipe, tokens, device))
        for phase, name in (("forward", "y"), ("backward", "dx")):
            check.compare(phase, f"{name}[0] among {tokens} rows", alone[name], among[name][:1])
    return check


def check_alignment(recipe: Recipe, device: torch.device) -> LayerCheck:
    """Inputs, gradients and weights whose memory starts one element after the address that the allocator gives."""
    check = LayerCheck()
    layer = layer_of(recipe, device)
    x_TH, dy_TH = layer_inputs(recipe, 48, device)
    aligned = run_layer(layer, x_TH, dy_TH)
    moved = run_layer(layer, one_element_off(x_TH), one_element_off(dy_TH))
    for parameter in layer.parameters():
        parameter.data = one_element_off(parameter.data)
    weights_too = run_layer(layer, one_element_off(x_TH), one_element_off(dy_TH))
    for what, found in (("inputs", moved), ("inputs and weights", weights_too)):
        for name, tensor in aligned.items():
            phase = "forward" if name == "y" else "backward"
            check.compare(phase, f"{name} with {what} off by one element", tensor, found[name])
    return check


def one_element_off(tensor: Tensor) -> Tensor:
    """The same values in memory that starts one element after an aligned address."""
    moved = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)[1:].view(tensor.shape)
    return moved.copy_(tensor)


def build_layer_step(
    recipe: Recipe, device: torch.device
) -> Callable[[], tuple[nn.Module, Callable[[int], Mapping[str, Tensor]]]]:
    """For `verify_step`: forward, backward and a plain update of the layer, on the tokens of one sequence."""

    def build() -> tuple[nn.Module, Callable[[int], Mapping[str, Tensor]]]:
        layer = layer_of(recipe, device)
        x_TH, dy_TH = layer_inputs(recipe, recipe.train.sequence_length, device)

        def step(number: int) -> Mapping[str, Tensor]:
            found = run_layer(layer, x_TH, dy_TH)
            with torch.no_grad():
                for parameter in layer.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad * 0.01)
            return {"y": found["y"], "dx": found["dx"]}

        return layer, step

    return build


def verify_layer(
    recipe: Recipe, axes: Sequence[str], *, device: torch.device, runs: int = DEFAULT_RUNS, steps: int = 2, inject: str = ""
) -> Report:
    """The axes of `LAYER_AXES` on the MoE layer of a recipe, in this process."""
    fault = parse_injection(inject) if inject else None
    if isinstance(fault, str):
        raise UsageError(f"--inject {inject}: one layer in one process adds no parts of gradients; use --target recipe")
    report = verify_step(build_layer_step(recipe, device), steps=steps, runs=runs, seed=recipe.seed, fault=fault)
    repeated = {axis.axis: axis for axis in report.axes}
    report.target, report.axes = "layer", []
    for axis in axes:
        if axis in repeated:
            report.axes.append(repeated[axis])
        elif axis in LAYER_CHECKS:
            report.axes.append(checked(axis, recipe, device))
        elif axis == "backend":
            report.axes.append(AxisResult(axis, "not run", "compared by --target recipe, and needs a CUDA device"))
        else:
            report.axes.append(AxisResult(axis, "not run", "one layer in one process has no such axis; use --target recipe"))
    return report


def checked(axis: str, recipe: Recipe, device: torch.device) -> AxisResult:
    started = time.perf_counter()
    found = LAYER_CHECKS[axis](recipe, device)
    arms = ["reference", axis]
    result = AxisResult(axis, "equal", "", arms, found.num_tensors, 1, found.num_bytes)
    if found.divergence is not None:
        phase, name, difference = found.divergence
        divergence = Divergence(Key(1, phase, name), "digest", ("", ""))
        result.status, result.finding = "diverged", Finding(divergence, (arms[0], arms[1]), difference, hint=hint_for(phase))
    result.seconds = time.perf_counter() - started
    return result


LAYER_CHECKS = {"batch": check_batch, "alignment": check_alignment}
