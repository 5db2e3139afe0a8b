"""A ``TransformerConfig`` in the terms of :mod:`kha_megatron.model.layout`."""

from megatron.core.transformer.transformer_config import TransformerConfig

from kha_megatron.config import KHAConfig
from kha_megatron.model.layout import Layout, Model, latents, moe_pattern


def model_of(config: TransformerConfig, kha: KHAConfig | None = None) -> Model:
    """The sizes that ``config`` and the kind of attention give; they know no vocabulary.

    A hybrid model's pattern of layers is not in ``config``, so its depth and dense width are left
    open; so is the depth under a custom pipeline layout, against which ``config`` has checked it.
    """
    latent = config.multi_latent_attention
    hybrid = config.is_hybrid_model
    kind = kha.attention if kha else None
    custom = config.pipeline_model_parallel_layout is not None
    return Model(
        num_layers=None if hybrid or custom else config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        kv_channels=config.qk_head_dim if latent else config.kv_channels,
        ffn_hidden_size=None if hybrid else config.ffn_hidden_size,
        num_experts=config.num_moe_experts,
        moe_ffn_hidden_size=config.moe_ffn_hidden_size,
        moe_shared_expert_intermediate_size=config.moe_shared_expert_intermediate_size,
        moe_router_topk=config.moe_router_topk,
        moe_layers=moe_pattern(config.moe_layer_freq, config.num_layers),
        swiglu=config.gated_linear_unit,
        qk_layernorm=config.qk_layernorm,
        attention_output_gate=config.attention_output_gate,
        norm_parameters=1 if config.normalization == "RMSNorm" else 2,
        tied_keys=kind == "gta",
        latent_heads=kha.latent_heads if kind == "gla" else 1,
        latents=_latents(config) if latent else (),
        latent_width=config.kv_lora_rank if latent else None,
    )


def _latents(config: TransformerConfig) -> tuple[tuple[str, int], ...]:
    cut = config.transformer_impl != "transformer_engine" or config.mla_down_proj_fusion
    return latents(
        config.q_lora_rank,
        config.kv_lora_rank,
        config.qk_pos_emb_head_dim,
        down_projections_cut=cut,
    )


def layout_of(config: TransformerConfig) -> Layout:
    """The parallel sizes of ``config``; it knows no world size."""
    return Layout(
        tp=config.tensor_model_parallel_size,
        pp=config.pipeline_model_parallel_size,
        vpp=config.virtual_pipeline_model_parallel_size,
        cp=config.context_parallel_size,
        ep=config.expert_model_parallel_size,
        etp=config.expert_tensor_parallel_size,
        sequence_parallel=config.sequence_parallel,
        overlap_p2p=config.overlap_p2p_comm,
        first_stage_layers=config.num_layers_in_first_pipeline_stage,
        last_stage_layers=config.num_layers_in_last_pipeline_stage,
        embedding_as_layer=config.account_for_embedding_in_pipeline_split,
        loss_as_layer=config.account_for_loss_in_pipeline_split,
    )


def fp8_recipe_of(config: TransformerConfig) -> str | None:
    """Name of the FP8 recipe, or None where ``config`` trains without."""
    return str(getattr(config.fp8_recipe, "value", config.fp8_recipe)) if config.fp8 else None
