"""One expert layer's speed, ours beside others' on the same tokens, routes and weights, after checking every result.

Owns the shapes and routings that are timed, the float64 truth, the clock and the rows of the report. What is further from
float64 than its bar is not timed: ours ends the run, a peer is left out with its reason, like one that fails or is not
installed. The router is not part of what is timed: ids and weights are given; our plan is. Knows nothing of the command line.
Read next: `mok/bench/peers/layer.py`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from mok.backends.quantization import Operand, round_rows, round_weight
from mok.bench.peers import layer as peers
from mok.bench.peers.absent import Absent
from mok.bench.power import PowerMeter
from mok.errors import CheckFailed
from mok.quantization import Quantization
from mok.shapes import LAYER_SHAPES, LayerShape

__all__ = [
    "ROUTINGS",
    "TABLE",
    "Clock",
    "Dense",
    "Inputs",
    "LayerReport",
    "LayerRow",
    "Problem",
    "Truth",
    "bench_layer",
    "call_of",
    "first_line",
    "make_problem",
    "make_rank_truth",
    "make_truth",
    "worst_error",
]

ROUTINGS = ("balanced", "skewed", "one-hot")

TABLE = {
    "olmoe-1b-7b": (LAYER_SHAPES["olmoe-1b-7b"], 32768),
    "qwen3-30b-a3b": (LAYER_SHAPES["qwen3-30b-a3b"], 32768),
    "mixtral-8x7b": (LAYER_SHAPES["mixtral-8x7b"], 8192),
    "deepseek-v3-slice": (LayerShape(7168, 2048, 32, 8), 8192),
}
"""What `--shape all` times: the routed experts that one GPU holds, and the tokens it is fed."""

SETS = 3
"""Inputs that take turns, so that no call finds its own in the cache."""

FACTOR = {torch.bfloat16: 1.1, torch.float32: 2.0}
"""Error over that of a plain loop in the same dtype, against float64, that our backends may have; fp32 sums differ in order."""

BELIEVABLE = 1.25
"""Times the rate of a large dense product beyond which a time is wrong: a call that was not waited for, or did not compute."""

PEER_ERROR = 0.02
"""Error that a peer may have: several bf16 roundings more than ours, far below a wrong result."""


@dataclass
class Inputs:
    """One set: x, dy [T, H]; ids int32, weights fp32 [T, K], ids rising."""

    x_TH: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    dy_TH: Tensor


@dataclass
class Problem:
    """A layer with its inputs. gate, up [E, I, H], down [E, H, I]. quantization: which operands ours rounds to 8 bits."""

    name: str
    shape: LayerShape
    tokens: int
    sets: list[Inputs]
    gate_EIH: Tensor
    up_EIH: Tensor
    down_EHI: Tensor
    quantization: Quantization | None = None

    @property
    def device(self) -> torch.device:
        return self.gate_EIH.device

    def flops(self, direction: str) -> int:
        return self.shape.flops(self.tokens) * (1 if direction == "forward" else 3)


@dataclass
class LayerRow:
    """One line of a report; None: not measured. direction: forward, or forward+backward.

    median_ms, spread_ms: of single calls in a burst, and the distance of the quartiles. sustained_ms: mean of calls back to
    back for most of a second. clock_mhz, power_w: while the burst ran, and while the sustained calls did. fraction_of_dense:
    against a dense product timed the same way before and after, burst against burst, sustained against sustained.
    saved_bytes: held between forward and backward; peak_bytes: above weights, inputs and gradients.
    """

    name: str
    shape: str
    direction: str
    tokens: int
    routing: str
    median_ms: float
    spread_ms: float
    clock_mhz: float | None
    power_w: float | None
    sustained_ms: float | None
    sustained_clock_mhz: float | None
    sustained_power_w: float | None
    tflops: float
    tokens_per_s: float
    bitwise_repeatable: bool
    relative_error: float | None
    saved_bytes: int | None
    peak_bytes: int | None
    fraction_of_dense: float = 0.0
    fraction_of_sustained_dense: float | None = None
    ratio_to: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Dense:
    """A dense product timed like a layer, TFLOP/s: in a burst, and sustained."""

    burst: float
    sustained: float | None


@dataclass
class LayerReport:
    """wrong: what was found of peers whose results were further off than they may be; they have no rows."""

    rows: list[LayerRow]
    environment: dict[str, Any]
    wrong: list[str] = field(default_factory=list)


def make_problem(
    name: str, shape: LayerShape, tokens: int, routing: str, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> Problem:
    """Random weights of unit gain, random tokens. Experts of a token: any alike; by Zipf's law; the same for all."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=torch.float32).mul_(scale).to(dtype)

    def weight(rows: int, columns: int) -> Tensor:
        return torch.stack([normal(rows, columns, scale=columns**-0.5) for _ in range(shape.num_experts)])

    def inputs() -> Inputs:
        uniform = torch.rand(tokens, shape.num_experts, generator=generator, device=device).clamp_(1e-9, 1 - 1e-6)
        scores = -(-uniform.log()).log()  # Gumbel noise: the largest K of score + log p are a draw without replacement by p
        rank = torch.arange(1, shape.num_experts + 1, device=device, dtype=torch.float32)
        if routing == "skewed":
            scores = scores - rank.log()
        elif routing == "one-hot":
            scores = -rank.expand(tokens, -1)
        ids_TK = scores.topk(shape.top_k, dim=1).indices.sort(1).values.to(torch.int32)
        logits = torch.randn(tokens, shape.top_k, generator=generator, device=device)
        return Inputs(normal(tokens, shape.hidden_size), ids_TK, logits.softmax(1), normal(tokens, shape.hidden_size))

    gate, up = (weight(shape.intermediate_size, shape.hidden_size) for _ in range(2))
    down = weight(shape.hidden_size, shape.intermediate_size)
    return Problem(name, shape, tokens, [inputs() for _ in range(SETS)], gate, up, down)


def bench_layer(
    problems: dict[str, tuple[LayerShape, int]],
    *,
    routing: str,
    backend: str,
    against: list[str],
    check: bool,
    device: torch.device,
    dtype: torch.dtype,
    quantization: Quantization | None = None,
    recompute: tuple[str, ...] = ("none",),
    calls: int = 24,
    warmup: int = 6,
    sustain_s: float = 0.6,
    report_row: Callable[[LayerRow], None] = lambda row: None,
    say: Callable[[str], None] = lambda line: None,
) -> LayerReport:
    """Time our `backend`, once for each of `recompute`, and each peer on each of `problems` (name -> shape, tokens): forward,
    and forward+backward.

    quantization: ours is then timed three times: with weights quantised in each call, with weights kept, and in bf16, which has
    the bar of a peer. against: names of `mok.bench.peers.layer.PEERS`. A peer that is not installed, fails or is wrong is left
    out, which `say` is told and the report's `environment["left_out"]` keeps. Raises UsageError for a peer that is unknown,
    CheckFailed where a result of ours is wrong, before any figure of that shape.
    """
    makers = {"mok" if how == "none" else f"mok {how}": peers.mok_with(backend, how) for how in recompute}
    if quantization is not None:
        makers |= {"mok kept": peers.mok_with(backend, weights="kept"), "bf16": peers.mok_with(backend, weights="bf16")}
    makers |= {name: peers.find(name) for name in against}
    rows: list[LayerRow] = []
    clock = Clock(device, calls, warmup)
    dense: dict[str, list[Dense]] = {}
    left_out: dict[str, str] = {}
    wrong: list[str] = []

    def leave_out(what: str, why: str) -> None:
        left_out[what] = why
        say(f"{what}: not measured, {why}")

    for name, (shape, tokens) in problems.items():
        problem = make_problem(name, shape, tokens, routing, device, dtype)
        problem.quantization = quantization
        truth = make_truth(problem) if check else None
        before = dense_rate(clock, sustain_s)
        found: list[LayerRow] = []
        for who, make in makers.items():
            ours = who.startswith("mok")
            if who in left_out:
                continue
            try:
                contestant = make(problem)
                error = None if truth is None else worst_error(problem, contestant, truth, ours)
                measured = [
                    measure(contestant, problem, routing, direction, clock, sustain_s, error)
                    for direction in ("forward", "forward+backward")
                ]
            except Absent as absent:
                leave_out(who, str(absent))
                continue
            except CheckFailed as failed:
                if ours:
                    raise
                leave_out(f"{who} on {name}", str(failed))
                wrong.append(str(failed))
                continue
            except Exception as failure:  # whatever somebody else's code may raise
                if ours:
                    raise
                leave_out(f"{who} on {name}", f"it failed: {type(failure).__name__}: {first_line(failure)}")
                continue
            for row in measured:
                first = next((other for other in found if other.direction == row.direction), None)
                if first is not None:
                    first.ratio_to[row.name] = row.median_ms / first.median_ms
                row.fraction_of_dense = row.tflops / before.burst
                report_row(row)
                if row.fraction_of_dense > BELIEVABLE:
                    say(f"{row.name} on {name}: {row.fraction_of_dense:.1f} times as fast as a dense product cannot be")
            found += measured
            del contestant
        after = dense_rate(clock, sustain_s)
        for row in found:
            compare_with_dense(row, problem, before, after)
        dense[name] = [before, after]
        rows += found
        del problem, truth
    facts = {"dense_tflops": {name: [vars(rate) for rate in rates] for name, rates in dense.items()}, "left_out": left_out}
    return LayerReport(rows, _environment(device, dtype, quantization) | facts, wrong)


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def measure(
    contestant: peers.Contestant,
    problem: Problem,
    routing: str,
    direction: str,
    clock: Clock,
    sustain_s: float,
    error: float | None,
) -> LayerRow:
    """Everything about one contestant and direction but the comparison with a dense product."""
    repeatable = _repeats(contestant, problem)
    saved, peak = _memory(contestant, problem)
    call = call_of(contestant, problem, direction)
    with PowerMeter(problem.device) as burst_meter:
        times = clock.burst(call)
    sustained = None
    with PowerMeter(problem.device) as meter:
        if sustain_s:
            sustained = clock.sustained(call, sustain_s)
    median = statistics.median(times)
    quartiles = statistics.quantiles(times, n=4)
    return LayerRow(
        name=contestant.name,
        shape=problem.name,
        direction=direction,
        tokens=problem.tokens,
        routing=routing,
        median_ms=median,
        spread_ms=quartiles[2] - quartiles[0],
        clock_mhz=burst_meter.clock_mhz,
        power_w=burst_meter.power_w,
        sustained_ms=sustained,
        sustained_clock_mhz=meter.clock_mhz,
        sustained_power_w=meter.power_w,
        tflops=problem.flops(direction) / median / 1e9,
        tokens_per_s=problem.tokens / median * 1e3,
        bitwise_repeatable=repeatable,
        relative_error=error,
        saved_bytes=saved,
        peak_bytes=peak,
    )


def compare_with_dense(row: LayerRow, problem: Problem, before: Dense, after: Dense) -> None:
    """Fill in the fractions of the mean of what the dense product reached before and after."""
    row.fraction_of_dense = row.tflops / statistics.mean((before.burst, after.burst))
    if row.sustained_ms is not None and before.sustained is not None and after.sustained is not None:
        rate = problem.flops(row.direction) / row.sustained_ms / 1e9
        row.fraction_of_sustained_dense = rate / statistics.mean((before.sustained, after.sustained))


def call_of(contestant: peers.Contestant, problem: Problem, direction: str) -> Callable[[int], None]:
    """Call number i with the inputs whose turn it is."""

    def forward(i: int) -> None:
        inputs = problem.sets[i % SETS]
        contestant.forward(inputs.x_TH, inputs.ids_TK, inputs.weights_TK)

    def both(i: int) -> None:
        inputs = problem.sets[i % SETS]
        contestant.backward(contestant.forward(inputs.x_TH, inputs.ids_TK, inputs.weights_TK), inputs.dy_TH)

    return forward if direction == "forward" else both


class Clock:
    """Times calls on one device: events on a GPU, the host's clock on a CPU. Warm-up stays out of the figures."""

    def __init__(self, device: torch.device, calls: int, warmup: int, rest_s: float = 0.5) -> None:
        self.device, self.calls, self.warmup, self.rest_s = device, calls, warmup, rest_s

    def burst(self, call: Callable[[int], object]) -> list[float]:
        """ms of each of `calls` calls after `warmup` others, from a card that has rested."""
        for i in range(self.warmup):
            call(i)
        if self.device.type != "cuda":
            times = []
            for i in range(self.calls):
                began = time.perf_counter()
                call(i)
                times.append((time.perf_counter() - began) * 1e3)
            return times
        torch.cuda.synchronize(self.device)
        time.sleep(self.rest_s)
        for i in range(self.warmup):
            call(i)
        torch.cuda.synchronize(self.device)
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.calls)]
        for i, (start, end) in enumerate(pairs):
            start.record()
            call(i)
            end.record()
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) for start, end in pairs]

    def sustained(self, call: Callable[[int], None], seconds: float) -> float:
        """Mean ms of the second half of calls back to back for about `seconds`."""
        if self.device.type != "cuda":
            self._calls_for(call, seconds / 2)
            return self._calls_for(call, seconds / 2)
        call(0)
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        call(0)
        torch.cuda.synchronize(self.device)
        half = max(3, round(seconds / (time.perf_counter() - start) / 2))
        for i in range(half):
            call(i)
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        for i in range(half):
            call(i)
        torch.cuda.synchronize(self.device)
        return (time.perf_counter() - start) * 1e3 / half

    def _calls_for(self, call: Callable[[int], None], seconds: float) -> float:
        """Mean ms of as many calls as fit, at least one."""
        start, done = time.perf_counter(), 0
        while not done or time.perf_counter() - start < seconds:
            call(done)
            done += 1
        return (time.perf_counter() - start) * 1e3 / done


def dense_rate(clock: Clock, sustain_s: float) -> Dense:
    """A square matrix product of 8192 (1024 on a CPU) timed like a layer."""
    size = 8192 if clock.device.type == "cuda" else 1024
    dtype = torch.bfloat16 if clock.device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=clock.device, dtype=dtype) for _ in range(2))

    def call(_: int) -> None:
        torch.mm(a, b)

    gflops = 2 * size**3 / 1e9
    burst = gflops / statistics.median(clock.burst(call))
    return Dense(burst, gflops / clock.sustained(call, sustain_s) if sustain_s else None)


@dataclass
class Truth:
    """What a problem's first inputs give in float64, and by how much a plain loop in the layer's dtype misses it, by name."""

    exact: dict[str, Tensor]
    plain_error: dict[str, float]


def make_truth(problem: Problem) -> Truth:
    inputs = problem.sets[0]
    exact = _loop(problem, inputs, torch.float64)
    plain = _loop(problem, inputs, inputs.x_TH.dtype, problem.quantization)
    return Truth(exact, {name: _error(plain[name], exact[name]) for name in exact})


def make_rank_truth(of_tokens: Problem, of_experts: Problem) -> Truth:
    """What one of several ranks must get. of_tokens: its tokens and the experts of all, for y, dx and the gradients of router
    weights; of_experts: its experts and the tokens of all, ids counted from its first, for the gradients of expert weights."""
    tokens, experts = make_truth(of_tokens), make_truth(of_experts)
    names = ("gate", "up", "down")
    return Truth(
        tokens.exact | {name: experts.exact[name] for name in names},
        tokens.plain_error | {name: experts.plain_error[name] for name in names},
    )


def worst_error(problem: Problem, contestant: peers.Contestant, truth: Truth, ours: bool) -> float:
    """The largest relative error of output and gradients, on the timed sizes; CheckFailed if one exceeds its bar."""
    inputs = problem.sets[0]
    dtype = inputs.x_TH.dtype
    y_TH = contestant.forward(inputs.x_TH, inputs.ids_TK, inputs.weights_TK)
    found = {"y": y_TH.detach()} | contestant.backward(y_TH, inputs.dy_TH)
    errors = {name: _error(value, truth.exact[name]) for name, value in found.items()}
    for name, error in errors.items():
        bar = FACTOR[dtype] * max(truth.plain_error[name], torch.finfo(dtype).eps)
        if not ours:
            bar = max(PEER_ERROR, bar) if problem.quantization is None else PEER_ERROR
        if not error <= bar:  # NaN fails
            raise CheckFailed(
                f"{contestant.name} on {problem.name}: {name} is {error:.1e} from float64, allowed {bar:.1e}; nothing timed"
            )
    return max(errors.values())


def _error(value: Tensor, exact: Tensor) -> float:
    """Frobenius norm of the difference over that of `exact`, expert by expert to spare memory."""
    parts = list(zip(value, exact, strict=True)) if exact.dim() == 3 else [(value, exact)]
    squares = [((a.double() - b.double()).square().sum(), b.double().square().sum()) for a, b in parts]
    difference, norm = (float(sum(column)) for column in zip(*squares, strict=True))
    return (difference / norm) ** 0.5 if norm else difference**0.5


def _loop(problem: Problem, inputs: Inputs, dtype: torch.dtype, quantization: Quantization | None = None) -> dict[str, Tensor]:
    """Output and gradients by name, expert by expert in `dtype`, sums over experts and weight gradients in fp32 or wider.

    quantization: which operands are rounded before their products; weight gradients are left as they are."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x, dy = inputs.x_TH.to(dtype), inputs.dy_TH.to(dtype)
    y, dx = torch.zeros_like(x, dtype=wide), torch.zeros_like(x, dtype=wide)
    dweights = torch.zeros_like(inputs.weights_TK, dtype=wide)
    grads: dict[str, list[Tensor]] = {"gate": [], "up": [], "down": []}
    for e in range(problem.shape.num_experts):
        token, slot = torch.where(inputs.ids_TK == e)
        gate, up, down = (weight[e].to(dtype) for weight in (problem.gate_EIH, problem.up_EIH, problem.down_EHI))
        gate_by, up_by, down_by = (_operand(weight, quantization) for weight in (gate, up, down))
        w = inputs.weights_TK[token, slot].to(wide).unsqueeze(1)
        rows, d_rows = x[token], dy[token]
        rounded = _rows(rows, quantization)
        g, u = (rounded @ gate_by.over_columns.t()).to(wide), (rounded @ up_by.over_columns.t()).to(wide)
        sigmoid = torch.sigmoid(g)
        h = (silu(g) * u).to(dtype)
        y.index_add_(0, token, (_rows(h, quantization) @ down_by.over_columns.t()).to(wide) * w)
        dh = (_rows(d_rows, quantization) @ down_by.over_rows).to(wide)
        dweights[token, slot] = (dh * h.to(wide)).sum(1)
        d_gate = (dh * w * u * (sigmoid + silu(g) * (1 - sigmoid))).to(dtype)
        d_up = (dh * w * silu(g)).to(dtype)
        d_rows_of_x = _rows(d_gate, quantization) @ gate_by.over_rows + _rows(d_up, quantization) @ up_by.over_rows
        dx.index_add_(0, token, d_rows_of_x.to(wide))
        grads["gate"].append((d_gate.to(wide).t() @ rows.to(wide)).float())
        grads["up"].append((d_up.to(wide).t() @ rows.to(wide)).float())
        grads["down"].append((d_rows.to(wide).t() @ (h.to(wide) * w).to(dtype).to(wide)).float())
    return {"y": y.to(dtype), "dx": dx.to(dtype), "dweights": dweights} | {k: torch.stack(v) for k, v in grads.items()}


def _operand(weight: Tensor, quantization: Quantization | None) -> Operand:
    if quantization is None:
        return Operand(weight, weight)
    both = round_weight(weight.unsqueeze(0), quantization.of_blocks)
    return Operand(both.over_columns[0], both.over_rows[0])


def _rows(rows: Tensor, quantization: Quantization | None) -> Tensor:
    return rows if quantization is None else round_rows(rows, quantization.of_blocks.block)


def _repeats(contestant: peers.Contestant, problem: Problem) -> bool:
    """Whether a second call gives the same bytes, gradients included."""

    def once() -> list[Tensor]:
        inputs = problem.sets[0]
        y_TH = contestant.forward(inputs.x_TH, inputs.ids_TK, inputs.weights_TK)
        return [y_TH.detach().clone(), *(value.clone() for value in contestant.backward(y_TH, inputs.dy_TH).values())]

    first = once()
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(first, once(), strict=True))


def _memory(contestant: peers.Contestant, problem: Problem) -> tuple[int | None, int | None]:
    """(bytes held after a forward beside its output, peak of forward and backward), both above what was there before."""
    device = problem.device
    if device.type != "cuda":
        return None, None
    inputs = problem.sets[0]
    contestant.backward(contestant.forward(inputs.x_TH, inputs.ids_TK, inputs.weights_TK), inputs.dy_TH)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    y_TH = contestant.forward(inputs.x_TH, inputs.ids_TK, inputs.weights_TK)
    saved = torch.cuda.memory_allocated(device) - before - y_TH.numel() * y_TH.element_size()
    contestant.backward(y_TH, inputs.dy_TH)
    torch.cuda.synchronize(device)
    return saved, torch.cuda.max_memory_allocated(device) - before


def _environment(device: torch.device, dtype: torch.dtype, quantization: Quantization | None) -> dict[str, Any]:
    name = quantization.format if quantization else str(dtype).removeprefix("torch.")
    found: dict[str, Any] = {"torch": torch.__version__, "device": str(device), "dtype": name}
    if device.type == "cuda":
        import triton

        found |= {"card": torch.cuda.get_device_name(device), "triton": triton.__version__, "cuda": torch.version.cuda}
    else:
        found["threads"] = torch.get_num_threads()
    return found
