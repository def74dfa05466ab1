"""Every launch of `mok/launch/dense.py`, `optimizer.py`, `product.py` and `router.py` once, on small CPU tensors, for
`cross_compile`."""

from __future__ import annotations

import torch

from mok.launch import dense, optimizer, product, router

TOKENS, HIDDEN, HEADS, DIM, VOCABULARY = 64, 2048, 16, 128, 50304


def launch_all(arch: int) -> None:
    x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)
    for branch in (None, x.clone()):
        _, y, rstd = dense.rms_norm(x, branch, x[0], 1e-5)
        dense.rms_norm_backward(y, branch, x, rstd, x[0], 1)
    heads = torch.zeros(1, TOKENS, 3 * HEADS, DIM, dtype=torch.bfloat16)
    turned, table = heads[:, :, : 2 * HEADS].contiguous(), heads[0, :, : 2 * HEADS].contiguous()
    for kind, weight in (("full", x[0]), ("head", x[0, :DIM])):
        part = dense.Heads(0, HEADS, kind)
        rstd = dense.norm_and_rotate(heads, part, weight, table, table, 1e-5, turned)
        dy = turned[:, :, :HEADS].contiguous()
        dense.norm_and_rotate_backward(dy, heads, part, weight, table, table, rstd, heads, 1)
    logits, targets = torch.zeros(TOKENS, VOCABULARY, dtype=torch.bfloat16), torch.zeros(TOKENS, dtype=torch.int64)
    for scale in (None, torch.zeros((), dtype=torch.float64)):
        dense.cross_entropy(logits, VOCABULARY, targets, -100, scale)
    flat, moments = torch.zeros(2, 1 << 16), torch.zeros(3, 1 << 16, dtype=torch.bfloat16)
    for weights, decay in ((moments[2], True), (None, False)):
        optimizer.adamw(weights, flat[0], moments[0], moments[1], flat[1], flat[0, :5], beta1=0.9, beta2=0.95, decay=decay)
    optimizer.square_sums(flat[0], 256)
    scores, weights = torch.zeros(TOKENS, 64), torch.zeros(TOKENS, 8)
    common = {"softmax": True, "normalize": True, "scaling": 1.0}
    ids, _, totals, lse, _ = router.route(scores, None, targets > 0, 1, top_k=8, epsilon=0.0, **common)
    router.route_backward(scores, ids, totals, lse, weights, scores[:1], lse[:1], 1, **common)
    for dtype, result in ((torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)):
        for width in (64, 1024):
            product.product_of_rows(x.to(dtype), torch.zeros(width, HIDDEN, dtype=dtype).t(), result)
            product.product_of_rows(x.to(dtype), torch.zeros(HIDDEN, width, dtype=dtype), result)
