"""Text from a model: one token after the other, with random numbers that depend on (seed, step, place) alone."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from mok.data.tokenizer import Tokenizer
from mok.errors import UsageError
from mok.gradients import GEMM_MULTIPLE
from mok.grid import CallGrid
from mok.model.transformer import Decoder

__all__ = ["printable", "sample_text"]


def sample_text(
    model: Decoder, tokenizer: Tokenizer, prompt: str, tokens: int, temperature: float, seed: int, step: int, window: int
) -> str:
    """`prompt` continued by up to `tokens` tokens, fewer if the document ends.

    temperature: 0 takes the likeliest token, of equal ones the lowest id. window: tokens of context that the model looks at.
    With expert-parallel ranks all of them call this together and get the same text.
    """
    ids = tokenizer.encode(prompt)
    if not ids:
        ids = [tokenizer.end_id]
    if max(ids) >= model.vocab_size:
        raise UsageError(f"the prompt has token {max(ids)}, the model knows {model.vocab_size}; use the run's own tokenizer")
    ranks = model.group.ranks
    grid = CallGrid(ranks, ranks, (0,), ranks, model.group.rank)
    given = len(ids)
    for place in range(tokens):
        context = ids[-window:]
        padded = context + [0] * (-len(context) % GEMM_MULTIPLE)
        logits_V = model.logits(torch.tensor([padded], device=model.w_embedding.device), grid)[0, len(context) - 1]
        chosen = _choose(logits_V.float().cpu(), temperature, _uniform(seed, step, place))
        if chosen == tokenizer.end_id:
            break
        ids.append(chosen)
    return prompt + tokenizer.decode(ids[given:])


def printable(text: str) -> str:
    """`text` as it may be shown on a terminal: a model's control characters, which could command it, become U+FFFD."""
    return "".join(character if character.isprintable() or character in "\n\t" else "\ufffd" for character in text)


def _uniform(seed: int, step: int, place: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    digest = hashlib.sha256(f"{seed}/sample/{step}/{place}".encode()).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) / (1 << 53)


def _choose(logits_V: Tensor, temperature: float, uniform: float) -> int:
    if temperature == 0.0:
        return int((logits_V == logits_V.max()).nonzero()[0])
    weights_V = ((logits_V - logits_V.max()) / temperature).double().exp()
    cumulative_V = weights_V.cumsum(0)
    place = torch.searchsorted(cumulative_V, uniform * cumulative_V[-1], right=True)
    return min(int(place), len(logits_V) - 1)
