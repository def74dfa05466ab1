"""Which settings the megakernel runs with, and why it cannot run: pure functions of shape and device.

Owns the knobs (none of which changes a bit of any result) and the requirements. Looks at no tensor and asks no driver: the
device is described by `DeviceFacts`. Read next: `mok/launch/tables.py`, which chooses the knobs, and `mok/launch/mega.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mok.launch.plan import TaskOrder
from mok.shapes import LayerShape

__all__ = ["DeviceFacts", "KernelConfig", "bad_settings", "device_facts", "why_not"]

TILE_BYTES = {"stage": (128 + 256) * 64 * 2, "piece": 64 * 64 * 2, "slot": 4096 * 2, "scales": 128}
SHARED_OVERHEAD_BYTES = 1024
"""Barriers of the rings and what the compiler passes between roles, rounded up; the compiled kernels use 640 to 712."""


@dataclass(frozen=True)
class KernelConfig:
    """Knobs of one layer's launches.

    forward_order, backward_order: the order of the tiles, see `TaskOrder`; the backward's has one phase.
    mover_share: part of the tokens that the mover warps combine while tiles still run; the rest is summed at the end.
    stages: operand stages of 48 KiB in the ring.
    pieces: store pieces of 8 KiB of each consumer.
    programs: persistent programs; 0 for one per multiprocessor.
    tensor_memory: the bodies for products that accumulate in tensor memory, as on compute capability 10.x; no choice elsewhere.
    """

    forward_order: TaskOrder = field(default_factory=TaskOrder)
    backward_order: TaskOrder = field(default_factory=TaskOrder)
    mover_share: float = 0.5
    stages: int = 3
    pieces: int = 4
    programs: int = 0
    tensor_memory: bool = False

    @property
    def shared_bytes(self) -> int:
        """Shared memory of one program."""
        rings = self.stages * TILE_BYTES["stage"] + 2 * self.pieces * TILE_BYTES["piece"] + 2 * TILE_BYTES["slot"]
        return rings + SHARED_OVERHEAD_BYTES

    @property
    def coded_shared_bytes(self) -> int:
        """The same where operands are 8-bit codes: each stage and piece has room for the scales of its rows."""
        return self.shared_bytes + (self.stages + 2 * self.pieces) * TILE_BYTES["scales"]


@dataclass(frozen=True)
class DeviceFacts:
    """What decides: compute capability, multiprocessors, shared memory one program may have."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int


def device_facts(device: torch.device) -> DeviceFacts | None:
    """The facts of a CUDA device; None for any other."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return DeviceFacts(
        properties.name,
        (properties.major, properties.minor),
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
    )


def bad_settings(config: KernelConfig) -> list[str]:
    """What no device could run with."""
    orders = (("forward", config.forward_order), ("backward", config.backward_order))
    least = [("stages", config.stages, 2), ("pieces", config.pieces, 3), ("programs", config.programs, 0)]
    for name, order in orders:
        least += [(f"{name} group_size", order.group_size, 1), (f"{name} groups_per_phase", order.groups_per_phase, 0)]
    found = [f"{name} = {value}: must be at least {low}" for name, value, low in least if value < low]
    if config.backward_order.groups_per_phase > 0:
        found.append(f"backward groups_per_phase = {config.backward_order.groups_per_phase}: must be 0, it has one phase")
    if not 0 <= config.mover_share <= 1:
        found.append(f"mover_share = {config.mover_share}: must be from 0 to 1")
    return found


def why_not(config: KernelConfig, shape: LayerShape, device: DeviceFacts | None, coded: bool = False) -> list[str]:
    """Why the megakernel cannot run with `config` on `device`, with 8-bit operands if `coded`, each reason with its remedy;
    empty if it can."""
    reasons = []
    if device is None:
        return ["needs a CUDA device; use moe.backend = torch"]
    if device.capability != (9, 0):
        found = "sm_{}{}".format(*device.capability)
        not_run = "; its bodies for that are compiled but have not run" if device.capability[0] == 10 else ""
        reasons.append(f"runs on sm_90 (H100, H200), this is {found}{not_run}: use moe.backend = staged")
    needed = config.coded_shared_bytes if coded else config.shared_bytes
    if device.shared_bytes < needed:
        reasons.append(
            f"needs {needed} bytes of shared memory a program, {device.name} has {device.shared_bytes}: "
            "use fewer stages or pieces, or moe.backend = staged"
        )
    if config.programs > device.multiprocessors:
        reasons.append(
            f"{config.programs} programs must run at once and {device.name} has {device.multiprocessors} multiprocessors: "
            "use 0 for as many as fit"
        )
    reasons += bad_settings(config)
    for name in ("hidden_size", "intermediate_size", "shared_size"):
        value = getattr(shape, name)
        if value % 16:
            reasons.append(f"{name} = {value}: must be a multiple of 16; pad the weights, or use moe.backend = torch")
    if shape.num_experts > 512:
        reasons.append(f"num_experts = {shape.num_experts}: at most 512 are planned for; use moe.backend = torch")
    return reasons
