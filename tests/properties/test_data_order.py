"""Data order: a permutation in every epoch, the same for every reader and after every resume."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mok.data import IGNORED, Loader, TokenView
from mok.data.loader import split_documents
from mok.data.order import permute
from mok.data.shards import ShardWriter, TokenStore


def store_of(folder: Path, lengths: list[int], shard_tokens: int = 16) -> TokenStore:
    """Documents of the given lengths; token i of the corpus has id i + 1, so an id tells its place."""
    folder.mkdir()
    writer = ShardWriter(folder, sum(lengths) + 1, shard_tokens)
    for number, length in enumerate(lengths):
        writer.append(np.arange(writer.num_tokens + 1, writer.num_tokens + 1 + length, dtype=np.uint32))
        writer.end_document(number * 0x9E3779B97F4A7C15 % 2**64)
    writer.finish({})
    return TokenStore(folder)


@settings(max_examples=50)
@given(st.integers(1, 300), st.integers(0, 2**63 - 1), st.integers(0, 1000))
def test_every_epoch_has_every_sample_once(size, seed, epoch):
    assert sorted(permute(index, size, seed, epoch) for index in range(size)) == list(range(size))


def test_orders_of_seeds_and_epochs_differ_and_look_random():
    orders = {(seed, epoch): [permute(i, 1000, seed, epoch) for i in range(1000)] for seed in (0, 1) for epoch in (0, 1)}
    assert len({tuple(order) for order in orders.values()}) == 4
    for order in orders.values():
        assert abs(np.corrcoef(order, range(1000))[0, 1]) < 0.1
        assert sum(place == index for index, place in enumerate(order)) < 10


def test_a_known_order_never_changes():
    assert [permute(index, 10, 0, 0) for index in range(10)] == [2, 3, 5, 6, 9, 1, 8, 0, 7, 4]


@pytest.mark.parametrize("stop", [20, 41, 64 + 12])
def test_a_resumed_run_sees_what_an_uninterrupted_one_sees(tmp_path, stop):
    store = store_of(tmp_path / "store", [513])
    view = TokenView(store, np.array([[0, 513]]), "whole")
    straight = Loader(view, 8, seed=0)
    ids = [int(straight.sequence(index)[0][0]) for index in range(192)]
    resumed = Loader(view, 8, seed=0)
    assert ids[:stop] + [int(resumed.sequence(index)[0][0]) for index in range(stop, 192)] == ids
    assert len(set(ids[64:128])) == 64
    assert ids[:64] != ids[64:128]


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_any_number_of_readers_gets_the_same_sequences(tmp_path, workers):
    loader = Loader(TokenView(store_of(tmp_path / "store", [100, 29]), np.array([[0, 129]]), "whole"), 8, seed=3)
    np.random.seed(workers)
    with ThreadPoolExecutor(workers) as pool:
        parallel = list(pool.map(loader.sequence, range(40)))
    for index, (inputs, targets) in enumerate(parallel):
        expected = loader.sequence(index)
        assert inputs.equal(expected[0])
        assert targets.equal(expected[1])


@settings(max_examples=40)
@given(data=st.data())
def test_views_and_sequences_are_the_corpus(tmp_path_factory, data):
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=20))
    fraction = data.draw(st.floats(0.01, 0.6))
    store = store_of(tmp_path_factory.mktemp("property") / "store", lengths, data.draw(st.integers(3, 50)))
    views = [TokenView(store, ranges, name) for ranges, name in zip(split_documents(store, fraction), "tv", strict=True)]
    tokens = [view.read(0, len(view))[0].tolist() for view in views]
    assert sorted(tokens[0] + tokens[1]) == list(range(1, sum(lengths) + 1))
    assert len(tokens[1]) <= sum(lengths) * fraction
    ends = set(np.cumsum(lengths).tolist())
    length = data.draw(st.integers(1, 30))
    if len(views[0]) <= length:
        return
    loader = Loader(views[0], length, seed=data.draw(st.integers(0, 5)))
    for index in range(loader.num_sequences):
        inputs, targets = loader.sequence(index)
        start = loader.place(index)[1] * length
        assert inputs.tolist() == tokens[0][start : start + length]
        for token, target, following in zip(inputs.tolist(), targets.tolist(), tokens[0][start + 1 :], strict=False):
            assert target == (IGNORED if token in ends or following != token + 1 else following)
