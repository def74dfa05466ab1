"""MoE inputs that have broken somebody's kernels: every backend is run on all of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

__all__ = ["CASES", "Case", "Inputs", "make_inputs", "random_ids"]


@dataclass(frozen=True)
class Case:
    """Sizes and peculiarities of one layer call. routing: uniform, one-expert (all to the last K), half (first half only) or
    some -1. weights: of the router: positive, signed (negative and zero among them) or tiny."""

    name: str
    tokens: int = 37
    hidden: int = 32
    width: int = 48
    experts: int = 8
    top_k: int = 2
    routing: str = "uniform"
    weights: str = "positive"
    clamp: float = 0.0
    contiguous: bool = True
    shared: int = 0
    scale: float = 1.0


CASES = (
    Case("balanced"),
    Case("one-expert", routing="one-expert", top_k=1),
    Case("hot-experts", routing="one-expert"),
    Case("empty-experts", routing="half"),
    Case("top-1", top_k=1),
    Case("all-experts", top_k=8),
    Case("one-of-one", experts=1, top_k=1),
    Case("no-token", tokens=0),
    Case("one-token", tokens=1),
    Case("two-tokens", tokens=2),
    Case("three-tokens", tokens=3),
    Case("masked", routing="masked"),
    Case("all-masked", routing="all-masked"),
    Case("signed-weights", weights="signed"),
    Case("tiny-weights", weights="tiny"),
    Case("odd-widths", tokens=11, hidden=1025, width=37, experts=3),
    Case("wide-experts", tokens=20, width=300),
    Case("clamped", clamp=0.05),
    Case("non-contiguous", contiguous=False),
    Case("shared", shared=40),
    Case("small-values", scale=1e-3),
    Case("more-tokens", tokens=130, top_k=3),
)


@dataclass
class Inputs:
    """One call, as leaves that record gradients. gate_EIH ... shared_scale_T are those of `mok.moe` and the shared expert."""

    x_TH: Tensor
    weights_TK: Tensor
    gate_EIH: Tensor
    up_EIH: Tensor
    down_EHI: Tensor
    shared_gate_up_JH: Tensor | None
    shared_down_HS: Tensor | None
    shared_scale_T: Tensor | None
    ids_TK: Tensor = field(default_factory=lambda: torch.empty(0))
    dy_TH: Tensor = field(default_factory=lambda: torch.empty(0))

    def differentiable(self) -> dict[str, Tensor]:
        """Leaf by name, without those the case has not."""
        names = (
            "x_TH",
            "weights_TK",
            "gate_EIH",
            "up_EIH",
            "down_EHI",
            "shared_gate_up_JH",
            "shared_down_HS",
            "shared_scale_T",
        )
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def to(self, dtype: torch.dtype, weights_dtype: torch.dtype) -> Inputs:
        """New leaves with these values in `dtype`; router weights and shared scale in `weights_dtype`."""
        new = {}
        for name, value in self.differentiable().items():
            wanted = weights_dtype if name in ("weights_TK", "shared_scale_T") else dtype
            detached = value.detach()
            cast = detached.to(wanted) if detached.dtype != wanted else detached.clone()
            new[name] = cast.requires_grad_()
        return replace(self, **new, dy_TH=self.dy_TH.to(dtype))


def random_ids(tokens: int, experts: int, top_k: int, generator: torch.Generator) -> Tensor:
    """int32 [tokens, top_k], distinct and rising in each row."""
    return torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k].sort(1).values.to(torch.int32)


def make_inputs(case: Case, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """The call of `case` with values that `dtype` can hold."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).mul_(scale * case.scale).to(dtype)

    tokens, experts, top_k = case.tokens, case.experts, case.top_k
    ids_TK = random_ids(tokens, experts, top_k, generator)
    if case.routing == "one-expert":
        ids_TK = torch.arange(experts - top_k, experts, dtype=torch.int32).expand(tokens, -1).contiguous()
    elif case.routing == "half":
        ids_TK = random_ids(tokens, experts // 2, top_k, generator)
    elif case.routing == "masked":
        ids_TK = ids_TK.masked_fill(torch.rand(ids_TK.shape, generator=generator) < 0.4, -1)
    elif case.routing == "all-masked":
        ids_TK = torch.full_like(ids_TK, -1)
    weights_TK = torch.rand(tokens, top_k, generator=generator)
    if case.weights == "signed":
        weights_TK = torch.randn(tokens, top_k, generator=generator)
        weights_TK[::3, 0] = 0.0
    elif case.weights == "tiny":
        weights_TK = weights_TK * 1e-6
    weights_TK = weights_TK.masked_fill(ids_TK < 0, torch.nan)  # what a masked route weighs must not matter
    x_TH = normal(tokens, case.hidden)
    gate, up = (normal(experts, case.width, case.hidden, scale=case.hidden**-0.5) for _ in range(2))
    down = normal(experts, case.hidden, case.width, scale=case.width**-0.5)
    if not case.contiguous:
        x_TH = torch.stack((x_TH, torch.full_like(x_TH, torch.nan)), 2).transpose(0, 1)[..., 0].t()
        gate = gate.transpose(1, 2).contiguous().transpose(1, 2)
        down = torch.cat((down, torch.full_like(down, torch.nan)), 2)[..., : case.width]
        ids_TK = ids_TK.t().contiguous().t()
        weights_TK = weights_TK.t().contiguous().t()
    shared_gate_up = shared_down = shared_scale = None
    if case.shared:
        shared_gate_up = normal(2 * case.shared, case.hidden, scale=case.hidden**-0.5)
        shared_down = normal(case.hidden, case.shared, scale=case.shared**-0.5)
        shared_scale = torch.rand(tokens, generator=generator)
    inputs = Inputs(
        x_TH, weights_TK, gate, up, down, shared_gate_up, shared_down, shared_scale, ids_TK, normal(tokens, case.hidden)
    )
    for leaf in inputs.differentiable().values():
        leaf.requires_grad_()
    return inputs
