"""Tiny random Hugging Face models."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from kha_megatron.hf import KHAModelConfig
from tests.conversion.checkpoints import VOCAB, tokens  # noqa: F401

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 24,
    "rms_norm_eps": 3e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
PARTIAL = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.7}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 4.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 3.5,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
}
SHORT_YARN = YARN | {"original_max_position_embeddings": 16, "beta_fast": 2, "beta_slow": 0.1}
"""Interpolates half of the second frequency. With the default betas, it would be all of it."""
LATENT = {
    "num_key_value_heads": 6,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}
DEEPSEEK = (
    SIZES
    | LATENT
    | {"rms_norm_eps": 1e-6}
    | {
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 20,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "n_group": 4,
        "topk_group": 2,
    }
)
DEEPSEEK.pop("head_dim")
GLM = SIZES | {
    "use_qk_norm": True,
    "attention_bias": True,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
    "rope_parameters": PARTIAL,
}
MOE = SIZES | {"num_experts": 6, "moe_intermediate_size": 20}
QWEN3_MOE = MOE | {"num_experts_per_tok": 3, "norm_topk_prob": True}
KHA_MOE = MOE | {
    "num_hidden_layers": 4,
    "num_experts_per_tok": 2,
    "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
    "shared_expert_intermediate_size": 28,
    "shared_expert_gate": True,
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.5,
}
FULL = {"layer_types": ["full_attention"] * 2}
QWEN3_NEXT = SIZES | FULL | {"num_experts": 0, "mlp_only_layers": [0, 1]}
QWEN3_5 = (
    SIZES | FULL | {"rope_parameters": {"mrope_section": [1, 1, 1], "mrope_interleaved": True}}
)
QWEN3_5["rope_parameters"] |= PARTIAL | {"partial_rotary_factor": 1.0}
SHARED = {"shared_expert_intermediate_size": 28}
LINEAR = {"kha_query": "linear", "kha_key": "linear", "kha_value": "linear"}
GTA = {"kha_attention": "gta", "head_dim": 12, "kha_query": "gate", "kha_value": "mlp"}
MLA = LINEAR | LATENT
GLA = MLA | {"kha_attention": "gla"}

CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(**SIZES),
    "qwen3, tied": Qwen3Config(**SIZES | {"tie_word_embeddings": True}),
    "qwen2, tied, yarn": Qwen2Config(
        **SIZES | {"tie_word_embeddings": True, "rope_parameters": SHORT_YARN}
    ),
    "llama": LlamaConfig(**SIZES | {"num_key_value_heads": 6}),
    "llama, llama3 rope": LlamaConfig(**SIZES | {"rope_parameters": LLAMA3}),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "qwen3_moe": Qwen3MoeConfig(**QWEN3_MOE),
    "qwen3_moe, weights as they are, a dense layer": Qwen3MoeConfig(
        **QWEN3_MOE | {"norm_topk_prob": False, "num_hidden_layers": 4, "mlp_only_layers": [1]}
    ),
    "glm4_moe": Glm4MoeConfig(**GLM),
    "deepseek_v3": DeepseekV3Config(**DEEPSEEK),
    "deepseek_v3, yarn": DeepseekV3Config(
        **DEEPSEEK
        | {"rope_parameters": YARN, "max_position_embeddings": 9000}
        | {"n_group": 1, "topk_group": 1}
    ),
    "qwen3_next": Qwen3NextConfig(**QWEN3_NEXT | {"rope_parameters": PARTIAL}),
    "qwen3_5_text": Qwen3_5TextConfig(**QWEN3_5),
    "kha": KHAModelConfig(**SIZES, kha_query="linear", kha_key="gate", kha_value="mlp"),
    "kha, output gate": KHAModelConfig(**SIZES, kha_gate={"output": "element"}),
    "kha, gates": KHAModelConfig(
        **SIZES,
        kha_value="mlp",
        kha_gate={"output": "element", "value": "head", "key": "shared", "dense": "element"},
    ),
    "kha, gate without input, biases": KHAModelConfig(
        **SIZES, attention_bias=True, kha_gate={"output": "head", "reads_input": False}
    ),
    "kha, moh": KHAModelConfig(**SIZES, kha_moh={"shared": 2, "active": 2}, kha_key="linear"),
    "kha, sparse": KHAModelConfig(**KHA_MOE, kha_value="mlp"),
    "kha, gta": KHAModelConfig(**SIZES | GTA),
    "kha, gta, no norm, nothing knocked": KHAModelConfig(
        **SIZES | {"kha_attention": "gta", "head_dim": 12, "use_qk_norm": False}
    ),
    "kha, mla": KHAModelConfig(**SIZES | MLA, zero_centered_norms=True),
    "kha, mla, direct queries": KHAModelConfig(
        **SIZES | MLA | {"q_lora_rank": None, "use_qk_norm": False}
    ),
    "kha, gta, sparse": KHAModelConfig(**KHA_MOE | GTA, zero_centered_norms=True),
    "kha, gla, sparse": KHAModelConfig(**KHA_MOE | GLA | {"n_group": 3, "topk_group": 2}),
    "qwen3_next, sparse": Qwen3NextConfig(
        **QWEN3_MOE | FULL | SHARED | {"rope_parameters": dict(PARTIAL)}
    ),
}

RUNS_FULL_ATTENTION = Version(transformers.__version__) >= Version("5.13")
"""Whether transformers runs qwen3_next and qwen3_5_text models without linear attention."""


def make(config: PreTrainedConfig, seed: int = 5) -> torch.nn.Module:
    """Return a model with random tensors, so that logits differ between tokens."""
    if config.model_type in ("qwen3_next", "qwen3_5_text") and not RUNS_FULL_ATTENTION:
        pytest.skip("transformers before 5.13 needs a layer with linear attention")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.dim() < 2 or "_knock." in name:
                tensor += 0.3 * noise
            else:
                tensor.copy_(noise * tensor.shape[-1] ** -0.5)
    return model


def make_bfloat16(config: PreTrainedConfig, seed: int = 5) -> torch.nn.Module:
    """Return a model as transformers loads one in bfloat16: expert biases stay float32."""
    wide, model = make(config, seed), make(config, seed).bfloat16()
    for name, buffer in wide.named_buffers():
        if name.endswith("e_score_correction_bias"):
            model.get_buffer(name).data = buffer
    return model


def load(folder: Path) -> torch.nn.Module:
    """Load a model in float32 with all tensors of its directory and no others."""
    model, report = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        output_loading_info=True,
        trust_remote_code=False,
        attn_implementation="eager",  # talking heads have no other
        experts_implementation="eager",  # torch's grouped product takes no rows of 20 features
    )
    assert not any(report.values()), report
    return model.eval()


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Apply a function to the tensors of a Hugging Face directory."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    """Change entries of the ``config.json`` of a Hugging Face directory."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def assert_same_tensors(one: Path, other: Path) -> None:
    """Check that two Hugging Face directories hold the same tensors, bit by bit."""
    one, other = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
