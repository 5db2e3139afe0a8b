"""From the arguments that Megatron saved to the configuration of the ``kha`` architecture."""

from collections.abc import Mapping
from typing import Any

from kha_megatron.config import KHAConfig
from kha_megatron.errors import CheckpointError
from kha_megatron.hf import KHAModelConfig

_REPRESENTED: dict[str, tuple[Any, ...]] = {
    "normalization": ("RMSNorm",),
    "swiglu": (True,),
    "position_embedding_type": ("rope",),
    "add_bias_linear": (False,),
    "layernorm_zero_centered_gamma": (False, None),
    "qk_l2_norm": (False, None),
    "attention_output_gate": (False, None),
    "multi_latent_attention": (False, None),
    "experimental_attention_variant": (None,),
    "linear_attention_freq": (None,),
    "softmax_type": ("vanilla", None),
    "window_size": (None,),
    "no_rope_freq": (None,),
    "rotary_interleaved": (False, None),
    "rotary_seq_len_interpolation_factor": (None,),
    "use_rope_scaling": (False, None),
    "apply_residual_connection_post_layernorm": (False, None),
    "use_mup": (False, None),
    "mtp_num_layers": (None, 0),
    "moe_router_num_groups": (None, 1),
    "moe_apply_probs_on_input": (False, None),
    "moe_latent_size": (None,),
    "moe_mlp_glu_interleave_size": (None,),
    "moe_shared_expert_glu_interleave_size": (None,),
    "moe_expert_capacity_factor": (None,),
    "moe_router_force_load_balancing": (False, None),
    "moe_router_force_biased": (None,),
    "glu_linear_offset": (0.0, None),
    "activation_func_clamp_value": (None,),
    "hybrid_layer_pattern": (None,),
    "heterogeneous_layers_config_path": (None,),
}
"""Arguments that change what a model computes, with the values the architecture can express."""

_ROUTING_BY_BALANCE = ("sinkhorn", "quantile_balancing")
"""Load balancing that is a routing rule of its own, not a loss."""


def hf_config(args: Mapping[str, Any], kha: KHAConfig, vocab_size: int) -> KHAModelConfig:
    """The Hugging Face configuration of a Megatron GPTModel.

    Args:
        args: Megatron's saved arguments (``MegatronCheckpoint.args``).
        kha: what is knocked.
        vocab_size: rows of the embedding without Megatron's padding.

    Raises:
        CheckpointError: an argument changes the model in a way that it cannot express.
    """
    for name, allowed in _REPRESENTED.items():
        if args.get(name) not in allowed:
            raise CheckpointError(
                f"the checkpoint was trained with {name}={args.get(name)!r}, which the kha "
                f"architecture cannot express (only {allowed[0]!r})"
            )
    try:
        return _config(args, kha, vocab_size)
    except KeyError as error:
        raise CheckpointError(
            f"the checkpoint's training arguments lack {error.args[0]}: it was not saved by a "
            "supported version of Megatron's training loop"
        ) from error


def _config(args: Mapping[str, Any], kha: KHAConfig, vocab_size: int) -> KHAModelConfig:
    heads = args["num_attention_heads"]
    return KHAModelConfig(
        vocab_size=vocab_size,
        hidden_size=args["hidden_size"],
        intermediate_size=args["ffn_hidden_size"],
        num_hidden_layers=args["num_layers"],
        num_attention_heads=heads,
        num_key_value_heads=args["num_query_groups"] if args["group_query_attention"] else heads,
        head_dim=args["kv_channels"],
        max_position_embeddings=args["max_position_embeddings"],
        initializer_range=args["init_method_std"],
        rms_norm_eps=args["layernorm_epsilon"],
        use_qk_norm=args["qk_layernorm"],
        attention_bias=args["add_qkv_bias"],
        attention_dropout=args["attention_dropout"],
        rope_parameters={
            "rope_type": "default",
            "rope_theta": float(args["rotary_base"]),
            "partial_rotary_factor": args["rotary_percent"],
        },
        tie_word_embeddings=not args["untie_embeddings_and_output_weights"],
        **_experts(args),
        **{f"kha_{projection}": variant for projection, variant in kha.variants.items()},
    )


def _experts(args: Mapping[str, Any]) -> dict[str, Any]:
    if not args["num_experts"]:
        return {}
    frequency, layers = args["moe_layer_freq"], args["num_layers"]
    if isinstance(frequency, int):
        frequency = [int(layer % frequency == 0) for layer in range(layers)]
    sigmoid = args["moe_router_score_function"] == "sigmoid"
    if not sigmoid and args["moe_router_score_function"] != "softmax":
        raise CheckpointError(
            f"moe_router_score_function={args['moe_router_score_function']!r} cannot be expressed: "
            "only softmax and sigmoid"
        )
    if args["moe_router_enable_expert_bias"] and not sigmoid:
        raise CheckpointError(
            "moe_router_enable_expert_bias with softmax scores cannot be expressed: only sigmoid"
        )
    if args["moe_router_load_balancing_type"] in _ROUTING_BY_BALANCE:
        raise CheckpointError(
            f"moe_router_load_balancing_type={args['moe_router_load_balancing_type']!r} chooses "
            "experts in a way that cannot be expressed: only balancing by losses or expert biases"
        )
    top_k = args["moe_router_topk"]
    return {
        "num_experts": args["num_experts"],
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": args["moe_ffn_hidden_size"] or args["ffn_hidden_size"],
        "mlp_layer_types": ["sparse" if sparse else "dense" for sparse in frequency],
        "shared_expert_intermediate_size": args["moe_shared_expert_intermediate_size"] or 0,
        "shared_expert_gate": bool(args["moe_shared_expert_gate"]),
        "scoring_func": args["moe_router_score_function"],
        # Megatron divides sigmoid scores by their sum only when there is more than one, and takes
        # the softmax over the chosen logits unless told to take it before
        "norm_topk_prob": top_k > 1 if sigmoid else not args["moe_router_pre_softmax"],
        "routed_scaling_factor": args["moe_router_topk_scaling_factor"] or 1.0,
    }
