"""The measured tables and `mok bench tune`: strict reading, the choice of a row, the rule of the fastest, refusals."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mok import backends
from mok.backends import choose
from mok.bench import tune
from mok.bench.layer import Clock, make_problem
from mok.bench.tune import Trial, candidates, fastest, write_row
from mok.determinism.axes import KERNEL_SETTINGS
from mok.errors import UsageError
from mok.launch import tables
from mok.launch.config import DeviceFacts, KernelConfig, why_not
from mok.launch.plan import TaskOrder
from mok.launch.tables import Row, Table, config_of, dump_table, nearest_row, read_table, table_of
from mok.shapes import LayerShape

H200 = DeviceFacts("NVIDIA H200", (9, 0), 132, 232448)
ROW = Row("some", 8192, 4096, 1024, 16, 2, (1.25, 3.5), KernelConfig(TaskOrder(8, 2), mover_share=0.25), (1.5, 3.25))
Run = Callable[..., subprocess.CompletedProcess[str]]


def test_a_table_comes_back_as_it_was_written(tmp_path: Path) -> None:
    other = dataclasses.replace(ROW, name='odd "name"', settings=KernelConfig(stages=2, pieces=3), staged_ms=None)
    table = Table("NVIDIA H200", (ROW, other))
    path = tmp_path / "table.toml"
    path.write_text(dump_table(table))
    assert read_table(path) == table


GOOD = dump_table(Table("NVIDIA H200", (ROW,)))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "device is missing"),
        ("device = [", "is not TOML"),
        ('device = "x"', "has no [[shape]]"),
        (GOOD.replace("tokens = 8192", "tokens = 0"), "tokens = 0"),
        (GOOD.replace("tokens = 8192", "tokens = true"), "tokens = True"),
        (GOOD.replace("top_k = 2\n", ""), "top_k is missing"),
        (GOOD.replace("top_k", "topk"), "there is no topk"),
        (GOOD.replace("[1.25, 3.5]", "[1.25]"), "mega_ms = [1.25]"),
        (GOOD.replace("3.5]", "nan]"), "mega_ms"),
        (GOOD.replace("mover_share", "movershare"), "there is no movershare"),
        (GOOD.replace("mover_share = 0.25", "mover_share = '1'"), "mover_share = '1'"),
        (GOOD.replace("group_size = 8", "group_size = 8.5"), "group_size = 8.5"),
        (GOOD.replace("group_size = 8", "groupsize = 8"), "there is no groupsize"),
        (GOOD.replace("mover_share = 0.25", "mover_share = 1.5"), "mover_share = 1.5: must be from 0 to 1"),
        (GOOD.replace("group_size = 8", "group_size = 0"), "group_size = 0"),
        (GOOD + GOOD.split("\n\n")[1], "names a shape twice"),
    ],
)
def test_a_broken_table_is_one_clear_error(text: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_table(path)
    assert str(path) in str(caught.value) and named in str(caught.value) and "mok bench tune" in str(caught.value)


def test_a_missing_or_foreign_table_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_table(tmp_path / "nowhere.toml")
    monkeypatch.setattr(tables, "TABLES", tmp_path)
    (tmp_path / "h100.toml").write_text(GOOD)
    with pytest.raises(UsageError, match="figures of NVIDIA H200, and its name says h100"):
        table_of.__wrapped__("NVIDIA H100 80GB HBM3")
    with pytest.raises(UsageError, match=r"h200.toml: cannot be read"):
        table_of.__wrapped__("NVIDIA Z1")


def test_every_table_that_ships_can_be_read_and_used() -> None:
    for path in tables.TABLES.glob("*.toml"):
        table = read_table(path)
        assert tables.table_name(table.device) == path.stem
        for row in table.rows:
            shape = LayerShape(row.hidden_size, row.intermediate_size, row.num_experts, row.top_k)
            assert nearest_row(table, shape, row.tokens) == row
            assert why_not(row.settings, shape, dataclasses.replace(H200, name=table.device)) == []


def test_the_nearest_row_also_looks_at_the_rows_of_an_expert() -> None:
    few = dataclasses.replace(ROW, tokens=512)
    table = Table("NVIDIA H200", (ROW, few, dataclasses.replace(ROW, name="wide", intermediate_size=4096)))
    shape = LayerShape(4096, 1024, 16, 2)
    assert nearest_row(table, shape, 8192) == ROW
    assert nearest_row(table, shape, 700) == few
    assert nearest_row(table, dataclasses.replace(shape, num_experts=256), 8192) == few
    assert nearest_row(table, LayerShape(4096, 3000, 16, 2), 8192).name == "wide"
    assert nearest_row(table, shape, 0) in (ROW, few)


@pytest.mark.parametrize(("staged_ms", "taken"), [((1.0, 3.0), "staged"), ((1.0, 3.5), "mega"), (None, "mega")])
def test_auto_takes_what_was_faster(
    staged_ms: tuple[float, float] | None, taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "h200.toml").write_text(dump_table(Table("NVIDIA H200", (dataclasses.replace(ROW, staged_ms=staged_ms),))))
    monkeypatch.setattr(tables, "TABLES", tmp_path)
    monkeypatch.setattr("mok.launch.config.device_facts", lambda device: H200)
    for name in ("mega", "staged"):
        monkeypatch.setattr(f"mok.backends.{name}.why_not", lambda *_: [])
    table_of.cache_clear()
    backends._choice.cache_clear()
    backend, notice = choose("auto", LayerShape(4096, 1024, 16, 2), torch.bfloat16, torch.device("cuda", 0), tokens=100)
    table_of.cache_clear()
    backends._choice.cache_clear()
    assert backend.__name__ == f"mok.backends.{taken}" and notice is None


def test_the_fastest_is_the_first_that_none_beats_by_more_than_noise() -> None:
    def trial(ms: float | None, **settings: object) -> Trial:
        return Trial("knob", KernelConfig(**settings), ms, "" if ms else "no")

    base, close, clear = trial(10.0), trial(9.95, stages=2), trial(9.0, pieces=3)
    assert fastest([base, close]) == base
    assert fastest([base, close, clear]) == clear
    assert fastest([trial(None), close]) == close
    with pytest.raises(UsageError, match="no candidate could run: no"):
        fastest([trial(None)])


def test_candidates_start_from_the_base_and_differ_in_one_knob() -> None:
    base = KernelConfig(TaskOrder(8, 32), mover_share=0.3)
    for knob in tune.KNOBS:
        found = candidates(knob, base)
        assert found[0] == base and len(set(found)) == len(found) >= 3
        assert all(dataclasses.replace(config, **{knob: getattr(base, knob)}) == base for config in found)


def test_candidates_with_other_bytes_or_that_fail_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the torch backend, which takes no settings: what they would do to the result is put in here."""
    problem = make_problem("small", LayerShape(32, 48, 4, 2), 24, "balanced", torch.device("cpu"), torch.bfloat16)
    real = tune.Mok
    changed, failing, huge = KernelConfig(pieces=3), KernelConfig(stages=2), KernelConfig(stages=4)

    def contestant(problem: object, backend: str, kernel: KernelConfig) -> tune.Mok:
        if kernel == failing:
            raise RuntimeError("out of resource\nand more")
        made = real(problem, "torch")
        if kernel == changed:
            made._weights[0].data[0, 0, 0] += 1
        return made

    monkeypatch.setattr(tune, "Mok", contestant)
    clock = Clock(problem.device, 3, 1)
    expected = tune.results_of(problem, contestant(problem, "mega", KernelConfig()))
    trials = [
        tune.try_settings("stages", config, problem, "forward", clock, H200, expected)
        for config in (KernelConfig(), huge, failing, changed)
    ]
    assert trials[0].median_ms and not trials[0].refused
    assert "bytes of shared memory" in trials[1].refused and trials[1].median_ms is None
    assert trials[2].refused == "failed: out of resource"
    assert "other bytes" in trials[3].refused


def test_a_row_takes_the_place_of_its_predecessor(tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    write_row(path, "NVIDIA H200", ROW)
    write_row(path, "NVIDIA H200", dataclasses.replace(ROW, tokens=512))
    write_row(path, "NVIDIA H200", dataclasses.replace(ROW, mega_ms=(1.0, 2.0)))
    assert [(row.tokens, row.mega_ms) for row in read_table(path).rows] == [(512, (1.25, 3.5)), (8192, (1.0, 2.0))]
    with pytest.raises(UsageError, match="holds figures of NVIDIA H200, this is NVIDIA H100"):
        write_row(path, "NVIDIA H100 PCIe", ROW)


def test_without_a_gpu_the_command_says_what_it_needs(mok: Run) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    found = mok("bench", "tune")
    assert found.returncode == 2 and "needs a CUDA device of compute capability 9.0" in found.stderr


def test_the_settings_that_verify_determinism_tries_can_run_and_differ_from_what_a_table_chooses() -> None:
    tried = [config_of(settings) for settings in KERNEL_SETTINGS.values()]
    chosen = [row.settings for row in table_of("NVIDIA H200").rows]
    for config in tried:
        assert not why_not(config, LayerShape(2048, 1024, 64, 8), H200)
        for field in ("forward_order", "backward_order", "mover_share"):
            assert all(getattr(config, field) != getattr(other, field) for other in [KernelConfig(), *chosen]), field


def test_settings_are_read_strictly() -> None:
    assert config_of({"stages": 2, "forward_order": {"group_size": 4}}) == KernelConfig(TaskOrder(4), stages=2)
    with pytest.raises(UsageError, match="there is no stage;"):
        config_of({"stage": 2})
    with pytest.raises(UsageError, match="stages = 1: must be at least 2"):
        config_of({"stages": 1})
