"""KHA as TransformerLayer specs, for Transformer Engine and local modules, dense and MoE.

Three ways in, from the outside to the inside:

- by name, for a stock Megatron script: ``--spec kha_megatron.mcore.specs kha_mlp``;
- :func:`kha_layer_spec`, for a program that builds ``GPTModel`` from a ``TransformerConfig``;
- :func:`with_kha`, to put the attention into any spec that Megatron (or a provider) has made.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from kha_megatron.config import KHAConfig
from kha_megatron.errors import ConfigError
from kha_megatron.mcore.attention import KHASelfAttention, check_config
from kha_megatron.mcore.compat import check_version
from kha_megatron.mcore.norm import TorchNorm

Spec = ModuleSpec | TransformerBlockSubmodules


def with_kha(spec: Spec, kha: KHAConfig) -> Spec:
    """A copy of ``spec`` whose self-attention knocks.

    Every ``SelfAttention`` becomes :class:`~kha_megatron.mcore.attention.KHASelfAttention` and
    every ``WrappedTorchNorm`` one that sequence parallelism accepts; the rest, the experts and
    the backend's linear layers included, stays as it was. ``spec`` is not changed.

    Raises:
        ConfigError: there is no ``SelfAttention`` in it (MLA and linear attention have others).
    """
    rewritten: dict[int, Any] = {}  # one object in the spec stays one object in the copy
    found = False

    def rewrite(node: Any) -> Any:
        nonlocal found
        if node is WrappedTorchNorm:
            return TorchNorm
        if isinstance(node, list):
            return [rewrite(item) for item in node]
        if not is_dataclass(node) or isinstance(node, type):
            return node
        if id(node) not in rewritten:
            changed = {f.name: rewrite(getattr(node, f.name)) for f in fields(node) if f.init}
            if isinstance(node, ModuleSpec) and node.module is SelfAttention:
                found = True
                changed |= {"module": KHASelfAttention, "params": {**node.params, "kha": kha}}
            rewritten[id(node)] = replace(node, **changed)
        return rewritten[id(node)]

    result = rewrite(spec)
    empty_stage = isinstance(spec, TransformerBlockSubmodules) and not spec.layer_specs
    if not found and not empty_stage:
        raise ConfigError(
            "no megatron.core SelfAttention in the layer spec to put KHA into: use a model with "
            "MHA, MQA or GQA attention (not MLA, linear or experimental attention variants)"
        )
    return result


def kha_layer_spec(config: Any, kha: KHAConfig, vp_stage: int | None = None) -> Spec:
    """What ``GPTModel(transformer_layer_spec=...)`` takes, for this pipeline stage, with KHA.

    Args:
        config: a ``TransformerConfig``, or the ``GPTModelConfig`` of Megatron's training package.
            ``transformer_impl`` chooses Transformer Engine or local modules, ``num_moe_experts``
            and ``moe_layer_freq`` the MoE layers.
        kha: what is knocked.
        vp_stage: virtual pipeline stage, if any.

    Raises:
        ConfigError: the model cannot carry KHA as configured; the message says why.
    """
    check_version()
    transformer: TransformerConfig = getattr(config, "transformer", config)
    check_config(transformer, kha)
    if kha.variants and transformer.mtp_num_layers:
        raise ConfigError(
            f"mtp_num_layers={transformer.mtp_num_layers}: Megatron builds its multi-token "
            "prediction layers without the layer spec, so they would train plain attention: "
            "remove --mtp-num-layers, or use the baseline preset"
        )
    return with_kha(_stock_spec(config, transformer, vp_stage), kha)


def _stock_spec(config: Any, transformer: TransformerConfig, vp_stage: int | None) -> Spec:
    use_te = transformer.transformer_impl == "transformer_engine"
    if config is not transformer and use_te:
        # Megatron's own choice, which also reads options that only its training package has
        from megatron.training.models.gpt import default_layer_spec

        return default_layer_spec(config, vp_stage)
    # a whole block rather than one layer, because a layer spec leaves the choice of the final norm
    # to Megatron, and without Transformer Engine that one refuses sequence parallelism
    return get_gpt_decoder_block_spec(
        transformer,
        use_transformer_engine=use_te,
        normalization=transformer.normalization,
        qk_l2_norm=transformer.qk_l2_norm,
        vp_stage=vp_stage,
    )


def _named(preset: str) -> Callable[..., Spec]:
    kha = KHAConfig.from_preset(preset)

    def spec(config: Any, vp_stage: int | None = None) -> Spec:
        # Megatron answers a mistyped --spec with plain attention, so the right one speaks up
        if vp_stage in (None, 0) and (
            not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        ):
            print(f"kha_megatron: spec {preset} knocks {kha}", flush=True)
        return kha_layer_spec(config, kha, vp_stage)

    spec.__name__ = spec.__qualname__ = preset
    spec.__doc__ = f"``--spec kha_megatron.mcore.specs {preset}``: knocks {kha}."
    return spec


# `--spec MODULE NAME` looks the name up in the module's own attributes
baseline = _named("baseline")
kha_mlp = _named("kha_mlp")
kha_linear = _named("kha_linear")
kha_linear_v = _named("kha_linear_v")
kha_gate_v = _named("kha_gate_v")
kha_mlp_qkv = _named("kha_mlp_qkv")
