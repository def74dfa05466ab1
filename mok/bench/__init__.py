"""Benchmarks: what is measured against what, and how a figure becomes a row of a report. Start at `mok/bench/train.py`."""
