"""The attention family with knocking heads: MHA, MQA and GQA, with talking and collaborative heads
too, then GTA, then MLA and GLA.

Each class projects, knocks, norms, rotates, attends and projects, in this order, and caches no more
numbers a token than its definition needs.

Shape legend: ``B`` batch, ``S`` tokens, ``K`` tokens with those of the cache, ``H`` query heads,
``G`` key/value heads, ``D`` head dim, ``R`` rotary features, ``C`` hidden size.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    apply_rotary_pos_emb_interleave,
)
from transformers.models.glm4_moe.modeling_glm4_moe import (
    Glm4MoeAttention,
    Glm4MoeRMSNorm,
    eager_attention_forward,
    rotate_half,
)

from kha_megatron.errors import ConfigError
from kha_megatron.heads import HeadTensor, Mechanism
from kha_megatron.heads.knock import PROJECTIONS, Variant
from kha_megatron.heads.mechanism import Stage, Start
from kha_megatron.hf.configuration_kha import KHAModelConfig
from kha_megatron.hf.head_ranks import ModelRanks
from kha_megatron.ops.heads import applied
from kha_megatron.ops.heads.ranks import Listener
from kha_megatron.ops.heads.talking import attend as talk

CosSin = tuple[Tensor, Tensor]
"""Cosine and sine of the rotary embedding, ``[B or 1, S, R]`` each."""


class HeadSharedLinear(nn.Linear):
    """One ``[D, D]`` matrix that all heads of a tensor share, in ``nn.Linear``'s layout.

    The weight is the transpose of the matrix in ``kha_megatron.ops``, which multiplies rows from
    the right. A class of its own, because transformers initialises module by module: it must be
    told here, and not by the parent, that these matrices start as a no-op.
    """

    def __init__(self, head_dim: int, start: Start) -> None:
        self.start = start
        super().__init__(head_dim, head_dim, bias=False)


class HeadWeight(nn.Module):
    """A parameter of a head mechanism that is no stack of matrices and reads no input.

    Whole on every rank; calling it is what transformers' tensor parallelism listens to.
    """

    def __init__(self, tensor: HeadTensor) -> None:
        super().__init__()
        (self.start,) = tensor.starts
        self.weight = nn.Parameter(torch.empty(tensor.shape))

    def forward(self) -> Tensor:
        """The parameter."""
        return self.weight


class InputLinear(nn.Linear):
    """What a head mechanism computes of the layer's input: a gate's score, a router's."""

    def __init__(self, hidden: int, features: int, start: Start) -> None:
        self.start = start
        super().__init__(hidden, features, bias=False)


class KHAKnock(nn.Module):
    """The shared matrices of one projected tensor (equations 5-7 and 9, Table 2)."""

    proj: HeadSharedLinear
    up_proj: HeadSharedLinear
    gate_proj: HeadSharedLinear
    down_proj: HeadSharedLinear

    def __init__(self, variant: Variant, tensor: HeadTensor) -> None:
        super().__init__()
        self.variant = variant
        for matrix, start in zip(tensor.matrices, tensor.starts, strict=True):
            self.add_module(matrix, HeadSharedLinear(tensor.shape[-1], start))

    def forward(self, x: Tensor) -> Tensor:
        """``[..., D]`` to ``[..., D]``: ``ops.knock``, one module call per matrix.

        Calling the modules keeps quantisation, adapters and tensor parallelism of transformers
        working, which act on modules. The order of the products is that of ``ops.knock``.
        """
        # One expression each, and the sigmoid no module: vLLM splits over its ranks what looks like
        # an MLP or like parallel projections, and here every rank holds other heads.
        if self.variant == "linear":
            return self.proj(x)
        if self.variant == "gate":
            return 2 * x * torch.sigmoid(self.gate_proj(x))
        return self.down_proj(2 * self.up_proj(x) * torch.sigmoid(self.gate_proj(x)))


class _Score(NamedTuple):
    """One thing that the mechanisms see of the input."""

    name: str
    module: str
    features: int
    of_heads: bool
    """Whether it is ``[..., heads, features]``: a rank may have fewer heads."""
    is_shared: bool
    """Whether all heads meet it: ``[..., 1, features]``."""


class KHAHeads:
    """Beside an attention: what its heads have, as modules."""

    q_knock: nn.Module
    k_knock: nn.Module
    v_knock: nn.Module
    layer_idx: int
    o_proj: nn.Module

    def _add_heads(self, config: KHAModelConfig, ranks: int = 1) -> None:
        """One module for each tensor, ``{q,k,v}_knock`` also where nothing is knocked; with the
        heads of one of ``ranks`` tensor-parallel ranks, where a server makes its own part."""
        kha, sizes, hidden = config.kha, config.head_sizes.on_rank(ranks), config.hidden_size
        knocks = {
            tensor.heads: KHAKnock(kha.variants[tensor.heads], tensor)
            for tensor in kha.knock.tensors(sizes)
        }
        for projection in PROJECTIONS:
            setattr(self, f"{projection[0]}_knock", knocks.get(projection, nn.Identity()))
        self.talking = kha.talking
        self.listeners: list[Listener] = []
        self.mechanisms: list[tuple[Mechanism, list[HeadTensor]]] = []
        self.scores: list[_Score] = []
        for everywhere in kha.others:
            mechanism = everywhere.for_layer(self.layer_idx)
            for row in mechanism.rows(sizes):
                rows = sizes.heads(row.heads) * row.features
                setattr(self, row.hf, nn.Linear(hidden, rows, bias=config.attention_bias))
                self.scores.append(_Score(row.name, row.hf, row.features, True, False))
            tensors = mechanism.tensors(sizes)
            for tensor in tensors:
                self._add_tensor(tensor, hidden)
            kept = [tensor for tensor in tensors if not tensor.reads_input]
            self.mechanisms.append((mechanism, kept))

    def _add_tensor(self, tensor: HeadTensor, hidden: int) -> None:
        if not tensor.reads_input:
            setattr(self, tensor.hf, HeadWeight(tensor))
            return
        *heads, features = tensor.shape[:-1]
        (start,) = tensor.starts
        setattr(self, tensor.hf, InputLinear(hidden, math.prod(heads) * features, start))
        is_shared = tensor.gradient == "heads" and not tensor.per_head
        self.scores.append(
            _Score(tensor.name, tensor.hf, features, tensor.per_head or is_shared, is_shared)
        )

    def _projected(self, heads: Tensor, kept: dict[str, Tensor]) -> Tensor:
        """``[..., H, D]`` that attention gives to ``[..., C]``, by the mechanisms on the way."""
        (heads,) = self._applied("output", kept, output=heads)
        (result,) = self._applied("dense", kept, dense=self.o_proj(heads.flatten(-2).contiguous()))
        return result

    def _ranks(self) -> ModelRanks:
        return ModelRanks(getattr(self.o_proj, "weight", None), self.listeners)

    def _read_input(self, hidden_states: Tensor) -> dict[str, Tensor]:
        """What the mechanisms see of the input ``[B, S, C]``, by name (``ops.heads.FUNCTIONS``)."""
        ranks, kept = self._ranks(), {}
        for name, module, features, of_heads, is_shared in self.scores:
            score = getattr(self, module)(hidden_states)
            score = score.unflatten(-1, (-1, features)) if of_heads else score
            kept[name] = ranks.met_by_heads(score) if is_shared else score
        return kept

    def _applied(self, stage: Stage, kept: dict[str, Tensor], **tensors: Tensor) -> list[Tensor]:
        """``[B, S, heads, D]`` each, after the mechanisms of a stage (``ops.heads.FUNCTIONS``).

        ``kept`` begins with :meth:`_read_input`, and goes from stage to stage.
        """
        ranks, mechanisms = self._ranks(), []
        for mechanism, parameters in self.mechanisms:
            if not mechanism.acts_at(stage):
                continue
            weights = {tensor.name: getattr(self, tensor.hf)() for tensor in parameters}
            for tensor in parameters:
                if tensor.per_head:
                    weights[tensor.name] = ranks.own_part(weights[tensor.name])
            mechanisms.append((mechanism, weights))
        return applied(stage, mechanisms, tensors, kept, ranks)


def _attend(
    module: Any,
    shape: torch.Size,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kept: dict[str, Tensor],
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """Attend by the backend that the configuration names, and project to ``[*shape, C]``.

    Flash attention has one width for queries, keys and values. What is narrower gets zeros, which
    add nothing to a score and nothing to an output; transformers itself widens only values.
    """
    asked = module.config._attn_implementation
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(asked, eager_attention_forward)
    if module.talking is not None:
        attend = _talk
    width = given = value.shape[-1]
    if "flash" in (asked or "") and query.shape[-1] != width:
        given = max(query.shape[-1], width)
        query, key, value = (
            nn.functional.pad(part, (0, given - part.shape[-1])) for part in (query, key, value)
        )
    output, weights = attend(
        module,
        query,
        key,
        value,
        mask,
        dropout=module.attention_dropout if module.training else 0.0,
        scaling=module.scaling,
        **kwargs,
    )
    heads = output.reshape(*shape, -1, given)[..., :width]
    return module._projected(heads, kept), weights


def _talk(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float,
    **kwargs,
) -> tuple[Tensor, Tensor]:
    """Eager attention whose heads mix logits and weights (arXiv 2003.02436), as a backend."""
    if (asked := module.config._attn_implementation) != "eager":
        raise ConfigError(needs_eager(asked))
    mixings = module.talking.mixings
    pre = module.talking_pre() if "pre" in mixings else None
    post = module.talking_post() if "post" in mixings else None
    drop = partial(nn.functional.dropout, p=dropout) if dropout else None
    output, weights = talk(query, key, value, pre, post, scale=scaling, mask=mask, dropout=drop)
    return output.transpose(1, 2).contiguous(), weights


def needs_eager(asked: str) -> str:
    """Why talking heads cannot have an attention implementation, with the remedy."""
    return (
        f"attn_implementation={asked!r} with talking heads, whose logits are mixed over all heads "
        "and no fused kernel mixes them: use attn_implementation='eager'"
    )


class KHAAttention(KHAHeads, Glm4MoeAttention):
    """Causal grouped-query attention: project, knock, QK-norm, RoPE, attend, project."""

    def __init__(self, config: KHAModelConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self._add_heads(config)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: CosSin,
        attention_mask: Tensor | None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """``[B, S, C]`` to ``[B, S, C]`` and the attention weights, if the backend makes them.

        The cache receives keys after knock, norm and RoPE, and values after the knock: a decoding
        step knocks its own token only.
        """
        input_shape = hidden_states.shape[:-1]
        heads = (*input_shape, -1, self.head_dim)
        kept = self._read_input(hidden_states)
        query, key, value = self._applied(
            "qkv",
            kept,
            query=self.q_knock(self.q_proj(hidden_states).view(heads)),
            key=self.k_knock(self.k_proj(hidden_states).view(heads)),
            value=self.v_knock(self.v_proj(hidden_states).view(heads)),
        )
        value = value.transpose(1, 2)
        if self.use_qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query = _rotate_first(query.transpose(1, 2), *position_embeddings)
        key = _rotate_first(key.transpose(1, 2), *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        # here and not in `_attend`: vLLM reads the source of this method for the call
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        if self.talking is not None:
            attend = _talk
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
        output = output.reshape(*heads)  # a server's has its heads side by side
        return self._projected(output, kept), weights


class KHACollaborativeAttention(KHAHeads, Glm4MoeAttention):
    """Attention whose heads share one query and one key (Cordonnier et al. 2020, arXiv 2006.16362),
    ``dim`` features wide, which each head weighs by a vector of its own.

    The cache holds the one key and the values of all heads side by side, ``dim + G D`` numbers a
    token.
    """

    def __init__(self, config: KHAModelConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        del self.q_proj, self.k_proj
        collaborative = config.kha.collaborative
        assert collaborative is not None
        self.scaling = collaborative.dim**-0.5
        if self.use_qk_norm:
            self.q_norm = Glm4MoeRMSNorm(collaborative.dim, eps=config.rms_norm_eps)
            self.k_norm = Glm4MoeRMSNorm(collaborative.dim, eps=config.rms_norm_eps)
        self._add_heads(config)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: CosSin,
        attention_mask: Tensor | None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """As :meth:`KHAAttention.forward`."""
        input_shape, kept = hidden_states.shape[:-1], self._read_input(hidden_states)
        heads = (*input_shape, -1, self.head_dim)
        query, key, value = self._applied(
            "qkv",
            kept,
            query=kept["collaborative_query"],
            key=kept["collaborative_key"],
            value=self.v_knock(self.v_proj(hidden_states).view(heads)),
        )
        if self.use_qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query = _rotate_first(query.transpose(1, 2), *position_embeddings)
        key = _rotate_first(key.transpose(1, 2), *position_embeddings)
        value = value.flatten(-2)[:, None]
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        value = value.squeeze(1).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        key = key.expand(-1, value.shape[1], -1, -1)
        return _attend(self, input_shape, query, key, value, attention_mask, kept, **kwargs)


class KHATiedAttention(KHAHeads, Glm4MoeAttention):
    """Grouped-Tied Attention (Zadouri et al. 2025, arXiv 2505.21487), its tied state knocked.

    All of a key/value head's state is its value; the first half of it is the half of the key
    without position. The other half of the key, the first to Megatron's partial rotary embedding
    and so here, is one head that all groups share. The cache holds ``G D + D / 2`` numbers a token,
    as one head of each: transformers' static cache wants as many of keys as of values.
    """

    def __init__(self, config: KHAModelConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.kv_proj = self.v_proj
        del self.k_proj, self.v_proj
        self.k_rope_proj = nn.Linear(config.hidden_size, config.head_dim // 2, bias=False)
        self._add_heads(config)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: CosSin,
        attention_mask: Tensor | None,
        past_key_values: Cache | None = None,
        key_position_embeddings: CosSin | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """As :meth:`KHAAttention.forward`.

        QK-norm sees whole keys, and each group's is another. So a model with it caches the rotary
        half before norm and rotation, and turns the keys of the whole cache by
        ``key_position_embeddings``, ``[B or 1, K, R]``; None is for keys of these tokens only.
        """
        input_shape, kept = hidden_states.shape[:-1], self._read_input(hidden_states)
        heads = (*input_shape, -1, self.head_dim)
        query = self.q_knock(self.q_proj(hidden_states).view(heads))
        tied = self.v_knock(self.kv_proj(hidden_states).view(heads)).flatten(-2)[:, None]
        rotary = self.k_rope_proj(hidden_states)[:, None]
        if self.use_qk_norm:
            query = self.q_norm(query)
        else:
            rotary = _rotate_first(rotary, *position_embeddings)
        query = _rotate_first(query.transpose(1, 2), *position_embeddings)
        if past_key_values is not None:
            rotary, tied = past_key_values.update(rotary, tied, self.layer_idx)
        value = tied.squeeze(1).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        plain = value[..., : self.head_dim - rotary.shape[-1]]
        key = torch.cat([rotary.expand(-1, value.shape[1], -1, -1), plain], dim=-1)
        if self.use_qk_norm:
            key = _rotate_first(self.k_norm(key), *(key_position_embeddings or position_embeddings))
        return _attend(self, input_shape, query, key, value, attention_mask, kept, **kwargs)


def _rotate_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first ``R`` features of ``[B, heads, S, D]``.

    Where all are turned the result keeps the strides of ``x``, as in the stock classes that know no
    partial rotation: the order in which fused attention adds up may follow the strides.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    width = cos.shape[-1]
    if width == x.shape[-1]:
        return x * cos + rotate_half(x) * sin
    turned, rest = x.split([width, x.shape[-1] - width], dim=-1)
    return torch.cat([turned * cos + rotate_half(turned) * sin, rest], dim=-1)


class KHALatentAttention(KHAHeads, DeepseekV3Attention):
    """Multi-head Latent Attention (DeepSeek-V2, arXiv 2405.04434), with ``linear`` knocks.

    Knocked are the parts of queries and keys without position, and the values. With several latent
    heads it is Grouped Latent Attention (Zadouri et al. 2025): each is normalised by itself, and
    expands to keys and values of its own group of query heads.

    The cache holds the normalised latent and the rotary key of all heads, ``kv_lora_rank + R``
    numbers a token. Like the stock class, a decoding step expands the whole cache, here with the
    knocks; ``kha-megatron convert fold`` makes MLA a stock model with the stock model's work.
    """

    def __init__(self, config: KHAModelConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        eps, groups, rank = config.rms_norm_eps, config.num_latent_heads, config.kv_lora_rank
        assert rank is not None
        norm = Glm4MoeRMSNorm if config.use_qk_norm else _no_norm  # the stock epsilon is fixed
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
        self._add_heads(config)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: CosSin,
        attention_mask: Tensor | None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """As :meth:`KHAAttention.forward`."""
        input_shape, kept = hidden_states.shape[:-1], self._read_input(hidden_states)
        query = self._queries(hidden_states).view(*input_shape, -1, self.qk_head_dim)
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
        return _attend(self, input_shape, query, key, value, attention_mask, kept, **kwargs)

    def _queries(self, hidden_states: Tensor) -> Tensor:
        if self.q_lora_rank is None:
            return self.q_proj(hidden_states)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))

    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[B, H, K, ...]`` of the latents ``[B, 1, K, kv_lora_rank]`` and the
        rotary keys ``[B, 1, K, R]``."""
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
    """RMSNorm of each of several latent heads by itself: ``[..., kv_lora_rank]`` to the same.

    No child of another RMSNorm: kernels that replace those would take all heads for one.
    """

    def __init__(self, features: int, eps: float, heads: int) -> None:
        super().__init__()
        self.eps, self.heads = eps, heads
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, latent: Tensor) -> Tensor:
        """Normalise, in float32."""
        heads = latent.float().unflatten(-1, (self.heads, -1))
        heads = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * heads.flatten(-2).to(latent.dtype)


def _no_norm(features: int, eps: float) -> nn.Module:
    return nn.Identity()


def attention_class(config: KHAModelConfig) -> type[nn.Module]:
    """The attention of a model, for each of its layers."""
    if config.kv_lora_rank is not None:
        return KHALatentAttention
    if config.kha.collaborative is not None:
        return KHACollaborativeAttention
    return KHATiedAttention if config.kha_attention == "gta" else KHAAttention
