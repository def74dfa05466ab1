"""Traces: recorded per step and rank, merged by name, searched for the first divergence; and what a report says of it."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from mok.determinism.compare import compare_tensors
from mok.determinism.report import AxisResult, Finding, Report, baseline_of, check_baseline
from mok.determinism.runs import environment_of
from mok.determinism.trace import Divergence, Key, Recorder, Trace, first_divergence, read_trace
from mok.errors import RunError, UsageError


def record(values: dict[tuple[int, str, str], float], sink=None, rank: int = 0) -> Trace:
    """A trace of one-element tensors."""
    recorder = Recorder(sink, rank=rank)
    for step in sorted({step for step, _, _ in values}):
        recorder.begin(step)
        for (at, phase, name), value in values.items():
            if at == step:
                recorder.see(phase, name, torch.tensor([value]))
        recorder.end()
    return recorder.trace


STEP = {(1, "data", "tokens"): 1.0, (1, "optimizer", "w"): 2.0, (1, "forward", "loss"): 3.0, (2, "forward", "loss"): 4.0}


def test_the_first_divergence_follows_steps_then_phases() -> None:
    left = record(STEP)
    assert first_divergence(left, record(STEP)) is None
    right = record(STEP | {(1, "optimizer", "w"): 0.0, (1, "forward", "loss"): 0.0, (2, "forward", "loss"): 0.0})
    divergence = first_divergence(left, right)
    assert divergence is not None
    assert (divergence.key, divergence.kind) == (Key(1, "forward", "loss"), "digest")


def test_a_step_that_only_one_run_reached_is_a_divergence() -> None:
    shorter = record({key: value for key, value in STEP.items() if key[0] == 1})
    divergence = first_divergence(record(STEP), shorter)
    assert divergence is not None
    assert (divergence.key.step, divergence.kind, divergence.digests[1]) == (2, "missing", "")


def test_ranks_are_merged_by_name_and_must_agree(tmp_path: Path) -> None:
    common = {(1, "optimizer", "w"): 2.0}
    for rank in range(2):
        with (tmp_path / f"rank_{rank:05d}.jsonl").open("w") as file:
            record(common | {(1, "data", f"tokens[{rank}]"): float(rank)}, file, rank)
    trace = read_trace(tmp_path)
    assert len(trace.records) == 3
    assert first_divergence(trace, record(common | {(1, "data", "tokens[0]"): 0.0, (1, "data", "tokens[1]"): 1.0})) is None
    with (tmp_path / "rank_00001.jsonl").open("w") as file:
        record({(1, "optimizer", "w"): -2.0, (1, "data", "tokens[1]"): 1.0}, file, 1)
    divergence = first_divergence(trace, read_trace(tmp_path))
    assert divergence is not None
    assert (divergence.kind, divergence.key.name) == ("ranks", "w")


def test_a_resumed_trace_counts_each_step_once_and_drops_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "rank_00000.jsonl"
    with path.open("w") as file:
        record({(1, "forward", "loss"): 1.0, (2, "forward", "loss"): 9.0}, file)
        record({(2, "forward", "loss"): 2.0}, file)
        file.write('{"step": 3, "rank": 0, "by')
    assert first_divergence(read_trace(tmp_path), record({(1, "forward", "loss"): 1.0, (2, "forward", "loss"): 2.0})) is None
    with pytest.raises(FileNotFoundError, match="no trace files"):
        read_trace(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "content",
    ["[1]\n", "[" * 100_000 + "\n", '{"step": 1}\n', '{"step": 1, "bytes": 1, "digests": {"dbta": {"x": "y"}}}\n', "\xff\n"],
)
def test_a_damaged_trace_or_environment_is_named(tmp_path: Path, content: str) -> None:
    for name in ("trace/rank_00000.jsonl", "environment.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(RunError, match=r"rank_00000\.jsonl: damaged"):
        read_trace(tmp_path / "trace")
    if not content.startswith("{"):
        with pytest.raises(RunError, match=r"environment\.json: damaged"):
            environment_of(tmp_path)


def test_a_pipe_in_the_place_of_a_trace_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank_00000.jsonl")
    with pytest.raises(RunError, match=r"rank_00000\.jsonl: damaged .*not a file"):
        read_trace(tmp_path)


def test_a_watcher_sees_the_live_tensor_before_its_digest_is_taken_and_a_check_its_digest() -> None:
    def flip(key: Key, tensor: torch.Tensor) -> None:
        if key.step == 2:
            tensor.view(torch.int32)[0] ^= 1

    seen: list[str] = []
    sink = io.StringIO()
    recorder = Recorder(sink, watchers=[flip], checks=[lambda key, tensor, digest: seen.append(digest)])
    weight = torch.ones(1)
    for step in (1, 2):
        recorder.begin(step)
        recorder.see("optimizer", "w", weight)
        recorder.end()
    first, second = (json.loads(line)["digests"]["optimizer"]["w"] for line in sink.getvalue().splitlines())
    assert first != second and seen == [first, second]
    assert weight.view(torch.int32).item() == torch.ones(1).view(torch.int32).item() ^ 1


def test_an_unknown_phase_is_refused() -> None:
    with pytest.raises(ValueError, match="must be one of data"):
        Recorder().see("later", "x", torch.zeros(1))


def report_of(finding: Finding) -> Report:
    return Report(
        "recipe",
        [
            AxisResult("rerun", "equal", arms=["a", "b"], num_tensors=4, num_steps=2, num_bytes=64),
            AxisResult("threads", "diverged", arms=["a", "c"], finding=finding),
            AxisResult("backend", "not run", "needs a CUDA device"),
        ],
        {"torch": "1"},
    )


def test_a_report_as_json_and_junit(tmp_path: Path) -> None:
    difference = compare_tensors("w", torch.tensor([0.0]), torch.tensor([-0.0]))
    finding = Finding(Divergence(Key(3, "reduce", "grad:w"), "digest", ("x", "y")), ("a", "c"), difference, hint="look")
    report = report_of(finding)
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["verdict"] == "diverged"
    found = plain["axes"][1]["divergence"]
    assert (found["step"], found["phase"], found["tensor"], found["index"], found["ulp"]) == (3, "reduce", "grad:w", 0, 1)
    assert found["hex"] == ["0x00000000", "0x80000000"]
    report.write_junit(tmp_path / "junit.xml")
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("3", "1", "1")
    assert "grad:w" in suite[1][0].text
    assert suite[2][0].get("message") == "needs a CUDA device"


def test_a_baseline_of_another_environment_is_refused_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "golden.json"
    trace, here, recipe = record(STEP), {"torch": "2.13", "threads": 2, "mode": "eager"}, {"seed": 0}
    path.write_text(json.dumps(baseline_of(trace, here, recipe)))
    again, differences = check_baseline(path, here, recipe, force=False)
    assert (again.records, differences) == (trace.records, [])
    with pytest.raises(UsageError, match=r"made in another environment \(threads: 2 against 1\); --force"):
        check_baseline(path, here | {"threads": 1}, recipe, force=False)
    with pytest.raises(UsageError, match="different execution mode, not comparable bitwise"):
        check_baseline(path, here | {"mode": "compiled"}, recipe, force=False)
    assert check_baseline(path, here | {"threads": 1}, recipe, force=True)[1] == ["threads: 2 against 1"]
    with pytest.raises(UsageError, match="another recipe"):
        check_baseline(path, here, {"seed": 1}, force=True)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"manifest_version": 1, "records": [[1, 2]]}', "\x00"])
def test_a_file_that_is_no_baseline_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "golden.json"
    path.write_text(content)
    with pytest.raises(UsageError, match="not a manifest"):
        check_baseline(path, {}, {}, force=False)
