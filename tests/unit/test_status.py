"""Status words: one for each layer, read once, and heard of without waiting."""

from __future__ import annotations

import pytest
import torch

import mok
from mok.errors import NonFiniteError, RunError
from mok.launch import status
from mok.launch.status import HostCopy, check_status, status_word
from mok.model.router import Router, Routing

CPU = torch.device("cpu")


def test_every_layer_has_a_word_that_compiled_kernels_find_aligned() -> None:
    words = [status_word(CPU, layer) for layer in range(5)]
    assert {word.numel() for word in words} == {1} and len({word.data_ptr() for word in words}) == 5
    assert {word.data_ptr() % 16 for word in words} == {words[0].data_ptr() % 16}
    assert status_word(CPU, 10_000).data_ptr() == status_word(CPU, status.LAYERS - 1).data_ptr()


def test_all_layers_and_reasons_are_named_once() -> None:
    status_word(CPU, 2).fill_(3)
    status_word(CPU, 7).fill_(32)
    status_word(CPU, 8).fill_(16 | 71 << 5 | 3 << 12)  # the last rank of a rack
    with pytest.raises(RunError) as caught:
        check_status(CPU)
    text = str(caught.value)
    assert "layer 2: a tile waited too long" in text and "expert ids out of range" in text and "layer 7: status 0x20" in text
    assert "layer 8: the experts of rank 71 of the expert group got 192 rows" in text
    check_status(CPU)
    mok.check_status()


def test_an_earlier_call_is_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = HostCopy()
    monkeypatch.setitem(status._seen, CPU, seen)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    word = status_word(CPU)
    status.raise_if_seen(CPU)
    word.fill_(2)
    status.raise_if_seen(CPU)  # nobody has told the host
    seen.refresh(word)
    with pytest.raises(RunError, match="layer 0: expert ids out of range"):
        status.raise_if_seen(CPU)
    status.raise_if_seen(CPU)


def test_bad_rows_of_an_earlier_call_are_heard_of() -> None:
    router = Router(4, 4, Routing(2), layer=5)
    router.raise_for_seen_rows()
    router.num_bad_rows += 3
    router.raise_for_seen_rows()
    with pytest.raises(NonFiniteError, match="router of layer 5: 3 rows"):
        router.raise_for_seen_rows()
    router.raise_for_seen_rows()
