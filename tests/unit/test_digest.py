"""Digests: every bit counts, layout in memory does not, and the GPU digest is what its torch description computes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from mok.determinism.digest import Digester, digest, mix128_torch


def test_every_single_bit_changes_both_kinds() -> None:
    content = torch.randint(0, 256, (23,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    seen = {digest(content)}
    mixes = {tuple(mix128_torch(content).tolist())}
    for bit in range(8 * content.numel()):
        flipped = content.clone()
        flipped[bit // 8] ^= 1 << bit % 8
        seen.add(digest(flipped))
        mixes.add(tuple(mix128_torch(flipped).tolist()))
    assert len(seen) == len(mixes) == 1 + 8 * content.numel()


def test_order_and_length_count() -> None:
    words = torch.arange(8, dtype=torch.int32).view(torch.uint8)
    variants = [words, words.view(-1, 4).flip(0).reshape(-1).contiguous(), words[:-1], torch.cat([words, words.new_zeros(1)])]
    assert len({tuple(mix128_torch(variant.clone()).tolist()) for variant in variants}) == len(variants)


def test_dtype_and_shape_count_and_strides_do_not() -> None:
    x = torch.arange(12.0).view(3, 4)
    assert digest(x) == digest(x.t().contiguous().t())
    assert len({digest(x), digest(x.view(4, 3)), digest(x.view(torch.int32)), digest(x.view(-1))}) == 4


def test_a_name_is_used_once_and_later_changes_do_not_matter() -> None:
    digester = Digester()
    x = torch.zeros(4)
    digester.add({"x": x})
    before = digest(x)
    x += 1
    with pytest.raises(ValueError, match="two tensors are called 'x'"):
        digester.add({"x": x})
    assert digester.finish() == {"x": before}
    assert digester.finish() == {}


def test_triton_digest_equals_its_torch_description() -> None:
    """In Triton's interpreter, in its own process: the interpreter is chosen when triton is imported."""
    program = """
import torch
from mok.determinism.digest import bytes_of, mix128, mix128_torch
contents = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (0, 1, 3, 4, 5, 16384, 16391, 70001)]
contents += [contents[-1][1:], contents[-1][::2], contents[-1][:69996].view(torch.float32).view(57, 307).t()]
expected = torch.stack([mix128_torch(bytes_of(content).clone()) for content in contents])
assert torch.equal(mix128(contents), expected)
assert torch.equal(mix128(contents[:1]), expected[:1])
"""
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "TRITON_INTERPRET": "1"}, check=True, timeout=120)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_digest_equals_its_torch_description() -> None:
    from mok.determinism.digest import mix128

    contents = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (100_003, 0, 64)]
    expected = torch.stack([mix128_torch(content) for content in contents])
    assert torch.equal(mix128([content.cuda() for content in contents]).cpu(), expected)


def test_a_table_is_used_again_for_tensors_of_the_same_sizes_only() -> None:
    """As a replayed graph does: the table is written anew, the work is queued as before."""
    program = """
import torch
from mok.determinism.digest import Mixer, mix128
first, second, other = torch.arange(4100), torch.arange(4100) + 1, torch.arange(3)
mixer = Mixer([first, other])
mixer.send_table()
before = mixer.run()
again = Mixer([second, other], mixer.place)
again.send_table()
assert again.run().tolist() == mix128([second, other]).tolist() and before.tolist() == mix128([first, other]).tolist()
try:
    Mixer([other, first], mixer.place)
    Mixer([other], mixer.place)
except ValueError as error:
    print(error)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    found = subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120, capture_output=True)
    assert b"does not fit a place for" in found.stdout
