"""Text to token ids and back: bytes, a byte-level BPE trained on the data, or any `tokenizer.json`.

Owns how a tokenizer is made, stored and asked. All three kinds are one `tokenizers.Tokenizer` inside, so whatever was trained
here can be exported as it is. Must not know files of text or shards. Read next: `mok/data/shards.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from mok.errors import DataError, UsageError

__all__ = ["END_OF_DOCUMENT", "Tokenizer"]

END_OF_DOCUMENT = "<|endoftext|>"
"""The token that ends every document, in tokenizers made here."""

KNOWN_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "<|end▁of▁sentence|>", "</s>", "<eos>", "[EOS]", "[SEP]")
"""Spellings looked for in a `tokenizer.json` that comes without a `tokenizer_config.json`, first match wins."""


class Tokenizer:
    """A tokenizer with the few questions that training asks.

    size: number of ids. end_id: the id that ends a document. sha256: over the tokenizer.json text and the end token.
    """

    def __init__(self, json_text: str, end_token: str | None = None, *, where: str = "tokenizer.json") -> None:
        try:
            self._inner = HfTokenizer.from_str(json_text)
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{where}: not a tokenizer ({error}); give the tokenizer.json of a fast tokenizer") from error
        self._inner.no_truncation()
        self._inner.no_padding()
        # Text that spells a special token, such as this project's own source, is text.
        self._inner.encode_special_tokens = True
        self.json_text = json_text
        ids = self._inner.get_vocab()
        self.size = max(ids.values(), default=-1) + 1
        self.end_token = end_token or next((name for name in KNOWN_ENDS if name in ids), "")
        if self.end_token not in ids:
            raise DataError(
                f"{where}: no token that ends a document ({end_token or 'looked for ' + ', '.join(KNOWN_ENDS)}); add one, or "
                f'name it as "eos_token" in a tokenizer_config.json beside it'
            )
        self.end_id = ids[self.end_token]
        self.sha256 = sha256(f"{self.end_token}\n{json_text}".encode()).hexdigest()
        if _drops_unknown(self._inner):
            raise DataError(
                f"{where}: a BPE without byte fallback and unk_token, which leaves out characters that it does not know "
                "and says nothing; give it an unk_token"
            )
        self._maps_bytes = _maps_bytes(self._inner, ids)
        self.bytes_of_id = _bytes_of_id(self._inner, ids, self.size)

    @classmethod
    def of_bytes(cls) -> Tokenizer:
        """Ids 0 to 255 are the bytes of UTF-8, 256 ends a document."""
        alphabet = _byte_alphabet()
        inner = _byte_level(models.BPE(vocab={alphabet[byte]: byte for byte in range(256)}, merges=[]))
        inner.add_special_tokens([END_OF_DOCUMENT])
        return cls(inner.to_str())

    @classmethod
    def train(cls, texts: Iterable[str], size: int) -> Tokenizer:
        """A byte-level BPE of at most `size` ids (the end token and 256 bytes among them); the same texts give the same ids."""
        if size < 257:
            raise UsageError(
                f'data.tokenizer = "bpe:{size}": needs room for 256 bytes and the end of a document; use bpe:257 or more'
            )
        inner = _byte_level(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=[END_OF_DOCUMENT], initial_alphabet=_byte_alphabet(), show_progress=False
        )
        inner.train_from_iterator(texts, trainer)
        return cls(inner.to_str())

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """From a `tokenizer.json`, or a folder with one; "eos_token" of a `tokenizer_config.json` beside it ends documents."""
        try:
            file = Path(path).expanduser()
            file = file / "tokenizer.json" if file.is_dir() else file
            if file.exists() and not file.is_file():
                raise OSError("not a file but a device or pipe")
            json_text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError, RuntimeError) as error:  # the last where ~ is nobody's
            raise DataError(
                f'data.tokenizer = "{path}": cannot be read ({error}); use bytes, bpe:SIZE or a tokenizer.json'
            ) from error
        return cls(json_text, _eos_token(file.with_name("tokenizer_config.json")), where=str(file))

    def save(self, folder: str | Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`, as `load` and transformers read them."""
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.end_token,
            "clean_up_tokenization_spaces": False,
        }
        Path(folder, "tokenizer.json").write_text(self.json_text, encoding="utf-8")
        Path(folder, "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without an end and without the special tokens that a tokenizer.json may want to add."""
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, as `encode`, on all cores."""
        if self._maps_bytes:
            return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32) for text in texts]
        try:
            encoded = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception
            raise DataError(
                f"data.tokenizer cannot encode the text ({error}); give tokenizer.json a token for what it does not know, or "
                "use bytes or bpe:SIZE"
            ) from error
        return [np.array(one.ids, dtype=np.uint32) for one in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, the end of a document spelled out; bytes that are not UTF-8 come out as U+FFFD."""
        return self._inner.decode([int(one) for one in ids], skip_special_tokens=False)

    def bytes_of(self, ids: Iterable[int]) -> int:
        """Bytes of UTF-8 text that these ids stand for; special tokens stand for none. The denominator of bits per byte."""
        return int(self.bytes_of_id[np.asarray(list(ids), dtype=np.int64)].sum())


def _byte_level(model: models.BPE) -> HfTokenizer:
    tokenizer = HfTokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_alphabet() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte, in the order of the bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    character = {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [character[byte] for byte in range(256)]


def _maps_bytes(inner: HfTokenizer, ids: dict[str, int]) -> bool:
    """Whether encoding is no more than the bytes of the text, so that nothing needs to be looked up."""
    merges = json.loads(inner.to_str())["model"].get("merges")
    return merges == [] and all(ids.get(character) == byte for byte, character in enumerate(_byte_alphabet()))


def _drops_unknown(inner: HfTokenizer) -> bool:
    """Whether text can vanish in encoding. Others have bytes for what is not in their vocabulary, a token, or an error."""
    parts = json.loads(inner.to_str())
    model = parts["model"]
    is_bytes = '"ByteLevel"' in json.dumps([parts["pre_tokenizer"], parts["normalizer"]])
    return model["type"] == "BPE" and model["unk_token"] is None and not model["byte_fallback"] and not is_bytes


def _bytes_of_id(inner: HfTokenizer, ids: dict[str, int], size: int) -> np.ndarray:
    """int32 [size]: bytes of text per id. Byte-level tokens have one character per byte, others spell their text."""
    byte_level = '"ByteLevel"' in json.dumps(json.loads(inner.to_str())["decoder"])
    special = {one for one, token in inner.get_added_tokens_decoder().items() if token.special}
    added = set(inner.get_added_tokens_decoder())
    table = np.zeros(size, dtype=np.int32)
    for token, one in ids.items():
        if one in special:
            continue
        if byte_level and one not in added:
            table[one] = len(token)
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):  # SentencePiece's byte fallback
            table[one] = 1
        else:
            table[one] = len(token.replace("▁", " ").encode())
    return table


def _eos_token(config: Path) -> str | None:
    if not config.is_file():
        return None
    try:
        token = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
        token = token["content"] if isinstance(token, dict) else token
        if not isinstance(token, str | None):
            raise TypeError(f"eos_token is {token!r}, not text")
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{config}: cannot be read ({error!r}); correct it, or move it away") from error
    return token
