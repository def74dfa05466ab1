"""From router logits to routes and back, one pass each way, in plain Triton.

Owns the arithmetic of `mok/model/router.py` for routers without groups whose scores are taken before the choice. Sums over
tokens are made of the rows of one program, each program's left apart for whoever adds them. Knows nothing of torch. Read next:
`mok/launch/router.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def route(
    logits, bias, valid, ids, weights, totals, lse, partial, num_tokens, num_experts, epsilon, scaling,
    K: tl.constexpr, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, BIASED: tl.constexpr, MASKED: tl.constexpr,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """ids, weights [T, K]: the K experts of highest score + bias, the lowest id of equal ones, in order of id; their scores,
    over their sum in descending order + epsilon if NORMALIZE, times scaling. -1 and 0 for a token that is not valid.

    Program: ROWS tokens of one slice (second grid axis; num_tokens tokens each). Reads logits fp32 [T, num_experts], bias fp32
    [num_experts] if BIASED, valid bool [T] if MASKED. Writes ids int32, weights fp32, totals fp32 [T] (the sum divided by),
    lse fp32 [T] (log of the sum of exponentials of the logits), and partial fp32 [slices, programs, 2 num_experts + 2]: sums
    over valid tokens of probabilities, of routes, of lse squared, and their number.
    Example, K = 1, softmax, normalised: logits (0, 2, 2) give id 1 with weight 1.
    """
    local = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = local < num_tokens
    row = tl.program_id(1).to(tl.int64) * num_tokens + local
    expert = tl.arange(0, EXPERTS)[None, :]
    inside = (expert < num_experts) & exists[:, None]
    x = tl.load(logits + row[:, None] * num_experts + expert, mask=inside, other=-float("inf"))
    top = tl.max(tl.where(exists[:, None], x, 0.0), axis=1)
    exponentials = tl.where(inside, tl.exp(x - top[:, None]), 0.0)
    sums = tl.where(exists, tl.sum(exponentials, axis=1), 1.0)
    log_sum = top + tl.log(sums)
    if SOFTMAX:
        scores = tl.div_rn(exponentials, sums[:, None] + tl.zeros_like(exponentials))
        probabilities = scores
    else:
        scores = tl.where(inside, tl.div_rn(tl.zeros_like(x) + 1.0, tl.exp(-x) + 1.0), 0.0)
        probabilities = scores / tl.where(exists, tl.sum(scores, axis=1), 1.0)[:, None]
    choice = scores
    if BIASED:
        choice = choice + tl.load(bias + expert, mask=expert < num_experts, other=0.0)
    choice = tl.where(expert < num_experts, choice, -float("inf"))
    chosen = tl.zeros((ROWS, EXPERTS), tl.int32)
    total = tl.zeros((ROWS,), tl.float32)
    for _ in tl.static_range(K):
        best = tl.max(choice, axis=1)
        first = tl.min(tl.where((choice == best[:, None]) & (chosen == 0), expert, EXPERTS), axis=1)
        taken = expert == first[:, None]
        total += tl.sum(tl.where(taken, scores, 0.0), axis=1)
        chosen = tl.where(taken, 1, chosen)
        choice = tl.where(taken, -float("inf"), choice)
    total = total + epsilon
    keeps = exists
    if MASKED:
        keeps = exists & (tl.load(valid + row, mask=exists, other=0) != 0)
    w = scores
    if NORMALIZE:
        w = tl.div_rn(scores, total[:, None] + tl.zeros_like(scores))
    slot = tl.cumsum(chosen, axis=1) - 1
    places = row[:, None] * K + slot
    writes = (chosen > 0) & exists[:, None]
    tl.store(ids + places, tl.where(keeps[:, None], expert, -1), mask=writes)
    tl.store(weights + places, tl.where(keeps[:, None], w * scaling, 0.0), mask=writes)
    tl.store(totals + row, total, mask=exists)
    tl.store(lse + row, log_sum, mask=exists)
    place = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    line = partial + place * (2 * num_experts + 2)
    column = tl.arange(0, EXPERTS)
    counted = keeps[:, None] & (chosen > 0)
    tl.store(line + column, tl.sum(tl.where(keeps[:, None], probabilities, 0.0), axis=0), mask=column < num_experts)
    tl.store(line + num_experts + column, tl.sum(tl.where(counted, 1.0, 0.0), axis=0), mask=column < num_experts)
    tl.store(line + 2 * num_experts, tl.sum(tl.where(keeps, log_sum * log_sum, 0.0), axis=0))
    tl.store(line + 2 * num_experts + 1, tl.sum(tl.where(keeps, 1.0, 0.0), axis=0))


@triton.jit
def route_backward(
    logits, ids, totals, lse, dweights, balance, dz, dlogits, num_tokens, num_experts, scaling,
    K: tl.constexpr, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, WEIGHTS: tl.constexpr, BALANCE: tl.constexpr,
    Z: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """dlogits of `route`.

    Program: ROWS tokens of one slice (second grid axis; num_tokens tokens each). Reads what `route` read and wrote; dweights
    fp32 [T, K] if WEIGHTS; balance fp32 [slices, num_experts], the gradient of each probability, if BALANCE; dz fp32 [slices],
    that of lse squared of each token, if Z. Writes dlogits fp32 [T, num_experts].
    """
    local = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = local < num_tokens
    row = tl.program_id(1).to(tl.int64) * num_tokens + local
    expert = tl.arange(0, EXPERTS)[None, :]
    inside = (expert < num_experts) & exists[:, None]
    x = tl.load(logits + row[:, None] * num_experts + expert, mask=inside, other=-float("inf"))
    log_sum = tl.load(lse + row, mask=exists, other=0.0)
    softmax = tl.where(inside, tl.exp(x - log_sum[:, None]), 0.0)
    if SOFTMAX:
        scores = softmax
        probabilities = softmax
    else:
        scores = tl.where(inside, tl.div_rn(tl.zeros_like(x) + 1.0, tl.exp(-x) + 1.0), 0.0)
        probabilities = scores / tl.where(exists, tl.sum(scores, axis=1), 1.0)[:, None]
    keeps = tl.load(ids + row * K, mask=exists, other=-1) >= 0
    d = tl.zeros((ROWS, EXPERTS), tl.float32)
    if WEIGHTS:
        chosen = tl.zeros((ROWS, EXPERTS), tl.int32)
        for k in tl.static_range(K):
            taken = expert == tl.load(ids + row * K + k, mask=exists, other=-1)[:, None]
            dw = tl.load(dweights + row * K + k, mask=exists, other=0.0) * scaling
            d = tl.where(taken, dw[:, None], d)
            chosen = tl.where(taken, 1, chosen)
        if NORMALIZE:
            total = tl.load(totals + row, mask=exists, other=1.0)[:, None]
            shares = tl.where(chosen > 0, scores / total, 0.0)
            d = tl.where(chosen > 0, (d - tl.sum(d * shares, axis=1)[:, None]) / total, 0.0)
        if SOFTMAX:
            d = (d - tl.sum(d * scores, axis=1)[:, None]) * scores
        else:
            d = d * scores * (1.0 - scores)
    if BALANCE:
        factor = tl.load(balance + tl.program_id(1) * num_experts + expert, mask=expert < num_experts, other=0.0)
        b = (factor - tl.sum(factor * probabilities, axis=1)[:, None]) * probabilities
        d += b if SOFTMAX else b * (1.0 - scores)
    if Z:
        d += (2.0 * tl.load(dz + tl.program_id(1)) * log_sum)[:, None] * softmax
    tl.store(dlogits + row[:, None] * num_experts + expert, tl.where(keeps[:, None], d, 0.0), mask=inside)
