"""When each task of a megakernel launch waited, loaded, finished and was stored, as a Chrome trace.

Owns the reading of the in-kernel clock (`mok.kernels.ring`, TRACE_*) and its translation; Perfetto shows the result. The
clock of a GPU ticks in steps of up to a microsecond. Read next: `mok/kernels/storer.py`, which notes most of it.
"""

from __future__ import annotations

from typing import Any

import torch

from mok.bench.layer import make_problem
from mok.errors import UsageError
from mok.kernels import tasks
from mok.launch import mega
from mok.launch.config import device_facts, why_not
from mok.launch.plan import plan_on_device
from mok.launch.tables import choose_config
from mok.shapes import LayerShape

__all__ = ["trace_layer"]

KINDS = {
    tasks.GATE_UP.value: "gate_up",
    tasks.DOWN.value: "down",
    tasks.DH.value: "dh",
    tasks.DX.value: "dx",
    tasks.DW_GATE_UP.value: "dw_gate_up",
    tasks.DW_DOWN.value: "dw_down",
}


def trace_layer(name: str, shape: LayerShape, tokens: int, routing: str, device: torch.device) -> dict[str, Any]:
    """One forward and one backward launch of the layer, after one untraced of each: {"traceEvents": [...]}.

    A process of the trace is a launch, a thread a program. Raises UsageError where the megakernel cannot run.
    """
    facts = device_facts(device)
    config = choose_config(shape, facts) if facts else None
    reasons = why_not(config, shape, facts) if config else ["needs a CUDA device of compute capability 9.0"]
    if config is None or reasons:
        raise UsageError(f"--trace: the megakernel cannot run here: {'; '.join(reasons)}")
    problem = make_problem(name, shape, tokens, routing, device, torch.bfloat16)
    weights = mega.Weights(problem.gate_EIH, problem.up_EIH, problem.down_EHI)
    gate, up, down = (torch.empty_like(weight, dtype=torch.float32) for weight in weights)
    gradients = mega.Gradients(gate, up, down, started=False)
    inputs = problem.sets[0]
    plan = plan_on_device(
        inputs.ids_TK,
        shape.num_experts,
        shape.hidden_size,
        shape.intermediate_size,
        config.forward_order,
        config.backward_order,
        units=mega.row_box(shape.hidden_size).units_per_block,
    )
    assert plan.backward_tasks is not None
    records = (plan.forward_tasks, plan.backward_tasks)
    times = [torch.zeros(table.shape[0], 4, dtype=torch.int64, device=device) for table in records]
    for _ in range(2):
        _, kept = mega.forward(inputs.x_TH, inputs.weights_TK, weights, plan, config, clamp=0.0, keep=True, trace=times[0])
        mega.backward(
            inputs.dy_TH, inputs.x_TH, inputs.weights_TK, weights, kept, plan, gradients, config, clamp=0.0, trace=times[1],
        )  # fmt: skip
    programs = config.programs or (facts.multiprocessors if facts else 0)
    sizes = plan.sizes.tolist()
    counts = (sizes[tasks.SIZE_FORWARD_TASKS.value], sizes[tasks.SIZE_BACKWARD_TASKS.value])
    events: list[dict[str, Any]] = []
    for launch, table, clock, count in zip(("forward", "backward"), records, times, counts, strict=True):
        events += _events(launch, table[:count].tolist(), clock[:count].tolist(), programs)
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _events(launch: str, table: list[list[int]], clock: list[list[int]], programs: int) -> list[dict[str, Any]]:
    """Three complete events a task, in microseconds from the launch's first: waiting, multiplying, storing."""
    start = min((times[0] for times in clock if times[0]), default=0)
    found = []
    for index, (record, times) in enumerate(zip(table, clock, strict=True)):
        kind = KINDS[record[tasks.KIND.value]]
        for what, begin, end in zip(("wait", "multiply", "store"), times[:3], times[1:], strict=True):
            found.append(
                {
                    "name": f"{kind} {what}",
                    "ph": "X",
                    "pid": launch,
                    "tid": f"{index % programs:03d} {'loads' if what == 'wait' else 'tiles'}",
                    "ts": (begin - start) / 1e3,
                    "dur": (end - begin) / 1e3,
                    "args": {"task": index, "expert": record[tasks.EXPERT.value], "row": record[tasks.ROW.value]},
                }
            )
    return found
