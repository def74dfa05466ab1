"""mok's experts inside Hugging Face models: forward, backward, a standard Trainer, and what is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")

import mok.hf  # noqa: E402
from mok.backends import mega  # noqa: E402
from mok.backends.interface import LayerShape  # noqa: E402
from mok.errors import UsageError  # noqa: E402

SIZES = {
    "vocab_size": 272,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=32, num_experts=4, head_dim=16, norm_topk_prob=True
    ),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(
        **SIZES, moe_intermediate_size=32, intermediate_size=48, n_routed_experts=4, head_dim=16, first_k_dense_replace=1
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, intermediate_size=32, num_local_experts=4),
    "olmoe": lambda: transformers.OlmoeConfig(**SIZES, intermediate_size=32, num_experts=4, pad_token_id=0, eos_token_id=0),
}


def model_of(name: str, implementation: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), experts_implementation=implementation)


def run(model: torch.nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ids = torch.randint(0, 272, (3, 40), generator=torch.Generator().manual_seed(1))
    output = model(ids, labels=ids)
    output.loss.backward()
    return output.logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.detach(), expected.detach()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients_are_those_of_eager_experts(name):
    logits, grads = run(model_of(name, "mok"))
    eager_logits, eager_grads = run(model_of(name, "eager"))
    assert error(logits, eager_logits) < 1e-6
    assert grads.keys() == eager_grads.keys()
    assert {name: error(grads[name], grad) for name, grad in eager_grads.items() if error(grads[name], grad) > 1e-5} == {}


def test_the_registered_function_is_the_one_that_runs(monkeypatch):
    calls = []
    real = mok.hf.moe
    monkeypatch.setattr(mok.hf, "moe", lambda *args, **kwargs: calls.append(1) or real(*args, **kwargs))
    model = model_of("qwen3_moe", "eager")
    run(model)
    assert not calls
    model.set_experts_implementation("mok")
    run(model)
    assert len(calls) == 2


def test_autocast_computes_in_bf16():
    model = model_of("qwen3_moe", "mok")
    experts = model.model.layers[0].mlp.experts
    x = torch.randn(20, 64)
    ids, weights = torch.topk(torch.randn(20, 4).softmax(1), 2).indices, torch.rand(20, 2)
    plain = experts(x, ids, weights)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = experts(x, ids, weights)
    assert cast.dtype == torch.float32
    assert 1e-4 < error(cast, plain) < 2e-2


def test_routes_of_other_ranks_contribute_nothing():
    experts = model_of("qwen3_moe", "mok").model.layers[0].mlp.experts
    experts._is_expert_parallel = True
    x, weights = torch.randn(6, 64), torch.rand(6, 2)
    ids = torch.tensor([[0, 1], [4, 1], [2, 4], [4, 4], [3, 0], [1, 2]])
    y = experts(x, ids, weights)
    assert torch.equal(y[3], torch.zeros(64))
    alone = experts(x[1:2], torch.tensor([[1, 4]]), weights[1:2].flip(1))
    assert torch.equal(y[1:2], alone)


def test_a_clamped_gate_is_found():
    module = torch.nn.Module()
    module.has_gate, module.has_bias, module.is_transposed, module.is_concatenated = True, False, False, True
    module.limit = 7.0

    def apply_gate(gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate.clamp(max=7.0)) * up.clamp(-7.0, 7.0)

    module._apply_gate = apply_gate
    assert mok.hf._checked_clamp(module) == 7.0
    module.limit = 6.0
    with pytest.raises(UsageError, match="its gate is not SwiGLU"):
        mok.hf._checked_clamp(module)


def test_other_experts_are_refused_by_name():
    config = transformers.GptOssConfig(
        vocab_size=64, hidden_size=64, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, num_local_experts=4, num_experts_per_tok=2, layer_types=["full_attention"], pad_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.set_experts_implementation("mok")
    with pytest.raises(UsageError, match="GptOssExperts has biases, transposed weights"):
        model(torch.tensor([[1, 2, 3]]))


def test_a_standard_trainer_trains_with_it(tmp_path):
    text = "def add(a, b):\n    return a + b\n\n" * 40
    rows = [list(text[start : start + 48].encode()) for start in range(0, 1200, 37)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=25,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    model = model_of("qwen3_moe", "mok")
    data = [{"input_ids": torch.tensor(row), "labels": torch.tensor(row)} for row in rows]
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] > 5
    assert losses[-1] < losses[0] - 2
    model.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", experts_implementation="mok")
    ids = torch.tensor([rows[0]])
    assert torch.equal(again.eval()(ids).logits, model.eval()(ids).logits)


@pytest.mark.gpu
def test_the_megakernel_runs_in_a_model_on_a_gpu(monkeypatch):
    """Logits and gradients in bf16 are no further from fp32 than those of eager experts in bf16."""
    device = torch.device("cuda")
    if reasons := mega.why_not(LayerShape(256, 128, 8, 2), torch.bfloat16, device):
        pytest.skip(f"no megakernel here: {reasons}")
    sizes = SIZES | {"hidden_size": 256}
    config = transformers.Qwen3MoeConfig(**sizes, moe_intermediate_size=128, num_experts=8, head_dim=64, norm_topk_prob=True)

    def result(implementation: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=implementation)
        ids = torch.randint(0, 272, (3, 40), generator=torch.Generator().manual_seed(1)).to(device)
        output = model.to(device, dtype)(ids, labels=ids)
        output.loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters() if ".experts." in name}
        return {"logits": output.logits.detach(), **grads}

    exact, eager = result("eager", torch.float32), result("eager", torch.bfloat16)
    calls = []
    forward = mega.forward
    monkeypatch.setattr(mega, "forward", lambda *args: calls.append(1) or forward(*args))
    ours = result("mok", torch.bfloat16)
    assert len(calls) == 2
    for name, value in exact.items():
        assert error(ours[name].float(), value) <= 1.5 * error(eager[name].float(), value), name


def test_plain_mok_does_not_load_transformers():
    program = "import sys, mok; mok.MoE; assert not any(name.startswith('transformers') for name in sys.modules)"
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


def test_without_transformers_5_the_import_says_what_is_needed():
    program = "import sys; sys.modules['transformers'] = None; import mok.hf"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "ImportError: mok.hf needs transformers 5" in result.stderr
