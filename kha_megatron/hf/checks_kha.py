"""Why no model can be built from a ``kha`` configuration: sizes and switches that contradict."""

from typing import Any

from kha_megatron.heads import HeadFacts

MLP_LAYER_TYPES = ("dense", "sparse")
SCORE_FUNCTIONS = ("softmax", "sigmoid")


def problem_of(config: Any) -> str | None:
    """What is wrong with a ``KHAModelConfig``, in one line with the fields; None if nothing is.

    Raises:
        ConfigError: a variant that latent attention cannot carry.
    """
    attention = _attention_problem if config.kv_lora_rank is None else _latent_problem
    return attention(config) or _mlp_problem(config)


def _attention_problem(config: Any) -> str | None:
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    if groups < 1 or heads % groups:
        return (
            f"num_attention_heads={heads} is not a multiple of num_key_value_heads={groups}: "
            "every key/value head must serve the same number of query heads"
        )
    if config.head_dim < 2 or config.head_dim % 2:
        return f"head_dim={config.head_dim} is not a positive even number, which RoPE needs"
    if config.kha_attention == "gla":
        return "kha_attention='gla' expands a latent: give kv_lora_rank"
    if config.q_lora_rank is not None:
        return f"q_lora_rank={config.q_lora_rank} without kv_lora_rank: give both or none"
    if config.kha_attention == "gta" and config.head_dim % 4:
        return (
            f"head_dim={config.head_dim} is no multiple of 4: grouped-tied attention rotates "
            "half of a head"
        )
    if config.kha_attention == "gta" and config.attention_bias:
        return "attention_bias=True with kha_attention='gta', which has no biases: remove one"
    return None


def _latent_problem(config: Any) -> str | None:
    heads, groups = config.num_attention_heads, config.num_latent_heads
    if config.kha_attention == "gta":
        return "kha_attention='gta' with kv_lora_rank are two kinds of attention: remove one"
    config.kha.check(HeadFacts(multi_latent=True))
    for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        if (getattr(config, name) or 0) < 1:
            return f"{name}={getattr(config, name)} with kv_lora_rank: it must be at least 1"
    if config.q_lora_rank is not None and config.q_lora_rank < 1:
        return f"q_lora_rank={config.q_lora_rank}: it must be at least 1, or None"
    if config.qk_rope_head_dim % 2:
        return f"qk_rope_head_dim={config.qk_rope_head_dim} is odd, and RoPE turns pairs"
    if config.num_key_value_heads != heads:
        return (
            f"num_key_value_heads={config.num_key_value_heads} with kv_lora_rank: every one of "
            f"the {heads} query heads has a key: leave it out"
        )
    if config.kv_lora_rank % groups or heads % groups:
        return (
            f"kha_latent_heads={groups} divides kv_lora_rank={config.kv_lora_rank} and "
            f"num_attention_heads={heads} into no equal parts"
        )
    return "attention_bias=True with kv_lora_rank: remove one" if config.attention_bias else None


def _mlp_problem(config: Any) -> str | None:
    layers, kinds = config.num_hidden_layers, config.mlp_layer_types
    if len(kinds) != layers or not set(kinds) <= set(MLP_LAYER_TYPES):
        return (
            f"mlp_layer_types={kinds} must name 'dense' or 'sparse' for each of the {layers} layers"
        )
    if "sparse" not in kinds:
        return None
    if not 1 <= config.num_experts_per_tok <= config.num_experts:
        return (
            f"num_experts_per_tok={config.num_experts_per_tok} must lie between 1 and "
            f"num_experts={config.num_experts}"
        )
    if problem := _group_problem(config):
        return problem
    if config.moe_intermediate_size < 1:
        return f"moe_intermediate_size={config.moe_intermediate_size} must be at least 1"
    if config.scoring_func not in SCORE_FUNCTIONS:
        return (
            f"unknown scoring_func {config.scoring_func!r}: "
            f"choose one of {', '.join(SCORE_FUNCTIONS)}"
        )
    if config.shared_expert_gate and not config.shared_expert_intermediate_size:
        return "shared_expert_gate=True needs a shared_expert_intermediate_size above 0"
    return None


def _group_problem(config: Any) -> str | None:
    groups, chosen = config.n_group, config.topk_group
    if not 1 <= chosen <= groups or config.num_experts % groups:
        return (
            f"n_group={groups} and topk_group={chosen} with num_experts={config.num_experts}: "
            "groups must be equal, and a token's among them"
        )
    most = chosen * (config.num_experts // groups)
    if groups > 1 and not chosen <= config.num_experts_per_tok <= most:
        return (
            f"num_experts_per_tok={config.num_experts_per_tok} must lie between "
            f"topk_group={chosen} and the experts of so many groups, {most}"
        )
    return None
