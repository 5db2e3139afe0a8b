"""A transformers model with Knocking-Heads Attention (KHA, arXiv 2510.23052), dense and MoE.

The decoder is GLM-4-MoE's, because it has every option that a Megatron run can set: QK-norm, q/k/v
biases, partial RoPE, sigmoid routing with shared experts. The attention and the router differ, and
each layer is either dense or sparse.

Shape legend: ``B`` batch, ``S`` tokens, ``K`` tokens including the cache, ``H`` query heads, ``G``
key/value heads, ``D`` head dim, ``R`` rotary features, ``C`` hidden size, ``N`` tokens of the whole
batch, ``E`` experts, ``T`` experts per token.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.glm4_moe.modeling_glm4_moe import (
    Glm4MoeAttention,
    Glm4MoeDecoderLayer,
    Glm4MoeForCausalLM,
    Glm4MoeMLP,
    Glm4MoeModel,
    Glm4MoePreTrainedModel,
    Glm4MoeRMSNorm,
    Glm4MoeRotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from transformers.utils.generic import maybe_autocast
from transformers.utils.output_capturing import OutputRecorder

from kha_megatron.hf.configuration_kha import KHAModelConfig

CosSin = tuple[Tensor, Tensor]
"""Cosine and sine of the rotary embedding, ``[B or 1, S, R]`` each."""

SHARED_BY_HEADS = "replicated_with_grad_allreduce"
"""Tensor-parallel style of a matrix that all heads share. The gradient on each rank is a partial
sum over its heads."""


# Experts are 3-D in memory and one tensor per expert and matrix on disk, as in Qwen3-MoE.
register_checkpoint_conversion_mapping(
    KHAModelConfig.model_type, get_checkpoint_conversion_mapping("qwen2_moe"), overwrite=True
)


class HeadSharedLinear(nn.Linear):
    """One ``[D, D]`` matrix that all heads of a tensor share, transposed as in ``nn.Linear``.

    Args:
        head_dim: ``D``.
        start: initial value: ``identity``, ``zeros`` or ``normal``. transformers initialises module
            by module, so each module must know its own.
    """

    def __init__(self, head_dim: int, start: str) -> None:
        self.start = start
        super().__init__(head_dim, head_dim, bias=False)

    def set_initial_value(self, std: float) -> None:
        """Fill the matrix."""
        if self.start == "normal":
            init.normal_(self.weight, mean=0.0, std=std)
        else:  # `torch.nn.init.eye_` fails on the meta device, which vLLM uses.
            init.copy_(self.weight, float(self.start == "identity") * torch.eye(len(self.weight)))


class KHAKnock(nn.Module):
    """Apply the matrices of one KHA variant to every head (equations 5-7 and 9, Table 2).

    With the initial values every variant is the identity.
    """

    def __init__(self, variant: str, head_dim: int, init: str = "identity") -> None:
        super().__init__()
        self.variant = variant
        identity, zeros = ("normal", "normal") if init == "random" else ("identity", "zeros")
        if variant == "linear":
            self.proj = HeadSharedLinear(head_dim, identity)
        if variant == "mlp":
            self.up_proj = HeadSharedLinear(head_dim, identity)
        if variant in ("mlp", "gate"):
            self.gate_proj = HeadSharedLinear(head_dim, zeros)
        if variant == "mlp":
            self.down_proj = HeadSharedLinear(head_dim, identity)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., D]`` to ``[..., D]``."""
        # vLLM merges modules that look like an MLP and splits them over ranks, which would be wrong
        # here, because each rank has other heads. The two uses of `gate_proj` prevent this.
        if self.variant == "linear":
            return self.proj(x)
        if self.variant == "gate":
            return 2 * x * torch.sigmoid(self.gate_proj(x))
        return self.down_proj(2 * self.up_proj(x) * torch.sigmoid(self.gate_proj(x)))


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first ``R`` features of ``[B, heads, S, D]``.

    If all features are rotated, the result keeps the strides of ``x`` as in stock classes, because
    the order of sums in fused attention may depend on the strides.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    width = cos.shape[-1]
    if width == x.shape[-1]:
        return x * cos + rotate_half(x) * sin
    rotated, rest = x.split([width, x.shape[-1] - width], dim=-1)
    return torch.cat([rotated * cos + rotate_half(rotated) * sin, rest], dim=-1)


Module: Any = nn.Module  # Any: type checkers take attributes of modules for tensors.


class KHAModule(Module):
    """Base of the attention classes: KHA on queries, keys and values."""

    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """Projections whose output is split over tensor-parallel ranks with the heads."""

    def add_knocks(self, config: KHAModelConfig, head_dim: int, value_dim: int) -> None:
        """Create ``q_knock``, ``k_knock`` and ``v_knock``, ``nn.Identity`` without KHA."""
        for name, dim in (("query", head_dim), ("key", head_dim), ("value", value_dim)):
            variant = getattr(config, f"kha_{name}")
            knock = KHAKnock(variant, dim, config.kha_init) if variant else nn.Identity()
            setattr(self, f"{name[0]}_knock", knock)

    def tp_plan(self) -> dict[str, str]:
        """Return the tensor-parallel style of each module of the attention."""
        present = dict(self.named_children())
        split = [name for name in self.projections if name in present]
        plan = dict.fromkeys(split, "colwise") | {"o_proj": "rowwise"}
        for name, module in self.named_modules():
            if isinstance(module, HeadSharedLinear) or name in ("q_norm", "k_norm"):
                plan[name] = SHARED_BY_HEADS
        return plan


class KHAAttention(KHAModule, Glm4MoeAttention):
    """MHA, MQA and GQA with KHA: project, knock, QK-norm, RoPE, attend, project."""

    def __init__(self, config: KHAModelConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.add_knocks(config, self.head_dim, self.head_dim)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: CosSin,
        attention_mask: Tensor | None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """Map ``[B, S, C]`` to ``[B, S, C]`` and the attention weights if the backend returns them.

        The cache holds keys after knock, norm and RoPE, and values after the knock. Decoding knocks
        the new token only.
        """
        input_shape = hidden_states.shape[:-1]
        heads = (*input_shape, -1, self.head_dim)
        query = self.q_knock(self.q_proj(hidden_states).view(heads))
        key = self.k_knock(self.k_proj(hidden_states).view(heads))
        value = self.v_knock(self.v_proj(hidden_states).view(heads)).transpose(1, 2)
        if self.use_qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query = apply_rotary(query.transpose(1, 2), *position_embeddings)
        key = apply_rotary(key.transpose(1, 2), *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
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
        return self.o_proj(output.reshape(*input_shape, -1).contiguous()), weights


ATTENTIONS: dict[str, Any] = {}
"""Attention classes of ``attention_kha``, by kind. Empty in a model directory that does not need
them."""


def attention_class(config: KHAModelConfig) -> Any:
    """Return the attention class of a model.

    Raises:
        ValueError: if this copy of the code does not contain the class.
    """
    if config.is_plain:
        return KHAAttention
    kind = "latent" if config.kv_lora_rank is not None else config.kha_attention
    kind = kind or next((name for name in config.mechanisms if name in ATTENTIONS), "heads")
    if kind not in ATTENTIONS:
        raise ValueError(
            f"This copy of the code has no attention of kind {kind!r} with {config.mechanisms}. "
            "Install kha-megatron and import kha_megatron.hf."
        )
    return ATTENTIONS[kind]


def vllm_obstacle(config: KHAModelConfig, *, by_backend: bool) -> str | None:
    """Return why vLLM would compute wrong tokens for a model, or None.

    Args:
        config: configuration of the model.
        by_backend: whether vLLM runs this file (``--model-impl transformers``) and not the model of
            ``kha_megatron.serving``.
    """
    remedy = "Serve the model with transformers."
    if config.kv_lora_rank is not None or config.kha_attention is not None:
        return f"vLLM supports kha models with MHA, MQA and GQA, not with MLA, GLA or GTA. {remedy}"
    if unknown := set(config.mechanisms) - {"gate"}:
        return f"vLLM's attention does not support {', '.join(sorted(unknown))}. {remedy}"
    if config.hidden_act != "silu":
        return f"vLLM computes SiLU, not hidden_act={config.hidden_act!r}. {remedy}"
    best = 2 if config.scoring_func == "sigmoid" else 1
    each = config.num_experts_per_tok // config.topk_group
    if by_backend and config.n_group > 1 and each != best:
        return (
            f"vLLM's transformers backend ranks groups of experts by their best {best}, this model "
            f"by their best {each}. Install kha-megatron and omit --model-impl."
        )
    return None


class KHARouter(nn.Module):
    """Route in float32 as Megatron-Core's ``topk_routing_with_score_function``.

    ``softmax`` with ``norm_topk_prob`` is the softmax over the chosen logits (Megatron's default),
    otherwise over all logits (``moe_router_pre_softmax``). ``sigmoid`` chooses by score plus
    correction bias and weights by the score. With ``n_group > 1``, a token's experts come from its
    ``topk_group`` best groups (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    """

    def __init__(self, config: KHAModelConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.score_function = config.scoring_func
        self.normalise = config.norm_topk_prob
        self.scaling_factor = config.routed_scaling_factor
        self.groups, self.groups_per_token = config.n_group, config.topk_group
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        if self.score_function == "sigmoid":
            bias = torch.zeros(config.num_experts, dtype=torch.float32)
            self.e_score_correction_bias = nn.Buffer(bias)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits ``[N, E]`` and weights ``[N, T]``, both float32, and experts ``[N, T]``."""
        logits = self.logits(hidden_states.reshape(-1, hidden_states.shape[-1]))
        return logits, *self.choose(logits)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Map tokens ``[N, C]`` to logits ``[N, E]`` in float32."""
        # Autocast would round the product and could change which experts are chosen.
        with maybe_autocast(device_type=hidden_states.device.type, enabled=False):
            return F.linear(hidden_states.float(), self.weight.float())

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights (float32) and expert indices, ``[N, T]`` each, for logits ``[N, E]``."""
        if self.score_function == "sigmoid":
            scores = logits.sigmoid()
            choice = self._of_best_groups(scores + self.e_score_correction_bias)
            # The order affects rounding of the sum. Megatron sorts in training only.
            experts = choice.topk(self.top_k, dim=-1, sorted=torch.is_grad_enabled()).indices
            weights = scores.gather(-1, experts)
            if self.normalise:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        else:
            scores = logits if self.normalise else logits.softmax(-1)
            weights, experts = self._of_best_groups(scores).topk(self.top_k, dim=-1)
            if self.normalise:
                weights = weights.softmax(-1)
        return weights * self.scaling_factor, experts

    def _of_best_groups(self, scores: Tensor) -> Tensor:
        """Set the scores ``[N, E]`` outside of a token's best groups to minus infinity.

        A group is ranked by the sum of its best ``T / topk_group`` experts.
        """
        if self.groups == 1:
            return scores
        grouped = scores.unflatten(-1, (self.groups, -1))
        each = self.top_k // self.groups_per_token
        best = grouped.topk(each, dim=-1).values.sum(-1).topk(self.groups_per_token, dim=-1).indices
        outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
        return grouped.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(-2)


class KHASparseMLP(nn.Module):
    """Routed experts plus the optional shared expert."""

    def __init__(self, config: KHAModelConfig) -> None:
        super().__init__()
        self.gate = KHARouter(config)
        self.experts = Qwen3MoeExperts(config)
        self.shared_experts = self.shared_expert_gate = None
        if config.shared_expert_intermediate_size:
            self.shared_experts = Glm4MoeMLP(config, config.shared_expert_intermediate_size)
        if config.shared_expert_gate:
            self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map ``[B, S, C]`` to ``[B, S, C]``."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, experts = self.gate(tokens)
        output = self.experts(tokens, experts, weights).view_as(hidden_states)
        if self.shared_experts is None:
            return output
        shared = self.shared_experts(hidden_states)
        if self.shared_expert_gate is not None:
            shared = shared * torch.sigmoid(self.shared_expert_gate(hidden_states))
        return output + shared


class KHADecoderLayer(Glm4MoeDecoderLayer):
    """Attention and a dense or sparse MLP, each with RMSNorm and residual connection."""

    def __init__(self, config: KHAModelConfig, layer_idx: int) -> None:
        GradientCheckpointingLayer.__init__(self)  # The parent would build other submodules.
        self.hidden_size = config.hidden_size
        self.self_attn = attention_class(config)(config, layer_idx)
        is_sparse = (config.mlp_layer_types or [])[layer_idx] == "sparse"
        self.mlp = KHASparseMLP(config) if is_sparse else Glm4MoeMLP(config)
        self.input_layernorm = Glm4MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Glm4MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class KHAPreTrainedModel(Glm4MoePreTrainedModel):
    """Loading, saving and initialisation of the models below."""

    config: KHAModelConfig
    config_class = KHAModelConfig
    _no_split_modules = ["KHADecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": KHADecoderLayer,
        "attentions": KHAModule,
        "router_logits": OutputRecorder(KHARouter, index=0),
    }
    # The parent drops the extra layers of its own releases. Here that would lose layers silently.
    _keys_to_ignore_on_load_unexpected = None

    def _check_config(self, config: KHAModelConfig) -> None:
        """Raise ValueError if this code cannot compute the model, and choose eager attention for a
        model that needs it."""
        in_vllm = config._attn_implementation == "vllm"
        if in_vllm and (obstacle := vllm_obstacle(config, by_backend=True)):
            raise ValueError(obstacle)
        if not config.is_plain and attention_class(config).check_config(config) == "eager":
            self._supports_sdpa = self._supports_flash_attn = self._supports_flex_attn = False

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Return True. transformers would look for a decorator in this file."""
        return True

    def _grouped_mm_can_dispatch(self) -> bool:
        """Raise ValueError for sizes that torch's grouped GEMM does not support. By default,
        transformers then uses a loop."""
        sizes = self.config.hidden_size, self.config.moe_intermediate_size
        if any(size % 8 for size in sizes):
            raise ValueError(
                "Expected hidden_size and moe_intermediate_size that are multiples of 8, got "
                f"{sizes[0]} and {sizes[1]}. Use experts_implementation='eager'."
            )
        return super()._grouped_mm_can_dispatch()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if (set_initial_value := getattr(module, "set_initial_value", None)) is not None:
            set_initial_value(std)
            return
        super()._init_weights(module)
        if isinstance(module, Qwen3MoeExperts):
            init.normal_(module.gate_up_proj, mean=0.0, std=std)
            init.normal_(module.down_proj, mean=0.0, std=std)
        elif isinstance(module, KHARouter):
            init.normal_(module.weight, mean=0.0, std=std)
            if module.score_function == "sigmoid":
                init.zeros_(module.e_score_correction_bias)


class KHAModel(KHAPreTrainedModel, Glm4MoeModel):
    """The decoder without an output layer."""

    def __init__(self, config: KHAModelConfig) -> None:
        self._check_config(config)
        super(Glm4MoeModel, self).__init__(config)  # Skip the parent, which would build layers.
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(
            KHADecoderLayer(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = Glm4MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Glm4MoeRotaryEmbedding(config)
        self.gradient_checkpointing = False
        attention: Any = self.layers[0].self_attn
        self.config.base_model_tp_plan = type(config).base_model_tp_plan | {
            f"layers.*.self_attn.{module}": style for module, style in attention.tp_plan().items()
        }
        self.post_init()


class KHAForCausalLM(KHAPreTrainedModel, Glm4MoeForCausalLM):
    """The decoder with its output layer, for training and generation."""

    def __init__(self, config: KHAModelConfig) -> None:
        self._check_config(config)
        super(Glm4MoeForCausalLM, self).__init__(config)  # Skip the parent, as above.
        self.model = KHAModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


__all__ = ["HeadSharedLinear", "KHAForCausalLM", "KHAModel", "KHAPreTrainedModel"]
