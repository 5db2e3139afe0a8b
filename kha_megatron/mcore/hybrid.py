"""HybridModel with KHA: Megatron's hybrid stack with the two halves of GPT layers.

Each symbol of ``--hybrid-layer-pattern`` is one layer: ``*`` attention, ``-`` a dense MLP, ``E`` a
mixture-of-experts MLP. Each is one half of the layer that a GPTModel with the same configuration
has. Both backends, QK-norm, sequence parallelism and GPT checkpoints therefore work as in GPT
models. Mamba (``M``) and gated delta net (``G``) layers are Megatron's own.
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
    """``HybridStack`` with KHA in its attention layers, for both backends.

    Takes the arguments of ``HybridStack`` except ``submodules``. ``kha`` is a configuration, or the
    name of a spec (see ``kha_megatron.mcore.settings``).
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
            post_layer_norm=False,  # Megatron's is always Transformer Engine's
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
    """Raise ConfigError if this stage of a hybrid model cannot be built with KHA."""
    stages = config.virtual_pipeline_model_parallel_size
    latent = sorted({Symbols.MLA, Symbols.DS_ATTENTION} & set(layers))
    others = sorted(set(layers) - {Symbols.ATTENTION, Symbols.MLP, Symbols.MOE})
    mistakes = {
        f"Hybrid models do not support virtual_pipeline_model_parallel_size={stages}.": (
            stages is not None
        ),
        f"Hybrid models do not support attention={kha.attention}. Use a GPT model.": kha.attention,
        f"Hybrid models with KHA do not support latent attention ({' '.join(latent)}).": latent,
        f"Layers {' '.join(others)} need --transformer-impl transformer_engine.": (
            others and config.transformer_impl != "transformer_engine"  # would be identity layers
        ),
    }
    raise_first(mistakes)


def _gpt_layers(config: TransformerConfig, kha: KHAConfig) -> TransformerBlockSubmodules:
    """Return the specs of a dense GPT layer, a MoE layer and the final norm."""
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
    ours = HybridStackSubmodules(
        attention_layer=_part(
            TransformerLayer, dense, "input_layernorm", "self_attention", "self_attn_bda"
        ),
        mlp_layer=_part(MLPLayer, dense, *mlp),
        moe_layer=_part(MoETransformerLayer, moe, *mlp),
    )
    if config.transformer_impl != "transformer_engine":
        return ours
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    return replace(
        hybrid_stack_spec.submodules,
        attention_layer=ours.attention_layer,
        mlp_layer=ours.mlp_layer,
        moe_layer=ours.moe_layer,
        mtp_block_spec=None,
    )


def _part(module: type, layer: ModuleSpec, *names: str) -> ModuleSpec:
    """Return a layer spec with some submodules of a GPT layer, and their checkpoint names."""
    part = {n: getattr(layer.submodules, n) for n in (*names, "sharded_state_dict_keys_map")}
    return ModuleSpec(module=module, submodules=TransformerLayerSubmodules(**part))
