# kha_megatron.hf.attention_kha of kha-megatron 0.1.0 (Apache-2.0)
"""PyTorch KHA attention for models that use MLA, GLA, GTA or other head mechanisms (e.g. gates)."""

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

from .heads_initial_kha import initial_weight
from .heads_mechanism_kha import (
    HeadFacts,
    HeadRows,
    HeadSizes,
    HeadTensor,
    InitialValue,
    Mechanism,
    Stage,
    apply_stage,
)
from .heads_ranks_kha import Listener, Ranks
from .configuration_kha import KHAModelConfig
from .mechanisms_kha import mechanism_types
from .modeling_kha import (
    KHA_ATTENTION_CLASSES,
    SHARED_BY_HEADS,
    CosSin,
    KHAModule,
    Module,
    apply_rotary,
)

logger = logging.get_logger(__name__)

# TP style for projections of the rotary key. All heads share it, even across ranks.
SHARED_KEY = "mla_kv_a_proj"


class HeadParameter(Module):
    """Base class for modules that hold a weight of a head mechanism."""

    initial: tuple[InitialValue, ...]

    def set_initial_value(self, std: float) -> None:
        value = torch.empty(1, *self.weight.shape, device="cpu")
        init.copy_(self.weight, initial_weight(value, self.initial, std=std)[0])


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
        super().__init__(hidden, math.prod(tensor.shape[:-1]), bias=False)


class KHAHeads(KHAModule):
    """Base class for attention modules with KHA and other head mechanisms."""

    @classmethod
    def check_config(cls, config: KHAModelConfig) -> str | None:
        """Validate the attention settings. Returns `"eager"` if other backends can't be used."""
        known = mechanism_types()
        if unknown := config.mechanisms.keys() - known.keys():
            source = (config.kha_providers or {}).get(min(unknown), "a newer kha-megatron")
            raise ValueError(
                f"Unknown fields kha_{', kha_'.join(sorted(unknown))} in the config. They require "
                f"{source} (install a package, or list a file in the environment variable "
                f"KHA_HEADS_FROM). Registered mechanisms: {', '.join(known)}."
            )
        latent = config.kv_lora_rank is not None
        if config.kha_attention == "gta" and config.kha_key is not None:
            raise ValueError(
                f"kha_key={config.kha_key!r} is not supported with GTA. Use kha_value."
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
        mechanisms = build_mechanisms(config)
        for mechanism in mechanisms:
            if reason := mechanism.unsupported_reason(facts):
                raise ValueError(reason)
        return "eager" if any(m.acts_at("core") for m in mechanisms) else None

    def add_heads(self, config: KHAModelConfig, ranks: int = 1) -> None:
        """
        Create the submodules for KHA and all other mechanisms.

        Args:
            ranks (`int`, *optional*, defaults to 1):
                Tensor-parallel size. Only needed if modules are created sharded, as in vLLM.
        """
        sizes = head_sizes(config).on_rank(ranks)
        self.add_knocks(config, sizes.dim("key"), sizes.dim("value"))
        self.listeners: list[Listener] = []
        self.mechanisms: list[tuple[Mechanism, Sequence[HeadRows], Sequence[HeadTensor]]] = []
        for settings in build_mechanisms(config):
            mechanism = settings.for_layer(self.layer_idx)
            rows, tensors = mechanism.rows(sizes), mechanism.tensors(sizes)
            for row in rows:
                features = sizes.heads(row.heads) * row.features
                linear = nn.Linear(config.hidden_size, features, bias=config.attention_bias)
                setattr(self, row.hf, linear)
            for tensor in tensors:
                if tensor.reads_input:
                    setattr(self, tensor.hf, InputLinear(config.hidden_size, tensor))
                else:
                    setattr(self, tensor.hf, ReplicatedWeight(tensor))
            self.mechanisms.append((mechanism, rows, tensors))

    def tp_plan(self) -> dict[str, str]:
        # Mixing attention logits across heads only works if every rank has all heads.
        if any(mechanism.acts_at("core") for mechanism, *_ in self.mechanisms):
            return {}
        plan = super().tp_plan()
        for _, rows, tensors in self.mechanisms:
            plan |= dict.fromkeys((row.hf for row in rows), "colwise")
            for tensor in tensors:
                plan[tensor.hf] = SHARED_BY_HEADS
                if tensor.reads_input:  # Gradients are all-reduced in `read_input`.
                    plan[tensor.hf] = "colwise" if tensor.per_head else "replicate"
        return plan

    def train(self, mode: bool = True) -> "KHAHeads":
        for mechanism, *_ in self.mechanisms:
            if mode and mechanism.adds_loss:
                logger.warning_once(
                    f"Training {mechanism} without the load-balance loss, which is only supported "
                    "in Megatron. The head load may become unbalanced."
                )
        return super().train(mode)

    def read_input(self, hidden_states: Tensor) -> dict[str, Tensor]:
        """
        Compute the input projections of all mechanisms, e.g. gate scores.

        Returns:
            `dict[str, torch.Tensor]`: Projections by name, usually of shape `(batch_size, seq_len,
            num_heads, num_features)`. The head dimension can be 1 or missing for shared weights.
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
        """
        Run all mechanisms that act at `stage`.

        Args:
            stage (`str`):
                One of `"qkv"`, `"output"` (before `o_proj`) or `"dense"` (after `o_proj`).
            seen (`dict[str, torch.Tensor]`):
                Output of `read_input`. Modified in place if a later stage needs more tensors.
            tensors (`torch.Tensor`):
                Tensors to transform, e.g. `query=...`. They are returned in the same order.
        """
        mechanisms = (
            (mechanism, self.head_weights(parameters))
            for mechanism, _, parameters in self.mechanisms
            if mechanism.acts_at(stage)
        )
        return apply_stage(stage, mechanisms, tensors, seen, self._ranks())

    def head_weights(self, tensors: Sequence[HeadTensor]) -> dict[str, Tensor]:
        """Get the replicated weights by name. Per-head weights are sliced to the local heads."""
        ranks, weights = self._ranks(), {}
        for tensor in tensors:
            if not tensor.reads_input:
                weight = getattr(self, tensor.hf)()
                weights[tensor.name] = ranks.own_part(weight) if tensor.per_head else weight
        return weights

    def project_output(self, heads: Tensor, seen: dict[str, Tensor]) -> Tensor:
        """Apply `o_proj`, and the mechanisms before and after it."""
        (heads,) = self.apply_heads("output", seen, output=heads)
        dense = self.o_proj(heads.flatten(-2).contiguous())
        return self.apply_heads("dense", seen, dense=dense)[0]

    def core_attention(self) -> Any:
        """Get the attention function. This is a custom one if a mechanism acts on all heads."""
        for mechanism, _, parameters in self.mechanisms:
            if mechanism.acts_at("core"):
                return partial(_eager_forward, mechanism, self.head_weights(parameters))
        return ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )

    def _ranks(self) -> "ModelRanks":
        return ModelRanks(self.o_proj, self.listeners)


def build_mechanisms(config: KHAModelConfig) -> list[Mechanism]:
    """Instantiate the mechanisms of a model in the order they are applied (KHA not included)."""
    settings = config.mechanisms
    return [kind.from_dict(settings[n]) for n, kind in mechanism_types().items() if n in settings]


def head_sizes(config: KHAModelConfig) -> HeadSizes:
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
    """
    Tensor-parallel collectives used by the mechanisms.

    Sequence parallelism is not supported here, i.e. every rank is expected to have all tokens.

    Args:
        projection (`nn.Module`):
            Any linear layer that transformers has sharded. We only use it to find the device mesh.
        listeners (`Sequence[Listener]`, *optional*):
            Callbacks for metrics of the mechanisms.
    """

    def __init__(self, projection: nn.Module, listeners: Sequence[Listener] = ()) -> None:
        self.listeners = listeners
        mesh: Any = getattr(getattr(projection, "weight", None), "device_mesh", None)
        is_split = mesh is not None and "tp" in (mesh.mesh_dim_names or ())
        self.mesh: Any = mesh["tp"] if is_split else None

    def all_heads(self, x: Tensor) -> Tensor:
        return self._redistribute(x, Shard(-1), Replicate())

    def own_heads(self, x: Tensor) -> Tensor:
        return self._redistribute(x, Replicate(), Shard(-1))

    def _redistribute(self, x: Tensor, before: Any, after: Any) -> Tensor:
        if self.mesh is None:
            return x
        placed = DTensor.from_local(x, self.mesh, [before], run_check=False)
        return placed.redistribute(placements=[after]).to_local()

    def sum_gradient(self, x: Tensor) -> Tensor:
        """Identity in the forward pass, all-reduce in the backward pass."""
        if self.mesh is None:
            return x
        placed = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        return placed.to_local(grad_placements=[Partial()])

    def own_part(self, weight: Tensor) -> Tensor:
        if self.mesh is None:
            return weight
        return weight.chunk(self.mesh.size())[self.mesh.get_local_rank()]


def _attention_forward(
    module: Any,
    shape: torch.Size,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seen: dict[str, Tensor],
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    # FlashAttention requires q, k and v to have the same head dim. transformers only pads v, but
    # here q and k can also be the smaller ones.
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
    if (given := module.config._attn_implementation) != "eager":
        raise ValueError(
            f"{mechanism} is not supported with attn_implementation={given!r}, because fused "
            "kernels cannot mix the logits of all heads. Please use attn_implementation='eager'."
        )
    drop = partial(nn.functional.dropout, p=dropout) if dropout else None
    output, scores = mechanism.attend(
        query, key, value, weights, scale=scaling, mask=mask, dropout=drop
    )
    return output.transpose(1, 2).contiguous(), scores


class KHAHeadsAttention(KHAHeads, Glm4MoeAttention):
    """Multi-headed attention with KHA and other head mechanisms. Supports MQA and GQA."""

    @classmethod
    def for_config(cls, config: KHAModelConfig) -> type:
        own = any(mechanism.own_projections for mechanism in build_mechanisms(config))
        return KHASharedKeyAttention if own else cls

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
        # Keep this call here. vLLM looks for it in the source code of `forward`.
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


class KHASharedKeyAttention(KHAHeads, Glm4MoeAttention):
    """
    Attention for a mechanism with its own query and key projections, which all heads share.

    The mechanism derives the query of each head. The cache stores the key along with the values of
    all heads.
    """

    projections = ("v_proj",)

    def __init__(self, config: KHAModelConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        del self.q_proj, self.k_proj
        own = next(m for m in build_mechanisms(config) if m.own_projections)
        self.own, dim = own.name, own.own_dim or 0
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
        input_shape, seen = hidden_states.shape[:-1], self.read_input(hidden_states)
        heads = (*input_shape, -1, self.head_dim)
        query, key, value = self.apply_heads(
            "qkv",
            seen,
            query=seen[f"{self.own}_query"],
            key=seen[f"{self.own}_key"],
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
        return _attention_forward(
            self, input_shape, query, key, value, attention_mask, seen, **kwargs
        )


class KHATiedAttention(KHAHeads, Glm4MoeAttention):
    """
    Grouped-Tied Attention (GTA, https://huggingface.co/papers/2505.21487) with KHA.

    Keys and values share a tied state, and KHA is applied to that state:

    - value: the tied state itself
    - key: a rotary half shared by all groups, then the first half of the tied state (no RoPE)

    Note: the rotary half and the tied state are cached with a single "head" each, because the
    static cache expects keys and values to have the same number of heads.
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
        # QK-norm needs complete keys, and those are different in each group. If it's enabled, we
        # cache the rotary half before RoPE and rotate the whole cache in every step. This assumes
        # consecutive positions, i.e. left padding is fine but packed sequences are not supported.
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
        return _attention_forward(
            self, input_shape, query, key, value, attention_mask, seen, **kwargs
        )

    def tp_plan(self) -> dict[str, str]:
        return super().tp_plan() | {"k_rope_proj": SHARED_KEY}


class KHALatentAttention(KHAHeads, DeepseekV3Attention):
    """
    Multi-head Latent Attention (MLA, https://huggingface.co/papers/2405.04434) or Grouped Latent
    Attention (GLA, https://huggingface.co/papers/2505.21487) with KHA-Linear. KHA is applied to
    the values and to the non-rotary part of queries and keys.

    In GLA, the latent is split into several latent heads, each with its own `kv_b_proj` for one
    group of query heads. The cache stores the normalized latent and the rotary key. As in
    DeepSeek-V3, we up-project the latents of all previous tokens in every decoding step.
    """

    projections = ("q_proj", "q_b_proj", "kv_b_proj")

    def __init__(self, config: KHAModelConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        eps, groups = config.rms_norm_eps, config.num_latent_heads
        rank: Any = config.kv_lora_rank
        # Replace the norms, because the parent class doesn't pass `rms_norm_eps`.
        norm = Glm4MoeRMSNorm if config.use_qk_norm else nn.Identity
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
        return _attention_forward(
            self, input_shape, query, key, value, attention_mask, seen, **kwargs
        )

    def tp_plan(self) -> dict[str, str]:
        # No tensor parallelism for GLA: its latent heads can't be sharded.
        if isinstance(self.kv_b_proj, nn.ModuleList):
            return {}
        return super().tp_plan() | {"kv_a_proj_with_mqa": SHARED_KEY}

    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """
        Compute the keys and values of all heads from the cache.

        Args:
            kv_nope (`torch.Tensor` of shape `(batch_size, 1, kv_len, kv_lora_rank)`): Latents.
            k_rot (`torch.Tensor` of shape `(batch_size, 1, kv_len, qk_rope_head_dim)`): Rotary key.
        """
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
    """
    RMSNorm that normalizes each latent head separately.

    This deliberately doesn't inherit from another RMSNorm, since kernels that replace the parent
    class would normalize over all heads.
    """

    def __init__(self, features: int, eps: float, heads: int) -> None:
        super().__init__()
        self.eps, self.heads = eps, heads
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, latent: Tensor) -> Tensor:
        heads = latent.float().unflatten(-1, (self.heads, -1))
        heads = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * heads.flatten(-2).to(latent.dtype)


KHA_ATTENTION_CLASSES |= {
    "heads": KHAHeadsAttention,
    "gta": KHATiedAttention,
    "latent": KHALatentAttention,
}

__all__ = ["KHAHeadsAttention"]
