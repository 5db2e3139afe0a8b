"""HybridModel with KHA: Megatron's hybrid stack, its GPT layers cut in two.

Each symbol of ``--hybrid-layer-pattern`` is a layer of its own: ``*`` attention, ``-`` a dense and
``E`` a mixture-of-experts MLP. They are the halves of the very layers that a GPTModel with the
same configuration has, so QK-norm, either backend, sequence parallelism and knocking are theirs,
and a GPT checkpoint's tensors fit. Mamba (``M``) and gated delta net (``G``) layers stay
Megatron's own.
"""

import copy
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from kha_megatron.config import KHAConfig
from kha_megatron.errors import ConfigError
from kha_megatron.mcore.compat import megatron_imports
from kha_megatron.mcore.settings import named_config, publish
from kha_megatron.mcore.specs import kha_layer_spec

with megatron_imports():
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols, parse_hybrid_pattern
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

_OURS = (Symbols.ATTENTION, Symbols.MLP, Symbols.MOE)
_LATENT = (Symbols.MLA, Symbols.DS_ATTENTION)
_NO_MTP = "a hybrid model with KHA has no multi-token prediction layers"
_NO_VIRTUAL = "Megatron documents virtual pipeline stages as unsupported for hybrid models"
_PACKAGES = {Symbols.MAMBA: "mamba_ssm", Symbols.GDN: "fla"}


class KHAHybridStack(HybridStack):
    """``HybridStack`` whose attention layers knock, on either backend.

    Takes what ``HybridStack`` does, except ``submodules``.

    Args:
        kha: what is knocked, or the name of a spec (see ``kha_megatron.mcore.settings``).

    Raises:
        ConfigError: the layers of this stage, or the model, cannot be built so; it says why.
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
        if config.mtp_num_layers:
            raise ConfigError(
                f"mtp_num_layers={config.mtp_num_layers}: {_NO_MTP}: remove --mtp-num-layers"
            )
        if config.virtual_pipeline_model_parallel_size is not None:
            raise ConfigError(
                "virtual_pipeline_model_parallel_size="
                f"{config.virtual_pipeline_model_parallel_size}: {_NO_VIRTUAL}: leave it out"
            )
        check_pattern(
            "".join(layer_type_list),
            kha,
            transformer_impl=config.transformer_impl,
            num_experts=config.num_moe_experts,
        )
        layers = _gpt_layers(config, kha)
        super().__init__(
            config,
            _submodules(layers, config),
            *args,
            layer_type_list=layer_type_list,
            pp_layer_offset=pp_layer_offset,
            post_layer_norm=False,  # upstream's is Transformer Engine's whatever the backend
            pg_collection=pg_collection,
            **kwargs,
        )
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = layers.layer_norm(
                config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )
        if name:
            publish(name, kha, pg_collection, speak=pp_layer_offset == 0)


def check_pattern(
    pattern: str,
    kha: KHAConfig,
    *,
    transformer_impl: str,
    num_experts: int | None,
    stages: int | None = None,
) -> None:
    """Refuse the layers that Megatron, this installation or KHA cannot build.

    Args:
        pattern: Megatron's ``--hybrid-layer-pattern``, or one pipeline stage of it.
        kha: what is knocked.
        transformer_impl: ``local`` or ``transformer_engine``.
        num_experts: of each MoE layer, if any.
        stages: pipeline stages of the model; None for a pattern of one stage.

    Raises:
        ConfigError: naming the symbol and what to do.
    """
    where = f"hybrid layer pattern {pattern!r}"
    if Symbols.MTP_SEPARATOR in pattern:
        raise ConfigError(f"{where}: {_NO_MTP}: remove {Symbols.MTP_SEPARATOR} and what follows")
    try:
        parse_hybrid_pattern(pattern)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    sections = pattern.count(Symbols.PIPE) + 1
    if stages and sections not in (1, stages):
        raise ConfigError(
            f"{where} has {sections} sections for {stages} pipeline stages, and {_NO_VIRTUAL}: "
            f"separate {stages} with {Symbols.PIPE}"
        )
    if stages and kha.mechanisms and Symbols.ATTENTION not in pattern:
        raise ConfigError(
            f"{where} has no attention layer ({Symbols.ATTENTION}) for KHA on {kha}: add one, or "
            "use the baseline preset"
        )
    if Symbols.MOE in pattern and not num_experts:
        raise ConfigError(
            f"{where} has MoE layers ({Symbols.MOE}): give --num-experts, or use {Symbols.MLP}"
        )
    if kha.attention:
        raise ConfigError(
            f"{where}: attention={kha.attention} is not available in hybrid models: use a GPT "
            "model, or leave it out"
        )
    if any(symbol in pattern for symbol in _LATENT):
        raise ConfigError(
            f"{where}: latent attention ({', '.join(_LATENT)}) is not available in this version: "
            f"use {Symbols.ATTENTION}, or Megatron's own hybrid_stack_spec"
        )
    for symbol in sorted(set(pattern) & Symbols.VALID_LAYERS - set(_OURS)):
        if transformer_impl != "transformer_engine":
            raise ConfigError(
                f"{where}: layers {symbol} exist as Transformer Engine modules only, not with "
                f"--transformer-impl {transformer_impl}: use {' '.join(_OURS)}"
            )
        package = _PACKAGES.get(symbol)
        if package and find_spec(package) is None:
            raise ConfigError(
                f"{where}: layers {symbol} need {package}, which is not installed: install it, or "
                f"use {' '.join(_OURS)}"
            )


def _gpt_layers(config: TransformerConfig, kha: KHAConfig) -> TransformerBlockSubmodules:
    """A dense GPT layer, a MoE one, and the norm after the last, whatever the pattern."""
    two = copy.copy(config)
    two.num_layers, two.moe_layer_freq = 2, [0, 1]
    two.pipeline_model_parallel_size, two.pipeline_model_parallel_layout = 1, None
    two.num_layers_in_first_pipeline_stage = two.num_layers_in_last_pipeline_stage = None
    return kha_layer_spec(two, kha)


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
    """A layer with some of a GPT layer's submodules, under the names they have in checkpoints."""
    kept = {n: getattr(layer.submodules, n) for n in (*names, "sharded_state_dict_keys_map")}
    return ModuleSpec(module=module, submodules=TransformerLayerSubmodules(**kept))
