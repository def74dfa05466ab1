"""`verify_step` on modules of one's own: it finds what does not repeat, says where, and knows the usual causes by name."""

from __future__ import annotations

import time
from itertools import count

import pytest
import torch
from torch import nn

from mok.determinism import fingerprint as fingerprint_module
from mok.determinism.step import verify_step
from mok.errors import CheckFailed, UsageError


class Sgd:
    """One linear layer, a loss given by the caller, a plain update."""

    def __init__(self, loss_of) -> None:
        self.module = nn.Linear(8, 4)
        self.x = torch.randn(16, 8)
        self.loss_of = loss_of

    def __call__(self, step: int) -> torch.Tensor:
        self.module.zero_grad()
        loss = self.loss_of(self.module, self.x, step)
        loss.backward()
        with torch.no_grad():
            for parameter in (p for p in self.module.parameters() if p.grad is not None):
                parameter.sub_(0.1 * parameter.grad)
        return loss


def builder(loss_of):
    def build():
        step = Sgd(loss_of)
        return step.module, step

    return build


def plain(module: nn.Module, x: torch.Tensor, step: int) -> torch.Tensor:
    return module(x).square().sum(1).sum()


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_step_that_repeats_passes_and_the_report_counts_what_was_compared() -> None:
    report = verify_step(builder(plain), steps=3, runs=3)
    assert [(axis.axis, axis.status) for axis in report.axes] == [("rerun", "equal"), ("threads", "equal")]
    rerun = report.axes[0]
    # Per step: random state, output, loss, two gradients, two weights.
    assert (rerun.num_tensors, rerun.num_steps) == (2 * 3 * 7, 2 * 3)
    assert rerun.num_bytes > 0
    assert report.to_dict()["verdict"] == "equal"
    assert "3 runs" in report.notes[0]
    report.raise_for_divergence()


def test_a_rare_fault_of_one_ulp_is_found_with_the_default_number_of_runs() -> None:
    """In one of 30 repeats, one element of one gradient is the next float."""
    builds = iter(count())

    def build():
        number = next(builds)
        step = Sgd(plain)

        def flip(grad: torch.Tensor) -> torch.Tensor:
            if number != 17:
                return grad
            grad = grad.clone()
            grad.view(-1)[13] = torch.nextafter(grad.view(-1)[13], torch.tensor(torch.inf))
            return grad

        step.module.weight.register_hook(flip)
        return step.module, step

    report = verify_step(build)
    finding = report.axes[0].finding
    assert finding is not None
    key, difference = finding.divergence.key, finding.difference
    assert (key.step, key.phase, key.name) == (1, "backward", "grad:weight")
    assert difference is not None
    assert (difference.index, difference.ulp, difference.num_differing) == (13, 1, 1)
    assert difference.values[0] != difference.values[1]
    with pytest.raises(CheckFailed, match="grad:weight"):
        report.raise_for_divergence()


def test_a_sum_that_depends_on_threads_is_named() -> None:
    long = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0))
    report = verify_step(builder(lambda module, x, step: (long * module.weight[0, 0]).sum()), steps=4, runs=2, threads=(1, 3))
    assert [axis.status for axis in report.axes] == ["equal", "diverged"]
    finding = report.axes[1].finding
    assert finding is not None
    assert finding.operation.startswith("aten.sum.default")
    assert finding.cause.startswith("thread-dependent sum")


def test_a_racing_accumulation_is_named() -> None:
    """The backward of x[idx] adds rows in the order in which two CPU threads arrive."""
    index = torch.randint(0, 1024, (100_000,), generator=torch.Generator().manual_seed(0))
    factor = torch.randn(100_000, 16, generator=torch.Generator().manual_seed(1))

    def build():
        module = nn.Embedding(1024, 16)

        def step(_: int) -> torch.Tensor:
            loss = (module.weight[index] * factor).sum(1).mean()
            loss.backward()
            return loss

        return module, step

    report = verify_step(build, steps=1, runs=20)
    finding = report.axes[0].finding
    assert finding is not None, "the race did not show in 20 runs"
    assert finding.divergence.key.name == "grad:weight"
    assert "index_put" in finding.operation
    assert finding.cause.startswith("atomics")


def test_a_choice_made_by_the_clock_is_named() -> None:
    ticks = iter(count())

    def loss_of(module: nn.Module, x: torch.Tensor, step: int) -> torch.Tensor:
        assert time.perf_counter_ns() > 0
        y = module(x)
        return y.square().sum(1).sum() if next(ticks) % 2 else (y * y).mean(1).sum()

    report = verify_step(builder(loss_of), steps=1, runs=2)
    finding = report.axes[0].finding
    assert finding is not None
    assert finding.cause.startswith("another operation")


def test_another_execution_mode_is_reported_as_such_with_the_largest_difference() -> None:
    def compiled():
        step = Sgd(lambda module, x, step: torch.compile(module, backend="eager")(x).mul(1.0000001).square().sum(1).sum())
        step.module.compile(backend="eager")
        return step.module, step

    report = verify_step(builder(plain), runs=2, against=compiled)
    against = report.axes[-1]
    assert against.status == "diverged"
    assert against.reason.startswith(
        "different execution mode (eager against compiled), not comparable bitwise; largest difference"
    )
    assert report.fingerprint["mode"] == "eager"


def test_cuda_that_started_too_early_is_refused_with_one_line_of_advice(monkeypatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(
        UsageError, match=r"^CUBLAS_WORKSPACE_CONFIG is not set and CUDA has already started; set it to :4096:8[^\n]*$"
    ):
        verify_step(builder(plain))


def test_the_workspace_is_set_before_cuda_starts(monkeypatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    fingerprint_module.prepare_cuda()
    assert fingerprint_module.os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_one_run_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        verify_step(builder(plain), runs=1)
