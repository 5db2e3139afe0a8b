"""Hybrid models (``--hybrid-layer-pattern``) with KHA.

The attention (``*``), MLP (``-``) and MoE (``E``) layers are halves of our GPT layers. This way,
they have the same options and checkpoint format as GPT models. Other layer types, such as Mamba
(``M``), come from Megatron.
"""

import copy
from dataclasses import replace
from typing import Any

from kha_megatron.config import KHAConfig
from kha_megatron.errors import raise_first
from kha_megatron.mcore.compat import megatron_imports
from kha_megatron.mcore.settings import named_config, publish
from kha_megatron.mcore.specs import kha_layer_spec

with megatron_imports():
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import (
        MoETransformerLayer,
        TransformerLayer,
        TransformerLayerSubmodules,
    )


class KHAHybridStack(HybridStack):
    """``HybridStack`` with KHA in its attention layers. Submodules are built from ``config``.

    ``kha`` is a KHAConfig or the name of a spec (see :mod:`kha_megatron.mcore.settings`).
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        kha: KHAConfig | str,
        layer_type_list: list[str],
        pp_layer_offset: int = 0,
        post_layer_norm: bool = True,
        pg_collection: ProcessGroupCollection,
        **kwargs: Any,
    ) -> None:
        name, kha = (kha, named_config(kha)) if isinstance(kha, str) else (None, kha)
        kha = kha.with_output_gate(config.attention_output_gate)
        _check(config, layer_type_list, kha)
        layers = _gpt_layers(config, kha)
        super().__init__(
            config,
            _submodules(layers, config),
            *args,
            layer_type_list=layer_type_list,
            pp_layer_offset=pp_layer_offset,
            post_layer_norm=False,  # Megatron's final norm always requires Transformer Engine
            pg_collection=pg_collection,
            **kwargs,
        )
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = layers.layer_norm(
                config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )
        if name:
            publish(name, kha, pg_collection, logs=pp_layer_offset == 0)


def _check(config: TransformerConfig, layers: list[str], kha: KHAConfig) -> None:
    stages = config.virtual_pipeline_model_parallel_size
    latent = sorted({Symbols.MLA, Symbols.DS_ATTENTION} & set(layers))
    others = sorted(set(layers) - {Symbols.ATTENTION, Symbols.MLP, Symbols.MOE})
    mistakes = {
        f"Hybrid models do not support virtual_pipeline_model_parallel_size={stages}.": (
            stages is not None
        ),
        f"Hybrid models do not support attention={kha.attention}. Use a GPT model.": kha.attention,
        f"Hybrid models with KHA do not support latent attention ({' '.join(latent)}).": latent,
        f"Hybrid layers {' '.join(others)} require --transformer-impl transformer_engine.": (
            others and config.transformer_impl != "transformer_engine"  # would be identity layers
        ),
    }
    raise_first(mistakes)


def _gpt_layers(config: TransformerConfig, kha: KHAConfig) -> TransformerBlockSubmodules:
    """Build a GPT block spec with two layers: one dense, one MoE."""
    both = copy.copy(config)
    both.num_layers, both.moe_layer_freq = 2, [0, 1]
    both.pipeline_model_parallel_size, both.pipeline_model_parallel_layout = 1, None
    both.num_layers_in_first_pipeline_stage = both.num_layers_in_last_pipeline_stage = None
    return kha_layer_spec(both, kha)


def _submodules(
    layers: TransformerBlockSubmodules, config: TransformerConfig
) -> HybridStackSubmodules:
    dense, moe = layers.layer_specs
    mlp = ("pre_mlp_layernorm", "mlp", "mlp_bda")
    attention = ("input_layernorm", "self_attention", "self_attn_bda")
    parts: dict[str, Any] = {
        "attention_layer": _part(TransformerLayer, dense, *attention),
        "mlp_layer": _part(MLPLayer, dense, *mlp),
        "moe_layer": _part(MoETransformerLayer, moe, *mlp),
    }
    if config.transformer_impl != "transformer_engine":
        return HybridStackSubmodules(**parts)
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    return replace(hybrid_stack_spec.submodules, mtp_block_spec=None, **parts)


def _part(module: type, layer: ModuleSpec, *names: str) -> ModuleSpec:
    part = {n: getattr(layer.submodules, n) for n in (*names, "sharded_state_dict_keys_map")}
    return ModuleSpec(module=module, submodules=TransformerLayerSubmodules(**part))
