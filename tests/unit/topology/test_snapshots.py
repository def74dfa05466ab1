"""Snapshots: what is saved comes back, what is damaged is refused with a reason, and each machine has its golden advice."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from mok.errors import UsageError
from mok.shapes import LAYER_SHAPES
from mok.topology import Topology, advise, findings
from mok.topology.measurement import Exchange, Measurement, Transfer
from mok.topology.snapshot import load, save, to_document
from mok.topology.summary import summary
from tests.unit.topology.machines import FIXTURES, MACHINES, golden_text, h100_box

SNAPSHOTS = sorted(FIXTURES.glob("*.json"))


@pytest.mark.parametrize("path", SNAPSHOTS, ids=lambda path: path.stem)
def test_golden_advice(path):
    assert golden_text(path) == path.with_suffix(".advice.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", SNAPSHOTS, ids=lambda path: path.stem)
def test_tables_fit_80_columns(path):
    lines = golden_text(path).splitlines()
    sentences = (": ", " -> ")
    assert [line for line in lines if len(line) > 80 and not any(mark in line for mark in sentences)] == []


@pytest.mark.parametrize("name", MACHINES)
def test_made_up_snapshot_is_what_its_description_makes(name):
    topology = load(FIXTURES / f"{name}.json")
    assert topology.origin == "made up"
    assert topology == MACHINES[name]()


def test_every_snapshot_says_what_it_is():
    assert {load(path).origin for path in SNAPSHOTS} <= {"made up", "captured"}
    assert {path.stem for path in SNAPSHOTS} >= set(MACHINES)


def boxed_with_measurement() -> Topology:
    transfer = Transfer(0, 1, "load", "verified", "", 1 << 26, 5, 350.0, 340.0, 360.5, 1.25)
    exchange = Exchange((0, 1), "even", "load", 4096, 7168, 8, "verified", "", 1 << 28, 5, 1.0, 0.9, 1.1)
    return dataclasses.replace(h100_box(), measurement=Measurement((transfer,), (exchange,), 12.5))


def test_measurement_comes_back(tmp_path):
    topology = boxed_with_measurement()
    save(topology, tmp_path / "x.json")
    assert load(tmp_path / "x.json") == topology


def damaged(name: str) -> str:
    text = json.dumps(to_document(h100_box()))
    document = json.loads(text)
    if name == "cut":
        return text[: len(text) // 2]
    if name == "newer":
        document["schema_version"] = 2
    elif name == "no version":
        del document["schema_version"]
    elif name == "other":
        document["kind"] = "something"
    elif name == "wrong type":
        document["topology"]["hosts"][0]["gpus"][0]["links_up"] = "many"
    elif name == "unknown key":
        document["topology"]["hosts"][0]["colour"] = "green"
    elif name == "missing key":
        del document["topology"]["hosts"][0]["gpus"][0]["uuid"]
    elif name == "position":
        document["topology"]["hosts"][0]["pairs"][0]["second"] = 9
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (damaged("cut"), "is cut off"),
        ("", "is not JSON"),
        ("GPU0 GPU1", "is not JSON"),
        ("[1, 2]", "is not a topology snapshot"),
        (damaged("other"), "is not a topology snapshot"),
        (damaged("newer"), "has schema version 2, this mok reads up to 1"),
        (damaged("no version"), "schema_version is None"),
        (damaged("wrong type"), "topology.hosts[0].gpus[0].links_up: int is expected, not 'many'"),
        (damaged("unknown key"), "topology.hosts[0]: unknown key 'colour'"),
        (damaged("missing key"), "topology.hosts[0].gpus[0]: key 'uuid' is missing"),
        (damaged("position"), "names a GPU that is not in its list"),
    ],
)
def test_damaged_snapshots_are_refused(tmp_path, text, words):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        load(tmp_path / "nothing.json")
    with pytest.raises(UsageError, match="cannot be written"):
        save(h100_box(), tmp_path / "no" / "folder.json")


def test_command_exit_codes(mok, tmp_path):
    path = str(FIXTURES / "h100-8.json")
    done = mok("probe-topology", "--from", path, "--require", "nvlink", "--expect-gpus", "8")
    assert (done.returncode, done.stderr) == (0, "")
    done = mok("probe-topology", "--from", path, "--require", "nvl72")
    assert done.returncode == 3
    assert done.stderr == "Error: nvl72 is required: h100, GPU 0: fabric this host only (no cluster id)\n"
    (tmp_path / "cut.json").write_text(damaged("cut"))
    for arguments in (
        ("--from", "cut.json"),
        ("--from", path, "--measure"),
        ("--shape", "nothing"),
        ("--ep", "8"),
        ("--from", path, "--shape", "mixtral-8x7b", "--ep", "72"),
    ):
        done = mok("probe-topology", *arguments)
        assert done.returncode == 2, arguments
        assert done.stderr.startswith("Error: "), done.stderr


def test_report_is_a_snapshot_too(mok, tmp_path: Path):
    source = str(FIXTURES / "gb200-one-unhealthy.json")
    done = mok("probe-topology", "--from", source, "--json", "report.json", "--save", "saved.json", "--shape", "kimi-k2.7")
    assert done.returncode == 0, done.stderr
    assert load(tmp_path / "report.json") == load(source) == load(tmp_path / "saved.json")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["advice"]["ep"] == 64
    assert [domain["size"] for domain in report["domains"]] == [71, 1]
    assert {finding["code"] for finding in report["findings"]} == {"fabric-unhealthy"}


def test_from_needs_no_torch(mok):
    done = mok("probe-topology", "--from", str(FIXTURES / "gb200-nvl72.json"), env={"PYTHONPROFILEIMPORTTIME": "1"})
    assert done.returncode == 0
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "mok.topology.domains" in imported
    assert "torch" not in imported


def test_every_key_and_code_is_documented():
    page = Path("docs/topology.md").read_text(encoding="utf-8")
    code = Path("mok/topology/findings.py").read_text(encoding="utf-8")
    codes = set(re.findall(r'Finding\(\s*(?:"\w+"|severity|[^,]+),\s*"([a-z0-9-]+)"', code)) | {
        "imex-missing",
        "imex-unreadable",
    }
    assert len(codes) > 15
    assert {code for code in codes if f"`{code}`" not in page} == set()
    keys: set[str] = set()

    def collect(value: object) -> None:
        if isinstance(value, dict):
            keys.update(value)
            for item in value.values():
                collect(item)
        elif isinstance(value, list):
            for item in value:
                collect(item)

    topology = boxed_with_measurement()
    report = json.loads(
        json.dumps(summary(topology, findings(topology), advise(topology, LAYER_SHAPES["toy"]), None, None, ""))
    )
    del report["gpus_per_host"]
    for gpu in report["gpus"]:
        gpu["fabric_health"] = {}
    for host in report["topology"]["hosts"]:
        host["environment"] = {}
    collect(report)
    assert {key for key in keys if not re.search(rf"[`.]{key}[`.\[]", page)} == set()
