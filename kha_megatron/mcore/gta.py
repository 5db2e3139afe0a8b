"""Grouped-Tied Attention (GTA) with KHA.

See Zadouri et al. 2025 (arXiv 2505.21487). Each KV head has a single "tied" state that serves as
the value. Keys have two halves: the first half is rotary and shared by all KV heads, and the second
half is the first half of the tied state. KHA is applied to the tied state, so a KV cache only needs
``num_kv_heads * head_dim + head_dim / 2`` elements per token.

The rotary half comes first because Megatron's ``--rotary-percent 0.5`` expects it there.
"""

from dataclasses import replace
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import (
    HAVE_TE,
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
)
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import Tensor

from kha_megatron.errors import ConfigError
from kha_megatron.mcore.attention import KHASelfAttention
from kha_megatron.mcore.knocking import parameter_device


class RotaryKeyProjection(MegatronModule):
    """Projects hidden states to the rotary half of the keys, which all KV heads share.

    The output has shape ``[sequence, batch, 1, head_dim / 2]``. The weight is replicated on all TP
    ranks, and its gradient is summed inside autograd. Megatron must not reduce it again.
    """

    def __init__(self, config: TransformerConfig, tp_group: torch.distributed.ProcessGroup) -> None:
        super().__init__(config)
        self.tp_group = tp_group
        self.tensor_model_parallel = False  # required by Megatron-FSDP
        shape = (config.kv_channels // 2, config.hidden_size)
        weight = torch.empty(
            shape,
            dtype=config.params_dtype,
            device=parameter_device(config),
        )
        self.weight = torch.nn.Parameter(weight)
        if config.perform_initialization:
            config.init_method(self.weight)  # the RNG state is the same on all TP ranks

    def forward(self, hidden_states: Tensor) -> Tensor:
        group = self.tp_group
        if self.config.sequence_parallel:
            weight = copy_to_tensor_model_parallel_region(self.weight, group=group)
            key = torch.nn.functional.linear(hidden_states, weight)
            key = gather_from_sequence_parallel_region(key, group=group)
        else:
            key = torch.nn.functional.linear(hidden_states, self.weight)
            key = copy_to_tensor_model_parallel_region(key, group=group)
        return key.unsqueeze(2)


class KHAGroupedTiedAttention(KHASelfAttention):
    """Self-attention with tied keys and values. KHA on values is applied to the tied state.

    Per KV head, ``linear_qkv`` contains the rows of the query heads and of the tied state.
    """

    kind = "gta"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.linear_k_rope = RotaryKeyProjection(self.config, self.tp_group)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        embedding = kwargs.get("rotary_pos_emb")
        if isinstance(embedding, tuple):
            embedding = embedding[0]
        rotary_features = 0 if embedding is None else embedding.shape[-1]
        expected_features = self.config.kv_channels // 2
        if rotary_features != expected_features:
            raise ConfigError(
                f"attention=gta requires {expected_features} rotary features, but got "
                f"{rotary_features}. Use --position-embedding-type rope --rotary-percent 0.5."
            )
        return super().forward(hidden_states, *args, **kwargs)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, ...]:
        heads = self._project(hidden_states)
        tied = heads["value"]
        rotary_half = self.linear_k_rope(hidden_states)
        features = rotary_half.shape[-1]
        rotary_half = rotary_half.expand(-1, -1, tied.shape[2], -1)
        tied_half = tied[..., :features]
        key = torch.cat([rotary_half, tied_half], dim=-1)
        query = self._normed(self.q_layernorm, heads["query"])
        key = self._normed(self.k_layernorm, key)
        return self._copy_views(query, key, tied)


def separate_input_norm(layer: TransformerLayerSubmodules) -> TransformerLayerSubmodules:
    """Return a layer spec with a separate input norm instead of one fused into ``linear_qkv``.

    This is because ``linear_k_rope`` needs the normalized input, too. In checkpoints, the norm is
    named ``input_layernorm``.
    """
    attention = layer.self_attention
    names = dict(layer.sharded_state_dict_keys_map or {})
    names.pop("input_layernorm.", None)
    layer = replace(layer, sharded_state_dict_keys_map=names)
    linear = attention.submodules.linear_qkv
    if HAVE_TE and linear is TELayerNormColumnParallelLinear:
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        submodules = replace(attention.submodules, linear_qkv=TEColumnParallelLinear)
        attention = replace(attention, submodules=submodules)
        norm = TESpecProvider().layer_norm(has_residual=True)
        return replace(layer, input_layernorm=norm, self_attention=attention)
    if linear not in (ColumnParallelLinear, TEColumnParallelLinear):
        raise ConfigError(f"attention=gta does not support the QKV projection {linear}.")
    return layer
