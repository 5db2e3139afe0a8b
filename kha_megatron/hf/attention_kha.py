"""Attention of ``kha`` models beyond MHA, MQA and GQA with KHA: other head mechanisms, Grouped-Tied
Attention (GTA), Multi-head Latent Attention (MLA) and Grouped Latent Attention (GLA).

Each class computes projections, KHA, QK-norm, RoPE, attention and the output projection, in this
order. A model directory contains this file only if its model needs it. ``modeling_kha`` has the
shape legend.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    apply_rotary_pos_emb_interleave,
)
from transformers.models.glm4_moe.modeling_glm4_moe import (
    Glm4MoeAttention,
    Glm4MoeRMSNorm,
    Glm4MoeRotaryEmbedding,
    eager_attention_forward,
)
from transformers.utils import logging

from kha_megatron.heads.initial import initial_weight
from kha_megatron.heads.mechanism import (
    HeadFacts,
    HeadRows,
    HeadSizes,
    HeadTensor,
    InitialValue,
    Mechanism,
    Stage,
    apply_stage,
)
from kha_megatron.heads.ranks import Listener, Ranks
from kha_megatron.hf.configuration_kha import KHAModelConfig
from kha_megatron.hf.mechanisms_kha import MECHANISMS
from kha_megatron.hf.modeling_kha import (
    ATTENTIONS,
    SHARED_BY_HEADS,
    CosSin,
    KHAModule,
    Module,
    apply_rotary,
)

logger = logging.get_logger(__name__)

SHARED_KEY = "mla_kv_a_proj"
"""Tensor-parallel style of a projection whose rotary output is used by the heads of all ranks."""


class HeadParameter(Module):
    """Base of modules with a ``weight`` of a head mechanism."""

    initial: tuple[InitialValue, ...]

    def set_initial_value(self, std: float) -> None:
        """Fill the weight."""
        value = torch.empty(1, *self.weight.shape, device="cpu")
        init.copy_(self.weight, initial_weight(value, self.initial, std=std)[0])


class HeadWeight(HeadParameter):
    """A parameter that every rank holds. transformers' tensor parallelism hooks the call."""

    def __init__(self, tensor: HeadTensor) -> None:
        super().__init__()
        self.initial = tensor.initial
        self.weight = nn.Parameter(torch.empty(tensor.shape))

    def forward(self) -> Tensor:
        """Return the parameter."""
        return self.weight


class InputLinear(HeadParameter, nn.Linear):
    """A projection of the layer's input: the scores of a gate or a router."""

    def __init__(self, hidden: int, tensor: HeadTensor) -> None:
        self.initial = tensor.initial
        super().__init__(hidden, math.prod(tensor.shape[:-1]), bias=False)


class KHAHeads(KHAModule):
    """Base of the attention classes in this file: adds the mechanisms that the model has."""

    @classmethod
    def check_config(cls, config: KHAModelConfig) -> str | None:
        """Return ``eager`` if the model needs eager attention, otherwise None.

        Raises:
            ValueError: if this code cannot compute a mechanism of the model.
        """
        if unknown := config.mechanisms.keys() - MECHANISMS.keys():
            raise ValueError(
                f"Unknown fields kha_{', kha_'.join(sorted(unknown))} in the configuration. This "
                f"code supports {', '.join(MECHANISMS)}. Update kha-megatron."
            )
        latent = config.kv_lora_rank is not None
        knocks = (config.kha_query, config.kha_key, config.kha_value)
        if latent and not {*knocks} <= {None, "linear"}:
            raise ValueError(f"Expected linear KHA or None on MLA and GLA, got {knocks}.")
        if config.kha_attention == "gta" and config.kha_key is not None:
            raise ValueError(
                f"Expected kha_key=None because GTA ties keys to values, got {config.kha_key!r}."
            )
        share = (config.rope_parameters or {}).get("partial_rotary_factor", 1.0)
        facts = HeadFacts(
            rotary_features=int(share * config.head_dim),
            multi_latent=latent,
            attention=config.kha_attention,
            qk_norm=config.use_qk_norm,
            query_heads=config.num_attention_heads,
            layers=config.num_hidden_layers,
        )
        mechanisms = mechanisms_of(config)
        for mechanism in mechanisms:
            if reason := mechanism.unsupported_reason(facts):
                raise ValueError(reason)
        return "eager" if any(m.acts_at("core") for m in mechanisms) else None

    def add_heads(self, config: KHAModelConfig, ranks: int = 1) -> None:
        """Create the modules of all mechanisms.

        Args:
            config: configuration of the model.
            ranks: tensor-parallel ranks, if this module holds only the heads of one of them.
        """
        sizes = head_sizes(config).on_rank(ranks)
        self.add_knocks(config, sizes.dim("key"), sizes.dim("value"))
        self.listeners: list[Listener] = []
        self.mechanisms: list[tuple[Mechanism, Sequence[HeadRows], Sequence[HeadTensor]]] = []
        for of_model in mechanisms_of(config):
            mechanism = of_model.for_layer(self.layer_idx)
            rows, tensors = mechanism.rows(sizes), mechanism.tensors(sizes)
            for row in rows:
                features = sizes.heads(row.heads) * row.features
                linear = nn.Linear(config.hidden_size, features, bias=config.attention_bias)
                setattr(self, row.hf, linear)
            for tensor in tensors:
                read = InputLinear(config.hidden_size, tensor) if tensor.reads_input else None
                setattr(self, tensor.hf, read or HeadWeight(tensor))
            self.mechanisms.append((mechanism, rows, tensors))

    def tp_plan(self) -> dict[str, str]:
        """Return the tensor-parallel style of each module. Empty: every rank has all heads."""
        if any(mechanism.acts_at("core") for mechanism, *_ in self.mechanisms):
            return {}
        plan = super().tp_plan()
        for _, rows, tensors in self.mechanisms:
            plan |= dict.fromkeys((row.hf for row in rows), "colwise")
            for tensor in tensors:
                plan[tensor.hf] = SHARED_BY_HEADS
                if tensor.reads_input:  # `read_input` sums the gradient of shared projections.
                    plan[tensor.hf] = "colwise" if tensor.per_head else "replicate"
        return plan

    def train(self, mode: bool = True) -> "KHAHeads":
        """Set the training mode, and warn once if a loss that Megatron adds is missing here."""
        for mechanism, *_ in self.mechanisms:
            if mode and mechanism.adds_loss:
                logger.warning_once(
                    f"transformers trains {mechanism} without the load-balance loss that Megatron "
                    "adds. The load of the heads may become unbalanced."
                )
        return super().train(mode)

    def read_input(self, hidden_states: Tensor) -> dict[str, Tensor]:
        """Return the mechanisms' projections of the input ``[B, S, C]``, by name.

        Each is ``[B, S, heads, features]``, with 1 for ``heads`` if all heads use the projection,
        or ``[B, S, features]`` if it acts on the output projection.
        """
        seen = {}
        for _, rows, tensors in self.mechanisms:
            for row in rows:
                score = getattr(self, row.hf)(hidden_states)
                seen[row.name] = score.unflatten(-1, (-1, row.features))
            for tensor in tensors:
                if not tensor.reads_input:
                    continue
                score = getattr(self, tensor.hf)(hidden_states)
                if tensor.per_head:
                    score = score.unflatten(-1, (-1, tensor.shape[-2]))
                elif tensor.gradient == "heads":
                    score = self._ranks().sum_gradient(score.unsqueeze(-2))
                seen[tensor.name] = score
        return seen

    def apply_heads(self, stage: Stage, seen: dict[str, Tensor], **tensors: Tensor) -> list[Tensor]:
        """Apply the mechanisms of a stage and return the tensors in the same order.

        Args:
            stage: ``qkv``, ``output`` or ``dense``.
            seen: results of :meth:`read_input`. Results for later stages are added.
            tensors: ``[B, S, heads, D]`` each, or ``[B, S, C]`` at ``dense``.
        """
        mechanisms = (
            (mechanism, self.head_weights(parameters))
            for mechanism, _, parameters in self.mechanisms
            if mechanism.acts_at(stage)
        )
        return apply_stage(stage, mechanisms, tensors, seen, self._ranks())

    def head_weights(self, tensors: Sequence[HeadTensor]) -> dict[str, Tensor]:
        """Return this rank's part of each parameter that does not read the input, by name."""
        ranks, weights = self._ranks(), {}
        for tensor in tensors:
            if not tensor.reads_input:
                weight = getattr(self, tensor.hf)()
                weights[tensor.name] = ranks.own_part(weight) if tensor.per_head else weight
        return weights

    def project_output(self, heads: Tensor, seen: dict[str, Tensor]) -> Tensor:
        """Map the output of attention ``[..., H, D]`` to ``[..., C]``."""
        (heads,) = self.apply_heads("output", seen, output=heads)
        dense = self.o_proj(heads.flatten(-2).contiguous())
        return self.apply_heads("dense", seen, dense=dense)[0]

    def core_attention(self) -> Any:
        """Return the attention function: the configured backend, or that of a mechanism."""
        for mechanism, _, parameters in self.mechanisms:
            if mechanism.acts_at("core"):
                return partial(_attend_eagerly, mechanism, self.head_weights(parameters))
        return ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )

    def _ranks(self) -> "ModelRanks":
        return ModelRanks(self.o_proj, self.listeners)


def mechanisms_of(config: KHAModelConfig) -> list[Mechanism]:
    """Return the mechanisms of a model except KHA, in the order in which they act."""
    settings = config.mechanisms
    return [kind.from_dict(settings[n]) for n, kind in MECHANISMS.items() if n in settings]


def head_sizes(config: KHAModelConfig) -> HeadSizes:
    """Return the sizes of the heads of one layer over all ranks."""
    latent = config.kv_lora_rank is not None
    return HeadSizes(
        query_heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=(latent and config.qk_nope_head_dim) or config.head_dim,
        value_dim=config.v_head_dim if latent else None,
        hidden_size=config.hidden_size,
        latent=latent,
    )


class ModelRanks(Ranks):
    """Collectives of mechanisms over the tensor-parallel ranks of a transformers model.

    Every rank has all tokens, so a projection of them is the same on each rank.

    Args:
        projection: a module whose weight tensor parallelism splits.
        listeners: receive the figures of :meth:`observe`.
    """

    def __init__(self, projection: nn.Module, listeners: Sequence[Listener] = ()) -> None:
        self.listeners = listeners
        mesh: Any = getattr(getattr(projection, "weight", None), "device_mesh", None)
        is_split = mesh is not None and "tp" in (mesh.mesh_dim_names or ())
        self.mesh: Any = mesh["tp"] if is_split else None

    def all_heads(self, x: Tensor) -> Tensor:
        """Gather ``[..., heads]`` of every rank. Backward returns the part of this rank."""
        return self._redistribute(x, Shard(-1), Replicate())

    def own_heads(self, x: Tensor) -> Tensor:
        """Return this rank's part of ``[..., heads]``. Backward gathers all parts."""
        return self._redistribute(x, Replicate(), Shard(-1))

    def _redistribute(self, x: Tensor, before: Any, after: Any) -> Tensor:
        if self.mesh is None:
            return x
        placed = DTensor.from_local(x, self.mesh, [before], run_check=False)
        return placed.redistribute(placements=[after]).to_local()

    def sum_gradient(self, x: Tensor) -> Tensor:
        """Return ``x``, equal on all ranks, and sum its gradient over ranks in backward."""
        if self.mesh is None:
            return x
        placed = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        return placed.to_local(grad_placements=[Partial()])

    def own_part(self, weight: Tensor) -> Tensor:
        """Return this rank's part of ``[heads, ...]``, a parameter that every rank holds."""
        if self.mesh is None:
            return weight
        return weight.chunk(self.mesh.size())[self.mesh.get_local_rank()]


def _attend(
    module: Any,
    shape: torch.Size,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seen: dict[str, Tensor],
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """Attend with the configured backend and project to ``[*shape, C]``.

    Flash attention needs equal widths of queries, keys and values. Narrower tensors are padded with
    zeros, which change neither scores nor outputs. transformers itself pads only values.
    """
    width = padded = value.shape[-1]
    if "flash" in (module.config._attn_implementation or "") and query.shape[-1] != width:
        padded = max(query.shape[-1], width)
        query, key, value = (
            nn.functional.pad(part, (0, padded - part.shape[-1])) for part in (query, key, value)
        )
    dropout = module.attention_dropout if module.training else 0.0
    output, weights = module.core_attention()(
        module, query, key, value, mask, dropout=dropout, scaling=module.scaling, **kwargs
    )
    heads = output.reshape(*shape, -1, padded)[..., :width]
    return module.project_output(heads, seen), weights


def _attend_eagerly(
    mechanism: Any,
    weights: dict[str, Tensor],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float,
    **kwargs,
) -> tuple[Tensor, Tensor]:
    """Attend with talking heads, which mix logits and weights (arXiv 2003.02436)."""
    if (given := module.config._attn_implementation) != "eager":
        raise ValueError(
            f"Expected attn_implementation='eager' with {mechanism}, got {given!r}. No fused "
            "kernel mixes the logits of all heads."
        )
    drop = partial(nn.functional.dropout, p=dropout) if dropout else None
    output, scores = mechanism.attend(
        query, key, value, weights, scale=scaling, mask=mask, dropout=drop
    )
    return output.transpose(1, 2).contiguous(), scores


class KHAHeadsAttention(KHAHeads, Glm4MoeAttention):
    """MHA, MQA and GQA with further head mechanisms."""

    def __init__(self, config: KHAModelConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.add_heads(config)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: CosSin,
        attention_mask: Tensor | None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """See :meth:`KHAAttention.forward`."""
        input_shape = hidden_states.shape[:-1]
        heads = (*input_shape, -1, self.head_dim)
        seen = self.read_input(hidden_states)
        query, key, value = self.apply_heads(
            "qkv",
            seen,
            query=self.q_knock(self.q_proj(hidden_states).view(heads)),
            key=self.k_knock(self.k_proj(hidden_states).view(heads)),
            value=self.v_knock(self.v_proj(hidden_states).view(heads)),
        )
        value = value.transpose(1, 2)
        if self.use_qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query = apply_rotary(query.transpose(1, 2), *position_embeddings)
        key = apply_rotary(key.transpose(1, 2), *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        # vLLM looks for this call in the source of `forward`, so it cannot move to `_attend`.
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        if any(mechanism.acts_at("core") for mechanism, *_ in self.mechanisms):
            attend = self.core_attention()
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.project_output(output.reshape(*heads), seen), weights


class KHACollaborativeAttention(KHAHeads, Glm4MoeAttention):
    """Collaborative heads (Cordonnier et al. 2020, arXiv 2006.16362): all heads share one query and
    one key of ``dim`` features, which each head weights by a vector of its own.

    The cache holds the shared key and the values of all heads, ``dim + G D`` numbers per token.
    """

    projections = ("v_proj",)

    def __init__(self, config: KHAModelConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        del self.q_proj, self.k_proj
        dim = config.mechanisms["collaborative"]["dim"]
        self.scaling = dim**-0.5
        if self.use_qk_norm:
            self.q_norm = Glm4MoeRMSNorm(dim, eps=config.rms_norm_eps)
            self.k_norm = Glm4MoeRMSNorm(dim, eps=config.rms_norm_eps)
        self.add_heads(config)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: CosSin,
        attention_mask: Tensor | None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """See :meth:`KHAAttention.forward`."""
        input_shape, seen = hidden_states.shape[:-1], self.read_input(hidden_states)
        heads = (*input_shape, -1, self.head_dim)
        query, key, value = self.apply_heads(
            "qkv",
            seen,
            query=seen["collaborative_query"],
            key=seen["collaborative_key"],
            value=self.v_knock(self.v_proj(hidden_states).view(heads)),
        )
        if self.use_qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query = apply_rotary(query.transpose(1, 2), *position_embeddings)
        key = apply_rotary(key.transpose(1, 2), *position_embeddings)
        value = value.flatten(-2)[:, None]
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        value = value.squeeze(1).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        key = key.expand(-1, value.shape[1], -1, -1)
        return _attend(self, input_shape, query, key, value, attention_mask, seen, **kwargs)


class KHATiedAttention(KHAHeads, Glm4MoeAttention):
    """Grouped-Tied Attention (Zadouri et al. 2025, arXiv 2505.21487) with a knocked tied state.

    The state of a key/value head is its value, and its first half is the half of the key without
    position. The rotary half of the key is one head that all groups share. It comes first, as in
    Megatron. The cache holds ``G D + D / 2`` numbers per token, stored as one head of keys and one
    of values because transformers' static cache needs equal numbers of heads.
    """

    projections = ("q_proj", "kv_proj")

    def __init__(self, config: KHAModelConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.kv_proj = self.v_proj
        del self.k_proj, self.v_proj
        self.k_rope_proj = nn.Linear(config.hidden_size, config.head_dim // 2, bias=False)
        self.rotary_emb = Glm4MoeRotaryEmbedding(config)
        self.add_heads(config)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: CosSin,
        attention_mask: Tensor | None,
        past_key_values: Cache | None = None,
        position_ids: Tensor | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """See :meth:`KHAAttention.forward`.

        QK-norm normalises whole keys, which differ between groups. A model with QK-norm therefore
        caches the rotary half before norm and rotation, and rotates the whole cache in every step.
        The cached tokens are assumed to have consecutive positions: true with left padding, not
        with packed sequences in one cache row.
        """
        input_shape, seen = hidden_states.shape[:-1], self.read_input(hidden_states)
        heads = (*input_shape, -1, self.head_dim)
        query = self.q_knock(self.q_proj(hidden_states).view(heads))
        tied = self.v_knock(self.kv_proj(hidden_states).view(heads)).flatten(-2)[:, None]
        rotary = self.k_rope_proj(hidden_states)[:, None]
        if self.use_qk_norm:
            query = self.q_norm(query)
        else:
            rotary = apply_rotary(rotary, *position_embeddings)
        query = apply_rotary(query.transpose(1, 2), *position_embeddings)
        if past_key_values is not None:
            last = past_key_values.get_seq_length(self.layer_idx) + input_shape[1] - 1
            rotary, tied = past_key_values.update(rotary, tied, self.layer_idx)
            if self.use_qk_norm:
                positions = torch.arange(tied.shape[-2], device=tied.device)[None]
                if position_ids is not None:
                    positions = positions + position_ids[:, -1:] - last
                position_embeddings = self.rotary_emb(tied, positions)
        value = tied.squeeze(1).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        plain = value[..., : self.head_dim - rotary.shape[-1]]
        key = torch.cat([rotary.expand(-1, value.shape[1], -1, -1), plain], dim=-1)
        if self.use_qk_norm:
            key = apply_rotary(self.k_norm(key), *position_embeddings)
        return _attend(self, input_shape, query, key, value, attention_mask, seen, **kwargs)

    def tp_plan(self) -> dict[str, str]:
        """Return the tensor-parallel style of each module."""
        return super().tp_plan() | {"k_rope_proj": SHARED_KEY}


class KHALatentAttention(KHAHeads, DeepseekV3Attention):
    """MLA (DeepSeek-V2, arXiv 2405.04434) and GLA (Zadouri et al. 2025) with KHA-Linear.

    KHA is applied to the parts of queries and keys without position and to values. In GLA the
    latent has several heads. Each is normalised separately and expands to the keys and values of
    its own group of query heads.

    The cache holds the normalised latent and the rotary key, ``kv_lora_rank + R`` numbers a token.
    Like the stock class, a decoding step expands the whole cache.
    """

    projections = ("q_proj", "q_b_proj", "kv_b_proj")

    def __init__(self, config: KHAModelConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        eps, groups, rank = config.rms_norm_eps, config.num_latent_heads, config.kv_lora_rank
        assert rank is not None
        norm = Glm4MoeRMSNorm if config.use_qk_norm else nn.Identity  # The stock epsilon is fixed.
        if config.q_lora_rank is not None:
            self.q_a_layernorm = norm(config.q_lora_rank, eps=eps)
        self.kv_a_layernorm = norm(rank, eps=eps)
        if groups > 1:
            rows = self.num_heads // groups * (self.qk_nope_head_dim + self.v_head_dim)
            self.kv_b_proj = nn.ModuleList(
                nn.Linear(rank // groups, rows, bias=False) for _ in range(groups)
            )
            if config.use_qk_norm:
                self.kv_a_layernorm = KHALatentRMSNorm(rank, eps, groups)
        self.add_heads(config)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: CosSin,
        attention_mask: Tensor | None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """See :meth:`KHAAttention.forward`."""
        input_shape, seen = hidden_states.shape[:-1], self.read_input(hidden_states)
        if self.q_lora_rank is None:
            query = self.q_proj(hidden_states)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        query = query.view(*input_shape, -1, self.qk_head_dim)
        plain, turned = query.transpose(1, 2).split(
            [self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1
        )
        latent, rotary = self.kv_a_proj_with_mqa(hidden_states)[:, None].split(
            [self.kv_lora_rank, self.qk_rope_head_dim], dim=-1
        )
        latent = self.kv_a_layernorm(latent)
        turned, rotary = apply_rotary_pos_emb_interleave(turned, rotary, *position_embeddings)
        if past_key_values is not None:
            latent, rotary = past_key_values.update(latent, rotary, self.layer_idx)
        query = torch.cat([self.q_knock(plain), turned], dim=-1)
        key, value = self.expand_kv(latent, rotary)
        return _attend(self, input_shape, query, key, value, attention_mask, seen, **kwargs)

    def tp_plan(self) -> dict[str, str]:
        """Return the tensor-parallel styles. Empty for GLA, whose latent heads cannot be split."""
        if isinstance(self.kv_b_proj, nn.ModuleList):
            return {}
        return super().tp_plan() | {"kv_a_proj_with_mqa": SHARED_KEY}

    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """Expand latents ``[B, 1, K, kv_lora_rank]`` and rotary keys ``[B, 1, K, R]`` to keys and
        values ``[B, H, K, ...]``."""
        latent = kv_nope.squeeze(1)
        if isinstance(self.kv_b_proj, nn.ModuleList):
            parts = zip(self.kv_b_proj, latent.chunk(len(self.kv_b_proj), dim=-1), strict=True)
            expanded = torch.cat([up(part) for up, part in parts], dim=-1)
        else:
            expanded = self.kv_b_proj(latent)
        widths = [self.qk_nope_head_dim, self.v_head_dim]
        heads = expanded.unflatten(-1, (-1, sum(widths))).transpose(1, 2)
        plain, value = heads.split(widths, dim=-1)
        k_rot = k_rot.expand(-1, plain.shape[1], -1, -1)
        return torch.cat([self.k_knock(plain), k_rot], dim=-1), self.v_knock(value)


class KHALatentRMSNorm(nn.Module):
    """Apply RMSNorm to each latent head of ``[..., kv_lora_rank]`` separately, in float32.

    Not a subclass of another RMSNorm: kernels that replace those would normalise all heads at once.
    """

    def __init__(self, features: int, eps: float, heads: int) -> None:
        super().__init__()
        self.eps, self.heads = eps, heads
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, latent: Tensor) -> Tensor:
        """Normalise the latent heads."""
        heads = latent.float().unflatten(-1, (self.heads, -1))
        heads = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * heads.flatten(-2).to(latent.dtype)


ATTENTIONS |= {
    "heads": KHAHeadsAttention,
    "collaborative": KHACollaborativeAttention,
    "gta": KHATiedAttention,
    "latent": KHALatentAttention,
}

__all__ = ["KHAHeadsAttention"]
