"""200 single-bit faults at random steps, tensors and bits, each found and located; 200 runs without one, no alarm.

The arms are those of `mok verify-determinism`; they are forked from a server that has imported everything, not started anew,
so that 600 of them take minutes. Prints the table of docs/determinism.md.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from mok import recipe as recipes
from mok.checkpoint import open_checkpoint
from mok.determinism.axes import Arm, check_arm
from mok.determinism.report import AxisResult
from mok.determinism.trace import Key, read_trace
from tests.distributed.processes import ForkingWorkshop

pytestmark = pytest.mark.soak

FAULTS = 200
TINY = """
data.tokenizer=bytes data.validation_fraction=0.2 model.hidden_size=32 model.num_layers=2 model.head_dim=16
moe.num_experts=4 moe.intermediate_size=16 train.batch_size=16 train.sequence_length=16 train.steps=5
"""


def bits_of(manifest: dict[str, Any], key: Key) -> tuple[int, int]:
    """(bits of the tensor that a key names, bits of one element): weights and their state from a checkpoint's manifest."""
    entry = manifest["tensors"].get(key.name.removeprefix("grad:"))
    if entry is None:
        # Of a slice: ids as int64, expert ids as int32, router weights and losses as fp32; one element is there in all.
        width = 64 if key.name.startswith(("tokens", "targets")) else 32
        return width, width
    width = 32 if key.name.startswith("grad:") else 8 * getattr(torch, entry["dtype"]).itemsize
    return width * math.prod(entry["shape"]), width


def test_every_fault_is_found_and_nothing_else(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    overrides = [*TINY.split(), f"data.path={text}", f"data.cache={tmp_path / 'cache'}"]
    shop = ForkingWorkshop(tmp_path / "arms", recipes.load("toy", overrides))
    reference = shop.run(Arm("reference"), "reference")
    trace = read_trace(reference / "trace")
    chance = random.Random(0)
    manifest = open_checkpoint(reference / "run" / "checkpoints" / "step_000005").manifest
    keys = [key for key in trace.in_order() if "[slice" in key.name or key.name.removeprefix("grad:") in manifest["tensors"]]
    found: Counter[str] = Counter()
    wrong, alarms = [], 0
    for number in range(FAULTS):
        key = chance.choice(keys)
        num_bits, width = bits_of(manifest, key)
        bit = chance.randrange(num_bits)
        arms = [(f"fault-{number}", Arm("fault", inject=f"{key.step}:{key.name}:{bit}")), (f"clean-{number}", Arm("clean"))]
        outcomes = shop.run_all(arms, reference)
        finding, alarm = (check_arm(shop, arm, outcomes[place], trace, AxisResult("rerun", "equal")) for place, arm in arms)
        alarms += alarm is not None
        difference = finding.difference if finding is not None else None
        if difference is None or finding.divergence.key != key or difference.index != bit // width:
            wrong.append((str(key), bit, str(finding)))
        else:
            found[key.phase] += 1
        if number % 25 == 24:
            print(f"\n{number + 1}: {dict(found)} found and located, {len(wrong)} not, {alarms} alarms", flush=True)
    print(f"\n{FAULTS} faults: {found.total()} found and located {dict(found)}; {alarms} alarms in {FAULTS} runs without one")
    assert not wrong and not alarms, wrong
