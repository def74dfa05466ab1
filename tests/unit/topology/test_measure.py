"""Measuring: the plan, the run on made-up GPUs, the watch over a child that hangs, and the kernels without a GPU."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import textwrap

import pytest

from mok.shapes import LAYER_SHAPES
from mok.topology import advise, findings, unmet
from mok.topology.measure.plan import METHODS, ROUTINGS, busiest_bytes, make_plan, rows_between
from mok.topology.measure.watch import measure
from mok.topology.model import Topology
from mok.topology.speeds import measured_rows, outliers
from tests.unit.topology.machines import h100_box, pcie_box
from tests.unit.topology.made_up_gpus import KIMI, MadeUpGpus, result


def boxed(measurement) -> Topology:
    return dataclasses.replace(h100_box(), measurement=measurement)


@pytest.mark.parametrize("num_gpus", [1, 2, 8, 16])
@pytest.mark.parametrize("shape", LAYER_SHAPES)
def test_plan_fits_a_minute_on_slow_links(num_gpus, shape):
    plan = make_plan(num_gpus, LAYER_SHAPES[shape])
    assert plan.expected_s <= plan.budget_s < 60
    assert plan.num_bytes >= 1 << 20
    assert len(plan.pairs) == max(1, num_gpus * (num_gpus - 1))
    for routing, tokens in zip(ROUTINGS, plan.tokens, strict=True):
        assert busiest_bytes(rows_between(routing, num_gpus, tokens * plan.top_k), plan.row_bytes) <= 2 << 30


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 72])
def test_rows_are_complete(routing, num_ranks):
    rows = rows_between(routing, num_ranks, 1000)
    assert [sum(counts) for counts in rows] == [1000] * num_ranks
    received = [sum(counts[j] for counts in rows) for j in range(num_ranks)]
    if routing == "skewed" and num_ranks > 1:
        assert received[0] == pytest.approx(2 * received[1], rel=0.1)
    if routing == "one-hot":
        assert received[0] == 1000 * num_ranks


def test_rows_example_of_the_docstring():
    assert rows_between("skewed", 3, 8)[0] == [4, 2, 2]


def test_eight_gpus_are_measured_pair_by_pair():
    gpus = MadeUpGpus()
    measurement = result(gpus)
    assert len(measurement.transfers) == 56 * 3
    assert {record.verdict for record in (*measurement.transfers, *measurement.exchanges)} == {"verified"}
    assert [exchange.routing for exchange in measurement.exchanges] == list(ROUTINGS)
    one = measurement.transfers[0]
    assert (one.source, one.target, one.method, one.repeats) == (0, 1, "copy", 5)
    assert one.low_gb_per_s < one.gb_per_s < one.high_gb_per_s < 350
    assert one.gb_per_s == pytest.approx(350 * 0.97)
    # Every repeat moved data of its own, the first one untimed.
    assert [seed for method, source, target, seed in gpus.seen if (method, source, target) == ("load", 3, 6)] == list(range(6))
    assert measurement.failed == ()
    row = measured_rows(boxed(measurement))[0]
    assert (row["link"], row["nominal_gb_per_s"]) == ("NV18", 450.0)
    assert row["percent"] == pytest.approx(75.4, abs=0.1)


def test_slow_pair_is_an_outlier():
    topology = boxed(result(MadeUpGpus(slow={(3, 6): 200.0})))
    assert {(t.source, t.target) for t, _ in outliers(topology)} == {(3, 6)}
    assert len(outliers(topology)) == len(METHODS)
    slow = [finding for finding in findings(topology) if finding.code == "slow-pair"]
    assert slow[0].where == "rank 3 to rank 6"
    assert slow[0].what == "copy at 194 GB/s, pairs with the same link reach 340"


def test_lost_writes_are_failed_though_capable():
    topology = boxed(result(MadeUpGpus(broken={(2, 5)})))
    failed = [t for t in topology.measurement.transfers if t.verdict == "FAILED"]
    assert {(t.source, t.target, t.method) for t in failed} == {(2, 5, method) for method in METHODS}
    assert failed[0].gb_per_s is None
    assert topology.hosts[0].pair(2, 5).capable is True
    assert "copy failed (all words are wrong)" in unmet(topology, "p2p")
    assert [exchange.verdict for exchange in topology.measurement.exchanges] == ["FAILED"] * 3
    assert advise(topology, KIMI).transport == "collective"
    assert advise(topology, KIMI).exchange_ms is not None  # from the pairs that do work


def test_a_transfer_that_raises_is_failed():
    measurement = result(MadeUpGpus(2, raising={(1, 0)}))
    assert {t.detail for t in measurement.transfers if t.verdict == "FAILED"} == {"raised: an illegal memory access"}


def test_pairs_without_peer_access_are_copied_only():
    gpus = MadeUpGpus(4, islands=[{0, 1}, {2, 3}])
    measurement = result(gpus)
    verdicts = {(t.source, t.target, t.method): t.verdict for t in measurement.transfers}
    assert verdicts[0, 1, "store"] == "verified"
    assert (verdicts[0, 2, "copy"], verdicts[0, 2, "load"]) == ("verified", "not capable")
    assert {exchange.method for exchange in measurement.exchanges} == {"copy"}
    topology = dataclasses.replace(pcie_box(), measurement=measurement)
    assert {row["nominal_gb_per_s"] for row in measured_rows(topology)} == {16 * 1.969}


def test_without_triton_copies_are_measured():
    measurement = result(MadeUpGpus(2, kernels=False))
    assert {t.method: t.verdict for t in measurement.transfers} == {
        "copy": "verified",
        "load": "not measured",
        "store": "not measured",
    }
    assert {t.detail for t in measurement.transfers if t.method == "load"} == {"Triton cannot be imported"}


def test_one_gpu_is_measured_with_itself():
    measurement = result(MadeUpGpus(1))
    assert [(t.source, t.target, t.verdict) for t in measurement.transfers] == [(0, 0, "verified")] * 3


def test_budget_ends_the_run():
    measurement = result(MadeUpGpus(slow={(0, 1): 0.012}))
    assert [t.verdict for t in measurement.transfers[:3]] == ["verified", "verified", "not measured"]
    assert measurement.transfers[-1].detail == "the budget of 40 s was used up"


def test_expected_time_comes_from_the_measured_exchange():
    topology = boxed(result(MadeUpGpus()))
    advice = advise(topology, KIMI)
    assert advice.measured_from == "even all-to-all among 8 ranks"
    assert advice.exchange_bytes == 4096 * 8 * 7 // 8 * 7168 * 2 * 4
    assert advice.exchange_ms == pytest.approx(advice.exchange_bytes / 300e9 * 1e3)
    assert advise(h100_box(), KIMI).exchange_ms is None


CHILD = """
import json, sys, time
plan = json.loads(sys.argv[1])
def say(**event): print(json.dumps(event), flush=True)
blank = dict(source=0, target=1, method="copy", verdict="not measured")
say(event="ready")
say(event="begin", transfer=blank)
say(event="end", transfer=dict(blank, verdict="verified", gb_per_s=10.0))
say(event="begin", transfer=dict(blank, method="load"))
"""


@pytest.mark.parametrize(
    ("ending", "detail"),
    [("time.sleep(60)", "no end within 1 s"), ("sys.exit('the GPU is lost')", "it ended with code 1 (the GPU is lost)")],
)
def test_a_transfer_that_never_ends_is_failed(ending, detail):
    plan = dataclasses.replace(make_plan(2, KIMI), limit_s=1.0)
    measurement = measure(plan, (sys.executable, "-c", CHILD + ending), start_limit_s=30.0)
    assert [(t.method, t.verdict, t.detail) for t in measurement.transfers] == [
        ("copy", "verified", ""),
        ("load", "FAILED", detail),
    ]
    assert measurement.unfinished == f"stopped at load from 0 to 1: {detail}"


def test_a_child_that_does_not_start_is_a_reason():
    measurement = measure(make_plan(2, KIMI), (sys.executable, "-c", "raise SystemExit('no CUDA')"), start_limit_s=30.0)
    assert measurement.transfers == ()
    assert measurement.unfinished == "the measuring process gave nothing more: it ended with code 1 (no CUDA)"


def test_data_are_random_verified_and_differ_by_stream():
    from mok.topology.measure.backend import POISON, pattern, wrong_words

    words = pattern(3, 0, 4096, "cpu")
    assert not wrong_words(words, pattern(3, 0, 4096, "cpu"))
    assert wrong_words(words[100:], pattern(3, 100, 3996, "cpu")) == ""
    assert int((words == POISON).sum()) == 0
    assert len(set(words.tolist())) == 4096
    ones = sum(bin(word).count("1") for word in words.tolist()) / (4096 * 63)
    assert 0.49 < ones < 0.51
    changed = words.clone()
    changed[7] ^= 1
    assert wrong_words(changed, words) == "1 of 4096 words are wrong, the first at byte 56"
    assert wrong_words(pattern(4, 0, 4096, "cpu"), words).startswith("4096 of 4096")


def in_interpreter(code: str) -> str:
    """Run `code` with Triton's interpreter, in a process of its own because the choice is made at import."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kernels_by_interpreter():
    output = in_interpreter(
        """
        import json, torch
        from mok.topology.measure.kernels import chase, copy_words, pull_chunks, store_and_read
        a = torch.arange(5000)
        b = torch.full((5008,), -1)
        copy_words[(3,)](a.data_ptr(), b.data_ptr(), 5000, BLOCK=1024)
        answers = [torch.equal(a, b[:5000]) and b[5000:].tolist() == [-1] * 8]
        table = torch.tensor([[a[100:].data_ptr(), 4, 0], [a[16:].data_ptr(), 8, 4]])
        c = torch.full((16,), -1)
        pull_chunks[(6,)](table, c, 2, BLOCK=4)
        answers.append(c.tolist())
        result = torch.full((1,), -1)
        chain = torch.tensor([2, 0, 1])
        chase[(1,)](chain.data_ptr(), 2, result)
        answers.append(int(result))
        store_and_read[(1,)](b.data_ptr(), 50, result, STRIDE=4, SLOTS=8)
        answers.append(int(result))
        print(json.dumps(answers))
        """
    )
    assert json.loads(output) == [True, [100, 101, 102, 103, *range(16, 24), -1, -1, -1, -1], 1, 50]


@pytest.mark.parametrize("arch", [90, 100, 103])
def test_kernels_compile_to_wide_plain_accesses(arch):
    """Machine code for each GPU generation: 16-byte loads and stores, volatile walks, and no multicast."""
    code = f"""
    import re, json, triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from mok.topology.measure import kernels
    def build(kernel, signature, constants, warps):
        names = kernel.arg_names
        types = {{**dict.fromkeys(constants, "constexpr"), **signature}}
        aligned = [n for n, kind in signature.items() if kind != "i32" or n == "num_words"]
        wide = {{(names.index(n),): [["tt.divisibility", 16]] for n in aligned}}
        source = ASTSource(kernel, {{n: types[n] for n in names}}, {{(names.index(n),): v for n, v in constants.items()}}, wide)
        ptx = triton.compile(source, target=GPUTarget("cuda", {arch}, 32), options={{"num_warps": warps}}).asm["ptx"]
        assert "multimem" not in ptx
        return sorted(set(re.findall(r"(?:ld|st)[.][a-z.]*global[a-z0-9.:]*", ptx)))
    word, block = "i64", {{"BLOCK": 2048}}
    print(json.dumps([
        build(kernels.copy_words, dict(source=word, target=word, num_words="i32"), block, 8),
        build(kernels.pull_chunks, dict(table="*i64", target="*i64", num_sources="i32"), block, 8),
        build(kernels.chase, dict(address=word, steps="i32", result="*i64"), {{}}, 1),
        build(kernels.store_and_read, dict(address=word, steps="i32", result="*i64"), dict(STRIDE=64, SLOTS=4096), 1),
    ]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    copy, pull, chase, store = json.loads(done.stdout)
    assert {"ld.global.v2.b64", "st.global.v2.b64"} <= set(copy)
    assert {"ld.global.v2.b64", "st.global.v2.b64"} <= set(pull)
    assert "ld.volatile.global.b64" in chase
    assert "ld.volatile.global.b64" in store
