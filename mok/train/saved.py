"""Models of finished or running runs, for looking at them: `mok sample` and `mok eval`."""

from __future__ import annotations

from pathlib import Path

import torch

from mok.checkpoint import read_tensors
from mok.data.corpus import Corpus
from mok.data.loader import Loader
from mok.errors import DataError
from mok.export import Run, open_run
from mok.grid import CallGrid
from mok.model.loss import IGNORED, head_loss
from mok.model.transformer import DTYPES, Decoder

__all__ = ["SavedModel", "load_model", "loss_on"]


class SavedModel:
    """A run at one checkpoint, with its weights loaded. Moments and master weights are not read."""

    def __init__(self, run: Run, device: torch.device) -> None:
        self.run, self.recipe, self.tokenizer, self.step = run, run.recipe, run.tokenizer, run.checkpoint.step
        vocab_size = run.checkpoint.fact("vocab_size", int)
        self.model = Decoder(run.recipe, vocab_size, dtype=DTYPES[run.recipe.train.dtype], device=device)
        with torch.no_grad():
            tensors = dict(self.model.named_tensors())
            for name, value in read_tensors(run.checkpoint, tensors):
                tensors[name].copy_(value)

    @property
    def window(self) -> int:
        """Tokens of context that the model was made for."""
        return self.recipe.model.max_positions or self.recipe.train.sequence_length


def load_model(path: Path, device: torch.device) -> SavedModel:
    """The model of a run folder (its newest checkpoint) or of one checkpoint. Raises CheckpointError for damaged ones."""
    return SavedModel(open_run(path), device)


@torch.no_grad()
def loss_on(saved: SavedModel, corpus: Corpus, *, everything: bool, max_batches: int) -> tuple[float, int, int]:
    """(sum of cross-entropy in nats, valid targets, bytes of text they stand for) on a corpus.

    everything: all of its documents, else those held out for validation. max_batches: batches of the training shape, 0 for all.
    """
    length, batch = saved.recipe.train.sequence_length, saved.recipe.train.batch_size
    loader = Loader(corpus.everything if everything else corpus.validation, length, saved.recipe.seed)
    count = loader.num_sequences if not max_batches else min(loader.num_sequences, max_batches * batch)
    total, tokens, num_bytes = 0.0, 0, 0
    for start in range(0, count, batch):
        pairs = [loader.sequence(index) for index in range(start, min(start + batch, count))]
        inputs, targets = (torch.stack(parts).to(saved.model.w_embedding.device) for parts in zip(*pairs, strict=True))
        hidden_TH, _ = saved.model(inputs, CallGrid())
        total += float(head_loss(hidden_TH, saved.model.w_head, saved.model.vocab_size, targets.view(-1)).double().sum())
        valid = targets[targets != IGNORED].cpu()
        tokens += valid.numel()
        num_bytes += corpus.tokenizer.bytes_of(valid.tolist())
    if tokens == 0:
        raise DataError("the text has no token to predict; give more text")
    return total, tokens, num_bytes
