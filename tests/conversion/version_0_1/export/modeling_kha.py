# kha_megatron.hf.modeling_kha of kha-megatron 0.1.0 (Apache-2.0)
"""PyTorch KHA model.

This is GLM-4-MoE with Knocking-Heads Attention (https://huggingface.co/papers/2510.23052), plus
softmax routing as in Megatron and a configurable MLP type (dense or sparse) for each layer.
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

from .configuration_kha import KHAModelConfig

CosSin = tuple[Tensor, Tensor]  # both (batch_size or 1, seq_len, rotary_dim)

# TP style for weights that all heads share. Each rank only sees the gradient from its own heads, so
# the gradients have to be summed.
SHARED_BY_HEADS = "replicated_with_grad_allreduce"

# Checkpoints store each expert separately (as in Qwen3-MoE), while the model fuses them.
register_checkpoint_conversion_mapping(
    KHAModelConfig.model_type, get_checkpoint_conversion_mapping("qwen2_moe"), overwrite=True
)


class HeadSharedLinear(nn.Linear):
    """
    A square linear layer that is applied to every head with the same weight.

    Args:
        head_dim (`int`): Head dimension.
        initial (`str`): One of `"identity"`, `"zeros"` or `"normal"`.
    """

    def __init__(self, head_dim: int, initial: str) -> None:
        self.initial = initial
        super().__init__(head_dim, head_dim, bias=False)

    def set_initial_value(self, std: float) -> None:
        if self.initial == "normal":
            init.normal_(self.weight, mean=0.0, std=std)
        else:  # `torch.nn.init.eye_` fails on the meta device (used by vLLM).
            init.copy_(self.weight, float(self.initial == "identity") * torch.eye(len(self.weight)))


class KHAKnock(nn.Module):
    """
    The knocking-heads transformation of queries, keys or values (equations 5-7 and 9 in the paper,
    and Table 2 for the gate). It's the identity at initialization unless `init="random"`.
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
        # `gate_proj` is called in two places on purpose. Otherwise vLLM takes this module for a
        # regular MLP, and would fuse and shard it.
        if self.variant == "linear":
            return self.proj(x)
        if self.variant == "gate":
            return 2 * x * torch.sigmoid(self.gate_proj(x))
        return self.down_proj(2 * self.up_proj(x) * torch.sigmoid(self.gate_proj(x)))


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies RoPE to the first features of each head, depending on the size of `cos`."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    width = cos.shape[-1]
    # Don't use `torch.cat` here. It changes the strides, so fused attention may round differently.
    if width == x.shape[-1]:
        return x * cos + rotate_half(x) * sin
    rotated, rest = x.split([width, x.shape[-1] - width], dim=-1)
    return torch.cat([rotated * cos + rotate_half(rotated) * sin, rest], dim=-1)


Module: Any = nn.Module  # Otherwise type checkers infer `Tensor | Module` for its attributes.


class KHAModule(Module):
    """Base class for attention modules with KHA."""

    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # column-parallel

    def add_knocks(self, config: KHAModelConfig, head_dim: int, value_dim: int) -> None:
        """Create `q_knock`, `k_knock` and `v_knock` (`nn.Identity` where KHA is disabled)."""
        for name, dim in (("query", head_dim), ("key", head_dim), ("value", value_dim)):
            variant = getattr(config, f"kha_{name}")
            knock = KHAKnock(variant, dim, config.kha_init) if variant else nn.Identity()
            setattr(self, f"{name[0]}_knock", knock)

    def tp_plan(self) -> dict[str, str]:
        """Tensor-parallel plan for the submodules. `KHAModel` adds it to the config."""
        present = dict(self.named_children())
        split = [name for name in self.projections if name in present]
        plan = dict.fromkeys(split, "colwise") | {"o_proj": "rowwise"}
        for name, module in self.named_modules():
            if isinstance(module, HeadSharedLinear) or name in ("q_norm", "k_norm"):
                plan[name] = SHARED_BY_HEADS
        return plan


class KHAAttention(KHAModule, Glm4MoeAttention):
    """Multi-headed attention (or MQA or GQA) with KHA applied before QK-norm and RoPE."""

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
        # Apply KHA before updating the cache, so only new tokens are transformed when decoding.
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
    if unknown := set(config.mechanisms) - {"gate"}:
        return f"vLLM does not support kha_{', kha_'.join(sorted(unknown))}. {remedy}"
    if config.hidden_act != "silu":
        return f"hidden_act={config.hidden_act!r} is not supported in vLLM, only silu. {remedy}"
    best = 2 if config.scoring_func == "sigmoid" else 1
    each = config.num_experts_per_tok // config.topk_group
    if by_backend and config.n_group > 1 and each != best:
        return (
            f"vLLM's transformers backend ranks expert groups by their top {best} experts, but "
            f"this model requires the top {each}. Install kha_megatron from source and remove "
            "--model-impl."
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
        self.normalise = config.norm_topk_prob
        self.in_float32 = config.router_dtype == "float32"
        # Qwen3-MoE has no groups.
        self.like_qwen = not self.in_float32 and config.n_group == 1
        self.scaling_factor = config.routed_scaling_factor
        self.groups, self.groups_per_token = config.n_group, config.topk_group
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        if self.score_function == "sigmoid":
            bias = torch.zeros(config.num_experts, dtype=torch.float32)
            self.e_score_correction_bias = nn.Buffer(bias)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the router logits of all experts, and the weights and indices of the top k."""
        logits = self.logits(hidden_states.reshape(-1, hidden_states.shape[-1]))
        weights, experts = self.choose(logits)
        return logits, weights.to(logits.dtype), experts

    def logits(self, hidden_states: Tensor) -> Tensor:
        if not self.in_float32:
            return F.linear(hidden_states, self.weight)
        # Autocast could change which experts are selected.
        with maybe_autocast(device_type=hidden_states.device.type, enabled=False):
            return F.linear(hidden_states.float(), self.weight.float())

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Select the top-k experts for each token. Returns their weights (float32) and indices."""
        if self.score_function == "sigmoid":
            scores = logits.float().sigmoid()
            choice = self._mask_groups(scores + self.e_score_correction_bias)
            # Megatron only sorts during training. Do the same, as the order affects rounding.
            experts = choice.topk(self.top_k, dim=-1, sorted=torch.is_grad_enabled()).indices
            weights = scores.gather(-1, experts)
            if self.normalise:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        else:
            selected_only = self.normalise and not self.like_qwen
            scores = logits if selected_only else logits.softmax(-1, dtype=torch.float32)
            weights, experts = self._mask_groups(scores).topk(self.top_k, dim=-1)
            if selected_only:
                weights = weights.softmax(-1, dtype=torch.float32)
            elif self.normalise:
                weights = weights / weights.sum(-1, keepdim=True)
        return weights * self.scaling_factor, experts

    def _mask_groups(self, scores: Tensor) -> Tensor:
        """Mask experts outside the `topk_group` best groups. A group's score is the sum of its
        best `top_k // topk_group` experts."""
        if self.groups == 1:
            return scores
        grouped = scores.unflatten(-1, (self.groups, -1))
        each = self.top_k // self.groups_per_token
        best = grouped.topk(each, dim=-1).values.sum(-1).topk(self.groups_per_token, dim=-1).indices
        outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
        return grouped.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(-2)


class KHASparseMLP(nn.Module):
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
    def __init__(self, config: KHAModelConfig, layer_idx: int) -> None:
        GradientCheckpointingLayer.__init__(self)  # Skip the parent, which builds other submodules.
        self.hidden_size = config.hidden_size
        self.self_attn = attention_class(config)(config, layer_idx)
        is_sparse = (config.mlp_layer_types or [])[layer_idx] == "sparse"
        self.mlp = KHASparseMLP(config) if is_sparse else Glm4MoeMLP(config)
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
    # The parent class skips the layer indices that are MTP layers in GLM checkpoints.
    _keys_to_ignore_on_load_unexpected = None

    def _check_config(self, config: KHAModelConfig) -> None:
        """Validate the config. Disables SDPA, FlashAttention etc. if the model needs eager."""
        in_vllm = config._attn_implementation == "vllm"
        if in_vllm and (obstacle := vllm_obstacle(config, by_backend=True)):
            raise ValueError(obstacle)
        if not config.is_plain and attention_class(config).check_config(config) == "eager":
            self._supports_sdpa = self._supports_flash_attn = self._supports_flex_attn = False

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # The parent looks for a decorator in this file.

    def _grouped_mm_can_dispatch(self) -> bool:
        # If the user did not ask for grouped_mm, transformers catches this and uses a loop.
        sizes = self.config.hidden_size, self.config.moe_intermediate_size
        if any(size % 8 for size in sizes):
            raise ValueError(
                "grouped_mm requires hidden_size and moe_intermediate_size to be multiples of 8, "
                f"got {sizes[0]} and {sizes[1]}. Please use experts_implementation='eager'."
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
    def __init__(self, config: KHAModelConfig) -> None:
        self._check_config(config)
        super(Glm4MoeModel, self).__init__(config)  # Skip the parent, which builds its own layers.
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
    """The KHA model with a language modeling head on top."""

    def __init__(self, config: KHAModelConfig) -> None:
        self._check_config(config)
        super(Glm4MoeForCausalLM, self).__init__(config)  # Skip the parent, as above.
        self.model = KHAModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


__all__ = ["HeadSharedLinear", "KHAForCausalLM", "KHAModel", "KHAPreTrainedModel"]

# Register the attention classes.
from .attention_kha import KHAHeadsAttention as KHAHeadsAttention  # noqa: E402
