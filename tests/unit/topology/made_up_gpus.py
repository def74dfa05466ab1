"""GPUs for tests of measuring: speeds, lost writes and refused access as described, with time that is counted, not spent."""

from __future__ import annotations

import dataclasses

from mok.shapes import LAYER_SHAPES
from mok.topology.measure.plan import busiest_bytes, make_plan
from mok.topology.measure.runner import run
from mok.topology.measurement import Exchange, Measurement, Transfer

KIMI = LAYER_SHAPES["kimi-k2.7"]


class MadeUpGpus:
    """Eight GPUs of 350 GB/s links. slow: pair -> GB/s. broken: pairs whose writes are lost. Time is counted, not spent."""

    def __init__(self, num_gpus=8, *, slow=None, broken=(), raising=(), islands=None, kernels=True):
        self.num_gpus, self.slow, self.broken, self.raising = num_gpus, slow or {}, set(broken), set(raising)
        self.islands, self.kernels = islands or [set(range(num_gpus))], kernels
        self.memory = {}
        self.now = 0.0
        self.seen = []

    def clock(self):
        return self.now

    def why_not(self, method):
        return "" if method == "copy" or self.kernels else "Triton cannot be imported"

    def capable(self, source, target):
        return any({source, target} <= island for island in self.islands)

    def transfer(self, method, source, target, num_bytes, seed):
        self.seen.append((method, source, target, seed))
        if (source, target) in self.raising:
            raise RuntimeError("an illegal memory access\nand more")
        speed = self.slow.get((source, target), 350.0 if self.capable(source, target) else 20.0) * (1 - 0.01 * seed)
        seconds = num_bytes / speed / 1e9
        self.now += seconds
        self.memory[target] = "poison"
        if (source, target) not in self.broken:
            self.memory[target] = (seed, source)
        return seconds, "" if self.memory[target] == (seed, source) else "all words are wrong"

    def latency(self, method, source, target):
        return 2e-6

    def exchange(self, method, rows, row_bytes, seed):
        assert method == "load" or not self.kernels or len(self.islands) > 1
        seconds = busiest_bytes(rows, row_bytes) / 300.0 / 1e9
        self.now += seconds
        return seconds, "rows from 2 to 5: all words are wrong" if (2, 5) in self.broken else ""


def result(gpus, shape=KIMI, **changes):
    plan = dataclasses.replace(make_plan(gpus.num_gpus, shape), **changes)
    records = [record for event, record in run(plan, gpus, gpus.clock) if event == "end"]
    transfers = tuple(record for record in records if isinstance(record, Transfer))
    return Measurement(transfers, tuple(record for record in records if isinstance(record, Exchange)), gpus.now)
