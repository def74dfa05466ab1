"""A training step on a GPU: queued without waiting, and as a CUDA graph."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mok.determinism.observe import StepObserver
from mok.determinism.trace import PHASES, Key, Recorder, first_divergence
from mok.errors import NonFiniteError, RunError
from mok.grid import Grid, Layout
from mok.launch.status import status_word
from mok.recipe import load
from mok.train.batches import Batches
from mok.train.device import prepare_device
from mok.train.ranks import OneRank
from mok.train.state import TrainState
from mok.train.step import StepGraph, StepReport, begin_step, can_record, finish_step, queue_step, train_step
from tests.gpu import no_waiting
from tests.train.runs import RECIPE, arguments

pytestmark = pytest.mark.gpu

# cuBLAS reads it once, at its first product in this process; runs set it too (mok/determinism/fingerprint.py).
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

CUDA = torch.device("cuda", 0)
VOCABULARY = 96


@dataclass
class Sequences:
    """Sample i of a stream of random tokens."""

    length: int

    def sequence(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(VOCABULARY, (self.length + 1,), generator=torch.Generator().manual_seed(index))
        return tokens[:-1], tokens[1:]


def fresh(folder: Path, backend: str, *overrides: str) -> tuple[TrainState, Batches]:
    sizes = ["model.hidden_size=128", "model.num_layers=2", "moe.num_experts=8", "moe.intermediate_size=64"]
    recipe = load(str(RECIPE), arguments(folder, *sizes, "train.dtype=bf16", f"moe.backend={backend}", *overrides))
    layout = Layout(Grid.of(recipe))
    state = TrainState(recipe, VOCABULARY, OneRank(layout), CUDA)
    return state, Batches(Sequences(recipe.train.sequence_length), layout.grid)


@pytest.fixture(params=["mega", "staged"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "mega" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the megakernel runs on sm_90")
    filled = torch.utils.deterministic.fill_uninitialized_memory
    prepare_device(CUDA)  # as a run does
    yield request.param
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled


def test_nobody_waits_for_the_device_in_a_step(tmp_path: Path, backend: str) -> None:
    state, batches = fresh(tmp_path, backend)
    train_step(state, batches)  # compiles, and takes memory
    with no_waiting():
        inputs = begin_step(state, batches)
        assert inputs is not None
        results = queue_step(state, inputs)
        with pytest.raises(RuntimeError, match="synchroniz"):
            results.cpu()
    assert finish_step(state, inputs, results).loss > 0 and state.step == 2


CORRECTED = ("moe.score=sigmoid", "moe.correction_bias=true", "distributed.lanes=2", "distributed.slices=2")


@pytest.mark.parametrize("overrides", [(), CORRECTED], ids=["plain", "grid"])
def test_a_replayed_graph_of_a_step_has_the_bits_of_the_step(tmp_path: Path, backend: str, overrides: tuple[str, ...]) -> None:
    eager, batches = fresh(tmp_path, backend, *overrides)
    expected = [train_step(eager, batches) for _ in range(4)]
    state, batches = fresh(tmp_path, backend, *overrides)
    assert can_record(state)
    graph = StepGraph()

    def replay() -> StepReport:
        return train_step(state, batches, graph=graph)

    assert [replay() for _ in range(4)] == expected
    assert state.state_sha256() == eager.state_sha256()

    status_word(CUDA, 1).fill_(1)
    with pytest.raises(RunError, match="layer 1 on rank 0: a tile waited too long"):
        replay()
    assert state.state_sha256() == eager.state_sha256() and state.step == 4
    weight = state.model.moe_layers[1].router.weight
    saved = weight.detach().clone()
    weight.data[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="router of layer 1 on rank 0: 128 rows"):
        replay()
    weight.data.copy_(saved)
    assert state.state_sha256() == eager.state_sha256()
    assert replay() == train_step(eager, batches)
    assert state.state_sha256() == eager.state_sha256()


def test_a_replayed_graph_records_what_the_step_records(tmp_path: Path, backend: str) -> None:
    """Digests of every call's routes, of gradients, weights and optimizer states, and of blocks: taken inside the graph."""
    overrides = ("distributed.lanes=2", "distributed.slices=2")  # two calls
    traces = []
    for graph in (None, StepGraph()):
        state, batches = fresh(tmp_path, backend, *overrides)
        recorder = Recorder(activations=True)
        observer = StepObserver(recorder, state.model)
        assert can_record(state, observer)
        for step in range(3):
            train_step(state, batches, observer, graph if step else None)
        traces.append(recorder.trace)
    eager, replayed = traces
    assert len(eager.records) > 3 * 50 and first_divergence(eager, replayed) is None
    assert list(eager.records) == list(replayed.records) and eager.num_bytes == replayed.num_bytes
    phases = {(key.phase, key.step) for key in replayed.records}
    assert phases == {(phase, step) for phase in PHASES if phase != "backward" for step in (1, 2, 3)}
    changing = {key.name for key in replayed.records if key.phase == "optimizer" and "proj" in key.name}
    for name in changing:
        assert len({replayed.records[Key(step, "optimizer", name)] for step in (1, 2, 3)}) == 3, name


def test_an_observer_that_needs_the_host_is_not_recorded(tmp_path: Path) -> None:
    state, _ = fresh(tmp_path, "staged")
    observer = StepObserver(Recorder(watchers=[lambda key, tensor: None]), state.model)
    assert can_record(state) and not can_record(state, observer)
