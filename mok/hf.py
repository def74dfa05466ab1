"""mok's experts inside Hugging Face models: `import mok.hf`, then `experts_implementation="mok"`.

Owns the entry in transformers' registry of expert functions and the translation of its calls. Any model whose experts are
SwiGLU without biases runs forward and backward through `mok.moe`, on whatever backend the machine has; others are refused when
they are called. Plain `import mok` never loads this module.

    import mok.hf
    model = AutoModelForCausalLM.from_pretrained(DIR, experts_implementation="mok")
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from mok.errors import UsageError
from mok.layer import moe

try:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
except ImportError as error:
    raise ImportError(
        "mok.hf needs transformers 5, which has the registry of experts; pip install 'transformers>=5.24'"
    ) from error

__all__ = ["experts_forward"]


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The routed experts of a transformers module: hidden_states [T, H], ids and weights [T, K], result [T, H].

    Under expert parallelism ids of `num_experts` and above are routes of other ranks; they contribute nothing here. Outputs of
    a token's experts are added in order of expert id, as the eager implementation does. Raises UsageError for experts that
    are not SwiGLU, or have biases, transposed or interleaved weights or a norm behind them.
    """
    clamp = _clamp_of(self)
    ids_TK, order_TK = torch.sort(top_k_index, dim=1)
    weights_TK = top_k_weights.gather(1, order_TK)
    if getattr(self, "_is_expert_parallel", False):  # since transformers 5.24
        ids_TK = ids_TK.masked_fill(ids_TK >= self.num_experts, -1)
    x_TH, gate_up_E2IH, down_EHI = hidden_states, self.gate_up_proj, self.down_proj
    if torch.is_autocast_enabled(x_TH.device.type):
        dtype = torch.get_autocast_dtype(x_TH.device.type)
        x_TH, gate_up_E2IH, down_EHI = x_TH.to(dtype), gate_up_E2IH.to(dtype), down_EHI.to(dtype)
    gate_EIH, up_EIH = gate_up_E2IH.chunk(2, dim=1)
    return moe(x_TH, ids_TK, weights_TK, gate_EIH, up_EIH, down_EHI, clamp=clamp).to(hidden_states.dtype)


def _clamp_of(experts: Any) -> float:
    """The limit on SwiGLU's inputs in these experts, 0 for none; found once and kept on the module."""
    known: float | None = getattr(experts, "_mok_clamp", None)
    if known is None:
        known = _checked_clamp(experts)
        experts._mok_clamp = known
    return known


def _checked_clamp(experts: Any) -> float:
    name = type(experts).__name__
    unlike = [
        what
        for what, present in (
            ("no gate", not experts.has_gate),
            ("biases", experts.has_bias),
            ("transposed weights", experts.is_transposed),
            ("interleaved gate and up rows", not experts.is_concatenated),
            ("a norm behind each expert", getattr(experts, "has_post_expert_norm", False)),
        )
        if present
    ]
    if unlike:
        raise UsageError(f'{name} has {", ".join(unlike)}, which mok.moe does not compute; use experts_implementation="eager"')
    limit = getattr(experts, "limit", None) or getattr(experts, "swiglu_limit", None) or 0.0
    # What the module's own gate does is tried on values to both sides of every limit in use, rather than guessed from its name.
    gate, up = torch.cartesian_prod(torch.linspace(-20, 20, 33), torch.linspace(-20, 20, 33)).unbind(1)
    expected = silu(gate.clamp(max=limit)) * up.clamp(-limit, limit) if limit else silu(gate) * up
    if not torch.allclose(experts._apply_gate(torch.cat([gate, up])), expected, rtol=1e-5, atol=1e-6):
        raise UsageError(
            f'{name}: its gate is not SwiGLU, which is all that mok.moe computes; use experts_implementation="eager"'
        )
    return float(limit)


ALL_EXPERTS_FUNCTIONS.register("mok", experts_forward)
