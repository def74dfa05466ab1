"""The output head and the cross-entropy on it, forward and backward in one pass over the logits.

Owns the language-model loss: log-softmax in fp32, ignored targets, padding columns of the vocabulary, and the gradients of the
head's input and weight. No autograd graph is built: the trainer feeds `dhidden` to the backward of the decoder itself. On a
GPU one kernel reads the logits and writes their gradient over them (`mok/launch/dense.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mok.gradients import add_product
from mok.model.linear import matmul_rows
from mok.model.norm import has_kernels

__all__ = ["IGNORED", "head_loss", "head_loss_and_gradient"]

IGNORED = -100
"""Targets with this value count nowhere: neither in the loss nor in what it is divided by."""


def _shifted_logits(hidden_TH: Tensor, w_VH: Tensor, vocab_size: int, slices: int) -> Tensor:
    """fp32 logits minus their row's maximum, -inf in the columns behind `vocab_size`: [T, V]."""
    logits_TV = matmul_rows(hidden_TH, w_VH.t(), slices)
    logits_TV = logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()
    logits_TV[:, vocab_size:] = float("-inf")
    return logits_TV.sub_(logits_TV.amax(-1, keepdim=True))


def _token_losses(logits_TV: Tensor, sums_T1: Tensor, targets_T: Tensor) -> Tensor:
    valid_T = targets_T != IGNORED
    chosen_T1 = logits_TV.gather(1, targets_T.clamp(min=0).unsqueeze(1))
    return torch.where(valid_T, (sums_T1.log() - chosen_T1).squeeze(1), 0.0)


@torch.no_grad()
def head_loss(hidden_TH: Tensor, w_VH: Tensor, vocab_size: int, targets_T: Tensor, slices: int = 1) -> Tensor:
    """Cross-entropy of each token, fp32 [T]; 0 where the target is ignored. See `head_loss_and_gradient`."""
    if has_kernels(hidden_TH):
        from mok.launch.dense import cross_entropy

        return cross_entropy(matmul_rows(hidden_TH, w_VH.t(), slices), vocab_size, targets_T, IGNORED, None)
    logits_TV = _shifted_logits(hidden_TH, w_VH, vocab_size, slices)
    return _token_losses(logits_TV, logits_TV.exp().sum(-1, keepdim=True), targets_T)


@torch.no_grad()
def head_loss_and_gradient(
    hidden_TH: Tensor, w_VH: Tensor, vocab_size: int, targets_T: Tensor, scale: Tensor, slices: int = 1
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cross-entropy of each token, the gradient of `scale` times their sum, and that of the weight if it has no sink.

    hidden_TH: output of the decoder. w_VH: head, V a multiple of 16 of which the first `vocab_size` rows mean something.
    targets_T: int64, `IGNORED` for none. scale: float64, one number on their device. slices: the T tokens are those of so many.
    Returns (fp32 [T], dhidden_TH, dw_VH or None). A weight with a `grad_sink` gives its gradient there, slice by slice; one
    that is frozen gives none.
    """
    if has_kernels(hidden_TH):
        from mok.launch.dense import cross_entropy

        dlogits_TV = matmul_rows(hidden_TH, w_VH.t(), slices)
        losses_T = cross_entropy(dlogits_TV, vocab_size, targets_T, IGNORED, scale)
    else:
        losses_T, dlogits_TV = _losses_and_gradient(hidden_TH, w_VH, vocab_size, targets_T, scale, slices)
    dw_VH = add_product(w_VH, dlogits_TV, hidden_TH)
    return losses_T, matmul_rows(dlogits_TV, w_VH, slices), dw_VH


def _losses_and_gradient(
    hidden_TH: Tensor, w_VH: Tensor, vocab_size: int, targets_T: Tensor, scale: Tensor, slices: int
) -> tuple[Tensor, Tensor]:
    """The loss of each token, fp32 [T], and the gradient of the logits, [T, V] in the dtype of `hidden_TH`."""
    logits_TV = _shifted_logits(hidden_TH, w_VH, vocab_size, slices)
    safe_T1 = targets_T.clamp(min=0).unsqueeze(1)
    chosen_T1 = logits_TV.gather(1, safe_T1)
    probabilities_TV = logits_TV.exp_()
    sums_T1 = probabilities_TV.sum(-1, keepdim=True)
    valid_T1 = (targets_T != IGNORED).unsqueeze(1)
    losses_T1 = torch.where(valid_T1, sums_T1.log() - chosen_T1, 0.0)
    scale_T1 = torch.where(valid_T1, scale, 0.0).to(sums_T1.dtype)
    dlogits_TV = probabilities_TV.mul_(scale_T1 / sums_T1)
    # One target per token, so each place is written once and the order of writes does not matter.
    dlogits_TV.scatter_(1, safe_T1, dlogits_TV.gather(1, safe_T1).sub_(scale_T1))
    return losses_T1.squeeze(1), dlogits_TV.to(hidden_TH.dtype)
