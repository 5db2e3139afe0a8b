"""Tiny `kha` models: 6 query heads on 2 key/value heads of 10 features, a vocabulary of 51."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from kha_megatron.hf import KHAForCausalLM, KHAModelConfig, read_kha

SIZES: dict[str, Any] = {
    "vocab_size": 51,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 1.0},
}
_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 14,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "dense": {"kha_query": "linear", "kha_key": "gate", "kha_value": "mlp"},
    "tied": {"kha_value": "mlp", "tie_word_embeddings": True, "use_qk_norm": False},
    "baseline": {
        "attention_bias": True,
        "rope_parameters": SIZES["rope_parameters"] | {"partial_rotary_factor": 0.6},
    },
    "sigmoid": _EXPERTS
    | {
        "kha_value": "mlp",
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.5,
        "shared_expert_intermediate_size": 8,
        "shared_expert_gate": True,
    },
    "softmax": _EXPERTS | {"kha_query": "linear", "kha_key": "linear", "kha_value": "linear"},
    "presoftmax": _EXPERTS | {"kha_value": "linear", "norm_topk_prob": False},
    "gated": {"kha_value": "mlp", "kha_gate": {"output": "element"}},
    "gated_heads": {
        "kha_gate": {"output": "head", "value": "head", "dense": "element"},
        "attention_bias": True,
        "num_key_value_heads": 1,
    },
    "gated_alike": {"kha_gate": {"output": "shared", "value": "head", "reads_input": False}},
    "moh": {"kha_value": "linear", "kha_moh": {"shared": 1, "active": [2, 3, 1, 2]}},
    "talking": {"kha_talking": {}},
    "collaborative": {"kha_collaborative": {"dim": 14}, "kha_gate": {"value": "element"}},
}
"""Every variant, layout, router and head mechanism."""


def hf_config(**overrides: Any) -> KHAModelConfig:
    return KHAModelConfig(architectures=["KHAForCausalLM"], **SIZES | overrides)


def described(config: KHAModelConfig) -> dict[str, Any]:
    """Return the fields of a configuration with all settings of the head mechanisms."""
    fields = config.to_dict().items()
    plain = {k: v for k, v in fields if not k.startswith(("kha_", "transformers_version"))}
    return plain | {"kha": str(read_kha(config))}


@torch.no_grad()
def save(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> None:
    """Save a model of ``CONFIGS[name]`` without initial values, and a tokenizer."""
    torch.manual_seed(5)
    model = KHAForCausalLM._from_config(hf_config(**CONFIGS[name]), dtype=dtype)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor += 0.1 * torch.randn_like(tensor)
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(SIZES["vocab_size"])}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)


def tokens() -> torch.Tensor:
    """Return token ids ``[2, 7]``."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, SIZES["vocab_size"], (2, 7), generator=generator)
