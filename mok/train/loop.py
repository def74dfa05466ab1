"""A whole run: steps, and what happens between them.

Owns the order of a run (evaluate, sample, save, log), interruption, and what a user is told. The step itself is
`mok/train/step.py`, the files are `mok/train/run_folder.py`, the state is `mok/train/state.py`.
"""

from __future__ import annotations

import logging
import math
import os
import resource
import signal
import sys
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save_file

from mok import __version__, checkpoint, shapes
from mok.backends import kernel_choices
from mok.data.corpus import Corpus, open_corpus
from mok.data.loader import Loader
from mok.determinism.fingerprint import fingerprint
from mok.determinism.observe import StepObserver
from mok.determinism.trace import Recorder
from mok.errors import CheckpointError, Interrupted, NonFiniteError, RunError, UsageError
from mok.hf_import import HfWeights, config_folder
from mok.model.transformer import DTYPES
from mok.topology.own_gpu import ranks_of_a_gpu
from mok.train.batches import Batches
from mok.train.device import prepare_device
from mok.train.memory import keep_freed_memory, old_objects_stay
from mok.train.ranks import Ranks
from mok.train.run_folder import Start, finite, refuse_odd_file
from mok.train.sampling import printable, sample_text
from mok.train.state import TrainState
from mok.train.step import Observer, StepGraph, StepReport, can_record, evaluate, train_step

__all__ = ["Run", "evaluate_bits", "peak_bytes", "train"]

log = logging.getLogger("mok.train")

SAME_CTRL_C_S = 3.0
"""A rank of a launch gets one Ctrl-C from the terminal and again from its launcher, which passes it on."""

DENSE_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "B300": 2500e12}
"""Dense bf16 operations per second by a part of the GPU's name, from the vendor's data sheets."""


def train(start: Start, ranks: Ranks, device: torch.device, console: Console, *, max_minutes: float = 0.0) -> dict[str, Any]:
    """Train what `start` describes to its last step, or for about `max_minutes`; returns the last metrics.

    console: for rank 0's lines. Raises Interrupted, after saving, on Ctrl-C and SIGTERM; NonFiniteError, saving nothing but the
    batch, where a number is not finite; CheckpointError and DataError.
    """
    return Run(start, ranks, device, console).train(max_minutes)


class Run:
    """One launch of a run: everything is set up by the constructor, `train` does the work."""

    def __init__(self, start: Start, ranks: Ranks, device: torch.device, console: Console) -> None:
        self.recipe, self.folder, self.ranks, self.device, self.console = start.recipe, start.folder, ranks, device, console
        self.first_rank = ranks.layout.rank == 0
        if self.recipe.train.threads:
            torch.set_num_threads(self.recipe.train.threads)
        keep_freed_memory()
        prepare_device(device)
        self._unlogged: list[str] | None = []
        if self.first_rank:
            weakref.finalize(self, os.close, self.folder.claim())  # the folder is ours as long as this object lives
        if start.resumed is None:
            self._open_folder(start)
        recipe, grid = self.recipe, start.grid
        self.corpus = open_corpus(recipe.data, self.say)
        for notice in self.corpus.notices:
            self.say(f"note: {notice}")
        loader = Loader(self.corpus.train, recipe.train.sequence_length, recipe.seed, batch_size=recipe.train.batch_size)
        self.batches = Batches(loader, grid)
        held_out = Loader(self.corpus.validation, recipe.train.sequence_length, recipe.seed)
        self.held_out = Batches(held_out, grid, count=held_out.num_sequences)
        self.state = self._fresh_state(fill=start.resumed is None)
        if start.resumed is not None:
            self._resume(start, start.resumed)
            self._open_folder(start)  # only now, so that a resume that fails leaves the run as it was
        self.observer: Observer | None = self._trace()
        self._graph: StepGraph | None = None
        # Nothing draws from the global generator (a trace would show it); what a user adds shall at least repeat.
        torch.manual_seed(recipe.seed)
        self._asked = ""  # why this rank wants to stop; a signal handler may set it at any moment
        self._tensorboard = self._open_tensorboard()

    def train(self, max_minutes: float = 0.0) -> dict[str, Any]:
        """See `train` above."""
        recipe, state = self.recipe, self.state
        began = time.monotonic()
        metrics: dict[str, Any] = {"step": state.step}
        self._say_what_is_trained()
        stop = ""
        with self._signals(), self._notices(), old_objects_stay(), self._progress() as advance:
            self._clock, self._logged_at = time.perf_counter(), state.step
            while state.step < recipe.train.steps and not stop:
                started = time.perf_counter()
                report = self._step()
                seconds = time.perf_counter() - started
                metrics = self._after_step(report, seconds)
                advance(state.step)
                if max_minutes and not self._asked and time.monotonic() - began > 60.0 * max_minutes:
                    self._asked = "time"
                stop = self._agreed_stop()
                if self._due(recipe.checkpoint.every) or stop:
                    metrics["state_sha256"] = self._save(metrics)
                self._write(metrics)
        if stop in ("SIGINT", "SIGTERM"):
            raise Interrupted(
                f"stopped by {stop} after step {state.step}, which is saved; go on with\n  {self._resume_command()}"
            )
        self._say_the_end(out_of_time=stop == "time" and state.step < recipe.train.steps)
        return metrics

    def say(self, text: str) -> None:
        """One line for people, from rank 0, on the console and in train.log."""
        if self.first_rank:
            self.console.print(text, markup=False)
            if self._unlogged is None:
                log.info(text)
            else:
                self._unlogged.append(text)

    # ---- a step and what follows it -----------------------------------------------------------------------------------

    def _step(self) -> StepReport:
        state = self.state
        try:
            report = train_step(state, self.batches, self.observer, self._graph)
        except NonFiniteError as error:
            where = self._keep_batch()
            raise NonFiniteError(
                f"step {state.step + 1}, rank {self.ranks.layout.rank}: {error} ({where}); the last checkpoint is untouched"
            ) from error
        if report.tokens == 0:
            self.say(f"warning: step {state.step} has no valid target and was skipped")
        elif self.recipe.train.cuda_graph and self._graph is None and can_record(state, self.observer):
            self._graph = StepGraph()
            self.say("note: steps are recorded as a CUDA graph and replayed from here on")
        return report

    def _after_step(self, report: StepReport, seconds: float) -> dict[str, Any]:
        recipe, step = self.recipe, self.state.step
        tokens = recipe.train.batch_size * recipe.train.sequence_length
        metrics: dict[str, Any] = {
            "step": step,
            "train/loss": report.loss,
            "train/balance_loss": report.balance_loss,
            "train/z_loss": report.z_loss,
            "train/grad_norm": report.grad_norm,
            "train/lr": report.lr,
            "train/tokens": report.tokens,
            "perf/tokens_per_s": tokens / seconds,
            "perf/mfu": self._mfu(tokens / seconds),
            "perf/peak_bytes": peak_bytes(self.device),
            "moe/max_over_mean": report.max_over_mean,
            "moe/dead_experts": report.dead_experts,
        }
        if step % recipe.log.every == 0 or step in (1, recipe.train.steps):
            now = time.perf_counter()
            pace = (now - self._clock) / max(step - self._logged_at, 1)
            self._clock, self._logged_at = now, step
            self.say(console_line(metrics, recipe.train.steps, tokens / pace, pace * (recipe.train.steps - step)))
        if self._due(recipe.eval.every):
            metrics |= self._evaluate()
        if self._due(recipe.sample.every):
            self._sample()
        return metrics

    def _due(self, every: int) -> bool:
        step = self.state.step
        return step == self.recipe.train.steps or (every > 0 and step % every == 0)

    def _evaluate(self) -> dict[str, Any]:
        grid = self.held_out.grid
        available = -(-self.held_out.loader.num_sequences // grid.sequences)
        loss, bits = evaluate_bits(self.state, self.held_out, self.corpus, min(self.recipe.eval.batches, available))
        self.say(f"step {self.state.step}  validation loss {loss:.4f}  bits per byte {bits:.4f}")
        return {"val/loss": loss, "val/bits_per_byte": bits}

    def _sample(self) -> None:
        recipe, sample = self.recipe, self.recipe.sample
        text = sample_text(
            self.state.model,
            self.corpus.tokenizer,
            sample.prompt,
            sample.tokens,
            sample.temperature,
            recipe.seed,
            self.state.step,
            recipe.model.max_positions or recipe.train.sequence_length,
        )
        if self.first_rank:
            self.say("sample:\n" + "\n".join(f"  {line}" for line in printable(text).split("\n")))
            record = {"step": self.state.step, "prompt": sample.prompt, "text": text, "temperature": sample.temperature}
            self.folder.append(self.folder.samples, record)

    def _save(self, metrics: dict[str, Any]) -> str:
        state = self.state
        facts = {
            "samples": state.samples,
            "metrics": finite(metrics),
            "vocab_size": state.model.vocab_size,
            "recipe": self.recipe.to_dict(),
            "corpus_sha256": self.corpus.fingerprint,
            "tokenizer_sha256": self.corpus.tokenizer.sha256,
            "torch": torch.__version__,
        }
        from mok import dcp

        keep = self.recipe.checkpoint.keep_last
        saved = dcp.save(self.folder.checkpoints, state.step, state.tensors(), facts, keep, self.ranks.collective)
        if self.first_rank:
            self.corpus.tokenizer.save(self.folder.path)
        self.say(f"saved {saved.path}")
        return saved.fact("state_sha256", str)

    def _write(self, metrics: dict[str, Any]) -> None:
        if self.first_rank:
            self.folder.append(self.folder.metrics, metrics)
            if self._tensorboard is not None:
                for name, value in metrics.items():
                    if isinstance(value, int | float) and name != "step":
                        self._tensorboard.add_scalar(name, value, metrics["step"])

    def _keep_batch(self) -> str:
        """Save this rank's part of the step that failed; returns where."""
        path = self.folder.path / f"bad_batch_step_{self.state.step + 1:06d}_rank_{self.ranks.layout.rank}.safetensors"
        loaded = [self.batches.of(self.state.samples, call) for call in self.state.calls]
        tensors = {"inputs": torch.cat([ids for ids, _ in loaded]), "targets": torch.cat([targets for _, targets in loaded])}
        save_file({name: tensor.cpu() for name, tensor in tensors.items()}, path)
        return f"the batch is in {path}"

    # ---- the start and the end ----------------------------------------------------------------------------------------

    def _resume(self, start: Start, saved: checkpoint.Checkpoint) -> None:
        expected = saved.fact("state_sha256", str)
        same_data = saved.fact("corpus_sha256", str) == self.corpus.fingerprint
        if saved.fact("tokenizer_sha256", str) != self.corpus.tokenizer.sha256:
            raise CheckpointError(f"{saved.path}: was made with another tokenizer; name that one in data.tokenizer")
        self.state.load(saved)
        digest = self.state.state_sha256()
        if digest != expected:
            raise CheckpointError(f"{saved.path}: state_sha256 is {digest[:16]} after loading, {expected[:16]} in it")
        self.say(
            f"resumed {saved.path}: step {saved.step}, {len(saved.entries)} tensors, state_sha256 {digest[:16]} as saved, "
            f"data from sample {self.state.samples}"
        )
        if not same_data:
            self.say("note: the data is not that of the checkpoint; its order starts anew at this sample")
        for change in start.changes:
            self.say(f"  changed: {change.key}  {change.before!r} -> {change.now!r}  ({change.kind})")

    def _fresh_state(self, *, fill: bool) -> TrainState:
        recipe, size = self.recipe, self.corpus.tokenizer.size
        folder = config_folder(recipe.model.init)
        if folder is None:
            vocab_size = self._vocab_size(size, recipe.model.vocab_size)
            return TrainState(recipe, vocab_size, self.ranks, self.device, fill=fill)
        imported = HfWeights(folder, recipe)
        for notice in imported.notices:
            self.say(f"note: {notice}")
        vocab_size = self._vocab_size(size, imported.vocab_size)
        return TrainState(recipe, vocab_size, self.ranks, self.device, imported.read, fill=fill)

    def _vocab_size(self, size: int, wanted: int) -> int:
        if wanted and wanted < size:
            raise UsageError(
                f"model.vocab_size = {wanted}: the tokenizer has {size} ids; use at least {size}, or 0 for its size"
            )
        return wanted or size

    def _say_what_is_trained(self) -> None:
        recipe, model = self.recipe, self.state.model
        parameters = sum(tensor.numel() for _, tensor in model.named_tensors())
        if self.state.step >= recipe.train.steps:
            self.say(f"{self.folder.path} is finished: step {self.state.step} of {recipe.train.steps}")
            return
        self.say(
            f"{parameters:,} parameters on this rank, {len(self.corpus.train):,} training tokens, "
            f"{recipe.train.batch_size * recipe.train.sequence_length:,} tokens a step, {recipe.train.steps} steps, "
            f"{torch.get_num_threads()} threads, writing to {self.folder.path}"
        )

        if self.device.type == "cuda" and (sharers := ranks_of_a_gpu()) > 1:
            self.say(
                f"note: {sharers} ranks share a GPU: the same bits, but no speed to speak of; where the machine has a GPU for "
                "each, let every rank see all of them (CUDA_VISIBLE_DEVICES)"
            )
        group = self.ranks.group
        if group.transport is not None and group.transport_reason:
            self.say(f"moe.transport = {recipe.moe.transport} takes {group.transport.name}: {group.transport_reason}")

    def _say_the_end(self, *, out_of_time: bool) -> None:
        recipe, folder = self.recipe, self.folder.path
        if out_of_time:
            self.say(f"time is up at step {self.state.step} of {recipe.train.steps}, which is saved; go on with")
            self.say(f"  {self._resume_command()}")
            return
        self.say(f"everything is in {folder} (metrics.jsonl, samples.jsonl, checkpoints, train.log); try next")
        self.say(f"  mok sample {folder} --prompt {recipe.sample.prompt!r}")
        self.say(f"  mok eval {folder}")

    def _resume_command(self) -> str:
        return f"mok train {self.folder.recipe_file} --out {self.folder.path} --resume auto"

    def _environment(self) -> dict[str, Any]:
        """What another run must have in common with this one before equal bytes may be expected of it."""
        layout = self.ranks.layout
        return fingerprint(
            mok=__version__,
            device=str(self.device),
            world_size=layout.world_size,
            replicas=layout.replicas,
            ep=layout.ep,
            kernels=self.kernels(),
            mkl_cbwr=os.environ.get("MKL_CBWR", ""),
            git=git_revision(),
            command=sys.argv,
            host=os.uname().nodename,
        )

    def kernels(self) -> dict[str, Any]:
        """Who computes the experts, and with which settings: fixed by shape, dtype and device, never by timing."""
        recipe = self.recipe
        if recipe.model.num_dense_layers == recipe.model.num_layers:
            return {}
        layout = self.ranks.layout
        shape = replace(shapes.layer_shape(recipe), ranks=layout.ep)
        group = self.ranks.group
        return kernel_choices(
            recipe.moe.backend,
            shape,
            DTYPES[recipe.train.dtype],
            self.device,
            recipe.quantization,
            layout.tokens_of_call(recipe),
            group.transport.name if group.transport else "collective",
        )

    def _open_folder(self, start: Start) -> None:
        """Make or take over the run folder, and write to its train.log what was said so far and will be said."""
        if not self.first_rank:
            return
        for notice in self.folder.prepare(start, self._environment()):
            self.say(f"note: {notice}")
        handler = logging.FileHandler(self.folder.log, encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        package = logging.getLogger("mok")
        for old in [old for old in package.handlers if isinstance(old, logging.FileHandler)]:
            package.removeHandler(old)
            old.close()
        package.addHandler(handler)
        package.setLevel(logging.INFO)
        package.propagate = False
        said, self._unlogged = self._unlogged or [], None
        for text in said:
            log.info(text)

    def _trace(self) -> Observer | None:
        """What `log.trace` asks for: digests of each step, one file per rank."""
        if self.recipe.log.trace == "none":
            return None
        rank = self.ranks.layout.rank
        path = self.folder.trace(rank)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)  # rank 0 may not have come to the folder yet
            refuse_odd_file(path)
            sink = path.open("a", encoding="utf-8")
        except OSError as error:
            raise RunError(f"{path}: cannot be written ({error.strerror}); move away what is in its place") from error
        recorder = Recorder(sink, rank=rank, activations=self.recipe.log.trace == "activations")
        return StepObserver(recorder, self.state.model)

    def _open_tensorboard(self) -> Any:
        if not self.recipe.log.tensorboard or not self.first_rank:
            return None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self.say("note: log.tensorboard is set but TensorBoard is not installed; metrics.jsonl has everything")
            return None
        return SummaryWriter(str(self.folder.path / "tensorboard"))

    @contextmanager
    def _progress(self) -> Iterator[Any]:
        """A bar on a terminal; elsewhere nothing, so that a log file has whole lines only."""
        if not self.console.is_terminal or not self.first_rank:
            yield lambda step: None
            return
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.console, transient=True) as progress:
            task = progress.add_task("steps", total=self.recipe.train.steps, completed=self.state.step)
            yield lambda step: progress.update(task, completed=step)

    @contextmanager
    def _notices(self) -> Iterator[None]:
        """Show what the library warns about as lines of the run."""
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.showwarning = lambda message, *_, **__: self.say(f"note: {message}")
            yield

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Let Ctrl-C and SIGTERM finish the step; a second Ctrl-C stops at once."""
        arrived: list[float] = []

        def on_signal(number: int, frame: FrameType | None) -> None:
            if number == signal.SIGINT:
                arrived.append(time.monotonic())
                if arrived[-1] - arrived[0] > SAME_CTRL_C_S:
                    raise KeyboardInterrupt
            self._asked = signal.Signals(number).name

        before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _agreed_stop(self) -> str:
        """The first rank's reason to stop, so that all ranks stop after the same step."""
        return next((reason for reason in self.ranks.gather(self._asked) if reason), "")

    def _mfu(self, tokens_per_s: float) -> float | None:
        """Share of the dense matmul rate of all GPUs; None on a CPU and on a GPU whose rate is not known."""
        if self.device.type != "cuda":
            return None
        name = torch.cuda.get_device_name(self.device)
        peak = next((rate for part, rate in DENSE_FLOPS.items() if part in name), None)
        if peak is None:
            return None
        flops = shapes.flops_per_token(self.recipe, self.state.model.vocab_size) * tokens_per_s
        return flops / (peak * self.ranks.layout.world_size)


def console_line(metrics: dict[str, Any], steps: int, tokens_per_s: float, seconds_left: float) -> str:
    """One line about a step, at most 80 columns for usual numbers."""
    balance, dead = metrics["moe/max_over_mean"], metrics["moe/dead_experts"]
    minutes, seconds = divmod(round(seconds_left), 60)
    parts = [
        f"{metrics['step']}/{steps}",
        f"loss {metrics['train/loss']:.3f}",
        f"norm {metrics['train/grad_norm']:.2f}",
        f"lr {metrics['train/lr']:.1e}".replace("e-0", "e-"),
        f"{_short(tokens_per_s)} tok/s",
        f"{_short(metrics['perf/peak_bytes'])}B",
        None if metrics["perf/mfu"] is None else f"mfu {metrics['perf/mfu']:.2f}",
        None if balance is None else f"bal {balance:.1f}",
        f"dead {dead}" if dead else None,
        f"eta {minutes}:{seconds:02d}",
    ]
    return " ".join(part for part in parts if part)


def _short(number: float) -> str:
    """Three digits and a letter: 17700 is 17.7k."""
    for letter in ("", "k", "M", "G"):
        if number < 999.5:
            return f"{number:.3g}{letter}"
        number /= 1000
    return f"{number:.3g}T"


def evaluate_bits(state: TrainState, batches: Batches, corpus: Corpus, num_batches: int) -> tuple[float, float]:
    """(mean cross-entropy in nats, bits per byte of text) over the first batches."""
    loss, tokens, mine = evaluate(state, batches, num_batches)
    num_bytes = sum(state.ranks.gather(corpus.tokenizer.bytes_of(mine.tolist())))
    return loss, loss * tokens / math.log(2.0) / max(num_bytes, 1)


def peak_bytes(device: torch.device) -> int:
    """Largest memory so far: of the GPU's allocator, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def git_revision() -> str:
    """The commit of the source tree that runs, "" outside of one. Read from the files, so that no git is needed."""
    for folder in Path(__file__).resolve().parents:
        head = folder / ".git" / "HEAD"
        if head.is_file():
            text = head.read_text().strip()
            reference = folder / ".git" / text.removeprefix("ref: ")
            return reference.read_text().strip() if reference.is_file() else text
    return ""
