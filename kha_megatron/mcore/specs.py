"""KHA as layer specs, for Transformer Engine and local modules, dense and MoE, GPT and hybrid.

Three ways in, from the outside to the inside:

- by name, for a stock Megatron script: ``--spec kha_megatron.mcore.specs kha_mlp``;
- :func:`kha_layer_spec` and :func:`kha_hybrid_stack_spec`, for a program that builds ``GPTModel``
  or ``HybridModel``;
- :func:`with_kha`, to put the attention into any spec that Megatron (or a provider) has made.
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
    from kha_megatron.mcore.collaborative import KHACollaborativeAttention
    from kha_megatron.mcore.gta import KHAGroupedTiedAttention, check_tied, tied_layer
    from kha_megatron.mcore.latent import (
        KHAFusedMLASelfAttention,
        KHAMLASelfAttention,
        check_grouped,
        grouped,
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
"""Modules without Transformer Engine that refuse a parallelism, and those that accept it."""


_LATENT: dict[type, type] = {
    MLASelfAttention: KHAMLASelfAttention,
    FusedMLASelfAttention: KHAFusedMLASelfAttention,
}


def with_kha(spec: Spec, kha: KHAConfig) -> Spec:
    """A copy of ``spec`` whose self-attention knocks.

    Every ``SelfAttention`` becomes :class:`~kha_megatron.mcore.attention.KHASelfAttention` (or
    :class:`~kha_megatron.mcore.gta.KHAGroupedTiedAttention`), every ``MLASelfAttention`` one of
    :mod:`kha_megatron.mcore.latent`. Of the local modules, the norm becomes one that sequence
    parallelism accepts and the core attention one that context parallelism and latent attention
    accept. The rest, the experts and the backend's linear layers included, stays as it was.
    ``spec`` is not changed.

    Raises:
        ConfigError: there is no attention in it that can be as ``kha`` asks.
    """
    rewritten: dict[int, Any] = {}  # one object in the spec stays one object in the copy
    alive: list[Any] = []  # what is known by its id must not go
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
                whole = tied_layer(node)
                alive.append(whole)
            changed = {f.name: rewrite(getattr(whole, f.name)) for f in fields(whole) if f.init}
            if isinstance(node, ModuleSpec) and (module := _knocked(node.module, kha)):
                found = True
                changed |= {"module": module, "params": {**node.params, "kha": kha}}
                if kha.talking:
                    changed["submodules"] = replace(
                        changed["submodules"], core_attention=TalkingAttention
                    )
                if kha.attention == "gla":
                    changed["submodules"] = grouped(changed["submodules"], kha.latent_heads)
            rewritten[id(node)] = replace(whole, **changed)
        return rewritten[id(node)]

    result = rewrite(spec)
    empty_stage = isinstance(spec, TransformerBlockSubmodules) and not spec.layer_specs
    if not found and not empty_stage:
        raise ConfigError(
            f"no attention in the layer spec to put KHA on {kha} into: use a model with MHA, MQA, "
            "GQA or multi-latent attention (not linear or experimental attention variants)"
        )
    return result


def _knocked(module: Any, kha: KHAConfig) -> type | None:
    """What takes the place of an attention; None for other modules, and where ``kha`` forbids."""
    if module is SelfAttention and kha.attention != "gla":
        if kha.collaborative:
            return KHACollaborativeAttention
        return KHAGroupedTiedAttention if kha.attention == "gta" else KHASelfAttention
    return _LATENT.get(module) if isinstance(module, type) and kha.attention != "gta" else None


def kha_layer_spec(
    config: Any, kha: KHAConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> Spec:
    """What ``GPTModel(transformer_layer_spec=...)`` takes, for this pipeline stage, with KHA.

    Args:
        config: a ``TransformerConfig``, or the ``GPTModelConfig`` of Megatron's training package.
            ``transformer_impl`` chooses Transformer Engine or local modules, ``num_moe_experts``
            and ``moe_layer_freq`` the MoE layers.
        kha: what is knocked.
        vp_stage: virtual pipeline stage, if any.
        pp_rank: pipeline stage; None is that of Megatron's ``parallel_state``.

    Raises:
        ConfigError: the model cannot carry KHA as configured; the message says why.
    """
    transformer = config if isinstance(config, TransformerConfig) else config.transformer
    check_config(transformer, kha)
    if transformer.heterogeneous_block_specs and any(m.adds_loss for m in kha.mechanisms):
        raise ConfigError(
            "heterogeneous_block_specs=True gives each layer a configuration of its own, and "
            "Megatron tells the scale of a loss to the model's alone: use moh.balance=0"
        )
    if kha.attention is not None:
        {"gta": check_tied, "gla": check_grouped}[kha.attention](transformer)
    return with_kha(_stock_spec(config, transformer, vp_stage, pp_rank), kha)


def _stock_spec(
    config: Any, transformer: TransformerConfig, vp_stage: int | None, pp_rank: int | None
) -> Spec:
    use_te = transformer.transformer_impl == "transformer_engine"
    if not use_te and transformer.transformer_impl != "local":
        raise ConfigError(
            f"transformer_impl={transformer.transformer_impl} has layers of its own, into which "
            "KHA was never put: use transformer_engine or local"
        )
    if config is not transformer and use_te:
        # Megatron's own choice, which also reads options that only its training package has
        from megatron.training.models.gpt import default_layer_spec

        return default_layer_spec(config, vp_stage)
    fused_mlp = use_te and not transformer.num_moe_experts
    for option, applies in (
        ("heterogeneous_block_specs", True),
        ("use_transformer_engine_op_fuser", fused_mlp),
    ):
        if applies and getattr(transformer, option):
            raise ConfigError(
                f"{option}=True asks for layers that a TransformerConfig does not describe: leave "
                "it out, or train a GPT model with `-m kha_megatron.training` and "
                "--transformer-impl transformer_engine"
            )
    # a whole block rather than one layer, because a layer spec leaves the choice of the final norm
    # to Megatron, and without Transformer Engine that one refuses sequence parallelism
    return get_gpt_decoder_block_spec(
        transformer,
        use_transformer_engine=use_te,
        normalization=transformer.normalization,
        qk_l2_norm=transformer.qk_l2_norm,
        vp_stage=vp_stage,
        pp_rank=pp_rank,
    )


class KHATransformerLayer(BaseTransformerLayer):
    """Builds the ``TransformerLayer`` with KHA that ``config`` asks for at this layer number.

    A stock script hands on what ``--spec`` names before there is a configuration, to old builders
    as it is. So the named object is a spec of one layer, and which layer that is (local or
    Transformer Engine, dense or MoE) is decided here, where Megatron repeats it over the stage.
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
        """Build a layer as ``TransformerBlock`` does.

        Args:
            layer_number: within this stage, from 1.
            spec_name: a preset, or ``kha``.

        Raises:
            ConfigError: see :func:`kha_layer_spec` and ``settings.named_config``.
        """
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
                speak=layer.layer_number == 1,
            )
        return layer


def kha_hybrid_stack_spec(kha: KHAConfig | str) -> ModuleSpec:
    """What ``HybridModel(hybrid_stack_spec=...)`` takes.

    Args:
        kha: what is knocked, or the name of a preset, resolved when the model is built.
    """
    # by its path, because importing Megatron's hybrid layers is of no use to a GPTModel
    stack = ("kha_megatron.mcore.hybrid", "KHAHybridStack")
    return ModuleSpec(module=stack, params={"kha": kha})


accept_sequence_parallelism()


def _layer(name: str) -> ModuleSpec:
    return ModuleSpec(module=KHATransformerLayer, params={"spec_name": name})


# `--spec MODULE NAME` looks the name up among the module's own attributes
for _name in (FROM_ENVIRONMENT, *PRESETS):
    globals()[_name] = _layer(_name)
    globals()[f"{_name}_hybrid"] = kha_hybrid_stack_spec(_name)
