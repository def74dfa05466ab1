"""Child side of `watch.py`: `python -m mok.topology.measure PLAN`, one JSON line per event on standard output."""

from __future__ import annotations

import dataclasses
import json
import sys

from mok.topology.measure.backend import CudaBackend
from mok.topology.measure.plan import Plan
from mok.topology.measure.runner import run
from mok.topology.measurement import Transfer
from mok.topology.model import from_plain


def main(plan: Plan) -> None:
    backend = CudaBackend()
    print(json.dumps({"event": "ready"}), flush=True)
    for event, record in run(plan, backend):
        kind = "transfer" if isinstance(record, Transfer) else "exchange"
        print(json.dumps({"event": event, kind: dataclasses.asdict(record)}), flush=True)
    print(json.dumps({"event": "done"}), flush=True)


if __name__ == "__main__":
    main(from_plain(Plan, json.loads(sys.argv[1])))
