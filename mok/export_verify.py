"""Whether an exported model gives the logits of the one it came from: `mok export --verify`.

Owns the comparison of mok's own forward pass over the written files with that of transformers, and the bounds it must keep.
Both read the folder, so a tensor that was written to the wrong place, rounded or renamed shows, and so does a config that
means another computation.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from mok.ahead import ahead
from mok.config import Recipe
from mok.errors import CheckFailed
from mok.hf_import import HfWeights
from mok.model.transformer import DTYPES, Decoder

__all__ = ["BOUNDS", "Verdict", "verify_export"]

BOUNDS = {"fp32": (0.99, 1e-4), "bf16": (0.9, 5e-2)}
"""By dtype, a share of positions and the bound that |logits - transformers' logits| / |transformers' logits| keeps on them. Not
all of them, because rounding may send a near-tie between two experts to the other one, which changes a position a lot."""

SEQUENCES, POSITIONS = 2, 128


@dataclass(frozen=True)
class Verdict:
    """What was compared and how it came out; all figures are None where transformers is not installed.

    max_difference: of two logits. relative_difference: reached by no more than the `share` of positions in `BOUNDS`; it must
    keep `bound`. argmax_agreement: share of positions.
    """

    share: float
    bound: float
    transformers: str | None = None
    num_positions: int | None = None
    bit_equal: bool | None = None
    max_difference: float | None = None
    relative_difference: float | None = None
    argmax_agreement: float | None = None

    def __str__(self) -> str:
        if self.transformers is None:
            return "not measured: transformers is not installed"
        return (
            f"transformers {self.transformers}, {self.num_positions} positions: bit-equal {'yes' if self.bit_equal else 'no'}, "
            f"largest difference {self.max_difference:.3g}, argmax agrees on {self.argmax_agreement:.1%}"
        )

    def require(self) -> None:
        """Raise CheckFailed if the logits were compared and are too far apart."""
        if self.relative_difference is not None and not self.relative_difference <= self.bound:
            raise CheckFailed(
                f"verify: logits differ by {self.relative_difference:.3g} (relative; {self.share:.0%} of positions by less), "
                f"the bound is {self.bound:g}; the exported model is not the trained one, do not use it"
            )


def verify_export(folder: Path, recipe: Recipe, dtype: str) -> Verdict:
    """Run an exported folder through mok and through transformers on the same ids, on the CPU, in `dtype`.

    Raises CheckpointError if a file is damaged.
    """
    share, bound = BOUNDS[dtype]
    if importlib.util.find_spec("transformers") is None:
        return Verdict(share, bound)
    weights = HfWeights(folder, recipe)
    length = min(POSITIONS, recipe.model.max_positions or recipe.train.sequence_length)
    ids_BS = torch.randint(0, weights.vocab_size, (SEQUENCES, length), generator=torch.Generator().manual_seed(0))
    ours = _logits_of_mok(weights, recipe, dtype, ids_BS).double().flatten(0, 1)
    theirs, version = _logits_of_transformers(folder, dtype, ids_BS)
    theirs = theirs.double().flatten(0, 1)
    return Verdict(
        share=share,
        bound=bound,
        transformers=version,
        num_positions=ids_BS.numel(),
        bit_equal=torch.equal(ours, theirs),
        max_difference=float((ours - theirs).abs().max()),
        relative_difference=float(((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).quantile(share)),
        argmax_agreement=float((ours.argmax(1) == theirs.argmax(1)).double().mean()),
    )


def _logits_of_mok(weights: HfWeights, recipe: Recipe, dtype: str, ids_BS: Tensor) -> Tensor:
    # In the precision of the files, whatever operands the run had: that is what transformers computes.
    recipe = replace(recipe, train=replace(recipe.train, dtype=dtype))
    model = Decoder(recipe, weights.vocab_size, dtype=DTYPES[dtype])
    tensors = dict(model.named_tensors())
    for tensor, value in zip(tensors.values(), ahead(weights.read, tensors, torch.get_num_threads()), strict=True):
        tensor.copy_(value)
    return model.logits(ids_BS)


def _logits_of_transformers(folder: Path, dtype: str, ids_BS: Tensor) -> tuple[Tensor, str]:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=DTYPES[dtype], attn_implementation="sdpa", experts_implementation="eager"
    )
    with torch.no_grad():
        return model.eval()(ids_BS).logits, transformers.__version__
