"""Layer specs with KHA for GPTModel.

Megatron has deprecated GPTModel. For new models, please use :mod:`kha_megatron.mcore.hybrid`.
"""

from dataclasses import replace
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    BaseTransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)
from megatron.core.utils import get_pg_rank

from kha_megatron.errors import ConfigError
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.mcore import patches
from kha_megatron.mcore.attention import check_config
from kha_megatron.mcore.layers import (
    can_knock,
    knock_layer,
    support_parallelism,
    uses_transformer_engine,
)
from kha_megatron.mcore.settings import named_config, publish

type Spec = ModuleSpec | TransformerBlockSubmodules


def with_kha(spec: Spec, kha: HeadsConfig) -> Spec:
    """Return a copy of a layer spec or block spec with KHA in all self-attention layers.

    Local (non-TE) norms and core attentions are replaced as well, to support sequence and context
    parallelism and latent attention.

    Raises:
        ConfigError: If ``spec`` has no attention module that supports ``kha``.
    """
    patches.count_tokens_in_integers()  # before the routers are built
    is_block = isinstance(spec, TransformerBlockSubmodules)
    layers = spec.layer_specs if is_block else [spec]
    if layers and not any(_supports_kha(layer, kha) for layer in layers):
        raise ConfigError(f"The layer spec has no attention module that supports KHA ({kha}).")
    if not is_block:
        return _copy_layer(spec, kha)
    copies_by_id: dict[int, ModuleSpec] = {}  # layers often share a spec
    layer_copies = []
    for layer in layers:
        if id(layer) not in copies_by_id:
            copies_by_id[id(layer)] = _copy_layer(layer, kha)
        layer_copies.append(copies_by_id[id(layer)])
    return replace(support_parallelism(spec), layer_specs=layer_copies)


def _supports_kha(layer: ModuleSpec, kha: HeadsConfig) -> bool:
    """Return whether a layer has attention to which ``kha`` can be added."""
    is_layer = isinstance(layer.submodules, TransformerLayerSubmodules)
    return is_layer and can_knock(layer.submodules, kha)


def _copy_layer(layer: ModuleSpec, kha: HeadsConfig) -> ModuleSpec:
    """Copy a layer spec, and add KHA if the layer has attention."""
    submodules = layer.submodules
    if _supports_kha(layer, kha):
        submodules = knock_layer(submodules, kha)
    elif isinstance(submodules, TransformerLayerSubmodules):
        submodules = support_parallelism(submodules)
    return replace(layer, submodules=submodules)


def kha_layer_spec(
    config: Any,
    kha: HeadsConfig,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> Spec:
    """Build the ``transformer_layer_spec`` for a ``GPTModel`` with KHA.

    Args:
        config (TransformerConfig): Model config. You can also pass the ``GPTModelConfig`` of
            Megatron's training package.
        kha (HeadsConfig): Head mechanisms to add.
        vp_stage (int, optional): Virtual pipeline stage.
        pp_rank (int, optional): Pipeline rank. Read from ``parallel_state`` by default.

    Raises:
        ConfigError: If ``config`` does not support ``kha``.
    """
    transformer = config if isinstance(config, TransformerConfig) else config.transformer
    check_config(transformer, kha)
    for mechanism in kha.mechanisms:
        if mechanism.adds_loss and transformer.heterogeneous_block_specs:
            raise ConfigError(
                f"heterogeneous_block_specs does not support the auxiliary loss of {mechanism}."
            )
    stock_spec = _stock_spec(config, transformer, vp_stage, pp_rank)
    return with_kha(stock_spec, kha)


def _stock_spec(
    config: Any,
    transformer: TransformerConfig,
    vp_stage: int | None,
    pp_rank: int | None,
) -> Spec:
    """Return the spec that Megatron would use. Parameters are as in :func:`kha_layer_spec`."""
    use_te = uses_transformer_engine(transformer)
    is_training_config = config is not transformer  # GPTModelConfig
    if is_training_config and use_te:
        from megatron.training.models.gpt import default_layer_spec

        return default_layer_spec(config, vp_stage)
    if transformer.heterogeneous_block_specs:
        raise ConfigError("heterogeneous_block_specs requires `-m kha_megatron.training` and TE.")
    # a block spec, because it also selects the final norm (TorchNorm for local modules)
    return get_gpt_decoder_block_spec(
        transformer,
        use_transformer_engine=use_te,
        normalization=transformer.normalization,
        qk_l2_norm=transformer.qk_l2_norm,
        vp_stage=vp_stage,
        pp_rank=pp_rank,
    )


class KHATransformerLayer(BaseTransformerLayer):
    """Builds a ``TransformerLayer`` with KHA (``--spec`` only).

    Stock scripts import the ``--spec`` object before there is a config. Local or TE modules, and
    dense or MoE layers, cannot be selected until this class is instantiated.
    """

    def __new__(
        cls,
        config: TransformerConfig,
        layer_number: int = 1,  # within the pipeline stage
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
        *,
        spec_name: str,
        **kwargs: Any,
    ) -> TransformerLayer:
        kha = named_config(spec_name).with_output_gate(config.attention_output_gate)
        pp_rank = get_pg_rank(pg_collection.pp) if pg_collection else None
        block = kha_layer_spec(config, kha, vp_stage, pp_rank)
        layer = build_module(
            block.layer_specs[layer_number - 1],
            config=config,
            layer_number=layer_number,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
            **kwargs,
        )
        if layer_number == 1:
            publish(
                spec_name,
                kha,
                layer.pg_collection,
                multi_latent=config.multi_latent_attention,
                logs=layer.layer_number == 1,
            )
        return layer
