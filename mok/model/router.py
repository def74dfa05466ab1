"""The router: which experts a token goes to, with what weights, and the losses that keep experts busy.

Owns everything between the tokens and (expert ids, weights): fp32 whatever the model's dtype, ties to the lowest expert id,
an explicit backward without scatter-add. Knows nothing of experts, schedules or trainers. Read next: `mok/model/moe.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mok.errors import NonFiniteError, UsageError
from mok.gradients import GEMM_MULTIPLE, add_gradient, add_product, slices_of
from mok.grid import CallGrid
from mok.launch.status import HostCopy

__all__ = ["Router", "Routes", "Routing", "route", "router_linear", "updated_bias"]

SIGMOID_EPSILON = 1e-20  # added to the sum of sigmoid scores, as the published sigmoid routers do


@dataclass(frozen=True)
class Routing:
    """How logits become routes; the keys of `mok.config.MoEConfig` with the same names say what they mean."""

    top_k: int
    score: str = "softmax"
    score_order: str = "before_top_k"
    normalize_weights: bool = True
    scaling_factor: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    force_routing: str = "none"

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("score", self.score, ("softmax", "sigmoid")),
            ("score_order", self.score_order, ("before_top_k", "after_top_k")),
            ("force_routing", self.force_routing, ("none", "balanced", "skewed", "one-hot")),
        ):
            if value not in allowed:
                raise UsageError(f"moe.{name} = {value!r}: must be one of {', '.join(allowed)}")
        if self.score == "sigmoid" and self.score_order == "after_top_k":
            raise UsageError("moe.score_order = after_top_k is for softmax only; use before_top_k, or moe.score = softmax")


@dataclass(frozen=True)
class Routes:
    """Where tokens go. Slots of a token are in order of rising expert id.

    expert_ids_TK: int32; -1 for tokens that are padding. weights_TK: fp32. balance_loss_C, z_loss_C: fp32, one for each
    of this rank's slices of the call. All but the ids can be differentiated.
    """

    expert_ids_TK: Tensor
    weights_TK: Tensor
    balance_loss_C: Tensor
    z_loss_C: Tensor


def route(
    logits_TE: Tensor,
    routing: Routing,
    bias_E: Tensor | None = None,
    num_slices: int = 1,
    valid_T: Tensor | None = None,
) -> Routes:
    """Routes of each token from its logits.

    logits_TE: fp32 (or float64), T a multiple of `num_slices`. bias_E: fp32, added to the scores for choosing only. valid_T:
    bool, False for padding, which gets no route and counts in no loss.

    The chosen experts are the K highest scores (of logits with `after_top_k`), ties going to the lowest id; with groups, from
    the `top_groups` groups whose two best scores sum highest. Their weights are the scores without the bias, divided by their
    sum in descending order of choice if normalised (plus 1e-20 for sigmoid), times `scaling_factor`.

    With n the tokens of a slice that are valid, c_e the routes to expert e among them and p_te the softmax of the logits (for
    sigmoid, the scores divided by their sum), a slice has

        balance loss = E * sum_e (c_e / (n K)) * (sum_t p_te / n)      1 if balanced, E/K if K experts get everything
        z-loss       = sum_t logsumexp_e(logits_te)^2 / n
    """
    function = _RouteOnGpu if _has_kernels(logits_TE, routing) else _Route
    ids_TK, weights_TK, balance_C, z_C = function.apply(logits_TE, bias_E, routing, num_slices, valid_T)
    return Routes(ids_TK, weights_TK, balance_C, z_C)


def router_linear(x_TH: Tensor, w_EH: Tensor) -> Tensor:
    """x w^T in fp32 (float64 for float64), whatever the dtypes: [T, E]. The weight's gradient goes to its `grad_sink` or
    `main_grad`, if it has one."""
    return _RouterLinear.apply(x_TH, w_EH)


def updated_bias(bias_E: Tensor, counts_E: Tensor, rate: float | Tensor) -> Tensor:
    """The correction bias after an optimizer step: plus `rate` for experts with fewer routes than the mean, minus `rate` for
    those with more. counts_E: integer, routes of the whole step over all ranks. Returns fp32."""
    total = counts_E.sum()
    return bias_E + rate * torch.sign(total - counts_E * counts_E.numel()).to(bias_E.dtype)


class Router(nn.Module):
    """Logits and routes of one MoE layer.

    weight [E, H] in the model's dtype; correction_bias [E] (a buffer, or None) stays fp32 through every cast. layer: index that
    errors name. Non-finite logits raise NonFiniteError at once on a CPU; on a GPU, and compiled, those tokens get no route, and
    `num_bad_rows`, a device counter, grows by their number: `raise_for_bad_rows` waits for it, `raise_for_seen_rows` does not.
    """

    correction_bias: Tensor | None
    num_bad_rows: Tensor

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        routing: Routing,
        *,
        correction_bias: bool = False,
        layer: int = 0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= routing.top_k <= num_experts:
            raise UsageError(f"moe.top_k = {routing.top_k}: must be 1 to moe.num_experts = {num_experts}")
        if num_experts % routing.num_groups or routing.top_groups * (num_experts // routing.num_groups) < routing.top_k:
            raise UsageError(
                f"moe.num_groups = {routing.num_groups}, top_groups = {routing.top_groups}: groups must share {num_experts} "
                f"experts evenly, and the chosen ones hold at least top_k = {routing.top_k}"
            )
        self.routing, self.layer = routing, layer
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        nn.init.normal_(self.weight, std=0.02)
        bias_E = torch.zeros(num_experts, dtype=torch.float32, device=device) if correction_bias else None
        self.register_buffer("correction_bias", bias_E)
        self.register_buffer("num_bad_rows", torch.zeros((), dtype=torch.int64, device=device), persistent=False)
        self._seen = HostCopy()

    def forward(self, x_TH: Tensor, grid: CallGrid | None = None, valid_T: Tensor | None = None) -> Routes:
        logits_TE = router_linear(x_TH, self.weight)
        if x_TH.device.type == "cpu" and not torch.compiler.is_compiling():
            self._raise_if_not_finite(logits_TE.detach())
        else:
            finite_T = logits_TE.detach().isfinite().all(1)
            self.num_bad_rows += (~finite_T).sum()
            logits_TE = logits_TE.masked_fill(~finite_T.unsqueeze(1), 0)
            valid_T = finite_T if valid_T is None else finite_T & valid_T
        return route(logits_TE, self.routing, self.correction_bias, len((grid or CallGrid()).local_slices), valid_T)

    @torch.no_grad()
    def update_bias(self, counts_E: Tensor, rate: float | Tensor) -> None:
        """See `updated_bias`; once per optimizer step."""
        assert self.correction_bias is not None
        self.correction_bias.copy_(updated_bias(self.correction_bias, counts_E, rate))

    def raise_for_bad_rows(self) -> None:
        """NonFiniteError if any call since the last of this method had logits that are not finite; waits for the device."""
        if bad := int(self.num_bad_rows):
            self.num_bad_rows.zero_()
            self._seen.clear()
            raise self.not_finite(str(bad))

    def raise_for_seen_rows(self) -> None:
        """The same for calls that the host has heard of by now; then ask to hear of those until here."""
        if self._seen.any():
            self.raise_for_bad_rows()
        self._seen.refresh(self.num_bad_rows)

    def _raise_if_not_finite(self, logits_TE: Tensor) -> None:
        if logits_TE.numel() == 0 or all(math.isfinite(bound) for bound in torch.aminmax(logits_TE)):
            return
        bad = int((~logits_TE.isfinite().all(1)).sum())
        raise self.not_finite(f"{bad} of {logits_TE.shape[0]}")

    def not_finite(self, rows: str, rank: int | None = None) -> NonFiniteError:
        """What to raise where `rows` (a number, in words) have logits that are not finite."""
        where = "" if rank is None else f" on rank {rank}"
        return NonFiniteError(
            f"router of layer {self.layer}{where}: {rows} rows of logits hold NaN or infinity; "
            "look at the loss and gradient norm of the steps before, and lower optim.lr"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Router:
        """Casts and moves: the bias only moves. In bf16 it would stop growing at 256 updates."""
        before = self.correction_bias
        super()._apply(fn, recurse)
        if before is not None and self.correction_bias is not None and self.correction_bias.dtype != torch.float32:
            self.correction_bias = before.to(self.correction_bias.device)
        return self


class _RouterLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, w_EH: Tensor) -> Tensor:
        ctx.save_for_backward(x_TH, w_EH)
        ctx.parameter = w_EH
        if _by_kernel(x_TH, w_EH):
            return _product_of_rows(x_TH, w_EH.t(), torch.float32)
        rows, columns, inner = -x_TH.shape[0] % GEMM_MULTIPLE, -w_EH.shape[0] % GEMM_MULTIPLE, -x_TH.shape[1] % GEMM_MULTIPLE
        x = F.pad(_wide(x_TH), (0, inner, 0, rows)) if rows or inner else _wide(x_TH)
        w = F.pad(_wide(w_EH), (0, inner, 0, columns)) if columns or inner else _wide(w_EH)
        return torch.mm(x, w.t())[: x_TH.shape[0], : w_EH.shape[0]].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogits_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TH, w_EH = ctx.saved_tensors
        dx_TH = dw_EH = None
        parts_TX = _three_parts(dlogits_TE) if _in_parts(x_TH, w_EH) else None
        if ctx.needs_input_grad[0] and parts_TX is not None:
            dx_TH = _product_of_rows(parts_TX, w_EH.repeat(3, 1), x_TH.dtype)
        elif ctx.needs_input_grad[0] and _by_kernel(x_TH, w_EH):
            dx_TH = _product_of_rows(dlogits_TE, w_EH, x_TH.dtype)
        elif ctx.needs_input_grad[0]:
            tokens, columns = -x_TH.shape[0] % GEMM_MULTIPLE, -x_TH.shape[1] % GEMM_MULTIPLE
            w = F.pad(_wide(w_EH), (0, columns)) if columns else _wide(w_EH)
            dlogits = F.pad(dlogits_TE, (0, 0, 0, tokens)) if tokens else dlogits_TE
            dx_TH = torch.mm(dlogits, w)[: x_TH.shape[0], : x_TH.shape[1]].to(x_TH.dtype)
        if ctx.needs_input_grad[1]:
            if parts_TX is not None:
                dw_EH = add_gradient(ctx.parameter, _sum_of_products(parts_TX, x_TH, slices_of(ctx.parameter)))
            else:
                dw_EH = add_product(ctx.parameter, dlogits_TE, _wide(x_TH))
        return dx_TH, dw_EH


def _by_kernel(x_TH: Tensor, w_EH: Tensor) -> bool:
    """Whether `mok/launch/product.py` makes the products: what a library does on a GPU depends on the number of rows."""
    return x_TH.is_cuda and torch.float64 not in (x_TH.dtype, w_EH.dtype)


def _in_parts(x_TH: Tensor, w_EH: Tensor) -> bool:
    """Whether fp32 gradients of logits meet bf16 as three bf16 parts, in sizes that the tensor cores take."""
    both_bf16 = x_TH.dtype == w_EH.dtype == torch.bfloat16
    return x_TH.is_cuda and both_bf16 and w_EH.shape[0] % GEMM_MULTIPLE == 0 and x_TH.shape[1] % GEMM_MULTIPLE == 0


def _product_of_rows(x: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    """x @ w on a GPU: of bf16 operands as they are, whose products are exact in fp32 and made by tensor cores; else in fp32."""
    from mok.launch.product import product_of_rows

    both_bf16 = x.dtype == w.dtype == torch.bfloat16
    return product_of_rows(x, w, dtype) if both_bf16 else product_of_rows(x.float(), w.float(), dtype)


def _three_parts(values_TE: Tensor) -> Tensor:
    """fp32 [T, E] as bf16 [T, 3 E]: three numbers side by side whose sum has all 24 bits of each."""
    parts, rest = [], values_TE
    for _ in range(3):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].float()
    return torch.cat(parts, 1)


def _sum_of_products(parts_TX: Tensor, x_TH: Tensor, num_slices: int) -> Tensor:
    """[slices, E, H]: the sum over the three parts of parts^T x, for each slice."""
    pairs = zip(parts_TX.chunk(num_slices), x_TH.chunk(num_slices), strict=True)
    products = [torch.mm(parts.t(), x, out_dtype=torch.float32) for parts, x in pairs]
    return torch.stack([product.unflatten(0, (3, -1)).sum(0) for product in products])


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TE: Tensor, bias_E: Tensor | None, routing: Routing, num_slices: int, valid_T: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        tokens = logits_TE.shape[0]
        if tokens % num_slices:
            raise _uneven(tokens, num_slices)
        if routing.score == "softmax":
            scores_TE = torch.softmax(logits_TE, dim=1)
        else:
            scores_TE = torch.neg(logits_TE).exp_().add_(1.0).reciprocal_()
        after = routing.score_order == "after_top_k"
        ids_TK = _chosen(logits_TE if after else scores_TE, bias_E, routing)
        chosen_TK = torch.softmax(logits_TE.gather(1, ids_TK), dim=1) if after else scores_TE.gather(1, ids_TK)
        sum_T1 = None
        if routing.normalize_weights and not after:
            sum_T1 = chosen_TK.sum(1, keepdim=True)
            if routing.score == "sigmoid":
                sum_T1 += SIGMOID_EPSILON
            chosen_TK = chosen_TK / sum_T1
        if routing.top_k > 1:
            ids_TK, order_TK = torch.sort(ids_TK, dim=1)
            chosen_TK = chosen_TK.gather(1, order_TK)
        weights_TK = chosen_TK if routing.scaling_factor == 1.0 else chosen_TK * routing.scaling_factor

        probabilities_TE = scores_TE if routing.score == "softmax" else scores_TE / scores_TE.sum(1, keepdim=True)
        if valid_T is not None:
            ids_TK = ids_TK.masked_fill(~valid_T.unsqueeze(1), -1)
            weights_TK = weights_TK.masked_fill(~valid_T.unsqueeze(1), 0)
        balance_C, load_CE, valid_C = _balance_loss(probabilities_TE, ids_TK, num_slices, valid_T)
        if routing.score == "softmax":  # the largest probability is exp(its logit - lse)
            lse_T = logits_TE.amax(1) - scores_TE.amax(1).log()
        else:
            lse_T = torch.logsumexp(logits_TE, dim=1)
        z_C = _slice_mean(lse_T.square(), num_slices, valid_T, valid_C)
        ids_TK = ids_TK.to(torch.int32)
        saved_logits_TE = None if routing.score == "softmax" else logits_TE
        ctx.save_for_backward(
            scores_TE, probabilities_TE, chosen_TK, sum_T1, ids_TK, load_CE, valid_C, lse_T, valid_T, saved_logits_TE
        )
        ctx.routing = routing
        ctx.mark_non_differentiable(ids_TK)
        ctx.set_materialize_grads(False)
        return ids_TK, weights_TK, balance_C, z_C

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, _: None, dweights_TK: Tensor | None, dbalance_C: Tensor | None, dz_C: Tensor | None
    ) -> tuple[Any, ...]:
        scores_TE, probabilities_TE, chosen_TK, sum_T1, ids_TK, load_CE, valid_C, lse_T, valid_T, logits_TE = ctx.saved_tensors
        routing: Routing = ctx.routing
        slice_tokens = scores_TE.shape[0] // valid_C.shape[0]
        terms = []
        if dweights_TK is not None:
            dchosen_TK = dweights_TK * routing.scaling_factor
            if valid_T is not None:
                dchosen_TK.masked_fill_(~valid_T.unsqueeze(1), 0)
            after = routing.score_order == "after_top_k"
            if after or sum_T1 is not None:  # the quotient rule; a softmax over the chosen has the same form
                dchosen_TK = dchosen_TK - (dchosen_TK * chosen_TK).sum(1, keepdim=True)
                dchosen_TK = dchosen_TK * chosen_TK if after else dchosen_TK / sum_T1
            # A token's ids differ, so every place is written once. Padding has id -1 and a gradient of 0.
            d_TE = torch.zeros_like(scores_TE).scatter_(1, ids_TK.clamp(min=0).to(torch.int64), dchosen_TK)
            if not after and routing.score == "softmax":
                d_TE = (d_TE - (d_TE * scores_TE).sum(1, keepdim=True)) * scores_TE
            elif not after:
                d_TE = d_TE * scores_TE * (1.0 - scores_TE)
            terms.append(d_TE)
        if dbalance_C is not None:
            factor_CE = load_CE * (load_CE.shape[1] * dbalance_C / valid_C.clamp(min=1)).unsqueeze(1)
            d_TE = _by_token(factor_CE, slice_tokens, valid_T)
            d_TE = (d_TE - (d_TE * probabilities_TE).sum(1, keepdim=True)) * probabilities_TE
            terms.append(d_TE if routing.score == "softmax" else d_TE * (1.0 - scores_TE))
        if dz_C is not None:
            factor_C1 = (2.0 * dz_C / valid_C.clamp(min=1)).unsqueeze(1)
            softmax_TE = scores_TE if logits_TE is None else torch.exp(logits_TE - lse_T.unsqueeze(1))
            terms.append(_by_token(factor_C1, slice_tokens, valid_T) * lse_T.unsqueeze(1) * softmax_TE)
        return sum(terms) if terms else None, None, None, None, None


class _RouteOnGpu(torch.autograd.Function):
    """`_Route` with one kernel each way. Keeps logits, ids and two numbers of each token."""

    @staticmethod
    def forward(
        ctx: Any, logits_TE: Tensor, bias_E: Tensor | None, routing: Routing, num_slices: int, valid_T: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        from mok.launch import router as launch

        if logits_TE.shape[0] % num_slices:
            raise _uneven(logits_TE.shape[0], num_slices)
        logits_TE = logits_TE.contiguous()
        softmax = routing.score == "softmax"
        ids_TK, weights_TK, totals_T, lse_T, sums_C = launch.route(
            logits_TE,
            bias_E,
            valid_T,
            num_slices,
            top_k=routing.top_k,
            softmax=softmax,
            normalize=routing.normalize_weights,
            epsilon=0.0 if softmax else SIGMOID_EPSILON,
            scaling=routing.scaling_factor,
        )
        num_experts = logits_TE.shape[1]
        probabilities_CE, counts_CE, squares_C, valid_C = sums_C.split((num_experts, num_experts, 1, 1), dim=1)
        valid_C = valid_C.clamp(min=1)
        load_CE = counts_CE / (valid_C * routing.top_k)
        ctx.save_for_backward(logits_TE, ids_TK, totals_T, lse_T, load_CE, valid_C)
        ctx.routing = routing
        ctx.mark_non_differentiable(ids_TK)
        ctx.set_materialize_grads(False)
        balance_C = num_experts * (load_CE * (probabilities_CE / valid_C)).sum(1)
        return ids_TK, weights_TK, balance_C, (squares_C / valid_C).squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, _: None, dweights_TK: Tensor | None, dbalance_C: Tensor | None, dz_C: Tensor | None
    ) -> tuple[Any, ...]:
        from mok.launch import router as launch

        logits_TE, ids_TK, totals_T, lse_T, load_CE, valid_C = ctx.saved_tensors
        balance_CE = None if dbalance_C is None else load_CE * (load_CE.shape[1] * dbalance_C.unsqueeze(1) / valid_C)
        dlogits_TE = launch.route_backward(
            logits_TE,
            ids_TK,
            totals_T,
            lse_T,
            dweights_TK,
            balance_CE,
            None if dz_C is None else dz_C / valid_C.squeeze(1),
            load_CE.shape[0],
            softmax=ctx.routing.score == "softmax",
            normalize=ctx.routing.normalize_weights,
            scaling=ctx.routing.scaling_factor,
        )
        return dlogits_TE, None, None, None, None


def _has_kernels(logits_TE: Tensor, routing: Routing) -> bool:
    """Whether the kernels of `mok/launch/router.py` can route: what is common; the rest takes separate operations."""
    return (
        logits_TE.is_cuda
        and logits_TE.dtype == torch.float32
        and routing.score_order == "before_top_k"
        and routing.num_groups == 1
        and routing.force_routing == "none"
        and not torch.compiler.is_compiling()
    )


def _uneven(tokens: int, num_slices: int) -> UsageError:
    return UsageError(f"{tokens} tokens do not fill {num_slices} slices evenly; give every slice as many tokens")


def _by_token(values_CX: Tensor, slice_tokens: int, valid_T: Tensor | None) -> Tensor:
    """Each token gets the values of its slice, padding zeros."""
    values_TX = values_CX.repeat_interleave(slice_tokens, 0)
    return values_TX if valid_T is None else values_TX.masked_fill(~valid_T.unsqueeze(1), 0)


def _chosen(scores_TE: Tensor, bias_E: Tensor | None, routing: Routing) -> Tensor:
    """Ids of the K experts of each token, int64 [T, K], best first."""
    if routing.force_routing != "none":
        tokens, num_experts = scores_TE.shape
        return _forced(tokens, num_experts, routing, scores_TE.device)
    choice_TE = scores_TE.clone() if bias_E is None else scores_TE + bias_E
    if routing.num_groups > 1:
        tokens, num_experts = choice_TE.shape
        choice_TGS = choice_TE.view(tokens, routing.num_groups, num_experts // routing.num_groups)
        best_two = choice_TGS.topk(min(2, choice_TGS.shape[2]), dim=2).values.sum(2)
        closed_TG = torch.ones_like(best_two, dtype=torch.bool)
        closed_TG.scatter_(1, _highest(best_two, routing.top_groups), False)
        choice_TE = choice_TGS.masked_fill(closed_TG.unsqueeze(2), float("-inf")).view(tokens, num_experts)
    return _highest(choice_TE, routing.top_k)


def _highest(values_TE: Tensor, count: int) -> Tensor:
    """Ids of the `count` highest values of each row, best first; `values` is destroyed. Of equal values the lowest id comes
    first, which `topk` does not promise: `max` returns the first of them."""
    ids = [values_TE.max(1, keepdim=True).indices]
    while len(ids) < count:
        values_TE.scatter_(1, ids[-1], float("-inf"))
        ids.append(values_TE.max(1, keepdim=True).indices)
    return torch.cat(ids, 1)


def _forced(tokens: int, num_experts: int, routing: Routing, device: torch.device) -> Tensor:
    """Routes that ignore the scores. balanced: round robin. one-hot: everything to the first K experts. skewed: K of E drawn
    without replacement, expert e with weight 1 / (e + 1), the same draws every time."""
    if routing.force_routing == "one-hot":
        return torch.arange(routing.top_k, device=device).expand(tokens, -1)
    if routing.force_routing == "balanced":
        return torch.arange(tokens * routing.top_k, device=device).view(tokens, routing.top_k) % num_experts
    uniform = torch.rand(tokens, num_experts, generator=torch.Generator().manual_seed(0)).to(device)
    keys_TE = uniform.log() * torch.arange(1, num_experts + 1, device=device)  # of exponential variables the smallest win
    return _highest(keys_TE, routing.top_k)


def _balance_loss(
    probabilities_TE: Tensor, ids_TK: Tensor, num_slices: int, valid_T: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of each slice (see `route`) [C]; its share of routes per expert [C, E], and its valid tokens [C]."""
    num_experts, top_k = probabilities_TE.shape[1], ids_TK.shape[1]
    tokens = probabilities_TE.shape[0] // num_slices
    if valid_T is None:
        valid_C = probabilities_TE.new_full((num_slices,), float(tokens))
    else:
        valid_C = valid_T.view(num_slices, tokens).sum(1).to(probabilities_TE.dtype)
        probabilities_TE = probabilities_TE.masked_fill(~valid_T.unsqueeze(1), 0)
    # A token's ids differ, so every place is written once; fp32 counts exactly up to 2^24.
    chosen_TE = torch.zeros_like(probabilities_TE).scatter_(1, ids_TK.clamp(min=0), 1.0)
    if valid_T is not None:
        chosen_TE.masked_fill_(~valid_T.unsqueeze(1), 0)
    counts_CE = chosen_TE.view(num_slices, tokens, num_experts).sum(1)
    load_CE = counts_CE / (valid_C.clamp(min=1) * top_k).unsqueeze(1)
    mean_CE = probabilities_TE.view(num_slices, tokens, num_experts).sum(1) / valid_C.clamp(min=1).unsqueeze(1)
    return num_experts * (load_CE * mean_CE).sum(1), load_CE, valid_C


def _slice_mean(values_T: Tensor, num_slices: int, valid_T: Tensor | None, valid_C: Tensor) -> Tensor:
    """Mean over the valid tokens of each slice: [C]."""
    if valid_T is not None:
        values_T = values_T.masked_fill(~valid_T, 0)
    return values_T.view(num_slices, -1).sum(1) / valid_C.clamp(min=1)


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()
