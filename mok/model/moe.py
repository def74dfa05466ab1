"""A whole MoE layer: the hub that routes, schedules, and has experts and shared experts computed and combined.

Owns the layer's parameters and what it tells a trainer about a call. Knows nothing of optimizers or of how a backend works.
Read next: `mok/model/router.py` and `mok/layer.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mok.backends import choose
from mok.backends.interface import LayerShape, Options
from mok.backends.quantization import WeightCache
from mok.errors import UsageError
from mok.grid import CallGrid
from mok.launch.status import raise_if_seen, tell_host
from mok.layer import grid_of, moe_layer
from mok.model.router import Router, Routing, router_linear
from mok.quantization import Quantization
from mok.transport.collective import CollectiveTransport
from mok.transport.interface import Transport

__all__ = ["MoE", "MoEStats"]


@dataclass(frozen=True)
class MoEStats:
    """What a call of a layer did. balance_loss_C, z_loss_C: fp32, of each of this rank's slices, see `mok.model.router.route`.
    counts_CE: int64, routes of each of this rank's slices to each expert of all ranks."""

    balance_loss_C: Tensor
    z_loss_C: Tensor
    counts_CE: Tensor


class MoE(nn.Module):
    """Router, E routed experts of width I of which each token sees K, and any number of shared experts.

    Parameters, in `dtype`: router.weight [E, H]; w_gate_up [L, 2, I, H] and w_down [L, H, I], this rank's L = E / ranks
    experts; with shared experts w_shared_gate_up [2S, H] (gate rows first) and w_shared_down [H, S], S their summed width;
    with `shared_gate` also w_shared_gate [1, H]. fp32 gradients are added to `main_grad` of a parameter that has one, else go
    to `.grad`.

    backend, recompute, clamp, quantization: see `mok.moe`. score ... force_routing: see `mok.model.router.route` and
    `mok.config.MoEConfig`. group: the ranks that share the experts, each with its own tokens; router and shared experts must be
    equal on all of them. transport: how rows travel among them, by default all-to-all; a trainer passes it with the number of
    ranks and no group. layer: the index that errors name.
    initialize: whether expert weights get random values, normal with deviation 0.02; without, who made the layer fills them.

    Example: y = MoE(128, 256, num_experts=8, top_k=2)(torch.randn(4, 16, 128)).
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        num_shared_experts: int = 0,
        shared_intermediate_size: int = 0,
        shared_gate: bool = False,
        clamp: float = 0.0,
        score: str = "softmax",
        score_order: str = "before_top_k",
        normalize_weights: bool = True,
        scaling_factor: float = 1.0,
        correction_bias: bool = False,
        num_groups: int = 1,
        top_groups: int = 1,
        force_routing: str = "none",
        backend: str = "auto",
        recompute: str = "none",
        quantization: Quantization | None = None,
        group: ProcessGroup | None = None,
        transport: Transport | None = None,
        ranks: int = 1,
        layer: int = 0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        initialize: bool = True,
    ) -> None:
        super().__init__()
        routing = Routing(top_k, score, score_order, normalize_weights, scaling_factor, num_groups, top_groups, force_routing)
        self.router = Router(
            hidden_size, num_experts, routing, correction_bias=correction_bias, layer=layer, device=device, dtype=dtype
        )
        self.grid = grid_of(group)
        if group is not None:
            transport, ranks = transport or CollectiveTransport(group), group.size()
        if num_experts % ranks:
            raise UsageError(f"{num_experts} experts cannot be shared by {ranks} ranks evenly; use a divisor of {num_experts}")
        self.backend = backend
        self.options = Options(clamp, recompute, transport, layer=layer, quantization=quantization)
        local = num_experts // ranks
        self.w_gate_up = _empty(local, 2, intermediate_size, hidden_size, device=device, dtype=dtype)
        self.w_down = _empty(local, hidden_size, intermediate_size, device=device, dtype=dtype)
        self.w_shared_gate_up = self.w_shared_down = self.w_shared_gate = None
        if num_shared_experts:
            width = num_shared_experts * (shared_intermediate_size or intermediate_size)
            self.w_shared_gate_up = _empty(2 * width, hidden_size, device=device, dtype=dtype)
            self.w_shared_down = _empty(hidden_size, width, device=device, dtype=dtype)
            if shared_gate:
                self.w_shared_gate = _empty(1, hidden_size, device=device, dtype=dtype)
        if initialize:  # from torch's global generator, as the router's
            for weight in self.parameters(recurse=False):
                nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to [..., H], in the dtype of x, which is that of the parameters.

        Raises NonFiniteError for logits that are not finite. A GPU is not waited for: there the error comes with the first call
        after the host has heard of it, or from `mok.check_status` and `router.raise_for_bad_rows`, which wait."""
        y_TH, _ = self.call(x.reshape(-1, x.shape[-1]))
        if x.is_cuda and not torch.compiler.is_compiling():
            self.router.raise_for_seen_rows()
            raise_if_seen(x.device)
            tell_host(x.device)
        return y_TH.view(x.shape)

    def plans_on_device(self, tokens: int) -> bool:
        """Whether the backend of calls of so many tokens plans them on the device, so that nothing waits for the host."""
        local, _, width, hidden = self.w_gate_up.shape
        shared = 0 if self.w_shared_down is None else self.w_shared_down.shape[1]
        ranks = self.grid.ranks
        shape = LayerShape(hidden, width, local * ranks, self.router.routing.top_k, ranks, shared)
        weight = self.w_gate_up
        transport = self.options.transport.name if self.options.transport else "collective"
        module, _ = choose(self.backend, shape, weight.dtype, weight.device, self.options.quantization, tokens, transport)
        return hasattr(module, "build_schedule")

    def cache_quantized_weights(self) -> None:
        """Keep rounded weights from call to call. Whoever changes weights must call `weights_changed` before the next one."""
        self.options = replace(self.options, weight_cache=WeightCache())

    def weights_changed(self) -> None:
        """Forget the rounded weights that are kept, if any are."""
        if self.options.weight_cache is not None:
            self.options.weight_cache.clear()

    def call(self, x_TH: Tensor, grid: CallGrid | None = None, valid_T: Tensor | None = None) -> tuple[Tensor, MoEStats]:
        """What a trainer calls: y_TH and the statistics. grid: the call, by default one slice of each rank. valid_T: bool,
        False for padding, which reaches no expert and counts in no loss."""
        grid = grid or self.grid
        routes = self.router(x_TH, grid, valid_T)
        shared = scale_T = None
        if self.w_shared_gate_up is not None and self.w_shared_down is not None:
            shared = (self.w_shared_gate_up, self.w_shared_down)
            if self.w_shared_gate is not None:
                scale_T = 1.0 / (1.0 + torch.exp(-router_linear(x_TH, self.w_shared_gate).squeeze(1)))
        y_TH, counts_CE = moe_layer(
            x_TH,
            routes.expert_ids_TK,
            routes.weights_TK,
            (self.w_gate_up, self.w_down),
            options=self.options,
            backend=self.backend,
            grid=grid,
            shared=shared,
            shared_scale_T=scale_T,
        )
        return y_TH, MoEStats(routes.balance_loss_C, routes.z_loss_C, counts_CE)


def _empty(*shape: int, device: torch.device | None, dtype: torch.dtype | None) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
