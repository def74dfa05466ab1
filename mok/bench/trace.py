"""When each task and each mover of a megakernel launch waited, loaded, finished, as a Chrome trace; over one rank or several.

Owns the reading of the in-kernel clock (`mok.kernels.ring`, TRACE_*) and its translation; Perfetto shows the result. The
clock of a GPU ticks in steps of up to a microsecond, and every GPU has its own. Read next: `mok/kernels/storer.py` and
`mok/kernels/mover.py`, which note most of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mok.backends.interface import Options
from mok.backends.mega import MegaSchedule, build_schedule
from mok.backends.quantization import why_not_coded
from mok.bench.layer import Inputs, make_problem
from mok.errors import UsageError
from mok.grid import CallGrid
from mok.kernels import tasks
from mok.launch import coded, mega, peer
from mok.launch.config import device_facts, why_not
from mok.launch.quantize import quantize_weight
from mok.launch.tables import choose_config
from mok.quantization import Quantization
from mok.shapes import LayerShape
from mok.transport.peer import PeerTransport

__all__ = ["TracedLaunch", "chrome_trace", "trace_layer", "trace_rank"]

KINDS = {
    tasks.GATE_UP.value: "gate_up",
    tasks.DOWN.value: "down",
    tasks.DH.value: "dh",
    tasks.DX.value: "dx",
    tasks.DW_GATE_UP.value: "dw_gate_up",
    tasks.DW_DOWN.value: "dw_down",
}


@dataclass(frozen=True)
class TracedLaunch:
    """name: of the launch. tasks: the records it walked. times: ns, four of each task. moves: ns, four of each program's mover,
    0 where it had nothing of a kind to do."""

    name: str
    tasks: list[list[int]]
    times: list[list[int]]
    moves: list[list[int]]


def trace_layer(
    name: str,
    shape: LayerShape,
    tokens: int,
    routing: str,
    device: torch.device,
    quantization: Quantization | None = None,
) -> dict[str, Any]:
    """One forward and one backward launch of the layer, after one untimed of each: {"traceEvents": [...]}.

    A process of the trace is a launch, a thread a program. Raises UsageError where the megakernel cannot run.
    """
    facts = device_facts(device)
    config = choose_config(shape, facts) if facts else None
    reasons = [] if quantization is None else why_not_coded(quantization, shape.ranks)
    if config is None:
        reasons.append("needs a CUDA device of compute capability 9.0")
    else:
        reasons += why_not(config, shape, facts, quantization is not None)
    if config is None or reasons:
        raise UsageError(f"--trace: the megakernel cannot run here: {'; '.join(reasons)}")
    problem = make_problem(name, shape, tokens, routing, device, torch.bfloat16)
    weights = mega.Weights(problem.gate_EIH, problem.up_EIH, problem.down_EHI)
    inputs = problem.sets[0]
    codes = None
    if quantization is not None:
        codes = coded.CodedWeights(*(quantize_weight(weight, quantization.of_blocks.block) for weight in weights))
    routed, options = replace(shape, shared_size=0), Options(kernel=config, quantization=quantization)
    schedule = build_schedule(inputs.ids_TK, routed, CallGrid(), options)
    return chrome_trace({"": launches(inputs, weights, schedule, codes)})


def trace_rank(
    inputs: Inputs, weights: mega.Weights, shape: LayerShape, transport: PeerTransport, grid: CallGrid
) -> list[TracedLaunch]:
    """The same of this rank of several, all of which call it. shape: of the whole layer; weights: of this rank's experts."""
    return launches(inputs, weights, build_schedule(inputs.ids_TK, shape, grid, Options(transport=transport)))


def launches(
    inputs: Inputs, weights: mega.Weights, schedule: MegaSchedule, codes: coded.CodedWeights | None = None
) -> list[TracedLaunch]:
    """A forward and a backward launch; those that are kept are the second of each. codes: of the weights, where they are
    quantised."""
    plan, config, peers = schedule.plan, schedule.config, schedule.peers
    x_TH, router_TK, dy_TH = inputs.x_TH, inputs.weights_TK, inputs.dy_TH
    gate, up, down = (torch.empty_like(weight, dtype=torch.float32) for weight in weights)
    gradients = mega.Gradients(gate, up, down, started=False)
    assert plan.backward_tasks is not None
    programs = mega.num_programs(config)
    records = (plan.forward_tasks, plan.backward_tasks)
    clocks = [torch.zeros(table.shape[0] + programs, 4, dtype=torch.int64, device=x_TH.device) for table in records]
    for _ in range(2):
        if codes is not None:
            _, kept = coded.forward(x_TH, router_TK, codes, plan, config, clamp=0.0, keep=True, trace=clocks[0])
            coded.backward(dy_TH, x_TH, router_TK, codes, kept, plan, gradients, config, clamp=0.0, trace=clocks[1])
            continue
        if peers is not None:
            peer.send_tokens(peers, x=x_TH)
        _, kept = mega.forward(
            x_TH, router_TK, weights, plan, config, clamp=0.0, keep=True, peers=peers, trace=clocks[0]
        )  # fmt: skip
        if peers is not None:
            peer.send_tokens(peers, x=x_TH, dy=dy_TH, weights=router_TK)
        mega.backward(
            dy_TH, x_TH, router_TK, weights, kept, plan, gradients, config, clamp=0.0, peers=peers, trace=clocks[1],
        )  # fmt: skip
    return [
        read_launch(name, table, clock, int(plan.sizes[size.value]), programs)
        for name, table, clock, size in zip(
            ("forward", "backward"), records, clocks, (tasks.SIZE_FORWARD_TASKS, tasks.SIZE_BACKWARD_TASKS), strict=True
        )
    ]


def read_launch(name: str, table: Tensor, clock: Tensor, count: int, programs: int) -> TracedLaunch:
    """What a launch of `count` tasks has noted."""
    times = clock[: count + programs].tolist()
    return TracedLaunch(name, table[:count].tolist(), times[:count], times[count:])


def chrome_trace(ranks: dict[str, list[TracedLaunch]], *, one_clock: bool = True) -> dict[str, Any]:
    """{"traceEvents": [...]} of the launches of ranks by name. one_clock: theirs is the same, as on one GPU; else times count
    from the first of each rank and say nothing between ranks."""
    first = {rank: min((ns for launch in found for ns in _known(launch)), default=0) for rank, found in ranks.items()}
    if one_clock:
        first = dict.fromkeys(first, min(first.values(), default=0))
    events = []
    for rank, found in ranks.items():
        for launch in found:
            events += _events(launch, f"{rank} {launch.name}".strip(), first[rank])
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _known(launch: TracedLaunch) -> list[int]:
    return [ns for times in (*launch.times, *launch.moves) for ns in times if ns]


def _events(launch: TracedLaunch, process: str, first: int) -> list[dict[str, Any]]:
    """Three complete events of a task, in microseconds from `first`: waiting, multiplying, storing; and of a mover: bringing
    rows, returning them, summing tokens. A task that had nothing to do has none."""
    programs = len(launch.moves)
    found = []

    def add(name: str, thread: str, begin: int, end: int, **facts: int) -> None:
        span = {"ts": (begin - first) / 1e3, "dur": (end - begin) / 1e3}
        found.append({"name": name, "ph": "X", "pid": process, "tid": thread, **span, "args": facts})

    for index, (record, times) in enumerate(zip(launch.tasks, launch.times, strict=True)):
        if not all(times):
            continue
        facts = {"task": index, "expert": record[tasks.EXPERT.value], "row": record[tasks.ROW.value]}
        for what, begin, end in zip(("wait", "multiply", "store"), times[:3], times[1:], strict=True):
            thread = f"{index % programs:03d} {'loads' if what == 'wait' else 'tiles'}"
            add(f"{KINDS[record[tasks.KIND.value]]} {what}", thread, begin, end, **facts)
    for program, (begun, brought, returned, combined) in enumerate(launch.moves):
        if not (begun and brought and combined):
            continue
        thread = f"{program:03d} mover"
        add("bring rows", thread, begun, brought)
        if returned:
            add("return rows", thread, brought, returned)
        add("sum tokens", thread, returned or brought, combined)
    return found
