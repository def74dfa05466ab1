"""Every command of the first page runs as written, in order, on a model and a text that are small."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
SMALL = """
data.tokenizer=bytes data.validation_fraction=0.3 model.hidden_size=64 model.num_layers=1 model.num_heads=1 moe.num_experts=4
moe.intermediate_size=64 train.batch_size=16 train.sequence_length=16 train.threads=1 eval.batches=1 sample.tokens=2
"""
MORE = {
    "train": ["--steps", "2"],
    "sample": ["--tokens", "2"],
    "eval": ["--batches", "1"],
    "verify-determinism": ["--axis", "rerun", "--steps", "2"],
    "bench train": ["--rounds", "2", "--steps", "1"],
    "bench layer": ["--calls", "2", "--tokens", "32"],
}
"""What keeps each command short; nothing of it changes what the page shows."""


def test_the_commands_of_the_readme_run(mok, tmp_path: Path):
    text = tmp_path / "text"
    text.mkdir()
    for number in range(20):
        (text / f"{number}.txt").write_text(f"Document {number}: " + "the quick brown fox, number after number. " * 8)
    meant = {"FOLDER_OR_FILE": str(text), "PATH": str(text), "RUN": "runs/mine", "DIR": "exported"}

    blocks = re.findall(r"```\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("mok ")]
    assert len(lines) >= 10
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        words = [re.sub("|".join(meant), lambda found: meant[found[0]], word) for word in words]
        words += MORE.get(words[0], []) + MORE.get(" ".join(words[:2]), [])
        if words[0] in ("train", "verify-determinism"):
            settings = [*SMALL.split(), f"data.path={text}", f"data.cache={tmp_path / 'cache'}"]
            given = {word.partition("=")[0] for word in words}
            words += [part for s in settings if s.partition("=")[0] not in given for part in ("--set", s)]
        result = mok(*words, env={"OMP_NUM_THREADS": "1"}, timeout=900)
        assert result.returncode == 0, f"{line}\n{result.stdout}\n{result.stderr}"
    assert (tmp_path / "exported" / "model.safetensors").is_file()
