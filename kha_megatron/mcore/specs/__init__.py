"""Layer specs with KHA for GPT and hybrid models.

With stock Megatron scripts, you can select a spec by name::

    --spec kha_megatron.mcore.specs kha_mlp+gate_output

In Python, build one with :func:`kha_layer_spec` or :func:`kha_hybrid_stack_spec`, or use
:func:`with_kha` to convert an existing spec.
"""

import sys
from dataclasses import fields, is_dataclass, replace
from typing import Any

from kha_megatron.errors import ConfigError
from kha_megatron.heads.config import CONFIG_VARIABLE, PRESETS, HeadsConfig, is_preset_name
from kha_megatron.mcore.compat import (
    build_mtp_without_te,
    count_tokens_in_integers,
    megatron_imports,
)

with megatron_imports():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import transformer_block
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

    from kha_megatron.mcore.all_heads import AllHeadsAttention
    from kha_megatron.mcore.attention import KHASelfAttention, check_config
    from kha_megatron.mcore.gta import KHAGroupedTiedAttention, separate_input_norm
    from kha_megatron.mcore.latent import (
        KHAFusedMLASelfAttention,
        KHAMLASelfAttention,
        use_grouped_latents,
    )
    from kha_megatron.mcore.local_modules import GatheredDotProductAttention, TorchNorm
    from kha_megatron.mcore.settings import FROM_ENVIRONMENT, named_config, publish

type Spec = ModuleSpec | TransformerBlockSubmodules

_LOCAL: dict[type, type] = {
    WrappedTorchNorm: TorchNorm,
    DotProductAttention: GatheredDotProductAttention,
}
"""Local modules that do not support sequence or context parallelism, and their replacements."""

_LATENT: dict[type, type] = {
    MLASelfAttention: KHAMLASelfAttention,
    FusedMLASelfAttention: KHAFusedMLASelfAttention,
}


def with_kha(spec: Spec, kha: HeadsConfig) -> Spec:
    """Return a copy of a layer spec or block spec with KHA in all self-attention layers.

    Local (non-TE) norms and core attentions are replaced as well, to support sequence and context
    parallelism and latent attention.

    Raises:
        ConfigError: If ``spec`` has no attention module that supports ``kha``.
    """
    count_tokens_in_integers()  # before the routers are built
    rewritten: dict[int, Any] = {}  # by id, to copy shared objects only once
    replaced: list[Any] = []  # keeps objects alive so that ids stay unique
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
                if any(mechanism.acts_at("core") for mechanism in kha.mechanisms):
                    changed["submodules"] = replace(
                        changed["submodules"], core_attention=AllHeadsAttention
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
        raise ConfigError(f"The layer spec has no attention module that supports KHA ({kha}).")
    return result


def _knocked(module: Any, kha: HeadsConfig) -> type | None:
    if module is SelfAttention and kha.attention != "gla":
        return KHAGroupedTiedAttention if kha.attention == "gta" else KHASelfAttention
    return _LATENT.get(module) if isinstance(module, type) and kha.attention != "gta" else None


def kha_layer_spec(
    config: Any, kha: HeadsConfig, vp_stage: int | None = None, pp_rank: int | None = None
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
    adding = [mechanism for mechanism in kha.mechanisms if mechanism.adds_loss]
    if transformer.heterogeneous_block_specs and adding:
        raise ConfigError(
            f"heterogeneous_block_specs does not support the auxiliary loss of {adding[0]}."
        )
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


def kha_hybrid_stack_spec(kha: HeadsConfig | str) -> ModuleSpec:
    """Build the ``hybrid_stack_spec`` for a ``HybridModel`` (``kha`` can be a spec name)."""
    # an import path, because hybrid.py imports this module
    stack = ("kha_megatron.mcore.hybrid", "KHAHybridStack")
    return ModuleSpec(module=stack, submodules=HybridStackSubmodules(), params={"kha": kha})


# this default final norm of transformer blocks does not support sequence parallelism
if transformer_block.LayerNormImpl is WrappedTorchNorm:
    transformer_block.LayerNormImpl = TorchNorm
build_mtp_without_te()


# --spec PACKAGE NAME looks up attributes of the package
def _add_named_spec(name: str) -> None:
    globals()[name] = ModuleSpec(module=KHATransformerLayer, params={"spec_name": name})
    globals()[f"{name}_hybrid"] = kha_hybrid_stack_spec(name)


for _name in (FROM_ENVIRONMENT, *PRESETS):
    _add_named_spec(_name)


def __getattr__(name: str) -> ModuleSpec:
    """Add the specs of several presets, e.g. ``kha_mlp+gate_output_hybrid``.

    Megatron calls ``__import__(package, fromlist=[name])``, for which Python looks up this
    attribute, and then reads ``vars(package)[name]``. Python only does this for packages.
    """
    presets = name.removesuffix("_hybrid")
    if not is_preset_name(presets):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _add_named_spec(presets)
    return globals()[name]


def _check_spec_name(words: list[str]) -> None:
    """Exit with an error message for ``--spec`` with an invalid name (Megatron: KeyError)."""
    names = words[words.index(__name__) + 1 :][:1] if __name__ in words else []
    for name in names:
        if name in globals():
            return
        try:
            HeadsConfig.from_preset(name.removesuffix("_hybrid"))
        except ConfigError as error:
            sys.exit(
                f"error: Invalid layer spec {name!r} in {__name__}. {error} The spec "
                f"{FROM_ENVIRONMENT} reads {CONFIG_VARIABLE}. For hybrid models, append _hybrid."
            )


_check_spec_name(sys.argv)
