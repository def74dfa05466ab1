"""Text in, training sequences out. Start reading at `corpus.py`; the rest of the folder is in its first lines."""

from __future__ import annotations

from mok.data.corpus import Corpus, open_corpus
from mok.data.loader import IGNORED, Loader, TokenView
from mok.data.tokenizer import Tokenizer

__all__ = ["IGNORED", "Corpus", "Loader", "TokenView", "Tokenizer", "open_corpus"]
