"""Reading text, tokenizing, shards and packing; the bad inputs that users really have."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import models, pre_tokenizers

import mok.data.corpus as corpus_module
from mok.config import DataConfig
from mok.data import IGNORED, Corpus, Loader, Tokenizer, open_corpus
from mok.data.shards import ShardWriter, TokenStore
from mok.data.sources import find_sources
from mok.errors import DataError, UsageError

LINES = [f"line {number} of the text" for number in range(400)]


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., DataConfig]:
    def make(path: Path | str, tokenizer: str = "bytes", **keys: object) -> DataConfig:
        return DataConfig(path=str(path), tokenizer=tokenizer, cache=str(tmp_path / "cache"), **keys)  # type: ignore[arg-type]

    return make


def text_of(corpus: Corpus) -> str:
    ids, _ = corpus.everything.read(0, corpus.num_tokens)
    return corpus.tokenizer.decode(ids)


def write_folder(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


# Formats


def test_a_folder_is_read_in_name_order_without_hidden_files(tmp_path, config):
    folder = write_folder(
        tmp_path / "text", {"b.txt": b"two", "a/z.md": b"one", ".git/config": b"no", "c.py": b"", ".env": b"no"}
    )
    assert text_of(open_corpus(config(folder))) == "one<|endoftext|>two<|endoftext|>"


def test_jsonl_plain_and_compressed(tmp_path, config):
    records = "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in ("one", "zwölf\n"))
    (tmp_path / "a.jsonl").write_text(records + "\n", encoding="utf-8")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(records.encode()))
    for name in ("a.jsonl", "a.jsonl.gz"):
        corpus = open_corpus(config(tmp_path / name))
        assert text_of(corpus) == "one<|endoftext|>zwölf\n<|endoftext|>"
        assert (corpus.num_documents, corpus.text_bytes) == (2, 10)


def test_parquet(tmp_path, config):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["one", "two"], "id": [1, 2]}), tmp_path / "a.parquet")
    assert text_of(open_corpus(config(tmp_path / "a.parquet"))) == "one<|endoftext|>two<|endoftext|>"
    parquet.write_table(pyarrow.table({"body": ["one"]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r'b\.parquet: no "text" column among body'):
        open_corpus(config(tmp_path / "b.parquet"))
    for column, named in (
        (pyarrow.array([b"one"]), "is of binary, not of strings"),
        (pyarrow.array([2**30], pyarrow.date32()), "is of date32"),
        (pyarrow.array([[{"x": "one"}]]), "is of list<"),
        (pyarrow.array(["one", None]), "row 1: .* is NoneType"),
    ):
        parquet.write_table(pyarrow.table({"text": column}), tmp_path / "c.parquet")
        with pytest.raises(DataError, match=rf"c\.parquet: .*{named}"):
            open_corpus(config(tmp_path / "c.parquet"))
    parquet.write_table(pyarrow.Table.from_arrays([pyarrow.array(["one"])] * 2, ["text", "text"]), tmp_path / "d.parquet")
    with pytest.raises(DataError, match='two "text" column among text, text'):
        open_corpus(config(tmp_path / "d.parquet"))
    parquet.write_table(pyarrow.table({"text": pyarrow.array(["one"]).dictionary_encode()}), tmp_path / "e.parquet")
    assert text_of(open_corpus(config(tmp_path / "e.parquet"))) == "one<|endoftext|>"


def test_a_parquet_file_that_arrow_cannot_decode_is_named(tmp_path, config, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["one"]}), tmp_path / "a.parquet")
    for error in (pyarrow.ArrowNotImplementedError, pyarrow.ArrowIndexError):
        monkeypatch.setattr(parquet.ParquetFile, "iter_batches", lambda *_, error=error, **__: raised(error("nested")))
        with pytest.raises(DataError, match=r"a\.parquet: not a readable parquet file \(nested\)"):
            open_corpus(config(tmp_path / "a.parquet"))


def raised(error):
    raise error


@pytest.mark.parametrize(
    "model",
    [
        models.BPE({"a": 0, "b": 1, "ab": 2, "</s>": 3}, [("a", "b")]),
        models.WordLevel({"a": 0, "</s>": 1}),
        models.Unigram([("a", -1.0), ("</s>", 0.0)]),
    ],
)
def test_a_tokenizer_without_a_token_for_the_unknown_loses_nothing_in_silence(tmp_path, config, model):
    inner = HfTokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("a ß a")
    with pytest.raises(DataError, match=r"unk_token|for what it does not know"):
        open_corpus(config(tmp_path / "a.txt", str(tmp_path / "tokenizer.json")))


def test_raw_tokens_are_cut_into_documents_at_the_end_token(tmp_path, config):
    ids = np.array([97, 256, 98, 99, 256, 100], dtype="<u2")
    (tmp_path / "a.u16").write_bytes(ids.tobytes())
    (tmp_path / "a.u32").write_bytes(ids.astype("<u4").tobytes())
    for name in ("a.u16", "a.u32"):
        corpus = open_corpus(config(tmp_path / name))
        read, last = corpus.everything.read(0, 6)
        assert read.tolist() == ids.tolist()
        assert last.tolist() == [False, True, False, False, True, True]
        assert corpus.text_bytes == 4


def test_a_file_longer_than_a_piece_is_one_document(tmp_path, config, monkeypatch):
    monkeypatch.setattr("mok.data.sources.PIECE_BYTES", 100)
    text = "\n".join(LINES)
    (tmp_path / "a.txt").write_text(text)
    corpus = open_corpus(config(tmp_path / "a.txt"))
    assert text_of(corpus) == text + "<|endoftext|>"
    assert corpus.num_documents == 1


def test_text_that_spells_the_end_token_stays_text(tmp_path, config):
    (tmp_path / "a.txt").write_text("a <|endoftext|> b")
    for tokenizer in ("bytes", "bpe:300"):
        corpus = open_corpus(config(tmp_path / "a.txt", tokenizer))
        ids, _ = corpus.everything.read(0, corpus.num_tokens)
        assert (ids == corpus.tokenizer.end_id).sum() == 1


# Tokenizers


def test_byte_tokenizer_gives_bytes_and_equals_its_exported_form():
    tokenizer = Tokenizer.of_bytes()
    text = "héllo\n\n\t\x00 😀"
    assert tokenizer.encode(text) == list(text.encode())
    assert HfTokenizer.from_str(tokenizer.json_text).encode(text).ids == list(text.encode())
    assert tokenizer.decode([*text.encode(), 256]) == text + "<|endoftext|>"


def test_trained_tokenizer_shrinks_text_and_counts_its_bytes(tmp_path):
    tokenizer = Tokenizer.train(LINES, 300)
    assert tokenizer.size == 300
    ids = tokenizer.encode(LINES[7] + " — ü")
    assert len(ids) < len(LINES[7])
    assert tokenizer.decode(ids) == LINES[7] + " — ü"
    assert tokenizer.bytes_of([*ids, tokenizer.end_id]) == len((LINES[7] + " — ü").encode())
    tokenizer.save(tmp_path)
    assert Tokenizer.load(tmp_path).sha256 == tokenizer.sha256
    assert Tokenizer.load(tmp_path / "tokenizer.json").encode(LINES[3]) == tokenizer.encode(LINES[3])


def test_training_a_tokenizer_does_not_depend_on_threads(tmp_path):
    program = (
        "from mok.data import Tokenizer\n"
        "lines = [f'value_{n % 97} = {n * 7919 % 1009} * other' for n in range(3000)]\n"
        "print(Tokenizer.train(lines, 400).sha256)"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "RAYON_NUM_THREADS": threads}, capture_output=True, check=True
        ).stdout
        for threads in ("1", "2")
    }
    assert len(digests) == 1


def test_a_foreign_tokenizer_is_used_without_its_extras(tmp_path, config):
    inner = HfTokenizer(models.WordLevel({"[UNK]": 0, "one": 1, "two": 2, "</s>": 3, "stop": 4}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.enable_truncation(1)
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("one two one")
    corpus = open_corpus(config(tmp_path / "a.txt", str(tmp_path / "tokenizer.json")))
    assert corpus.everything.read(0, 4)[0].tolist() == [1, 2, 1, 3]
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "stop"}}')
    assert Tokenizer.load(tmp_path).end_id == 4


@pytest.mark.parametrize("spec", ["bpe:12", "bpe:", "bpe:1k"])
def test_a_bpe_size_that_cannot_be_is_refused(tmp_path, config, spec):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UsageError, match=r"data\.tokenizer"):
        open_corpus(config(tmp_path / "a.txt", spec))


def test_a_tokenizer_file_that_is_none_is_refused(tmp_path, config):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "no.json").write_text('{"model": 3}')
    with pytest.raises(DataError, match="not a tokenizer"):
        open_corpus(config(tmp_path / "a.txt", str(tmp_path / "no.json")))
    with pytest.raises(DataError, match=r'data\.tokenizer = "words": cannot be read'):
        open_corpus(config(tmp_path / "a.txt", "words"))
    HfTokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "no_end.json"))
    with pytest.raises(DataError, match="no token that ends a document"):
        open_corpus(config(tmp_path / "a.txt", str(tmp_path / "no_end.json")))


# Bad input


BAD_UTF8 = b"one\ntwo\nthr\x92ee\nfour\nfive\n"


@pytest.mark.parametrize("where", ["alone", "in a folder"])
def test_a_byte_that_is_not_utf8_names_file_line_and_byte(tmp_path, config, where):
    file = write_folder(tmp_path / "text", {"a.txt": BAD_UTF8}) / "a.txt"
    with pytest.raises(DataError, match=r"a\.txt: line 3, byte 11: 0x92 .*data\.invalid_utf8"):
        open_corpus(config(file if where == "alone" else file.parent))


def test_a_byte_that_is_not_utf8_can_be_replaced_and_is_counted(tmp_path, config):
    (tmp_path / "a.txt").write_bytes(BAD_UTF8 + "already \ufffd there".encode())
    corpus = open_corpus(config(tmp_path / "a.txt", invalid_utf8="replace"))
    assert text_of(corpus).split("\n")[2:5] == ["thr\ufffdee", "four", "five"]
    assert corpus.notices == ["1 invalid UTF-8 sequence(s) replaced by U+FFFD"]
    assert open_corpus(config(tmp_path / "a.txt", invalid_utf8="replace")).notices == corpus.notices


def test_the_line_of_a_bad_byte_counts_earlier_pieces(tmp_path, config, monkeypatch):
    monkeypatch.setattr("mok.data.sources.PIECE_BYTES", 5)
    (tmp_path / "a.txt").write_bytes(b"aaaa\nbbbb\ncccc\nd\xffdd\n")
    with pytest.raises(DataError, match="line 4, byte 16: 0xff"):
        open_corpus(config(tmp_path / "a.txt"))


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf16_is_named(tmp_path, config, encoding):
    (tmp_path / "a.txt").write_bytes("\ufeffone\ntwo".encode(encoding))
    for path in (tmp_path / "a.txt", tmp_path):
        with pytest.raises(DataError, match="UTF-16"):
            open_corpus(config(path))


def test_a_binary_file_is_refused_alone_and_reported_in_a_folder(tmp_path, config):
    folder = write_folder(tmp_path / "text", {"a.png": b"\x89PNG\n\x00\x01", "b.txt": b"text"})
    with pytest.raises(DataError, match=r"a\.png: line 2, byte 5: .*binary"):
        open_corpus(config(folder / "a.png"))
    corpus = open_corpus(config(folder))
    assert text_of(corpus) == "text<|endoftext|>"
    assert corpus.notices == ["1 left out (binary, a link to a folder, or no file): a.png"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "two"', r"line 2, column 15: not JSON"),
        ('["text"]', r'line 2: no "text" field'),
        ('{"body": "two"}', r'line 2: no "text" field'),
        ('{"text": 2}', r'line 2: no "text" field'),
        ('{"n": ' + "1" * 5000 + "}", r"line 2: cannot be read as JSON"),
        ("[" * 100_000, r"line 2: cannot be read as JSON"),
        ('{"text": "\\ud800"}', r"line 2: half of a surrogate pair, \\ud800"),
    ],
)
def test_a_broken_jsonl_line_is_named(tmp_path, config, line, message):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "one"}}\n{line}\n{{"text": "three"}}\n')
    with pytest.raises(DataError, match=message):
        open_corpus(config(tmp_path / "a.jsonl"))


def test_a_byte_order_mark_is_no_text(tmp_path, config):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\n')
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbftwo")
    assert text_of(open_corpus(config(tmp_path))) == "one<|endoftext|>two<|endoftext|>"


def test_links_and_pipes_in_a_folder_are_left_out_and_told(tmp_path, config):
    folder = write_folder(tmp_path / "text", {"a.txt": b"text"})
    (folder / "circle").symlink_to(folder)
    (folder / "nowhere").symlink_to("missing")
    os.mkfifo(folder / "pipe")
    corpus = open_corpus(config(folder))
    assert text_of(corpus) == "text<|endoftext|>"
    assert corpus.notices == ["3 left out (binary, a link to a folder, or no file): circle, nowhere, pipe"]
    with pytest.raises(DataError, match="device or pipe"):
        open_corpus(config(folder / "pipe"))


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path, config, monkeypatch):
    folder = write_folder(tmp_path / "text", {"a.txt": b"text", "b/c.txt": b"more"})
    listing = os.scandir

    def refused(path):
        if str(path).endswith("/b"):
            raise PermissionError(13, "Permission denied", str(path))
        return listing(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(DataError, match=r"text/b: cannot be read \(Permission denied\)"):
        open_corpus(config(folder))


@pytest.mark.parametrize("key", ["path", "cache", "tokenizer"])
def test_the_home_of_nobody_is_named(tmp_path, config, key):
    (tmp_path / "a.txt").write_text("text")
    given = dataclasses.replace(config(tmp_path / "a.txt"), **{key: "~nobody-here/x"})
    with pytest.raises(DataError, match=f"data.{key} = .~nobody-here/x"):
        open_corpus(given)


@pytest.mark.parametrize("eos", ['{"content": 5}', '{"id": 3}', "[1]", "7"])
def test_a_tokenizer_config_of_another_form_is_named(tmp_path, eos):
    Tokenizer.of_bytes().save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(f'{{"eos_token": {eos}}}')
    with pytest.raises(DataError, match=r"tokenizer_config\.json: cannot be read"):
        Tokenizer.load(tmp_path)


def test_a_truncated_gz_is_named(tmp_path, config):
    whole = gzip.compress("".join(json.dumps({"text": line}) + "\n" for line in LINES).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz: cannot be read"):
        open_corpus(config(tmp_path / "a.jsonl.gz"))


def test_nothing_to_read_is_an_error(tmp_path, config):
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").touch()
    with pytest.raises(DataError, match="there is no such file or folder"):
        open_corpus(config(tmp_path / "missing"))
    with pytest.raises(DataError, match="holds no files"):
        open_corpus(config(tmp_path / "empty"))
    with pytest.raises(DataError, match="no text in 1 file"):
        open_corpus(config(tmp_path / "blank.txt", "bpe:300"))


def test_raw_tokens_outside_of_the_tokenizer_or_cut_short(tmp_path, config):
    (tmp_path / "a.u16").write_bytes(np.array([1, 2, 257], dtype="<u2").tobytes())
    with pytest.raises(DataError, match="token 2 has id 257, but the tokenizer has 257 ids"):
        open_corpus(config(tmp_path / "a.u16"))
    (tmp_path / "b.u32").write_bytes(b"\0\0\0\0\0")
    with pytest.raises(DataError, match="whole number of 4-byte ids"):
        open_corpus(config(tmp_path / "b.u32"))
    with pytest.raises(UsageError, match="holds token ids already"):
        open_corpus(config(tmp_path / "a.u16", "bpe:300"))


def test_too_little_text_tells_needed_and_available_tokens(tmp_path, config):
    (tmp_path / "a.txt").write_text("ten tokens")
    view = open_corpus(config(tmp_path / "a.txt")).train
    with pytest.raises(DataError, match=r"the training data has 11 tokens but 1 sequence\(s\) of 128 need 129; give more text"):
        Loader(view, 128, 0)
    assert Loader(view, 5, 0).num_sequences == 2
    with pytest.raises(DataError, match=r"4 sequence\(s\) of 5 need 21"):
        Loader(view, 5, 0, batch_size=4)


# Cache


def cached_folder(tmp_path: Path) -> Path:
    (folder,) = (entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir())
    return folder


def test_the_second_open_reads_no_text_and_a_changed_file_is_read_again(tmp_path, config, monkeypatch):
    file = tmp_path / "a.txt"
    file.write_text("one")
    first = open_corpus(config(file))
    with monkeypatch.context() as patch:
        patch.setattr("mok.data.corpus._build", None)
        assert open_corpus(config(file)).fingerprint == first.fingerprint
    file.write_text("other")
    assert open_corpus(config(file)).fingerprint != first.fingerprint


def test_tokenizing_is_told_once_and_how_far_it_is(tmp_path, config, monkeypatch):
    monkeypatch.setattr("mok.data.corpus.SAY_EVERY_S", -1.0)
    monkeypatch.setattr("mok.data.corpus.BATCH_CHARACTERS", 1000)
    (tmp_path / "a.txt").write_text("x" * 3_000_000)
    said: list[str] = []
    open_corpus(config(tmp_path / "a.txt"), said.append)
    assert said[0].startswith(f"tokenizing {tmp_path / 'a.txt'}, this first time only, into ")
    assert said[1:] == ["tokenized 3 MB of text so far"]
    open_corpus(config(tmp_path / "a.txt"), said.append)
    assert len(said) == 2


def test_the_fingerprint_is_the_same_wherever_the_files_lie(tmp_path, config):
    folders = [write_folder(tmp_path / name, {"a.txt": b"one\n" * 50, "b/c.txt": b"two\n" * 50}) for name in ("x", "y")]
    corpora = [open_corpus(config(folder, "bpe:300")) for folder in folders]
    assert corpora[0].folder != corpora[1].folder
    assert corpora[0].fingerprint == corpora[1].fingerprint
    assert corpora[0].tokenizer.sha256 == corpora[1].tokenizer.sha256


def test_a_failed_build_leaves_nothing_and_a_killed_one_is_cleaned_up(tmp_path, config):
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xff")
    with pytest.raises(DataError):
        open_corpus(config(file))
    assert not [entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]
    file.write_text("one")
    open_corpus(config(file))
    folder = cached_folder(tmp_path)
    (folder / "manifest.json").unlink()
    folder.rename(folder.with_name(folder.name + ".building-abandoned"))
    open_corpus(config(file))
    assert cached_folder(tmp_path) == folder


def test_processes_that_ask_at_once_get_one_corpus(tmp_path, config):
    (tmp_path / "a.txt").write_text("\n".join(LINES))
    program = (
        "import sys; from mok.config import DataConfig; from mok.data import open_corpus\n"
        "print(open_corpus(DataConfig(path=sys.argv[1], tokenizer='bpe:300', cache=sys.argv[2])).fingerprint)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "a.txt"), str(tmp_path / "cache")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert len({process.communicate()[0] for process in running}) == 1
    assert all(process.returncode == 0 for process in running)
    cached_folder(tmp_path)


def test_without_a_lock_the_first_rename_wins(tmp_path, config, monkeypatch):
    (tmp_path / "a.txt").write_text("one")
    open_corpus(config(tmp_path / "a.txt"))
    manifest = cached_folder(tmp_path) / "manifest.json"
    kept = manifest.read_bytes()
    manifest.unlink()  # not there when this process looks, there when it wants to publish

    build = corpus_module._build

    def slow_build(*arguments: object) -> None:
        build(*arguments)
        manifest.write_bytes(kept)

    monkeypatch.setattr(corpus_module, "_build", slow_build)
    assert text_of(open_corpus(config(tmp_path / "a.txt"))) == "one<|endoftext|>"


def test_a_cache_that_cannot_be_written_names_the_key(tmp_path, config):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(DataError, match=r"set data\.cache to another folder"):
        open_corpus(config(tmp_path / "a.txt"))


@pytest.mark.parametrize("name", ["tokens_00000.u16", "documents.u64", "tokenizer.json", "manifest.json"])
@pytest.mark.parametrize("harm", ["truncated", "flipped", "removed"])
def test_damaged_shards_are_never_trained_on(tmp_path, config, name, harm):
    (tmp_path / "a.txt").write_text("\n".join(LINES))
    open_corpus(config(tmp_path / "a.txt"))
    file = cached_folder(tmp_path) / name
    data = bytearray(file.read_bytes())
    if harm == "removed":
        file.unlink()
    elif harm == "truncated":
        file.write_bytes(data[:-3])
    else:
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    if (name, harm) == ("manifest.json", "removed"):
        file.parent.rename(tmp_path / "gone")  # without a manifest the folder counts as unfinished
        return
    with pytest.raises(DataError, match=name if harm != "flipped" or name != "manifest.json" else "cache"):
        corpus = open_corpus(config(tmp_path / "a.txt"))
        corpus.everything.read(0, corpus.num_tokens)


# Shards and packing


def test_shards_are_joined_seamlessly(tmp_path):
    ids = np.arange(1000, dtype=np.uint32) % 300
    writer = ShardWriter(tmp_path, 300, shard_tokens=64)
    for part in np.split(ids, [1, 60, 64, 129, 500]):
        writer.append(part)
        writer.end_document(len(part))
    writer.finish({})
    store = TokenStore(tmp_path)
    assert len(list(tmp_path.glob("tokens_*.u16"))) == 16
    assert store.read(0, 1000).tolist() == ids.tolist()
    assert store.read(63, 65).tolist() == [63, 64]
    assert store.document_ends.tolist() == [1, 60, 64, 129, 500, 1000]


def test_packing_ignores_targets_across_documents(tmp_path, config):
    folder = write_folder(tmp_path / "text", {"1": b"ab", "2": b"cde"})
    loader = Loader(open_corpus(config(folder)).everything, 4, 0)
    inputs, targets = loader.sequence(0)
    assert inputs.tolist() == [97, 98, 256, 99]
    assert targets.tolist() == [98, 256, IGNORED, 100]


def test_validation_is_by_document_and_disjoint(tmp_path, config):
    files = {f"{number:03}.txt": bytes([number]) * 40 for number in range(32, 128)}
    corpus = open_corpus(config(write_folder(tmp_path / "text", files), validation_fraction=0.1))
    train, held_out = (set(view.read(0, len(view))[0].tolist()) - {256} for view in (corpus.train, corpus.validation))
    assert not train & held_out
    assert len(train | held_out) == 96
    assert len(held_out) == 9
    held_out_bytes = [file for file in files.values() if file[0] in held_out]
    shuffled = {f"x{number}.txt": content for number, content in enumerate(reversed(files.values()))}
    again = open_corpus(config(write_folder(tmp_path / "other", shuffled), validation_fraction=0.1))
    assert set(again.validation.read(0, len(again.validation))[0].tolist()) - {256} == {
        content[0] for content in held_out_bytes
    }


def test_one_long_document_gives_its_tail_to_validation(tmp_path, config):
    (tmp_path / "a.txt").write_text("\n".join(LINES))
    corpus = open_corpus(config(tmp_path / "a.txt", validation_fraction=0.1))
    assert len(corpus.validation) == int(corpus.num_tokens * 0.1)
    assert len(corpus.train) + len(corpus.validation) == corpus.num_tokens
    assert corpus.train.read(len(corpus.train) - 3, len(corpus.train))[1].tolist() == [False, False, True]


def test_stdlib_is_python_source_without_its_tests():
    sources = find_sources("stdlib")
    names = {source.name for source in sources}
    assert {"json/decoder.py", "ast.py"} <= names
    assert not any({"test", "tests", "site-packages"} & set(name.split("/")) for name in names)
    assert 4_000_000 < sum(source.path.stat().st_size for source in sources) < 20_000_000
