"""Every launch of the planner and the staged backend once, on small CPU tensors: what `cross_compile` compiles."""

from __future__ import annotations

import torch

from mok.launch import staged
from mok.launch.plan import TaskOrder, plan_on_device
from tests.kernels.cross_compile import NUM_SMS, SHARED_MEMORY_BYTES

TOKENS, HIDDEN, WIDTH, EXPERTS = 300, 256, 512, 8


def launch_all(arch: int) -> None:
    gpu = staged.Gpu(arch, NUM_SMS[arch], SHARED_MEMORY_BYTES[arch])
    config = staged.choose_config(gpu)
    plan = plan_on_device(torch.zeros(TOKENS, 2, dtype=torch.int32), EXPERTS, HIDDEN, WIDTH, TaskOrder(16, 2), TaskOrder(8, 0))

    def rows(width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(plan.max_rows, width, dtype=dtype)

    def weights(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(EXPERTS, *shape, dtype=dtype)

    x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)
    router = torch.zeros(TOKENS, 2)
    gate, up, down = weights(WIDTH, HIDDEN), weights(WIDTH, HIDDEN), weights(HIDDEN, WIDTH)
    d_gate, d_up = (weights(WIDTH, HIDDEN, dtype=torch.float32) for _ in range(2))
    d_down = weights(HIDDEN, WIDTH, dtype=torch.float32)
    wide, partial = rows(HIDDEN), rows(-(-WIDTH // staged.SUM_COLUMNS), torch.float32)
    both, h_rows = torch.zeros(2, plan.max_rows, WIDTH, dtype=torch.bfloat16), rows(WIDTH)
    staged.dispatch(x, wide, plan)
    staged.gate_up(wide, gate, up, h_rows, both, plan, 7.0, gpu, config)
    staged.down(h_rows, down, wide, plan, gpu, config)
    staged.combine(wide, plan, router, x, router[:, 0], x)
    staged.dh(wide, down, both, h_rows, partial, router, plan, 7.0, gpu, config)
    staged.dx(both, gate, up, wide, plan, gpu, config)
    for started in (False, True):
        staged.down_gradient(wide, h_rows, d_down, started, plan, gpu, config)
        staged.gate_up_gradients(both, wide, d_gate, d_up, started, plan, gpu, config)
    staged.combine(wide, plan, None, None, None, x)
    staged.route_weight_gradients(partial, plan, router)
