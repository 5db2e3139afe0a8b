"""PyTorch KHA model.

This is GLM-4-MoE with Knocking-Heads Attention (https://huggingface.co/papers/2510.23052), plus
softmax routing as in Megatron and a configurable MLP type (dense or sparse) for each layer.
"""

import inspect
from collections.abc import Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
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
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm
from transformers.utils.generic import maybe_autocast
from transformers.utils.output_capturing import OutputRecorder

from kha_megatron.hf.configuration_kha import KHAModelConfig

CosSin = tuple[Tensor, Tensor]  # both (batch_size or 1, seq_len, rotary_dim)

# TP style for weights that all heads share. Each rank only sees the gradient from its own heads, so
# the gradients have to be summed.
SHARED_BY_HEADS = "replicated_with_grad_allreduce"

# Checkpoints store each expert separately (as in Qwen3-MoE), while the model fuses them.
register_checkpoint_conversion_mapping(
    KHAModelConfig.model_type,
    get_checkpoint_conversion_mapping("qwen2_moe"),
    overwrite=True,
)


class HeadSharedLinear(nn.Linear):
    """
    A square linear layer that is applied to every head with the same weight.

    Args:
        head_dim (`int`): Head dimension.
        initial (`str`): One of `"identity"`, `"zeros"` or `"normal"`.
    """

    def __init__(
        self,
        head_dim: int,
        initial: str,
    ) -> None:
        self.initial = initial
        super().__init__(head_dim, head_dim, bias=False)

    def set_initial_value(self, std: float) -> None:
        if self.initial == "normal":
            init.normal_(self.weight, mean=0.0, std=std)
        elif self.initial == "zeros":
            init.zeros_(self.weight)
        else:  # `torch.nn.init.eye_` fails on the meta device (used by vLLM).
            identity = torch.eye(len(self.weight))
            init.copy_(self.weight, identity)


class KHAKnock(nn.Module):
    """
    The knocking-heads transformation of queries, keys or values (equations 5-7 and 9 in the paper,
    and Table 2 for the gate). It is the identity at initialization unless `init="random"`.
    """

    def __init__(
        self,
        variant: str,
        head_dim: int,
        init: str = "identity",
    ) -> None:
        super().__init__()
        self.variant = variant
        initial = "identity"
        initial_gate = "zeros"
        if init == "random":
            initial = "normal"
            initial_gate = "normal"
        if variant == "linear":
            self.proj = HeadSharedLinear(head_dim, initial)
        if variant == "mlp":
            self.up_proj = HeadSharedLinear(head_dim, initial)
        if variant in ("mlp", "gate"):
            self.gate_proj = HeadSharedLinear(head_dim, initial_gate)
        if variant == "mlp":
            self.down_proj = HeadSharedLinear(head_dim, initial)

    def forward(self, x: Tensor) -> Tensor:
        # `gate_proj` is called in two places on purpose. Otherwise vLLM takes this module for a
        # regular MLP, and would fuse and shard it.
        if self.variant == "linear":
            return self.proj(x)
        if self.variant == "gate":
            gate = torch.sigmoid(self.gate_proj(x))
            return 2 * x * gate
        up = self.up_proj(x)
        gate = self.gate_proj(x)
        up_and_gate = torch.cat([up, gate], dim=-1)
        hidden = F.glu(up_and_gate, dim=-1)
        return self.down_proj(2 * hidden)


class KHAFoldedKnock(nn.Module):
    """
    What remains of KHA-MLP or KHA-Gate on the values if `kha_folded` is set.

    The value projection then returns `[2 * up, gate]` for each head (for KHA-Gate, `[2 * value,
    gate]`). Unless `o_proj` contains `down_proj`, it is applied here.
    """

    def __init__(
        self,
        head_dim: int,
        has_down: bool,
    ) -> None:
        super().__init__()
        self.down_proj = None
        if has_down:
            self.down_proj = HeadSharedLinear(head_dim, "identity")

    def forward(self, up_and_gate: Tensor) -> Tensor:
        hidden = F.glu(up_and_gate, dim=-1)
        if self.down_proj is None:
            return hidden
        return self.down_proj(hidden)


def apply_knock(knock: nn.Module | None, x: Tensor) -> Tensor:
    """Applies KHA, if enabled, to queries, keys or values of shape `(..., head_dim)`."""
    if knock is None:  # Calling `nn.Identity` instead would take longer when decoding.
        return x
    return knock(x)


def rotate_features(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """Applies RoPE to the first features of each head, depending on the size of `cos`."""
    rotary_dim = cos.shape[-1]
    # Do not use `torch.cat` here. It changes the strides, so fused attention may round differently.
    if rotary_dim == x.shape[-1]:
        return x * cos + rotate_half(x) * sin
    x_rot = x[..., :rotary_dim]
    x_pass = x[..., rotary_dim:]
    x_embed = x_rot * cos + rotate_half(x_rot) * sin
    return torch.cat([x_embed, x_pass], dim=-1)


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """Applies RoPE to queries or keys of shape `(batch_size, num_heads, seq_len, head_dim)`."""
    return rotate_features(x, cos.unsqueeze(1), sin.unsqueeze(1))


def apply_rotary_pos_emb(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor]:
    """Same as `apply_rotary` for queries and keys, with two views less."""
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    query = rotate_features(query, cos, sin)
    key = rotate_features(key, cos, sin)
    return query, key


# transformers 5.24 renamed `past_key_values` to `cache` in all layers.
CACHE_ARGUMENTS = ("past_key_values", "cache")
# Before, it passed the paged cache of continuous batching as `cache` to the attention functions.
LAYERS_UPDATE_PAGED_CACHE = "cache" in inspect.signature(Glm4MoeAttention.forward).parameters


def pop_cache(arguments: dict[str, Any]) -> Cache | None:
    """
    Remove the KV cache from the keyword arguments of an attention layer.

    A cache that the layer does not use is an error. Otherwise, every new token would only attend to
    itself.
    """
    names = []
    for name, value in arguments.items():
        if isinstance(value, Cache):
            names.append(name)
    unknown = set(names) - set(CACHE_ARGUMENTS)
    if unknown:
        expected = " or ".join(map(repr, CACHE_ARGUMENTS))
        raise TypeError(
            f"The KV cache was passed as {min(unknown)!r}, which this model does not support. "
            f"Expected {expected}. Please update the code of the "
            "model or use an older version of transformers."
        )
    if not names and arguments.get("use_cache"):
        raise ValueError(
            "use_cache=True requires a KV cache, but the attention layer received none. Please "
            "pass `past_key_values` or use_cache=False."
        )
    cache = None
    if names:
        cache = arguments.pop(names[0])
    arguments.pop("past_key_values", None)  # transformers also passes it if there is no cache
    return cache


def update_paged_cache(
    layer: Any,
    key: Tensor,
    value: Tensor,
    arguments: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """
    Update the paged cache of continuous batching, and return all keys and values.

    This changes `arguments`, which have to be passed to the attention function.
    """
    if not LAYERS_UPDATE_PAGED_CACHE or arguments.get("cache") is None:
        return key, value
    paged_cache = arguments.pop("cache")
    return paged_cache.update(
        key,
        value,
        layer.layer_idx,
        kwargs=arguments,
    )


Module: Any = nn.Module  # Otherwise type checkers infer `Tensor | Module` for its attributes.


class KHAModule(Module):
    """Base class for attention modules with KHA."""

    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # column-parallel
    value_projection = "v_proj"

    def add_knocks(
        self,
        config: KHAModelConfig,
        head_dim: int,
        value_dim: int,
    ) -> None:
        """
        Create `q_knock`, `k_knock` and `v_knock` (`None` where KHA is disabled).

        `value_features` is the number of features that the value projection returns for each head.
        """
        self.q_knock = self.build_knock(
            config.kha_query,
            head_dim,
            config,
        )
        self.k_knock = self.build_knock(
            config.kha_key,
            head_dim,
            config,
        )
        if config.kha_folded is None:
            self.value_features = value_dim
            self.v_knock = self.build_knock(
                config.kha_value,
                value_dim,
                config,
            )
        else:
            self.value_features = 2 * value_dim
            self.widen_value_projection(config)
            is_mlp = config.kha_value == "mlp"
            has_down = is_mlp and "output" not in config.kha_folded
            self.v_knock = KHAFoldedKnock(value_dim, has_down)

    def widen_value_projection(self, config: KHAModelConfig) -> None:
        """Replace the value projection for folded models."""
        kv_heads = config.num_key_value_heads or config.num_attention_heads
        projection = nn.Linear(
            config.hidden_size,
            kv_heads * self.value_features,
            bias=config.attention_bias,
        )
        setattr(self, self.value_projection, projection)

    def build_knock(
        self,
        variant: str | None,
        dim: int,
        config: KHAModelConfig,
    ) -> nn.Module | None:
        if variant is None:
            return None
        return KHAKnock(variant, dim, config.kha_init)

    def tp_plan(self) -> dict[str, str]:
        """Tensor-parallel plan for the submodules. `KHAModel` adds it to the config."""
        plan = {"o_proj": "rowwise"}
        for name, module in self.named_modules():
            if name in self.projections:
                plan[name] = "colwise"
            is_norm = name in ("q_norm", "k_norm")
            if is_norm or isinstance(module, HeadSharedLinear):
                plan[name] = SHARED_BY_HEADS
        return plan


class KHAAttention(KHAModule, Glm4MoeAttention):
    """Multi-headed attention (or MQA or GQA) with KHA applied before QK-norm and RoPE."""

    def __init__(
        self,
        config: KHAModelConfig,
        layer_idx: int,
    ) -> None:
        super().__init__(config, layer_idx)
        self.add_knocks(config, self.head_dim, self.head_dim)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: CosSin,
        attention_mask: Tensor | None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        # Apply KHA before updating the cache, so only new tokens are transformed when decoding.
        cache = pop_cache(kwargs)
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        value_shape = (*input_shape, -1, self.value_features)
        query = self.q_proj(hidden_states).view(hidden_shape)
        key = self.k_proj(hidden_states).view(hidden_shape)
        value = self.v_proj(hidden_states).view(value_shape)
        query = apply_knock(self.q_knock, query)
        key = apply_knock(self.k_knock, key)
        value = apply_knock(self.v_knock, value)
        if self.use_qk_norm:
            query = self.q_norm(query)
            key = self.k_norm(key)
        query = query.transpose(1, 2)
        key = key.transpose(1, 2)
        value = value.transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        key, value = update_paged_cache(
            self,
            key,
            value,
            kwargs,
        )
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
        output = output.reshape(*input_shape, -1).contiguous()
        return self.o_proj(output), weights


# Populated by `attention_kha`. That module is only exported with models that need it.
KHA_ATTENTION_CLASSES: dict[str, Any] = {}


def attention_class(config: KHAModelConfig) -> Any:
    if config.is_plain:
        return KHAAttention
    if config.kv_lora_rank is not None:
        return KHA_ATTENTION_CLASSES["latent"]
    if config.kha_attention is not None:
        return KHA_ATTENTION_CLASSES[config.kha_attention]
    return KHA_ATTENTION_CLASSES["heads"].for_config(config)


def vllm_obstacle(config: KHAModelConfig, *, by_backend: bool) -> str | None:
    """
    Check whether vLLM can run the model. Returns `None` if so, otherwise an error message.

    Args:
        by_backend (`bool`):
            `True` for vLLM's transformers backend (`--model-impl transformers`), `False` for the
            vLLM model in `kha_megatron.serving`.
    """
    remedy = "Please serve the model with transformers."
    if config.kv_lora_rank is not None or config.kha_attention is not None:
        return f"KHA models with MLA, GLA or GTA are not supported in vLLM. {remedy}"
    unsupported = []
    for name in sorted(config.mechanisms):
        if name != "gate":
            unsupported.append(f"kha_{name}")
    if unsupported:
        return f"vLLM does not support {', '.join(unsupported)}. {remedy}"
    if config.hidden_act != "silu":
        return f"hidden_act={config.hidden_act!r} is not supported in vLLM, only silu. {remedy}"
    if by_backend and config.n_group > 1:
        experts_in_vllm = 2 if config.scoring_func == "sigmoid" else 1
        experts_per_group = config.num_experts_per_tok // config.topk_group
        if experts_per_group != experts_in_vllm:
            return (
                f"vLLM's transformers backend ranks expert groups by their top {experts_in_vllm} "
                f"experts, but this model requires the top {experts_per_group}. Install "
                "kha_megatron from source and remove --model-impl."
            )
    return None


class KHARouter(nn.Module):
    """
    Top-k router. Equivalent to `topk_routing_with_score_function` in Megatron-Core.

    - `scoring_func="softmax"`: if `norm_topk_prob` is set (default in Megatron), the softmax is
      computed over the selected experts, otherwise over all experts.
    - `scoring_func="sigmoid"`: `e_score_correction_bias` is only used for selecting the experts.
    - `router_dtype="auto"`: logits and weights have the dtype of the model. Softmax routing is then
      bit-identical to Qwen3-MoE, which normalizes the softmax over all experts.
    - `n_group > 1`: each token is routed to its `topk_group` best groups only, see section 2.1.2 of
      DeepSeek-V3 (https://huggingface.co/papers/2412.19437).
    """

    def __init__(self, config: KHAModelConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.score_function = config.scoring_func
        self.norm_topk_prob = config.norm_topk_prob
        self.in_float32 = config.router_dtype == "float32"
        # Qwen3-MoE normalizes the softmax over all experts (and has no groups).
        is_like_qwen = not self.in_float32 and config.n_group == 1
        self.selects_before_softmax = self.norm_topk_prob and not is_like_qwen
        self.scaling_factor = config.routed_scaling_factor
        self.groups = config.n_group
        self.groups_per_token = config.topk_group
        weight = torch.empty(config.num_experts, config.hidden_size)
        self.weight = nn.Parameter(weight)
        if self.score_function == "sigmoid":
            bias = torch.zeros(config.num_experts, dtype=torch.float32)
            self.e_score_correction_bias = nn.Buffer(bias)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the router logits of all experts, and the weights and indices of the top k."""
        hidden_size = hidden_states.shape[-1]
        tokens = hidden_states.reshape(-1, hidden_size)
        logits = self.logits(tokens)
        weights, experts = self.choose(logits)
        return logits, weights.to(logits.dtype), experts

    def logits(self, hidden_states: Tensor) -> Tensor:
        if not self.in_float32:
            return F.linear(hidden_states, self.weight)
        # Autocast could change which experts are selected.
        with maybe_autocast(device_type=hidden_states.device.type, enabled=False):
            hidden_states = hidden_states.float()
            weight = self.weight.float()
            return F.linear(hidden_states, weight)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Select the top-k experts for each token. Returns their weights (float32) and indices."""
        if self.score_function == "sigmoid":
            weights, experts = self._choose_by_sigmoid(logits)
        else:
            weights, experts = self._choose_by_softmax(logits)
        return weights * self.scaling_factor, experts

    def _choose_by_sigmoid(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.float().sigmoid()
        scores_for_choice = self._mask_groups(scores + self.e_score_correction_bias)
        # Megatron only sorts during training. Do the same, as the order affects rounding.
        is_sorted = torch.is_grad_enabled()
        experts = scores_for_choice.topk(
            self.top_k,
            dim=-1,
            sorted=is_sorted,
        ).indices
        weights = scores.gather(-1, experts)
        if self.norm_topk_prob:
            total = weights.sum(-1, keepdim=True)
            weights = weights / (total + 1e-20)
        return weights, experts

    def _choose_by_softmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if self.selects_before_softmax:
            scores = self._mask_groups(logits)
            selected, experts = scores.topk(self.top_k, dim=-1)
            weights = selected.softmax(-1, dtype=torch.float32)
            return weights, experts
        probabilities = logits.softmax(-1, dtype=torch.float32)
        scores = self._mask_groups(probabilities)
        weights, experts = scores.topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            total = weights.sum(-1, keepdim=True)
            weights = weights / total
        return weights, experts

    def _mask_groups(self, scores: Tensor) -> Tensor:
        """Mask experts outside the `topk_group` best groups. A group's score is the sum of its
        best `top_k // topk_group` experts."""
        if self.groups == 1:
            return scores
        grouped = scores.unflatten(-1, (self.groups, -1))
        experts_per_group = self.top_k // self.groups_per_token
        best_scores = grouped.topk(experts_per_group, dim=-1).values
        group_scores = best_scores.sum(-1)
        best_groups = group_scores.topk(self.groups_per_token, dim=-1).indices
        all_groups = torch.ones_like(group_scores, dtype=torch.bool)
        other_groups = all_groups.scatter(-1, best_groups, False)
        masked = grouped.masked_fill(other_groups.unsqueeze(-1), -torch.inf)
        return masked.flatten(-2)


class KHASparseMLP(nn.Module):
    def __init__(self, config: KHAModelConfig) -> None:
        super().__init__()
        self.gate = KHARouter(config)
        self.experts = Qwen3MoeExperts(config)
        self.shared_experts = None
        self.shared_expert_gate = None
        if config.shared_expert_intermediate_size:
            self.shared_experts = Glm4MoeMLP(config, config.shared_expert_intermediate_size)
        if config.shared_expert_gate:
            self.shared_expert_gate = nn.Linear(
                config.hidden_size,
                1,
                bias=False,
            )

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_size = hidden_states.shape[-1]
        tokens = hidden_states.reshape(-1, hidden_size)
        _, weights, experts = self.gate(tokens)
        output = self.experts(tokens, experts, weights)
        output = output.view_as(hidden_states)
        if self.shared_experts is None:
            return output
        shared_output = self.shared_experts(hidden_states)
        if self.shared_expert_gate is not None:
            gate = self.shared_expert_gate(hidden_states)
            shared_output = shared_output * torch.sigmoid(gate)
        return output + shared_output


def center_norms(model: nn.Module) -> None:
    """Replaces all norms by those of Qwen3-Next, which multiply by `1 + weight` in float32."""
    for module in list(model.modules()):
        for name, norm in list(module.named_children()):
            if isinstance(norm, Glm4MoeRMSNorm):
                centered = Qwen3NextRMSNorm(len(norm.weight), eps=norm.variance_epsilon)
                setattr(module, name, centered)


class KHADecoderLayer(Glm4MoeDecoderLayer):
    def __init__(
        self,
        config: KHAModelConfig,
        layer_idx: int,
    ) -> None:
        GradientCheckpointingLayer.__init__(self)  # Skip the parent, which builds other submodules.
        self.hidden_size = config.hidden_size
        self.self_attn = attention_class(config)(config, layer_idx)
        mlp_types = config.mlp_layer_types or []
        if mlp_types[layer_idx] == "sparse":
            self.mlp = KHASparseMLP(config)
        else:
            self.mlp = Glm4MoeMLP(config)
        self.input_layernorm = Glm4MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Glm4MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class KHAPreTrainedModel(Glm4MoePreTrainedModel):
    config: KHAModelConfig
    config_class = KHAModelConfig
    _no_split_modules = ["KHADecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": KHADecoderLayer,
        "attentions": KHAModule,
        "router_logits": OutputRecorder(KHARouter, index=0),
    }
    # With transformers 5.24, the parent class also keeps the weight of the router in float32.
    _keep_in_fp32_modules_strict = ["e_score_correction_bias"]  # noqa: RUF012
    # The parent class skips the layer indices that are MTP layers in GLM checkpoints.
    _keys_to_ignore_on_load_unexpected = None

    def __init__(self, config: KHAModelConfig) -> None:
        self._check_config(config)
        # The classification heads build their base model with `AutoModel`. With remote code, the
        # class of `config` comes from another copy of `configuration_kha`.
        AutoModel.register(type(config), KHAModel, exist_ok=True)
        super().__init__(config)

    def _check_config(self, config: KHAModelConfig) -> None:
        """Validate the config. Disables SDPA, FlashAttention etc. if the model needs eager."""
        if config._attn_implementation == "vllm":
            obstacle = vllm_obstacle(config, by_backend=True)
            if obstacle:
                raise ValueError(obstacle)
        if config.is_plain:
            return
        attention = attention_class(config)
        attention.check_config(config)
        if attention.requires_eager(config):
            self._supports_sdpa = False
            self._supports_flash_attn = False
            self._supports_flex_attn = False

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # The parent looks for a decorator in this file.

    def _grouped_mm_can_dispatch(self) -> bool:
        # If the user did not ask for grouped_mm, transformers catches this and uses a loop.
        hidden_size = self.config.hidden_size
        intermediate_size = self.config.moe_intermediate_size
        if hidden_size % 8 or intermediate_size % 8:
            raise ValueError(
                "grouped_mm requires hidden_size and moe_intermediate_size to be multiples of 8, "
                f"got {hidden_size} and {intermediate_size}. Please use "
                "experts_implementation='eager'."
            )
        return super()._grouped_mm_can_dispatch()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        set_initial_value = getattr(module, "set_initial_value", None)
        if set_initial_value is not None:
            set_initial_value(std)
            return
        super()._init_weights(module)
        if isinstance(module, Qwen3MoeExperts):
            init.normal_(
                module.gate_up_proj,
                mean=0.0,
                std=std,
            )
            init.normal_(
                module.down_proj,
                mean=0.0,
                std=std,
            )
        elif isinstance(module, Qwen3NextRMSNorm):
            init.zeros_(module.weight)
        elif isinstance(module, KHARouter):
            init.normal_(module.weight, mean=0.0, std=std)
            if module.score_function == "sigmoid":
                init.zeros_(module.e_score_correction_bias)


class KHAModel(KHAPreTrainedModel, Glm4MoeModel):
    def __init__(self, config: KHAModelConfig) -> None:
        self._check_config(config)
        super(Glm4MoeModel, self).__init__(config)  # Skip the parent, which builds its own layers.
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(
            config.vocab_size,
            config.hidden_size,
            self.padding_idx,
        )
        self.layers = nn.ModuleList()
        for layer_idx in range(config.num_hidden_layers):
            self.layers.append(KHADecoderLayer(config, layer_idx))
        self.norm = Glm4MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Glm4MoeRotaryEmbedding(config)
        self.gradient_checkpointing = False
        if config.zero_centered_norms:
            center_norms(self)
        plan = dict(type(config).base_model_tp_plan)
        if "sparse" not in (config.mlp_layer_types or []):
            # NeMo AutoModel ignores the whole plan if it does not support the style of one entry.
            plan = {name: style for name, style in plan.items() if "experts" not in name}
        attention: Any = self.layers[0].self_attn
        for module, style in attention.tp_plan().items():
            plan[f"layers.*.self_attn.{module}"] = style
        self.config.base_model_tp_plan = plan
        self.post_init()

    @wraps(Glm4MoeModel.forward)
    def forward(self, *args, **kwargs):
        past_length = 0
        past_cache = find_cache((*args, *kwargs.values()))
        if past_cache is not None:
            past_length = past_cache.get_seq_length()
        output = super().forward(*args, **kwargs)
        outputs = output.values() if isinstance(output, dict) else output
        cache = find_cache(outputs)
        if cache is not None and not torch.compiler.is_compiling():
            check_is_longer(cache, past_length)
        return output


def find_cache(values: Iterable[Any]) -> Cache | None:
    for value in values:
        if isinstance(value, Cache):
            return value
    return None


def check_is_longer(cache: Cache, past_length: int) -> None:
    """Raise an error if a forward pass did not add tokens to the KV cache."""
    length = cache.get_seq_length()
    # The length of a static cache is a tensor. Reading it would wait for the GPU.
    if isinstance(length, int) and length <= past_length:
        raise RuntimeError(
            f"The forward pass did not lengthen the KV cache: it has {length} tokens and had "
            f"{past_length} before. Please use another version of transformers or use_cache=False."
        )


class KHAForCausalLM(KHAPreTrainedModel, Glm4MoeForCausalLM):
    """The KHA model with a language modeling head on top."""

    def __init__(self, config: KHAModelConfig) -> None:
        self._check_config(config)
        super(Glm4MoeForCausalLM, self).__init__(config)  # Skip the parent, as above.
        self.model = KHAModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(
            config.hidden_size,
            config.vocab_size,
            bias=False,
        )
        self.post_init()


class KHAForQuestionAnswering(GenericForQuestionAnswering, KHAPreTrainedModel):
    """The KHA model with a span classification head on top."""


class KHAForSequenceClassification(GenericForSequenceClassification, KHAPreTrainedModel):
    """The KHA model with a sequence classification head on top."""


class KHAForTokenClassification(GenericForTokenClassification, KHAPreTrainedModel):
    """The KHA model with a token classification head on top."""


__all__ = [
    "HeadSharedLinear",
    "KHAForCausalLM",
    "KHAForQuestionAnswering",
    "KHAForSequenceClassification",
    "KHAForTokenClassification",
    "KHAModel",
    "KHAPreTrainedModel",
]
