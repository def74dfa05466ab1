"""Every expert kernel once, forward and backward, on small layers: what `make sanitize` runs under compute-sanitizer.

Sizes that leave tiles half full, an expert without rows, masked routes, shared experts, recomputation. Ends with an error if a
kernel gave up waiting, for which it gets more time: under a sanitizer everything takes hundreds of times as long.
"""

from __future__ import annotations

import sys

import torch
from triton.experimental import gluon

from mok.autograd import Plan, experts
from mok.backends import choose
from mok.backends.interface import LayerShape, Options
from mok.grid import CallGrid
from mok.kernels import ring
from mok.launch.status import check_status
from tests.cases import Case, make_inputs

CASES = (
    Case("half tiles", tokens=70, hidden=144, width=80, experts=3, top_k=2, routing="masked"),
    Case("shared", tokens=33, hidden=64, width=64, experts=4, top_k=1, routing="one-expert", shared=48),
)


def run(case: Case, backend: str, recompute: str) -> None:
    inputs = make_inputs(case, torch.bfloat16)
    leaves = {name: value.detach().cuda().requires_grad_() for name, value in inputs.differentiable().items()}
    shape = LayerShape(case.hidden, case.width, case.experts, case.top_k, shared_size=case.shared)
    device = leaves["x_TH"].device
    module, _ = choose(backend, shape, torch.bfloat16, device)
    options = Options(case.clamp, recompute)
    schedule = module.build_schedule(inputs.ids_TK.to(device), shape, CallGrid(), options)
    routed = tuple(leaves[name] for name in ("gate_EIH", "up_EIH", "down_EHI"))
    shared = (leaves["shared_gate_up_JH"], leaves["shared_down_HS"]) if case.shared else None
    plan = Plan(module, schedule, options)
    y = experts(leaves["x_TH"], leaves["weights_TK"], routed, plan, shared, leaves.get("shared_scale_T"))
    y.backward(inputs.dy_TH.to(device))
    check_status(device)


def main(backends: list[str]) -> None:
    ring.MAX_POLLS = gluon.language.constexpr(1 << 30)
    for case in CASES:
        for backend in backends:
            for recompute in ("none", "all"):
                run(case, backend, recompute)
                print(f"{case.name}, {backend}, recompute {recompute}: done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or ["mega", "staged"])
