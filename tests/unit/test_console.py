"""What training shows: a line that fits a terminal, samples that cannot command it."""

from __future__ import annotations

from mok.train.loop import console_line
from mok.train.sampling import printable

USUAL = {
    "step": 100,
    "train/loss": 5.47881,
    "train/grad_norm": 0.604,
    "train/lr": 0.003,
    "perf/peak_bytes": 455_000_000,
    "perf/mfu": None,
    "moe/max_over_mean": 4.02,
    "moe/dead_experts": 2,
}


def test_a_line_has_everything_in_80_columns():
    line = console_line(USUAL, 100, tokens_per_s=17_730.0, seconds_left=135.2)
    assert line == "100/100 loss 5.479 norm 0.60 lr 3.0e-3 17.7k tok/s 455MB bal 4.0 dead 2 eta 2:15"
    assert len(line) <= 80


def test_what_is_not_known_or_not_there_is_left_out():
    gpu = {**USUAL, "perf/mfu": 0.413, "perf/peak_bytes": 23_400_000_000, "moe/dead_experts": 0}
    assert "23.4GB mfu 0.41 bal 4.0 eta 0:05" in console_line(gpu, 2000, 1_250_000.0, 5.0)
    dense = {**USUAL, "moe/max_over_mean": None, "moe/dead_experts": 0}
    assert "455MB eta" in console_line(dense, 100, 999.7, 0.0)


def test_samples_cannot_command_the_terminal():
    assert printable("a\tb\nc ü") == "a\tb\nc ü"
    assert printable("\x1b[31mred\x07\r\x7f") == "\ufffd[31mred\ufffd\ufffd\ufffd"
