"""Hybrid models (``--hybrid-layer-pattern``) with KHA.

With Transformer Engine, we take Megatron's ``hybrid_stack_spec`` and replace its attention layers:
``*``, or ``+`` for latent attention. Megatron has no such spec of local modules, so we build one
with attention, MLP (``-``) and MoE (``E``) layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm, LayerNormBuilder
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from kha_megatron.errors import ConfigError
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.mcore import patches
from kha_megatron.mcore.added_loss import LossScale
from kha_megatron.mcore.attention import check_config
from kha_megatron.mcore.compat import layer_symbols
from kha_megatron.mcore.layers import knock_layer, parallel_module, uses_transformer_engine
from kha_megatron.mcore.settings import named_config, publish

_FUSED_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Names of local norms, and their names in checkpoints. The latter are those of the norms that
Transformer Engine fuses into linear layers."""

_CAUSAL = {"attn_mask_type": AttnMaskType.causal}


def kha_hybrid_stack_spec(kha: HeadsConfig | str) -> ModuleSpec:
    """Build the ``hybrid_stack_spec`` for a ``HybridModel`` (``kha`` can be a spec name)."""
    return ModuleSpec(
        module=KHAHybridStack, submodules=HybridStackSubmodules(), params={"kha": kha}
    )


class KHAHybridStack(HybridStack):
    """``HybridStack`` with KHA in its attention layers.

    The specs of all layers depend on ``config``, so they are built here and stored in
    ``submodules``. ``HybridModel`` reads them again for multi-token prediction, after building
    this stack.

    ``kha`` is a HeadsConfig or the name of a spec (see :mod:`kha_megatron.mcore.settings`).
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: HybridStackSubmodules,
        *,
        kha: HeadsConfig | str,
        post_layer_norm: bool = True,
        pg_collection: ProcessGroupCollection,
        layer_type_list: Sequence[str] | None = None,
        layer_config_list: Sequence[TransformerConfig] | None = None,
        pp_layer_offset: int = 0,
        **kwargs: Any,
    ) -> None:
        spec_name = kha if isinstance(kha, str) else None
        heads_config = named_config(kha) if isinstance(kha, str) else kha
        heads_config = heads_config.with_output_gate(config.attention_output_gate)
        symbols = layer_symbols(layer_type_list, layer_config_list)
        _check_layers(config, heads_config, symbols, pp_layer_offset)
        _check_options(config, heads_config)
        patches.count_tokens_in_integers()  # before the routers are built
        patches.build_mtp_without_te()
        if any(mechanism.adds_loss for mechanism in heads_config.mechanisms):
            LossScale.share(config, layer_config_list or ())
        if layer_config_list is None:
            kwargs["layer_type_list"] = layer_type_list
        else:
            kwargs["layer_config_list"] = layer_config_list
        layer_specs = hybrid_submodules(config, heads_config)
        for field in fields(layer_specs):
            setattr(submodules, field.name, getattr(layer_specs, field.name))
        is_local = not uses_transformer_engine(config)
        super().__init__(
            config,
            submodules,
            # Megatron's final norm requires Transformer Engine
            post_layer_norm=post_layer_norm and not is_local,
            pg_collection=pg_collection,
            pp_layer_offset=pp_layer_offset,
            **kwargs,
        )
        self.post_layer_norm = post_layer_norm
        if is_local and self.post_process and post_layer_norm:
            build_norm: Any = _local_norm(config)
            self.final_norm = build_norm(
                config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )
        if spec_name:
            publish(
                spec_name,
                heads_config,
                pg_collection,
                multi_latent=config.multi_latent_attention,
                logs=self.pre_process,
            )

    def _fuse_mla_down_proj(self, submodules: HybridStackSubmodules) -> HybridStackSubmodules:
        if uses_transformer_engine(self.config):
            return super()._fuse_mla_down_proj(submodules)
        return submodules  # there is no fused local module


class KHALatentLayer(TransformerLayer):
    """``TransformerLayer`` that adds KHA to the latent attention in its submodules.

    KHA cannot be added to the spec, because each ``HybridStack`` overwrites the attention class in
    the spec of ``+`` layers with ``mla_down_proj_fusion``.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        *args: Any,
        kha: HeadsConfig,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, knock_layer(submodules, kha), *args, **kwargs)


def _check_layers(
    config: TransformerConfig,
    kha: HeadsConfig,
    layers: Sequence[str],
    offset: int,
) -> None:
    is_latent = config.multi_latent_attention
    other_attention = Symbols.ATTENTION if is_latent else Symbols.MLA
    if other_attention in layers:
        raise ConfigError(
            f"{other_attention} in --hybrid-layer-pattern requires "
            f"multi_latent_attention={not is_latent}."
        )
    if Symbols.DS_ATTENTION in layers:
        raise ConfigError("KHA does not support DeepSeek sparse attention (D).")
    if Symbols.MOE in layers and config.num_moe_experts is None:
        raise ConfigError(f"{Symbols.MOE} in --hybrid-layer-pattern requires --num-experts.")
    if _depends_on_layer_numbers(kha):
        if not _alternates(layers, offset):
            raise ConfigError(
                f"{kha} requires --hybrid-layer-pattern to alternate between attention and MLP "
                "layers, e.g. *-*E."
            )
        if config.mtp_num_layers:
            raise ConfigError(f"{kha} does not support multi-token prediction.")
    local_layers = {Symbols.ATTENTION, Symbols.MLA, Symbols.MLP, Symbols.MOE}
    engine_layers = set(layers) - local_layers
    # without Transformer Engine, these layers would be the identity
    if engine_layers and config.transformer_impl != "transformer_engine":
        raise ConfigError(
            f"Hybrid layers {' '.join(sorted(engine_layers))} require "
            "--transformer-impl transformer_engine."
        )


def _depends_on_layer_numbers(kha: HeadsConfig) -> bool:
    """Return whether a mechanism needs its number among, or the number of, attention layers.

    They are known without the pattern if attention and other layers alternate (see
    :func:`kha_megatron.mcore.head_ranks.layers_per_attention`).
    """
    for mechanism in kha.mechanisms:
        has_settings_per_layer = mechanism.for_layer(0) is not mechanism
        if mechanism.adds_loss or has_settings_per_layer:
            return True
    return False


def _alternates(layers: Sequence[str], offset: int) -> bool:
    """Return whether every other layer of a pipeline stage is attention, and the model's first."""
    for number, layer in enumerate(layers, start=offset):
        is_attention = layer in (Symbols.ATTENTION, Symbols.MLA)
        is_even = number % 2 == 0
        if is_attention != is_even:
            return False
    return True


_UNSUPPORTED_OPTIONS = (
    "heterogeneous_block_specs",
    "experimental_attention_variant",
    "use_kitchen",
)
"""Fields of ``TransformerConfig`` that change the layers of a GPTModel only."""


def _check_options(config: TransformerConfig, kha: HeadsConfig) -> None:
    check_config(config, kha)
    for option in _UNSUPPORTED_OPTIONS:
        value = getattr(config, option)
        if value:
            raise ConfigError(
                f"KHA does not support {option}={value} in hybrid models. Remove it, or use a "
                "GPTModel."
            )
    fuses_projections = config.multi_latent_attention and config.mla_down_proj_fusion
    is_local = not uses_transformer_engine(config)
    if fuses_projections and config.mtp_num_layers and is_local:
        raise ConfigError(
            "mla_down_proj_fusion with multi-token prediction requires "
            "--transformer-impl transformer_engine."
        )


def hybrid_submodules(config: TransformerConfig, kha: HeadsConfig) -> HybridStackSubmodules:
    """Build the layer specs of a hybrid stack with KHA in its attention layers."""
    if uses_transformer_engine(config):
        submodules = _engine_submodules(config)
    else:
        submodules = _local_submodules(config)
    if config.multi_latent_attention:
        stock_layer = submodules.mla_layer
        params = {**stock_layer.params, "kha": kha}
        latent_layer = replace(stock_layer, module=KHALatentLayer, params=params)
        return replace(submodules, mla_layer=latent_layer)
    stock_layer = submodules.attention_layer
    knocked_layer = replace(stock_layer, submodules=knock_layer(stock_layer.submodules, kha))
    return replace(submodules, attention_layer=knocked_layer)


def _engine_submodules(config: TransformerConfig) -> HybridStackSubmodules:
    """Return Megatron's layers, with options that it supports in a GPTModel only."""
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    stock = hybrid_stack_spec.submodules
    backend = TESpecProvider()
    norm = backend.layer_norm(has_residual=True)  # --fused-residual-rmsnorm
    changed_layers = {"moe_layer": _moe_layer(config, backend, norm)}
    if config.use_te_activation_func:
        no_norm = IdentityOp  # it is fused into the linear layer
        changed_layers["mlp_layer"] = _mlp_layer(config, backend, no_norm)
    if config.multi_latent_attention:
        changed_layers["mla_layer"] = _engine_latent_layer(config, stock.mla_layer, norm)
    return replace(stock, **changed_layers)


def _engine_latent_layer(
    config: TransformerConfig,
    stock_layer: ModuleSpec,
    norm: LayerNormBuilder,
) -> ModuleSpec:
    """Return Megatron's latent attention layer with other norms."""
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    attention = stock_layer.submodules.self_attention
    if config.qk_layernorm:
        up_projection = TESpecProvider().column_parallel_layer_norm_linear()
        projections = replace(
            attention.submodules,
            linear_q_up_proj=up_projection,
            linear_kv_up_proj=up_projection,
        )
        attention = replace(attention, submodules=projections)
    submodules = replace(
        stock_layer.submodules,
        input_layernorm=norm,
        self_attention=attention,
    )
    return replace(stock_layer, submodules=submodules)


def _local_submodules(config: TransformerConfig) -> HybridStackSubmodules:
    backend = LocalSpecProvider()
    norm = _local_norm(config)
    # like Megatron's local GPT layers, which do not rename norms in models with latent attention
    checkpoint_names = {} if config.multi_latent_attention else dict(_FUSED_NORMS)
    attention = TransformerLayerSubmodules(
        input_layernorm=norm,
        self_attention=_local_attention(config, backend, norm),
        self_attn_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=checkpoint_names,
    )
    latent_attention = replace(
        attention,
        self_attention=_local_latent_attention(config, backend, norm),
    )
    return HybridStackSubmodules(
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
        mla_layer=ModuleSpec(module=TransformerLayer, submodules=latent_attention),
        mlp_layer=_mlp_layer(config, backend, norm, checkpoint_names=checkpoint_names),
        moe_layer=_moe_layer(config, backend, norm, checkpoint_names=checkpoint_names),
        mtp_block_spec=_local_mtp_block(backend, norm),
    )


def _local_norm(config: TransformerConfig) -> LayerNormBuilder:
    is_rms_norm = config.normalization == "RMSNorm"
    return parallel_module(LocalSpecProvider().layer_norm(rms_norm=is_rms_norm, has_residual=True))


def _local_attention(
    config: TransformerConfig,
    backend: BackendSpecProvider,
    norm: LayerNormBuilder,
) -> ModuleSpec:
    query_key_norm: LayerNormBuilder = IdentityOp
    if config.qk_l2_norm:
        query_key_norm = L2Norm
    elif config.qk_layernorm:
        query_key_norm = norm
    submodules = SelfAttentionSubmodules(
        linear_qkv=backend.column_parallel_linear(),
        core_attention=backend.core_attention(),
        linear_proj=backend.row_parallel_linear(),
        q_layernorm=query_key_norm,
        k_layernorm=query_key_norm,
    )
    return ModuleSpec(module=SelfAttention, params=_CAUSAL, submodules=submodules)


def _local_latent_attention(
    config: TransformerConfig,
    backend: BackendSpecProvider,
    norm: LayerNormBuilder,
) -> ModuleSpec:
    latent_norm = norm if config.qk_layernorm else IdentityOp
    submodules = MLASelfAttentionSubmodules(
        linear_q_proj=backend.column_parallel_linear(),
        linear_q_down_proj=backend.column_parallel_linear(),
        linear_q_up_proj=backend.column_parallel_linear(),
        linear_kv_down_proj=backend.column_parallel_linear(),
        linear_kv_up_proj=backend.column_parallel_linear(),
        core_attention=backend.core_attention(),
        linear_proj=backend.row_parallel_linear(),
        q_layernorm=latent_norm,
        kv_layernorm=latent_norm,
    )
    return ModuleSpec(module=MLASelfAttention, params=_CAUSAL, submodules=submodules)


def _mlp_layer(
    config: TransformerConfig,
    backend: BackendSpecProvider,
    norm: LayerNormBuilder,
    *,
    checkpoint_names: Mapping[str, str] | None = None,
) -> ModuleSpec:
    fused_linear = backend.column_parallel_layer_norm_linear()
    linears = MLPSubmodules(
        linear_fc1=fused_linear or backend.column_parallel_linear(),
        linear_fc2=backend.row_parallel_linear(),
        activation_func=backend.activation_func() if config.use_te_activation_func else None,
    )
    submodules = TransformerLayerSubmodules(
        pre_mlp_layernorm=norm,
        mlp=partial(MLP.as_mlp_submodule, submodules=linears),
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=dict(checkpoint_names or {}),
    )
    return ModuleSpec(module=MLPLayer, submodules=submodules)


def _moe_layer(
    config: TransformerConfig,
    backend: BackendSpecProvider,
    norm: LayerNormBuilder,
    *,
    checkpoint_names: Mapping[str, str] | None = None,
) -> ModuleSpec:
    experts = get_moe_module_spec_for_backend(
        backend,
        num_experts=config.num_moe_experts or 1,  # any number, if there are no MoE layers
        moe_grouped_gemm=config.moe_grouped_gemm,
    )
    submodules = TransformerLayerSubmodules(
        pre_mlp_layernorm=norm,
        mlp=experts,
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=dict(checkpoint_names or {}),
    )
    return ModuleSpec(module=MoETransformerLayer, submodules=submodules)


def _local_mtp_block(backend: BackendSpecProvider, norm: LayerNormBuilder) -> ModuleSpec:
    submodules = MultiTokenPredictionLayerSubmodules(
        enorm=norm,
        hnorm=norm,
        eh_proj=backend.column_parallel_linear(),
        mtp_model_layer=None,  # built from the other submodules
        layer_norm=norm,
    )
    layer = ModuleSpec(module=MultiTokenPredictionLayer, submodules=submodules)
    block = MultiTokenPredictionBlockSubmodules(layer_specs=[layer])
    return ModuleSpec(module=MultiTokenPredictionBlock, submodules=block)
