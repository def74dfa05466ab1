"""From a token store to training sequences: which documents are held out, and which tokens sample `index` is.

Owns the train/validation split, packing and document borders. All of it is a function of its arguments; the only state of a run
is the number of samples seen. Must not know text or files. Read next: `mok/data/corpus.py`.

Example of packing, sequence_length 4, documents "a b ." and "c d e ." ("." ends a document):

    tokens of the view   a b . c d e .
    inputs               a b . c            targets  b . -100 d
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mok.data.order import permute
from mok.data.shards import TokenStore
from mok.errors import DataError

__all__ = ["IGNORED", "Loader", "TokenView", "split_documents"]

IGNORED = -100
"""Target that the loss leaves out."""


class TokenView:
    """Some token ranges of a store, one after the other.

    ranges: int64 [n, 2], starts and exclusive ends, rising. len() is the number of tokens.
    """

    def __init__(self, store: TokenStore, ranges: np.ndarray, name: str) -> None:
        self.store = store
        self.ranges = ranges
        self.name = name
        self._ends = np.cumsum(ranges[:, 1] - ranges[:, 0])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens start..stop-1 of the view: int64 ids, and bool marks on the last token of each document."""
        ids, last = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=bool)]
        for place in range(int(np.searchsorted(self._ends, start, "right")), len(self.ranges)):
            if start == stop:
                break
            view_end = int(self._ends[place])
            end = int(self.ranges[place, 1])
            low = end - (view_end - start)
            high = min(end, low + stop - start)
            ids.append(self.store.read(low, high))
            last.append(self._last_marks(low, high, end))
            start += high - low
        return np.concatenate(ids), np.concatenate(last)

    def _last_marks(self, low: int, high: int, range_end: int) -> np.ndarray:
        ends = self.store.document_ends
        inside = ends[np.searchsorted(ends, low, "right") : np.searchsorted(ends, high, "right")]
        marks = np.zeros(high - low, dtype=bool)
        marks[inside - 1 - low] = True
        if high == range_end:
            marks[-1] = True
        return marks


def split_documents(store: TokenStore, validation_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Token ranges (int64 [n, 2]) for training and for validation, a function of the documents' content alone.

    Documents with the smallest content hashes are held out, as many as stay within the fraction. Where that gives less than
    half of it (few or very long documents) the tail of the corpus is held out instead, wherever in a document that begins.
    """
    ends = store.document_ends
    starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
    budget = int(store.num_tokens * validation_fraction)
    order = np.argsort(store.document_hashes, kind="stable")
    taken = order[np.cumsum((ends - starts)[order]) <= budget]
    if int((ends - starts)[taken].sum()) * 2 < budget:
        cut = store.num_tokens - budget
        return np.array([[0, cut]]), np.array([[cut, store.num_tokens]])
    held_out = np.zeros(len(ends), dtype=bool)
    held_out[taken] = True
    return _joined(starts[~held_out], ends[~held_out]), _joined(starts[held_out], ends[held_out])


def _joined(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Neighbouring ranges as one."""
    fresh = np.concatenate([[True], starts[1:] != ends[:-1]]) if len(starts) else np.empty(0, dtype=bool)
    final = np.concatenate([fresh[1:], [True]]) if len(starts) else fresh
    return np.stack([starts[fresh], ends[final]], axis=1)


class Loader:
    """Sequences of a view in an order that depends on (seed, epoch, index) only.

    sequence_length: S. batch_size: an epoch must hold at least this many sequences, or DataError says what is missing.
    num_sequences: sequences of an epoch; the last tokens that do not fill one are left out.
    """

    def __init__(self, view: TokenView, sequence_length: int, seed: int, *, batch_size: int = 1) -> None:
        self.view = view
        self.sequence_length = sequence_length
        self.seed = seed
        self.num_sequences = max(0, len(view) - 1) // sequence_length
        if self.num_sequences < batch_size:
            needed = batch_size * sequence_length + 1
            raise DataError(
                f"the {view.name} data has {len(view)} tokens but {batch_size} sequence(s) of {sequence_length} need {needed}; "
                f"give more text, or lower train.sequence_length or train.batch_size"
                + (", or raise data.validation_fraction" if view.name == "validation" else "")
            )

    def place(self, index: int) -> tuple[int, int]:
        """(epoch, which sequence of the view) sample `index` of the whole run is; every epoch has each sequence once."""
        epoch, sample = divmod(index, self.num_sequences)
        return epoch, permute(sample, self.num_sequences, self.seed, epoch)

    def sequence(self, index: int) -> tuple[Tensor, Tensor]:
        """Sample `index` of the run, counted over all epochs: inputs and targets, int64 [S].

        A target that would be the first token of another document is -100.
        """
        start = self.place(index)[1] * self.sequence_length
        ids, last = self.view.read(start, start + self.sequence_length + 1)
        targets = np.where(last[:-1], IGNORED, ids[1:])
        return torch.from_numpy(ids[:-1]), torch.from_numpy(targets)
