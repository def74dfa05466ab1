"""The launches that multiply 8-bit operands, on small CPU tensors: what `cross_compile` compiles. On Hopper both launches of
the megakernel and the staged ones of fp8_block, on Blackwell the staged ones of mxfp8."""

from __future__ import annotations

import torch

from mok.launch import coded, mega, staged
from mok.launch.config import KernelConfig
from mok.launch.plan import TaskOrder, plan_on_device
from mok.launch.quantize import quantize_weight, quantize_weight_along
from tests.kernels.cross_compile import NUM_SMS, SHARED_MEMORY_BYTES

TOKENS, WIDTH, EXPERTS = 300, 512, 8


def launch_all(arch: int) -> None:
    if arch == 90:
        launch_mega(KernelConfig(programs=NUM_SMS[arch]), hidden=2048, top_k=8)
    launch_staged(arch, hidden=256)


def weights(hidden: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """gate, up, down."""
    shapes = (WIDTH, hidden), (WIDTH, hidden), (hidden, WIDTH)
    return tuple(torch.zeros(EXPERTS, *shape, dtype=torch.bfloat16) for shape in shapes)


def launch_mega(config: KernelConfig, *, hidden: int, top_k: int) -> None:
    x = torch.zeros(TOKENS, hidden, dtype=torch.bfloat16)
    router = torch.zeros(TOKENS, top_k)
    plain = weights(hidden)
    codes = coded.CodedWeights(*(quantize_weight(weight, 128) for weight in plain))
    gradients = mega.Gradients(*(weight.float() for weight in plain), False)
    plan = plan_on_device(
        torch.zeros(TOKENS, top_k, dtype=torch.int32),
        EXPERTS,
        hidden,
        WIDTH,
        config.forward_order,
        config.backward_order,
        units=coded.code_box(hidden).units_per_block,
        row_units=mega.row_box(hidden).units_per_block,
    )
    _, kept = coded.forward(x, router, codes, plan, config, clamp=0.0, keep=True)
    coded.backward(x, x, router, codes, kept, plan, gradients, config, clamp=0.0)


def launch_staged(arch: int, *, hidden: int) -> None:
    gpu = staged.Gpu(arch, NUM_SMS[arch], SHARED_MEMORY_BYTES[arch])
    config = staged.choose_config(gpu)
    block, quantised = (128, quantize_weight) if arch == 90 else (32, quantize_weight_along)
    gate, up, down = (quantised(weight, block) for weight in weights(hidden))
    plan = plan_on_device(torch.zeros(TOKENS, 2, dtype=torch.int32), EXPERTS, hidden, WIDTH, TaskOrder(), TaskOrder())
    rows = torch.zeros(plan.max_rows, hidden, dtype=torch.bfloat16)
    h_rows, both = torch.zeros(3, plan.max_rows, WIDTH, dtype=torch.bfloat16).split((1, 2))
    h_rows, router = h_rows[0], torch.zeros(TOKENS, 2)
    staged.gate_up(staged.coded_rows(rows, block), gate, up, h_rows, both, plan, 0.0, gpu, config)
    staged.down(staged.coded_rows(h_rows, block), down, rows, plan, gpu, config)
    partial = staged.partial_sums(plan.max_rows, WIDTH, rows.device)
    staged.dh(staged.coded_rows(rows, block), down, both, h_rows, partial, router, plan, 0.0, gpu, config)
    staged.dx(tuple(staged.coded_rows(part, block) for part in both), gate, up, rows, plan, gpu, config)
