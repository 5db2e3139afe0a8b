"""Hybrid models (``--hybrid-layer-pattern``) with KHA.

The attention (``*``, or ``+`` for latent attention), MLP (``-``) and MoE (``E``) layers are halves
of our GPT layers. This way, they have the same options as GPT models. Other layer types, such as
Mamba (``M``), come from Megatron.
"""

import copy
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from kha_megatron.errors import raise_first
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.mcore.compat import layer_symbols, megatron_imports
from kha_megatron.mcore.settings import named_config, publish
from kha_megatron.mcore.specs import kha_layer_spec

with megatron_imports():
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionBlock,
        MultiTokenPredictionBlockSubmodules,
        MultiTokenPredictionLayer,
        MultiTokenPredictionLayerSubmodules,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import (
        MoETransformerLayer,
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    from kha_megatron.mcore.added_loss import LossScale


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
        name, kha = (kha, named_config(kha)) if isinstance(kha, str) else (None, kha)
        kha = kha.with_output_gate(config.attention_output_gate)
        _check(config, kha, layer_symbols(layer_type_list, layer_config_list), pp_layer_offset)
        if any(mechanism.adds_loss for mechanism in kha.mechanisms):
            LossScale.share(config, layer_config_list or ())
        if layer_config_list is None:
            kwargs["layer_type_list"] = layer_type_list
        else:
            kwargs["layer_config_list"] = layer_config_list
        layers = _gpt_layers(config, kha)
        for part, spec in _submodules(layers, config).items():
            setattr(submodules, part, spec)
        super().__init__(
            config,
            submodules,
            post_layer_norm=False,  # Megatron's final norm always requires Transformer Engine
            pg_collection=pg_collection,
            pp_layer_offset=pp_layer_offset,
            **kwargs,
        )
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = layers.layer_norm(
                config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )
        if name:
            publish(
                name,
                kha,
                pg_collection,
                multi_latent=config.multi_latent_attention,
                logs=self.pre_process,
            )

    def _fuse_mla_down_proj(self, submodules: HybridStackSubmodules) -> HybridStackSubmodules:
        return submodules  # our GPT layers are fused already


def _check(config: TransformerConfig, kha: HeadsConfig, layers: Sequence[str], offset: int) -> None:
    attends = [layer in (Symbols.ATTENTION, Symbols.MLA) for layer in layers]
    alternate = all(a == (n % 2 == 0) for n, a in enumerate(attends, offset))
    counted = [m for m in kha.mechanisms if m.adds_loss or m.for_layer(0) is not m]
    latent = config.multi_latent_attention
    wrong = Symbols.ATTENTION if latent else Symbols.MLA
    others = set(layers) - {Symbols.ATTENTION, Symbols.MLA, Symbols.MLP, Symbols.MOE}
    raise_first(
        {
            f"{wrong} in --hybrid-layer-pattern requires multi_latent_attention={not latent}.": (
                wrong in layers  # would be the identity
            ),
            "KHA does not support DeepSeek sparse attention (D).": Symbols.DS_ATTENTION in layers,
            f"{kha} requires --hybrid-layer-pattern to alternate between attention and MLP layers, "
            "e.g. *-*E.": counted and not alternate,
            f"{kha} does not support multi-token prediction.": counted and config.mtp_num_layers,
            f"Hybrid layers {' '.join(sorted(others))} require "
            "--transformer-impl transformer_engine.": (
                others and config.transformer_impl != "transformer_engine"  # would be the identity
            ),
        }
    )


def _gpt_layers(config: TransformerConfig, kha: HeadsConfig) -> TransformerBlockSubmodules:
    """Build a GPT block spec with two layers: one dense, one MoE."""
    both = copy.copy(config)
    both.num_layers, both.moe_layer_freq = 2, [0, 1]
    both.pipeline_model_parallel_size, both.pipeline_model_parallel_layout = 1, None
    both.virtual_pipeline_model_parallel_size = None
    both.num_layers_in_first_pipeline_stage = both.num_layers_in_last_pipeline_stage = None
    return kha_layer_spec(both, kha)


def _submodules(layers: TransformerBlockSubmodules, config: TransformerConfig) -> dict[str, Any]:
    dense, moe = layers.layer_specs
    mlp = ("pre_mlp_layernorm", "mlp", "mlp_bda")
    attention = ("input_layernorm", "self_attention", "self_attn_bda")
    attends = "mla_layer" if config.multi_latent_attention else "attention_layer"
    parts: dict[str, Any] = {
        attends: _part(TransformerLayer, dense, *attention),
        "mlp_layer": _part(MLPLayer, dense, *mlp),
        "moe_layer": _part(MoETransformerLayer, moe, *mlp),
    }
    if config.transformer_impl == "transformer_engine":
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

        stock = hybrid_stack_spec.submodules
        return {f.name: getattr(stock, f.name) for f in fields(stock)} | parts
    norm = layers.layer_norm
    prediction = MultiTokenPredictionLayerSubmodules(
        enorm=norm,
        hnorm=norm,
        eh_proj=LocalSpecProvider().column_parallel_linear(),
        mtp_model_layer=None,  # built from the other submodules
        layer_norm=norm,
    )
    layer = ModuleSpec(module=MultiTokenPredictionLayer, submodules=prediction)
    parts["mtp_block_spec"] = ModuleSpec(
        module=MultiTokenPredictionBlock,
        submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[layer]),
    )
    return parts


def _part(module: type, layer: ModuleSpec, *names: str) -> ModuleSpec:
    part = {n: getattr(layer.submodules, n) for n in (*names, "sharded_state_dict_keys_map")}
    return ModuleSpec(module=module, submodules=TransformerLayerSubmodules(**part))
