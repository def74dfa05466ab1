from __future__ import annotations

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex

from mok.train.places import Place, boxes


def test_the_example_of_the_docstring() -> None:
    assert boxes((4, 3), 2, 9) == [(2, (0, 2), (1, 1)), (3, (1, 0), (2, 3))]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_boxes_cover_a_range_once_and_lie_where_they_say(shape: list[int], data: st.DataObject) -> None:
    size = prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    numbers = torch.arange(size).view(shape)
    found = boxes(shape, start, stop)
    assert len(found) <= 2 * len(shape) - 1
    parts = []
    for first, offsets, sizes in found:
        part = numbers[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))].reshape(-1)
        assert part.tolist() == list(range(first, first + prod(sizes)))
        parts += part.tolist()
    assert parts == list(range(start, stop))


def test_a_place_gives_its_chunks_as_views() -> None:
    flat = torch.arange(20.0)
    place = Place(torch.Size((4, 3)), flat[5:12], first=2)
    for chunk in place.__create_chunk_list__():
        shard = place.__get_tensor_shard__(MetadataIndex("w", chunk.offsets))
        assert shard.shape == chunk.sizes
        shard.mul_(-1)
    assert flat.tolist() == [*range(5), *(-i for i in range(5, 12)), *range(12, 20)]
