"""Layer specs with KHA, for Transformer Engine and local modules, dense and MoE, GPT and hybrid.

Use one of:

- a name in a stock Megatron script: ``--spec kha_megatron.mcore.specs kha_mlp``;
- :func:`kha_layer_spec` or :func:`kha_hybrid_stack_spec` in a program that builds the model;
- :func:`with_kha` to add KHA to an existing spec.
"""

from dataclasses import fields, is_dataclass, replace
from typing import Any

from kha_megatron.config import PRESETS, KHAConfig
from kha_megatron.errors import ConfigError
from kha_megatron.mcore.compat import megatron_imports

with megatron_imports():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.multi_latent_attention import (
        FusedMLASelfAttention,
        MLASelfAttention,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import (
        BaseTransformerLayer,
        TransformerLayer,
        TransformerLayerSubmodules,
    )
    from megatron.core.utils import get_pg_rank

    from kha_megatron.mcore.attention import KHASelfAttention, check_config
    from kha_megatron.mcore.gta import KHAGroupedTiedAttention, separate_input_norm
    from kha_megatron.mcore.latent import (
        KHAFusedMLASelfAttention,
        KHAMLASelfAttention,
        use_grouped_latents,
    )
    from kha_megatron.mcore.local_modules import (
        GatheredDotProductAttention,
        TorchNorm,
        accept_sequence_parallelism,
    )
    from kha_megatron.mcore.settings import FROM_ENVIRONMENT, named_config, publish
    from kha_megatron.mcore.talking import TalkingAttention

type Spec = ModuleSpec | TransformerBlockSubmodules

_LOCAL: dict[type, type] = {
    WrappedTorchNorm: TorchNorm,
    DotProductAttention: GatheredDotProductAttention,
}
"""Local modules that refuse a parallelism, and their replacements."""

_LATENT: dict[type, type] = {
    MLASelfAttention: KHAMLASelfAttention,
    FusedMLASelfAttention: KHAFusedMLASelfAttention,
}


def with_kha(spec: Spec, kha: KHAConfig) -> Spec:
    """Return a copy of ``spec`` with KHA in its self-attention.

    Also replaces the local norm by one that supports sequence parallelism, and the local core
    attention by one that supports context parallelism and latent attention.

    Raises:
        ConfigError: ``spec`` has no attention to which ``kha`` can be added.
    """
    rewritten: dict[int, Any] = {}  # by id; an object that occurs twice is copied once
    replaced: list[Any] = []  # keeps ids unique
    found = False

    def rewrite(node: Any) -> Any:
        nonlocal found
        if isinstance(node, type):
            return _LOCAL.get(node, node)
        if isinstance(node, list):
            return [rewrite(item) for item in node]
        if not is_dataclass(node):
            return node
        if id(node) not in rewritten:
            whole: Any = node
            if isinstance(node, TransformerLayerSubmodules) and kha.attention == "gta":
                whole = separate_input_norm(node)
                replaced.append(whole)
            changed = {f.name: rewrite(getattr(whole, f.name)) for f in fields(whole) if f.init}
            if isinstance(node, ModuleSpec) and (module := _knocked(node.module, kha)):
                found = True
                changed |= {"module": module, "params": {**node.params, "kha": kha}}
                if any("core" in mechanism.stages for mechanism in kha.mechanisms):
                    changed["submodules"] = replace(
                        changed["submodules"], core_attention=TalkingAttention
                    )
                if kha.attention == "gla":
                    changed["submodules"] = use_grouped_latents(
                        changed["submodules"], kha.latent_heads
                    )
            rewritten[id(node)] = replace(whole, **changed)
        return rewritten[id(node)]

    result = rewrite(spec)
    empty_stage = isinstance(spec, TransformerBlockSubmodules) and not spec.layer_specs
    if not found and not empty_stage:
        raise ConfigError(f"The layer spec has no attention that supports KHA ({kha}).")
    return result


def _knocked(module: Any, kha: KHAConfig) -> type | None:
    """Return the class that replaces an attention class, or None."""
    if module is SelfAttention and kha.attention != "gla":
        return KHAGroupedTiedAttention if kha.attention == "gta" else KHASelfAttention
    return _LATENT.get(module) if isinstance(module, type) and kha.attention != "gta" else None


def kha_layer_spec(
    config: Any, kha: KHAConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> Spec:
    """Return ``GPTModel(transformer_layer_spec=...)`` with KHA for this pipeline stage.

    Args:
        config: a ``TransformerConfig``, or the ``GPTModelConfig`` of Megatron's training package.
            ``transformer_impl`` chooses Transformer Engine or local modules, ``num_moe_experts``
            and ``moe_layer_freq`` the MoE layers.
        vp_stage: virtual pipeline stage, if any.
        pp_rank: pipeline stage; None takes it from Megatron's ``parallel_state``.
    """
    transformer = config if isinstance(config, TransformerConfig) else config.transformer
    check_config(transformer, kha)
    if transformer.heterogeneous_block_specs and any(m.adds_loss for m in kha.mechanisms):
        raise ConfigError("heterogeneous_block_specs=True needs moh.balance=0.")
    return with_kha(_stock_spec(config, transformer, vp_stage, pp_rank), kha)


def _stock_spec(
    config: Any, transformer: TransformerConfig, vp_stage: int | None, pp_rank: int | None
) -> Spec:
    use_te = transformer.transformer_impl == "transformer_engine"
    if not use_te and transformer.transformer_impl != "local":
        raise ConfigError(f"KHA does not support transformer_impl={transformer.transformer_impl}.")
    if config is not transformer and use_te:
        from megatron.training.models.gpt import default_layer_spec

        return default_layer_spec(config, vp_stage)
    if transformer.heterogeneous_block_specs:
        raise ConfigError("heterogeneous_block_specs=True needs `-m kha_megatron.training` and TE.")
    # with a layer spec, Megatron would choose the final norm, which locally refuses sequence
    # parallelism
    return get_gpt_decoder_block_spec(
        transformer,
        use_transformer_engine=use_te,
        normalization=transformer.normalization,
        qk_l2_norm=transformer.qk_l2_norm,
        vp_stage=vp_stage,
        pp_rank=pp_rank,
    )


class KHATransformerLayer(BaseTransformerLayer):
    """Build the ``TransformerLayer`` with KHA that ``config`` needs at this layer number.

    A stock script reads the object of ``--spec`` before it has a configuration. The object is
    therefore the spec of one layer, and this class chooses the layer (local or Transformer Engine,
    dense or MoE) when Megatron builds it.
    """

    def __new__(
        cls,
        config: TransformerConfig,
        layer_number: int = 1,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
        *,
        spec_name: str,
        **kwargs: Any,
    ) -> TransformerLayer:
        """Build the layer ``layer_number`` (in this stage, from 1) of the spec ``spec_name``."""
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


def kha_hybrid_stack_spec(kha: KHAConfig | str) -> ModuleSpec:
    """Return ``HybridModel(hybrid_stack_spec=...)`` with KHA or the named spec."""
    # the path is resolved later, so that a GPTModel does not import Megatron's hybrid layers
    stack = ("kha_megatron.mcore.hybrid", "KHAHybridStack")
    return ModuleSpec(module=stack, params={"kha": kha})


accept_sequence_parallelism()


# `--spec MODULE NAME` needs module attributes
for _name in (FROM_ENVIRONMENT, *PRESETS):
    globals()[_name] = ModuleSpec(module=KHATransformerLayer, params={"spec_name": _name})
    globals()[f"{_name}_hybrid"] = kha_hybrid_stack_spec(_name)
