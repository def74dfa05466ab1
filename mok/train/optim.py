"""AdamW on fp32 master weights, and the global gradient norm, with bits that do not depend on how tensors are cut.

Owns moments and master weights as flat tensors (one `ParameterGroup` per kind of parameter) and the arithmetic of rules 9
and 12 of docs/numerics.md: element by element with separately rounded products and sums, reductions over fixed blocks of one
logical tensor. Knows nothing of models, layouts or files.

Update of one element, g already scaled by the clipping factor:

    m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2        c = sqrt(1 - b2^t)
    w = w (1 - lr wd) - (lr c / (1 - b1^t) * m) / (sqrt(v) + eps c)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from mok.config import OptimConfig
from mok.gradients import ALIGNMENT, Bank, Exchange, halving_tree
from mok.train.places import local_shard

__all__ = ["MOMENT_DTYPES", "AdamW", "ParameterGroup", "gradient_norm", "tensor_square_sums"]

MOMENT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

CHUNK = 1 << 18
"""Elements that a CPU works on at once: between two operations the operands of a chunk mostly stay in the caches of its cores,
and the calls cost little (a quarter faster than 65536 on two cores, a tenth faster than all at once)."""


@dataclass
class ParameterGroup:
    """Parameters with one weight decay, as flat tensors laid out by `bank`; all but `weights` are cut into shards.

    weights: what the forward reads, in the model's dtype, whole; the parameters are views of it. master: fp32, the same memory
    as the shard of `weights` where the model is fp32. exp_avg, exp_avg_sq: moments. grads: fp32, a view of the main gradients.
    These four are DTensors where several ranks keep shards; `local` has this rank's shards as plain tensors, to compute with.
    """

    bank: Bank
    weights: Tensor
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grads: Tensor
    weight_decay: float

    @classmethod
    def of(
        cls,
        bank: Bank,
        grads: Tensor,
        weight_decay: float,
        moment_dtype: torch.dtype,
        sharded: Callable[[Tensor, bool], Tensor] = lambda shard_N, experts: shard_N,
    ) -> ParameterGroup:
        """Move the parameters of `bank` into one flat tensor; moments start at zero. sharded: of `mok.train.ranks.Ranks`."""
        weights = bank.flat(bank.parameters[0].dtype)
        for parameter, view in zip(bank.parameters, bank.views(weights), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        shards = {
            "master": weights[bank.shard].float(),
            "exp_avg": bank.flat_shard(moment_dtype),
            "exp_avg_sq": bank.flat_shard(moment_dtype),
            "grads": grads[bank.shard],
        }
        stored = {name: sharded(shard_N, bank.experts) for name, shard_N in shards.items()}
        return cls(bank, weights, weight_decay=weight_decay, **stored)

    @cached_property
    def local(self) -> ParameterGroup:
        """The same group and memory without DTensors."""
        return replace(
            self,
            master=local_shard(self.master),
            exp_avg=local_shard(self.exp_avg),
            exp_avg_sq=local_shard(self.exp_avg_sq),
            grads=local_shard(self.grads),
        )

    @property
    def has_master(self) -> bool:
        """Whether `master` is memory of its own."""
        return self.weights.dtype != torch.float32


class AdamW:
    """One optimizer over several groups. `step` is the only method that changes anything.

    What differs from update to update reaches it in tensors, so that a CUDA graph of a step can be replayed.
    """

    def __init__(self, groups: Sequence[ParameterGroup], config: OptimConfig) -> None:
        self.groups = list(groups)
        self.config = config

    def factors(self, step: int, lr: float) -> list[float]:
        """What differs from one update to the next, for update number `step` (from 1): lr c / (1 - b1^t), eps c, and 1 - lr wd
        of each group."""
        config = self.config
        correction = math.sqrt(1.0 - config.beta2**step)
        rate = lr * correction / (1.0 - config.beta1**step)
        return [rate, config.eps * correction, *(1.0 - lr * group.weight_decay for group in self.groups)]

    @torch.no_grad()
    def step(self, factors: Tensor, scale: Tensor) -> None:
        """Update with gradients multiplied by `scale`; a scale of NaN leaves everything as it is.

        factors: float64 [2 + groups], see `factors`. scale: float64, one number. Both on the device of the groups, for which
        nobody waits.
        """
        if not scale.is_cuda and scale.isnan():
            return
        for group, numbers in zip(self.groups, self._numbers(factors, scale), strict=True):
            update = _update_in_one_pass if group.weights.is_cuda else _update_by_chunks
            update(group.local, self.config, numbers)

    def _numbers(self, factors: Tensor, scale: Tensor) -> list[Tensor]:
        """For each group (1 - b1) scale, sqrt(1 - b2) scale, eps c, lr c / (1 - b1^t) and 1 - lr wd, float64."""
        to_avg, to_root = scale * (1.0 - self.config.beta1), scale * math.sqrt(1.0 - self.config.beta2)
        rate, epsilon, *keeps = factors.unbind()
        return [torch.stack((to_avg, to_root, epsilon, rate, keep)) for keep in keeps]


def _update_in_one_pass(group: ParameterGroup, config: OptimConfig, numbers: Tensor) -> None:
    """On a GPU: the same operations element by element, in one kernel."""
    from mok.launch.optimizer import adamw

    weights = group.weights[group.bank.shard] if group.has_master else None
    adamw(
        weights,
        group.master,
        group.exp_avg,
        group.exp_avg_sq,
        group.grads,
        numbers.float(),
        beta1=config.beta1,
        beta2=config.beta2,
        decay=group.weight_decay > 0,
    )


def _update_by_chunks(group: ParameterGroup, config: OptimConfig, numbers: Tensor) -> None:
    """On a CPU: chunk by chunk. Products and sums are rounded apart on purpose: `addcmul` and `lerp` round once where the
    vector unit is used and twice at the end of a tensor, so the place of a cut would show. `addcdiv` is a product, a quotient
    and a sum, which no unit fuses; with a divisor of 1 it is a product and a sum."""
    to_avg, to_root, epsilon, rate, keep = numbers.tolist()
    size = group.bank.shard_size
    buffers = torch.empty(3, min(CHUNK, size))
    one = torch.ones(())
    for start in range(0, size, CHUNK):
        part = slice(start, min(start + CHUNK, size))
        other, wide_m, wide_v = buffers[:, : part.stop - part.start]
        grad, m, v, master = group.grads[part], group.exp_avg[part], group.exp_avg_sq[part], group.master[part]
        exact = m.dtype == torch.float32
        first, second = (m, v) if exact else (wide_m.copy_(m), wide_v.copy_(v))
        first.mul_(config.beta1).addcdiv_(grad, one, value=to_avg)
        torch.mul(grad, to_root, out=other)
        second.mul_(config.beta2).add_(other.mul_(other))
        if not exact:
            m.copy_(first)
            v.copy_(second)
        torch.sqrt(second, out=other).add_(epsilon)
        if group.weight_decay:
            master.mul_(keep)
        master.addcdiv_(first, other, value=-rate)
        if group.has_master:
            group.weights[group.bank.shard][part].copy_(master)


def _block_square_sums(flat: Tensor) -> Tensor:
    """Sums of squares of consecutive `ALIGNMENT` elements: [n] to [n / ALIGNMENT]."""
    if flat.is_cuda:
        from mok.launch.optimizer import square_sums

        return square_sums(flat, ALIGNMENT)
    return torch.linalg.vector_norm(flat.view(-1, ALIGNMENT), dim=1).square_()


def tensor_square_sums(group: ParameterGroup, matrices: Sequence[int], exchange: Exchange | None) -> Tensor:
    """Sum of squares of the gradient of every logical tensor of a group, in an order that the bank alone decides: float64, one
    dim.

    matrices: for each parameter, how many logical tensors of equal size it stacks on its leading dims (experts).
    exchange: how the ranks that share the bank show one another the sums of their blocks; None for one rank.
    Each sum is made of fixed blocks of that tensor alone, so it is the same wherever the tensor lives or is cut.
    """
    bank = group.bank
    blocks = _block_square_sums(group.local.grads)
    if exchange is not None:
        mine, blocks = blocks, blocks.new_zeros(bank.numel // ALIGNMENT)
        blocks[bank.shard.start // ALIGNMENT : bank.shard.stop // ALIGNMENT] = mine
        exchange.gather_shards(blocks, bank.experts)
    sums = []
    for part in _stacks(blocks, bank, matrices):
        while part.shape[-1] > ALIGNMENT:
            part = torch.nn.functional.pad(part, (0, -part.shape[-1] % ALIGNMENT)).unflatten(-1, (-1, ALIGNMENT)).sum(-1)
        sums.append(part.sum(-1).view(-1))
    return torch.cat(sums).double()


def _stacks(blocks: Tensor, bank: Bank, matrices: Sequence[int]) -> Iterator[Tensor]:
    """`blocks` as views [parameters, matrices of each, blocks of a matrix] of parameters that lie equally far apart, as those
    of equal layers do: the fewer views, the fewer operations."""
    alike: dict[tuple[int, int], list[int]] = {}
    for start, parameter, count in zip(bank.starts, bank.parameters, matrices, strict=True):
        alike.setdefault((-(-parameter.numel() // ALIGNMENT), count), []).append(start // ALIGNMENT)
    for (length, count), starts in alike.items():
        apart = {second - first for first, second in itertools.pairwise(starts)}
        stacks = [starts] if len(apart) <= 1 else [[start] for start in starts]
        for stack in stacks:
            size = (len(stack), count, length // count)
            yield blocks.as_strided(size, (max(apart, default=0), length // count, 1), stack[0])


def gradient_norm(square_sums: Tensor) -> Tensor:
    """Global norm from the sums of squares of all logical tensors of all ranks, float64; NaN or infinity if one of them is.

    Added as a halving tree in order of size, so that neither ranks nor the order of tensors show.
    """
    return halving_tree(square_sums.sort().values).sqrt()
