"""Import models with the ``config.json`` of published ones, scaled down.

Models are built by transformers. Their logits are compared with Megatron's own model.
"""

import json

import pytest
import torch
from transformers import AutoConfig

from kha_megatron import announcements
from kha_megatron.conversion import to_hf, to_megatron
from kha_megatron.conversion.hf_configs import from_hf_config
from kha_megatron.conversion.verify import load_hf_model
from kha_megatron.errors import CheckpointError
from tests.conversion.megatron import load_and_run
from tests.conversion.models import CONFIGS, YARN, edit_config, make

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "use_cache": True,
    "torch_dtype": "bfloat16",
}
LLAMA = SIZES | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA_3_1 = LLAMA | {
    "eos_token_id": [1, 8, 9],
    "max_position_embeddings": 131072,
    "rope_scaling": LLAMA3_ROPE,
    "rope_theta": 500000.0,
    "transformers_version": "4.42.3",
}
LLAMA_3_2 = LLAMA_3_1 | {
    "head_dim": 8,
    "rope_scaling": LLAMA3_ROPE | {"factor": 32.0},
    "tie_word_embeddings": True,
    "transformers_version": "4.45.0.dev0",
}
MISTRAL = SIZES | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "rms_norm_eps": 1e-05,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "transformers_version": "4.42.0.dev0",
}
QWEN2_5 = SIZES | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "bos_token_id": 3,
    "eos_token_id": 5,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "transformers_version": "4.40.1",
    "use_mrope": False,
    "use_sliding_window": False,
}
QWEN3 = SIZES | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 16,
    "bos_token_id": 3,
    "eos_token_id": 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "transformers_version": "4.51.0",
    "use_sliding_window": False,
}
QWEN3_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
}
GLM_4_5 = SIZES | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "pad_token_id": 3,
    "eos_token_id": [3, 6, 8],
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "transformers_version": "4.54.0",
    "use_qk_norm": True,
}
DEEPSEEK_V3 = SIZES | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModel": "modeling_deepseek.DeepseekV3Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 16,
    "moe_layer_freq": 1,
    "n_group": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "transformers_version": "4.33.1",
    "v_head_dim": 16,
}
PUBLISHED = {
    "Llama 3.1": LLAMA_3_1,
    "Llama 3.2": LLAMA_3_2,
    "TinyLlama": LLAMA
    | {
        "max_position_embeddings": 2048,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "transformers_version": "4.35.0",
    },
    "Mistral 7B v0.3": MISTRAL,
    "Mistral NeMo": MISTRAL | {"head_dim": 16, "max_position_embeddings": 131072},
    "Qwen2.5": QWEN2_5,
    "Qwen2.5, long": QWEN2_5
    | {"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}},
    "Qwen3": QWEN3,
    "Qwen3-MoE": QWEN3_MOE,
    "GLM-4.5": GLM_4_5,
    "DeepSeek-V3": DEEPSEEK_V3,
}
ADDED = {
    "SmolLM2": (
        LLAMA_3_2 | {"rope_scaling": None},
        {
            "is_llama_config": True,
            "pad_token_id": 2,
            "rope_interleaved": False,
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        },
    ),
    "transformers 4.48": (
        LLAMA_3_2,
        {"_attn_implementation_autoset": True, "_name_or_path": "meta-llama/Llama-3.2-1B"},
    ),
    "transformers 4.57": (
        QWEN3,
        {
            "dtype": "bfloat16",
            "layer_types": ["full_attention"] * 2,
            "_name_or_path": "Qwen/Qwen3-0.6B",
        },
    ),
    "unsloth": (
        LLAMA_3_2,
        {"unsloth_fixed": True, "unsloth_version": "2024.11.9", "model_name": "unsloth/Llama"},
    ),
    "attention package": (QWEN3, {"_attn_implementation": "flash_attention_2"}),
    "experts kernel": (QWEN3_MOE, {"_experts_implementation": "grouped_mm"}),
    "trainers": (
        MISTRAL,
        {
            "neftune_noise_alpha": 5,
            "gradient_checkpointing": True,
            "max_length": 20,
            "temperature": 0.7,
            "tokenizer_class": "LlamaTokenizer",
            "task_specific_params": {"conversational": {"max_length": 100}},
            "decoder_start_token_id": 1,
            "classifier_dropout": 0.1,
            "max_sequence_length": 4096,
            "model_max_length": 4096,
            "return_dict": False,
        },
    ),
    "vLLM": (QWEN2_5, {"dual_chunk_attention_config": {"chunk_size": 262144}}),
}
"""Published configurations, and fields that they have although transformers does not use them."""


@pytest.fixture
def ignored(monkeypatch, capsys):
    """Return a function that returns all warnings about fields."""
    monkeypatch.setattr(announcements, "_logged", set())
    return lambda: [line for line in capsys.readouterr().err.splitlines() if "Ignoring" in line]


def save(folder, raw):
    """Save a model that transformers builds from a ``config.json``, and the file unchanged."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    config._attn_implementation = config._experts_implementation = None
    config.return_dict = True
    model = make(config)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(raw))
    return model


def assert_megatron_computes_the_same(ranks, model, folder, target):
    to_megatron.plan_import(folder, divisible_by=1).write(target)
    ids = torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(0))
    (logits,) = ranks(load_and_run, 1, str(target), ids.tolist(), {})
    with torch.no_grad():
        expected = model(ids).logits
    torch.testing.assert_close(torch.from_numpy(logits), expected, atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_imported(ranks, tmp_path, ignored, name):
    model = save(tmp_path / "hf", PUBLISHED[name])
    assert_megatron_computes_the_same(ranks, model, tmp_path / "hf", tmp_path / "save")
    assert not ignored()


@pytest.mark.parametrize("name", ADDED)
def test_fields_that_transformers_ignores_are_listed_in_one_warning(ranks, tmp_path, ignored, name):
    raw, added = ADDED[name]
    model = save(tmp_path / "hf", raw | added)
    assert_megatron_computes_the_same(ranks, model, tmp_path / "hf", tmp_path / "save")
    to_hf.plan_export(tmp_path / "hf")
    load_hf_model(tmp_path / "hf")
    listed = ignored()
    silent = ("return_dict", "dtype", "layer_types", "_name_or_path", "pad_token_id")
    names = sorted(n for n, value in added.items() if value is not False and n not in silent)
    assert len(listed) == bool(names)
    assert not names or f"Ignoring {', '.join(names)} in config.json" in listed[0]


FIELDS = {
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "mlp_gate_softcap": 7.0,
    "logits_soft_cap": 30.0,
    "query_pre_attn_scalar": 144,
    "attention_multiplier": 0.0156,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
    "logit_scale": 0.0625,
    "lm_head_multiplier": 0.02,
    "mup_enabled": True,
    "use_mup": True,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
    "clip_qkv": 8.0,
    "qk_layernorm": True,
    "alibi": True,
    "use_logn_attn": True,
    "use_dynamic_ntk": True,
    "rope_ratio": 16,
    "rotary_dim": 8,
    "no_rope_layers": [1, 0],
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "sliding_window_pattern": 6,
    "attn_temperature_tuning": True,
    "parallel_attn": True,
    "use_parallel_residual": True,
    "layer_norm_eps": 1e-3,
    "num_kv_shared_layers": 1,
    "learnable_sink_init": True,
    "swiglu_limit": 7.0,
    "attention_out_bias": True,
    "per_layer_config": {"0": {"head_dim": 4}},
    "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "compression_config": {"format": "int-quantized"},
    "transformers_weights": "other.safetensors",
    "text_config": {"hidden_size": 32},
    "elementwise_attn_output_gate": True,
    "kha_value": "mlp",
    "attribute_map": {"hidden_size": "vocab_size"},
    "from_dict": True,
}
"""Fields that change the outputs of some model, with a published or plausible value."""


@pytest.mark.parametrize("field", FIELDS)
def test_fields_that_change_the_outputs_of_any_model_are_refused(field):
    with pytest.raises(CheckpointError, match=rf"{field}=.* in config\.json is not supported"):
        from_hf_config(LLAMA_3_1 | {field: FIELDS[field]})
    assert from_hf_config(LLAMA_3_1 | {field: None}) == from_hf_config(LLAMA_3_1)


CHANGES = {
    "a causal mask": ("qwen3", {"is_causal": False}, "is_causal=False"),
    "a window": ("mistral", {"sliding_window": 8}, "sliding_window=8"),
    "a window in some layers": (
        "qwen2, tied, yarn",
        {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
        "sliding_window=8",
    ),
    "yarn's attention factor": (
        "llama",
        {"rope_parameters": YARN | {"attention_factor": 0.7}},
        "attention_factor",
    ),
    "yarn's attention factor, MLA": (
        "deepseek_v3",
        {"rope_parameters": YARN | {"attention_factor": 0.7}},
        "attention_factor",
    ),
    "yarn without truncation": (
        "qwen3",
        {"rope_parameters": YARN | {"truncate": False}},
        "attention_factor or truncate",
    ),
    "another yarn": (
        "qwen3",
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0}},
        "must be set together",
    ),
    "longrope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 3,
                "long_factor": [2.0] * 3,
                "original_max_position_embeddings": 16,
            }
        },
        "rope_type 'longrope'",
    ),
    "another activation": ("llama", {"hidden_act": "relu"}, "hidden_act='relu'"),
}


def logits_of(model):
    tokens = torch.randint(0, 51, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.eval()(tokens).logits


@pytest.mark.parametrize("name", CHANGES)
def test_settings_that_change_the_outputs_are_refused(tmp_path, name):
    """Each of them changes the logits in transformers with the same tensors."""
    family, changes, message = CHANGES[name]
    model = make(CONFIGS[family])
    model.save_pretrained(tmp_path / "hf")
    to_megatron.plan_import(tmp_path / "hf")
    edit_config(tmp_path / "hf", layer_types=None, **changes)
    changed = type(model)(AutoConfig.from_pretrained(tmp_path / "hf"))
    changed.load_state_dict(model.state_dict(), strict=False)
    assert not torch.allclose(logits_of(model), logits_of(changed), atol=1e-3)
    for plan in (to_megatron.plan_import, to_hf.plan_export):
        with pytest.raises(CheckpointError, match=message):
            plan(tmp_path / "hf")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2, tied, yarn", "qwen3"])
def test_another_head_dim_must_match_the_tensors(tmp_path, family):
    make(CONFIGS[family]).save_pretrained(tmp_path / "hf")
    edit_config(tmp_path / "hf", head_dim=4)
    for plan in (to_megatron.plan_import, to_hf.plan_export):
        with pytest.raises(CheckpointError, match=r"_proj\.weight has shape"):
            plan(tmp_path / "hf")
