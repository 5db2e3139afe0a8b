"""PyTorch KHA attention for models that use MLA, GLA, GTA or other head mechanisms (e.g. gates)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
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
    conflict_with_own_projections,
)
from kha_megatron.heads.ranks import Listener, Ranks
from kha_megatron.hf.configuration_kha import KHAModelConfig
from kha_megatron.hf.mechanisms_kha import mechanism_types
from kha_megatron.hf.modeling_kha import (
    KHA_ATTENTION_CLASSES,
    SHARED_BY_HEADS,
    CosSin,
    KHAModule,
    Module,
    apply_knock,
    apply_rotary,
    apply_rotary_pos_emb,
    pop_cache,
    update_paged_cache,
)

logger = logging.get_logger(__name__)

# TP style for projections of the rotary key. All heads share it, even across ranks.
SHARED_KEY = "mla_kv_a_proj"


class HeadParameter(Module):
    """Base class for modules that hold a weight of a head mechanism."""

    initial: tuple[InitialValue, ...]

    def set_initial_value(self, std: float) -> None:
        stacked = torch.empty(1, *self.weight.shape, device="cpu")
        (value,) = initial_weight(stacked, self.initial, std=std)
        init.copy_(self.weight, value)


class ReplicatedWeight(HeadParameter):
    """
    A single parameter, replicated on all tensor-parallel ranks.

    This has to be a module, because transformers uses module hooks to all-reduce gradients.
    """

    def __init__(self, tensor: HeadTensor) -> None:
        super().__init__()
        self.initial = tensor.initial
        self.weight = nn.Parameter(torch.empty(tensor.shape))

    def forward(self) -> Tensor:
        return self.weight


class InputLinear(HeadParameter, nn.Linear):
    """Computes the scores of a gate or router from the layer input."""

    def __init__(self, hidden: int, tensor: HeadTensor) -> None:
        self.initial = tensor.initial
        out_features = math.prod(tensor.shape[:-1])
        super().__init__(hidden, out_features, bias=False)


@dataclass
class LayerMechanism:
    """A head mechanism and its submodules in one layer."""

    mechanism: Mechanism
    # Projections of the layer input, which are rows of `linear_qkv` in Megatron.
    rows: Sequence[HeadRows]
    # All other weights.
    tensors: Sequence[HeadTensor]


class KHAHeads(KHAModule):
    """Base class for attention modules with KHA and other head mechanisms."""

    @classmethod
    def check_config(cls, config: KHAModelConfig) -> None:
        """Validate the attention settings."""
        check_mechanisms_are_registered(config)
        if config.kha_attention == "gta" and config.kha_key is not None:
            raise ValueError(
                f"kha_key={config.kha_key!r} is not supported with GTA. Use kha_value."
            )
        cls.check_own_projections(config)
        facts = head_facts(config)
        for mechanism in build_mechanisms(config):
            reason = mechanism.unsupported_reason(facts)
            if reason:
                raise ValueError(reason)

    @staticmethod
    def check_own_projections(config: KHAModelConfig) -> None:
        """Check that nothing else changes a projection that a mechanism computes on its own."""
        mechanisms = build_mechanisms(config)
        for owner in mechanisms:
            if owner.own_projections and config.attention_bias:
                raise ValueError(f"The projections of {owner} do not support `attention_bias`.")
        knocks = {}
        for projection in ("query", "key", "value"):
            if getattr(config, f"kha_{projection}") is not None:
                knocks[projection] = f"kha_{projection}"
        conflict = conflict_with_own_projections(mechanisms, knocks)
        if conflict:
            raise ValueError(conflict)

    @classmethod
    def requires_eager(cls, config: KHAModelConfig) -> bool:
        """Whether a mechanism only works with eager attention."""
        return any(mechanism.acts_at("core") for mechanism in build_mechanisms(config))

    def add_heads(
        self,
        config: KHAModelConfig,
        ranks: int = 1,
    ) -> None:
        """
        Create the submodules for KHA and all other mechanisms.

        Args:
            ranks (`int`, *optional*, defaults to 1):
                Tensor-parallel size. Only needed if modules are created sharded, as in vLLM.
        """
        sizes = head_sizes(config).on_rank(ranks)
        self.add_knocks(config, sizes.dim("key"), sizes.dim("value"))
        self.listeners: list[Listener] = []
        self.mechanisms: list[LayerMechanism] = []
        for settings in build_mechanisms(config):
            mechanism = settings.for_layer(self.layer_idx)
            layer_mechanism = LayerMechanism(
                mechanism=mechanism,
                rows=mechanism.rows(sizes),
                tensors=mechanism.tensors(sizes),
            )
            self.mechanisms.append(layer_mechanism)
            for rows in layer_mechanism.rows:
                features = sizes.heads(rows.heads) * rows.features
                linear = nn.Linear(
                    config.hidden_size,
                    features,
                    bias=config.attention_bias,
                )
                setattr(self, rows.hf, linear)
            for tensor in layer_mechanism.tensors:
                module: HeadParameter
                if tensor.reads_input:
                    module = InputLinear(config.hidden_size, tensor)
                else:
                    module = ReplicatedWeight(tensor)
                setattr(self, tensor.hf, module)

    def tp_plan(self) -> dict[str, str]:
        plan = super().tp_plan()
        for layer_mechanism in self.mechanisms:
            # Mixing attention logits across heads only works if every rank has all heads.
            if layer_mechanism.mechanism.acts_at("core"):
                return {}
            for rows in layer_mechanism.rows:
                plan[rows.hf] = "colwise"
            for tensor in layer_mechanism.tensors:
                if not tensor.reads_input:
                    plan[tensor.hf] = SHARED_BY_HEADS
                elif tensor.per_head:
                    plan[tensor.hf] = "colwise"
                else:  # Gradients are all-reduced in `read_input`.
                    plan[tensor.hf] = "replicate"
        return plan

    def train(self, mode: bool = True) -> "KHAHeads":
        for layer_mechanism in self.mechanisms:
            if mode and layer_mechanism.mechanism.adds_loss:
                logger.warning_once(
                    f"Training {layer_mechanism.mechanism} without the load-balance loss, which "
                    "is only supported in Megatron. The head load may become unbalanced."
                )
        return super().train(mode)

    def read_input(self, hidden_states: Tensor) -> dict[str, Tensor]:
        """
        Compute the input projections of all mechanisms, e.g. gate scores.

        Returns:
            `dict[str, torch.Tensor]`: Projections by name, usually of shape `(batch_size, seq_len,
            num_heads, num_features)`. The head dimension can be 1 or missing for shared weights.
        """
        projections = {}
        for layer_mechanism in self.mechanisms:
            for rows in layer_mechanism.rows:
                linear = getattr(self, rows.hf)
                projected = linear(hidden_states)
                projections[rows.name] = projected.unflatten(-1, (-1, rows.features))
            for tensor in layer_mechanism.tensors:
                if not tensor.reads_input:
                    continue
                linear = getattr(self, tensor.hf)
                projected = linear(hidden_states)
                if tensor.per_head:
                    projected = projected.unflatten(-1, (-1, tensor.shape[-2]))
                elif tensor.gradient == "heads":
                    projected = self._ranks().sum_gradient(projected.unsqueeze(-2))
                projections[tensor.name] = projected
        return projections

    def apply_heads(
        self,
        stage: Stage,
        input_projections: dict[str, Tensor],
        **tensors: Tensor,
    ) -> list[Tensor]:
        """
        Run all mechanisms that act at `stage`.

        Args:
            stage (`str`):
                One of `"qkv"`, `"output"` (before `o_proj`) or `"dense"` (after `o_proj`).
            input_projections (`dict[str, torch.Tensor]`):
                Output of `read_input`. Modified in place if a later stage needs more tensors.
            tensors (`torch.Tensor`):
                Tensors to transform, e.g. `query=...`. They are returned in the same order.
        """
        mechanisms = []
        for layer_mechanism in self.mechanisms:
            if layer_mechanism.mechanism.acts_at(stage):
                weights = self.head_weights(layer_mechanism.tensors)
                mechanisms.append((layer_mechanism.mechanism, weights))
        return apply_stage(
            stage,
            mechanisms,
            tensors,
            input_projections,
            self._ranks(),
        )

    def head_weights(self, tensors: Sequence[HeadTensor]) -> dict[str, Tensor]:
        """Get the replicated weights by name. Per-head weights are sliced to the local heads."""
        ranks = self._ranks()
        weights = {}
        for tensor in tensors:
            if tensor.reads_input:
                continue
            module = getattr(self, tensor.hf)
            weight = module()
            if tensor.per_head:
                weight = ranks.own_part(weight)
            weights[tensor.name] = weight
        return weights

    def project_output(
        self,
        heads: Tensor,
        input_projections: dict[str, Tensor],
    ) -> Tensor:
        """Apply `o_proj`, and the mechanisms before and after it."""
        (heads,) = self.apply_heads(
            "output",
            input_projections,
            output=heads,
        )
        flat = heads.flatten(-2).contiguous()
        dense = self.o_proj(flat)
        (dense,) = self.apply_heads(
            "dense",
            input_projections,
            dense=dense,
        )
        return dense

    def _ranks(self) -> "ModelRanks":
        return ModelRanks(self.o_proj, self.listeners)


def check_mechanisms_are_registered(config: KHAModelConfig) -> None:
    registered = mechanism_types()
    unknown = config.mechanisms.keys() - registered.keys()
    if not unknown:
        return
    # no other text of the config, which could be read as a command
    names = []
    for name in sorted(unknown):
        if name.isidentifier():
            names.append(f"kha_{name}")
    raise ValueError(
        f"Unknown fields {', '.join(names)} in the config. They belong to head mechanisms "
        "that are not registered. Look at their code first (see `kha_providers` in the "
        "config). Then install their package, or list their file in the environment "
        f"variable KHA_HEADS_FROM. Registered mechanisms: {', '.join(registered)}."
    )


def build_mechanisms(config: KHAModelConfig) -> list[Mechanism]:
    """Instantiate the mechanisms of a model in the order they are applied (KHA not included)."""
    mechanisms = []
    for name, mechanism_type in mechanism_types().items():
        if name in config.mechanisms:
            mechanisms.append(mechanism_type.from_dict(config.mechanisms[name]))
    return mechanisms


def head_facts(config: KHAModelConfig) -> HeadFacts:
    """Collect what mechanisms need to know in order to reject a model."""
    rope_parameters = config.rope_parameters or {}
    rotary_share = rope_parameters.get("partial_rotary_factor", 1.0)
    return HeadFacts(
        rotary_features=int(rotary_share * config.head_dim),
        multi_latent=config.kv_lora_rank is not None,
        attention=config.kha_attention,
        qk_norm=config.use_qk_norm,
        query_heads=config.num_attention_heads,
        layers=config.num_hidden_layers,
    )


def head_sizes(config: KHAModelConfig) -> HeadSizes:
    is_latent = config.kv_lora_rank is not None
    head_dim = config.head_dim
    value_dim = None
    if is_latent:
        head_dim = config.qk_nope_head_dim or config.head_dim
        value_dim = config.v_head_dim
    return HeadSizes(
        query_heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        hidden_size=config.hidden_size,
        latent=is_latent,
    )


class ModelRanks(Ranks):
    """
    Tensor-parallel collectives used by the mechanisms.

    Sequence parallelism is not supported here, i.e. every rank is expected to have all tokens.

    Args:
        projection (`nn.Module`):
            Any linear layer that transformers has sharded. We only use it to find the device mesh.
        listeners (`Sequence[Listener]`, *optional*):
            Callbacks for metrics of the mechanisms.
    """

    def __init__(
        self,
        projection: nn.Module,
        listeners: Sequence[Listener] = (),
    ) -> None:
        self.listeners = listeners
        self.mesh: Any = None
        weight = getattr(projection, "weight", None)
        mesh = getattr(weight, "device_mesh", None)
        if mesh is not None and "tp" in (mesh.mesh_dim_names or ()):
            self.mesh = mesh["tp"]

    def all_heads(self, x: Tensor) -> Tensor:
        return self._redistribute(x, Shard(-1), Replicate())

    def own_heads(self, x: Tensor) -> Tensor:
        return self._redistribute(x, Replicate(), Shard(-1))

    def _redistribute(
        self,
        x: Tensor,
        before: Any,
        after: Any,
    ) -> Tensor:
        if self.mesh is None:
            return x
        distributed = DTensor.from_local(
            x,
            self.mesh,
            [before],
            run_check=False,
        )
        redistributed = distributed.redistribute(placements=[after])
        return redistributed.to_local()

    def sum_gradient(self, x: Tensor) -> Tensor:
        """Identity in the forward pass, all-reduce in the backward pass."""
        if self.mesh is None:
            return x
        distributed = DTensor.from_local(
            x,
            self.mesh,
            [Replicate()],
            run_check=False,
        )
        return distributed.to_local(grad_placements=[Partial()])

    def own_part(self, weight: Tensor) -> Tensor:
        if self.mesh is None:
            return weight
        shards = weight.chunk(self.mesh.size())
        return shards[self.mesh.get_local_rank()]


def split_heads(flat: Tensor, head_dim: int) -> Tensor:
    """Split heads that the cache stores as one, i.e. from `(batch_size, 1, seq_len, features)`."""
    heads = flat.squeeze(1).unflatten(-1, (-1, head_dim))
    return heads.transpose(1, 2)


def pad_to_same_dim(
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """
    Pad the features of all heads with zeros, because FlashAttention requires the same head dim.

    transformers only pads values, but here queries and keys can also be the smaller ones.
    """
    head_dim = query.shape[-1]
    value_dim = value.shape[-1]
    if head_dim < value_dim:
        padding = (0, value_dim - head_dim)
        query = nn.functional.pad(query, padding)
        key = nn.functional.pad(key, padding)
    else:
        value = nn.functional.pad(value, (0, head_dim - value_dim))
    return query, key, value


def _eager_forward(
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
    implementation = module.config._attn_implementation
    if implementation != "eager":
        raise ValueError(
            f"{mechanism} is not supported with attn_implementation={implementation!r}, because "
            "fused kernels cannot mix the logits of all heads. Please use "
            "attn_implementation='eager'."
        )
    drop = partial(nn.functional.dropout, p=dropout) if dropout else None
    output, scores = mechanism.attend(
        query,
        key,
        value,
        weights,
        scale=scaling,
        mask=mask,
        dropout=drop,
    )
    return output.transpose(1, 2).contiguous(), scores


class KHABaseAttention(KHAHeads):
    """Base class for attention modules. Subclasses define what the cache stores."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: CosSin,
        attention_mask: Tensor | None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        cache = pop_cache(kwargs)
        input_projections = self.read_input(hidden_states)
        query, key, value = self.project_heads(
            hidden_states,
            input_projections,
            position_embeddings,
        )
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        key, value = self.expand_heads(
            key,
            value,
            position_embeddings,
            cache,
            kwargs,
        )
        key, value = update_paged_cache(self, key, value, kwargs)
        value_dim = value.shape[-1]
        is_flash = "flash" in (self.config._attn_implementation or "")
        if is_flash and query.shape[-1] != value_dim:
            query, key, value = pad_to_same_dim(query, key, value)
        # Keep this call here. vLLM looks for it in the source code of `forward`.
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        for layer_mechanism in self.mechanisms:
            if layer_mechanism.mechanism.acts_at("core"):
                head_weights = self.head_weights(layer_mechanism.tensors)
                attend = partial(
                    _eager_forward,
                    layer_mechanism.mechanism,
                    head_weights,
                )
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
        input_shape = hidden_states.shape[:-1]
        heads = output.reshape(*input_shape, -1, value.shape[-1])
        heads = heads[..., :value_dim]
        return self.project_output(heads, input_projections), weights

    def project_heads(
        self,
        hidden_states: Tensor,
        input_projections: dict[str, Tensor],
        position_embeddings: CosSin,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """
        Compute the queries, and the two tensors that the cache stores instead of keys and values.

        Returns:
            `tuple[torch.Tensor, ...]`: Three tensors of shape `(batch_size, num_heads, seq_len,
            num_features)`. Each can have its own number of heads and features.
        """
        raise NotImplementedError

    def normalize_and_rotate(
        self,
        query: Tensor,
        key: Tensor,
        position_embeddings: CosSin,
    ) -> tuple[Tensor, Tensor]:
        """Apply QK-norm and RoPE to tensors of shape `(batch_size, seq_len, num_heads, head_dim)`.

        Returns:
            `tuple[torch.Tensor, ...]`: Two tensors of shape `(batch_size, num_heads, seq_len,
            head_dim)`.
        """
        if self.use_qk_norm:
            query = self.q_norm(query)
            key = self.k_norm(key)
        query = query.transpose(1, 2)
        key = key.transpose(1, 2)
        return apply_rotary_pos_emb(query, key, *position_embeddings)

    def expand_heads(
        self,
        key: Tensor,
        value: Tensor,
        position_embeddings: CosSin,
        cache: Cache | None,
        arguments: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """
        Compute keys and values from what the cache stores. By default, these are the same.

        This can change `arguments`, which are passed to the attention function.
        """
        return key, value


class KHAHeadsAttention(KHABaseAttention, Glm4MoeAttention):
    """Multi-headed attention with KHA and other head mechanisms. Supports MQA and GQA."""

    @classmethod
    def for_config(cls, config: KHAModelConfig) -> type:
        if any(mechanism.own_projections for mechanism in build_mechanisms(config)):
            return KHASharedKeyAttention
        return cls

    def __init__(
        self,
        config: KHAModelConfig,
        layer_idx: int,
    ) -> None:
        super().__init__(config, layer_idx)
        self.add_heads(config)

    def project_heads(
        self,
        hidden_states: Tensor,
        input_projections: dict[str, Tensor],
        position_embeddings: CosSin,
    ) -> tuple[Tensor, Tensor, Tensor]:
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        value_shape = (*input_shape, -1, self.value_features)
        query = self.q_proj(hidden_states).view(hidden_shape)
        key = self.k_proj(hidden_states).view(hidden_shape)
        value = self.v_proj(hidden_states).view(value_shape)
        query, key, value = self.apply_heads(
            "qkv",
            input_projections,
            query=apply_knock(self.q_knock, query),
            key=apply_knock(self.k_knock, key),
            value=apply_knock(self.v_knock, value),
        )
        query, key = self.normalize_and_rotate(
            query,
            key,
            position_embeddings,
        )
        return query, key, value.transpose(1, 2)


class KHASharedKeyAttention(KHABaseAttention, Glm4MoeAttention):
    """
    Attention for a mechanism with its own query and key projections, which all heads share.

    The mechanism derives the query of each head. The cache stores the key along with the values of
    all heads.
    """

    projections = ("v_proj",)

    def __init__(
        self,
        config: KHAModelConfig,
        layer_idx: int,
    ) -> None:
        super().__init__(config, layer_idx)
        del self.q_proj, self.k_proj
        for mechanism in build_mechanisms(config):
            if mechanism.own_projections:
                self.mechanism_name = mechanism.name
                key_dim = mechanism.own_projections["key"]
        self.scaling = key_dim**-0.5
        if self.use_qk_norm:
            self.q_norm = Glm4MoeRMSNorm(key_dim, eps=config.rms_norm_eps)
            self.k_norm = Glm4MoeRMSNorm(key_dim, eps=config.rms_norm_eps)
        self.add_heads(config)

    def project_heads(
        self,
        hidden_states: Tensor,
        input_projections: dict[str, Tensor],
        position_embeddings: CosSin,
    ) -> tuple[Tensor, Tensor, Tensor]:
        value_shape = (*hidden_states.shape[:-1], -1, self.value_features)
        value = self.v_proj(hidden_states).view(value_shape)
        query, key, value = self.apply_heads(
            "qkv",
            input_projections,
            query=input_projections[f"{self.mechanism_name}_query"],
            key=input_projections[f"{self.mechanism_name}_key"],
            value=apply_knock(self.v_knock, value),
        )
        query, key = self.normalize_and_rotate(
            query,
            key,
            position_embeddings,
        )
        flat_value = value.flatten(-2).unsqueeze(1)
        return query, key, flat_value

    def expand_heads(
        self,
        key: Tensor,
        value: Tensor,
        position_embeddings: CosSin,
        cache: Cache | None,
        arguments: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        value = split_heads(value, self.head_dim)
        num_heads = value.shape[1]
        key = key.expand(-1, num_heads, -1, -1)
        return key, value


class KHATiedAttention(KHABaseAttention, Glm4MoeAttention):
    """
    Grouped-Tied Attention (GTA, https://huggingface.co/papers/2505.21487) with KHA.

    Keys and values share a tied state, and KHA is applied to that state:

    - value: the tied state itself
    - key: a rotary half shared by all groups, then the first half of the tied state (no RoPE)

    Note: the rotary half and the tied state are cached with a single "head" each, because the
    static cache expects keys and values to have the same number of heads.
    """

    projections = ("q_proj", "kv_proj")
    value_projection = "kv_proj"

    def __init__(
        self,
        config: KHAModelConfig,
        layer_idx: int,
    ) -> None:
        super().__init__(config, layer_idx)
        self.kv_proj = self.v_proj
        del self.k_proj, self.v_proj
        self.k_rope_proj = nn.Linear(
            config.hidden_size,
            config.head_dim // 2,
            bias=False,
        )
        self.rotary_emb = Glm4MoeRotaryEmbedding(config)
        self.add_heads(config)

    def project_heads(
        self,
        hidden_states: Tensor,
        input_projections: dict[str, Tensor],
        position_embeddings: CosSin,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # QK-norm needs complete keys, and those are different in each group. If it is enabled, we
        # cache the rotary half before RoPE and rotate the whole cache in every step. This assumes
        # consecutive positions, i.e. left padding is fine but packed sequences are not supported.
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        tied_shape = (*input_shape, -1, self.value_features)
        query = self.q_proj(hidden_states).view(hidden_shape)
        query = apply_knock(self.q_knock, query)
        tied = self.kv_proj(hidden_states).view(tied_shape)
        tied = apply_knock(self.v_knock, tied)
        rotary = self.k_rope_proj(hidden_states).unsqueeze(1)
        if self.use_qk_norm:
            query = self.q_norm(query)
        else:
            rotary = apply_rotary(rotary, *position_embeddings)
        query = apply_rotary(query.transpose(1, 2), *position_embeddings)
        flat_tied = tied.flatten(-2).unsqueeze(1)
        return query, rotary, flat_tied

    def expand_heads(
        self,
        key: Tensor,
        value: Tensor,
        position_embeddings: CosSin,
        cache: Cache | None,
        arguments: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        position_ids = arguments.pop("position_ids", None)
        rotary = key
        tied = split_heads(value, self.head_dim)
        not_rotary_dim = self.head_dim - rotary.shape[-1]
        not_rotary = tied[..., :not_rotary_dim]
        rotary = rotary.expand(-1, tied.shape[1], -1, -1)
        key = torch.cat([rotary, not_rotary], dim=-1)
        if self.use_qk_norm:
            if cache is not None:
                position_embeddings = self.embed_cached_positions(
                    value,
                    cache,
                    position_ids,
                )
            key = self.k_norm(key)
            key = apply_rotary(key, *position_embeddings)
        return key, tied

    def embed_cached_positions(
        self,
        cached: Tensor,
        cache: Cache,
        position_ids: Tensor | None,
    ) -> CosSin:
        """Compute the position embeddings of all tokens in the cache."""
        length = cached.shape[-2]
        positions = torch.arange(length, device=cached.device).unsqueeze(0)
        if position_ids is not None:
            last_index = cache.get_seq_length(self.layer_idx) - 1
            left_padding = last_index - position_ids[:, -1:]
            positions = positions - left_padding
        return self.rotary_emb(cached, positions)

    def tp_plan(self) -> dict[str, str]:
        return super().tp_plan() | {"k_rope_proj": SHARED_KEY}


class KHALatentAttention(KHABaseAttention, DeepseekV3Attention):
    """
    Multi-head Latent Attention (MLA, https://huggingface.co/papers/2405.04434) or Grouped Latent
    Attention (GLA, https://huggingface.co/papers/2505.21487) with KHA-Linear. KHA is applied to
    the values and to the non-rotary part of queries and keys.

    In GLA, the latent is split into several latent heads, each with its own `kv_b_proj` for one
    group of query heads. The cache stores the normalized latent and the rotary key. As in
    DeepSeek-V3, we up-project the latents of all previous tokens in every decoding step.
    """

    projections = ("q_proj", "q_b_proj", "kv_b_proj")

    def __init__(
        self,
        config: KHAModelConfig,
        layer_idx: int,
    ) -> None:
        super().__init__(config, layer_idx)
        eps = config.rms_norm_eps
        groups = config.num_latent_heads
        rank: Any = config.kv_lora_rank
        # Replace the norms, because the parent class does not pass `rms_norm_eps`.
        norm = Glm4MoeRMSNorm if config.use_qk_norm else nn.Identity
        if config.q_lora_rank is not None:
            self.q_a_layernorm = norm(config.q_lora_rank, eps=eps)
        self.kv_a_layernorm = norm(rank, eps=eps)
        if groups > 1:
            features_per_head = self.qk_nope_head_dim + self.v_head_dim
            features = self.num_heads // groups * features_per_head
            self.kv_b_proj = nn.ModuleList()
            for _ in range(groups):
                projection = nn.Linear(
                    rank // groups,
                    features,
                    bias=False,
                )
                self.kv_b_proj.append(projection)
            if config.use_qk_norm:
                self.kv_a_layernorm = KHALatentRMSNorm(
                    rank,
                    eps,
                    groups,
                )
        self.add_heads(config)

    def project_heads(
        self,
        hidden_states: Tensor,
        input_projections: dict[str, Tensor],
        position_embeddings: CosSin,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.q_lora_rank is None:
            query = self.q_proj(hidden_states)
        else:
            query_latent = self.q_a_proj(hidden_states)
            query_latent = self.q_a_layernorm(query_latent)
            query = self.q_b_proj(query_latent)
        query = query.unflatten(-1, (-1, self.qk_head_dim))
        query = query.transpose(1, 2)
        query_dims = [self.qk_nope_head_dim, self.qk_rope_head_dim]
        plain_query, rotary_query = query.split(query_dims, dim=-1)
        compressed = self.kv_a_proj_with_mqa(hidden_states).unsqueeze(1)
        compressed_dims = [self.kv_lora_rank, self.qk_rope_head_dim]
        latent, rotary_key = compressed.split(compressed_dims, dim=-1)
        rotary_query, rotary_key = apply_rotary_pos_emb_interleave(
            rotary_query,
            rotary_key,
            *position_embeddings,
        )
        plain_query = apply_knock(self.q_knock, plain_query)
        query = torch.cat([plain_query, rotary_query], dim=-1)
        latent = self.kv_a_layernorm(latent)
        return query, latent, rotary_key

    def expand_heads(
        self,
        key: Tensor,
        value: Tensor,
        position_embeddings: CosSin,
        cache: Cache | None,
        arguments: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        return self.expand_kv(kv_nope=key, k_rot=value)

    def tp_plan(self) -> dict[str, str]:
        # No tensor parallelism for GLA: its latent heads cannot be sharded.
        if isinstance(self.kv_b_proj, nn.ModuleList):
            return {}
        return super().tp_plan() | {"kv_a_proj_with_mqa": SHARED_KEY}

    def expand_kv(
        self,
        kv_nope: Tensor,
        k_rot: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """
        Compute the keys and values of all heads from the cache. Overrides the same method of
        DeepSeek-V3.

        Args:
            kv_nope (`torch.Tensor` of shape `(batch_size, 1, kv_len, kv_lora_rank)`): Latents.
            k_rot (`torch.Tensor` of shape `(batch_size, 1, kv_len, qk_rope_head_dim)`): Rotary key.
        """
        expanded = self.up_project(kv_nope.squeeze(1))
        dims = [self.qk_nope_head_dim, self.v_head_dim]
        heads = expanded.unflatten(-1, (-1, sum(dims)))
        heads = heads.transpose(1, 2)
        plain_key, value = heads.split(dims, dim=-1)
        plain_key = apply_knock(self.k_knock, plain_key)
        value = apply_knock(self.v_knock, value)
        num_heads = plain_key.shape[1]
        rotary_key = k_rot.expand(-1, num_heads, -1, -1)
        key = torch.cat([plain_key, rotary_key], dim=-1)
        return key, value

    def up_project(self, latent: Tensor) -> Tensor:
        if not isinstance(self.kv_b_proj, nn.ModuleList):
            return self.kv_b_proj(latent)
        latent_heads = latent.chunk(len(self.kv_b_proj), dim=-1)
        groups = []
        for projection, latent_head in zip(
            self.kv_b_proj,
            latent_heads,
            strict=True,
        ):
            groups.append(projection(latent_head))
        return torch.cat(groups, dim=-1)


class KHALatentRMSNorm(nn.Module):
    """
    RMSNorm that normalizes each latent head separately.

    This deliberately does not inherit from another RMSNorm, since kernels that replace the parent
    class would normalize over all heads.
    """

    def __init__(
        self,
        features: int,
        eps: float,
        heads: int,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.heads = heads
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, latent: Tensor) -> Tensor:
        heads = latent.float().unflatten(-1, (self.heads, -1))
        variance = heads.square().mean(-1, keepdim=True)
        heads = heads * torch.rsqrt(variance + self.eps)
        normalized = heads.flatten(-2)
        return self.weight * normalized.to(latent.dtype)


KHA_ATTENTION_CLASSES |= {
    "heads": KHAHeadsAttention,
    "gta": KHATiedAttention,
    "latent": KHALatentAttention,
}

__all__ = ["KHAHeadsAttention"]
