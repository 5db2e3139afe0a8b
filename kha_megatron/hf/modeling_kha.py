"""Knocking-Heads Attention as a transformers model, dense and mixture-of-experts.

The decoder around the attention is GLM-4-MoE's, the one stock architecture that has every switch a
Megatron run can set: QK-norm on or off, q/k/v biases, partial RoPE, sigmoid routing with shared
experts. What differs is the attention (``attention_kha``), Megatron's two routers, and a dense or
sparse MLP chosen layer by layer.

Shape legend: ``B`` batch, ``S`` tokens, ``N`` tokens of the whole batch, ``E`` experts, ``K``
experts per token, ``C`` hidden size.
"""

from functools import partial

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
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.glm4_moe.modeling_glm4_moe import (
    Glm4MoeDecoderLayer,
    Glm4MoeForCausalLM,
    Glm4MoeMLP,
    Glm4MoeModel,
    Glm4MoePreTrainedModel,
    Glm4MoeRMSNorm,
    Glm4MoeRotaryEmbedding,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from transformers.utils import logging
from transformers.utils.generic import maybe_autocast
from transformers.utils.output_capturing import OutputRecorder

from kha_megatron.errors import ConfigError
from kha_megatron.hf.attention_kha import (
    HeadSharedLinear,
    HeadWeight,
    InputLinear,
    KHAAttention,
    KHACollaborativeAttention,
    KHALatentAttention,
    KHATiedAttention,
    attention_class,
    needs_eager,
)
from kha_megatron.hf.configuration_kha import KHAModelConfig
from kha_megatron.hf.serving_limits import unserved
from kha_megatron.ops.heads import initial_weight

logger = logging.get_logger(__name__)

# Experts are 3-D in memory and one tensor per expert and matrix on disk, as in qwen3_moe files.
register_checkpoint_conversion_mapping(
    KHAModelConfig.model_type, get_checkpoint_conversion_mapping("qwen2_moe"), overwrite=True
)


class KHARouter(nn.Module):
    """Megatron-Core's ``topk_routing_with_score_function``, in float32 whatever the model's dtype.

    ``softmax`` with ``norm_topk_prob`` is the softmax over the chosen logits (Megatron's default);
    without, the softmax over all logits is taken first (``moe_router_pre_softmax``). ``sigmoid``
    chooses by score plus correction bias and weighs by the score alone; a bias of zeros equals
    training without one. With ``n_group`` above one, a token's experts come from its ``topk_group``
    best groups (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
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
        """Choose experts for ``[..., C]`` tokens.

        Returns:
            Logits ``[N, E]`` and weights ``[N, K]``, both float32, and expert indices ``[N, K]``.
        """
        logits = self.logits(hidden_states.reshape(-1, hidden_states.shape[-1]))
        return logits, *self.choose(logits)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """``[N, C]`` tokens to ``[N, E]`` in float32."""
        # mixed precision would round the product, and so send tokens to other experts
        with maybe_autocast(device_type=hidden_states.device.type, enabled=False):
            return F.linear(hidden_states.float(), self.weight.float())

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Weights in float32 and expert indices, ``[N, K]`` each, from ``[N, E]`` logits."""
        weights, experts = self._choose(logits)
        return weights * self.scaling_factor, experts

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if self.score_function == "sigmoid":
            scores = logits.sigmoid()
            choice = self._of_best_groups(scores + self.e_score_correction_bias)
            # the order decides how their sum is rounded: Megatron sorts only where it trains, and
            # stock models with sigmoid scores never do
            experts = choice.topk(self.top_k, dim=-1, sorted=torch.is_grad_enabled()).indices
            weights = scores.gather(-1, experts)
            if self.normalise:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
            return weights, experts
        if self.normalise:
            chosen, experts = self._of_best_groups(logits).topk(self.top_k, dim=-1)
            return chosen.softmax(-1), experts
        weights, experts = self._of_best_groups(logits.softmax(-1)).topk(self.top_k, dim=-1)
        return weights, experts

    def _of_best_groups(self, scores: Tensor) -> Tensor:
        """``[N, E]`` scores, minus infinity outside of a token's best groups.

        A group is as good as its best experts together: as many as a token would take from each
        group if it took as many from all.
        """
        if self.groups == 1:
            return scores
        grouped = scores.unflatten(-1, (self.groups, -1))
        each = self.top_k // self.groups_per_token
        best = grouped.topk(each, dim=-1).values.sum(-1).topk(self.groups_per_token, dim=-1).indices
        outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
        return grouped.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(-2)


class KHASparseMLP(nn.Module):
    """Routed experts, and the shared expert if the configuration has one."""

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
        """``[B, S, C]`` to ``[B, S, C]``."""
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
    """Attention and a dense or sparse MLP, each behind its RMSNorm and residual."""

    def __init__(self, config: KHAModelConfig, layer_idx: int) -> None:
        GradientCheckpointingLayer.__init__(self)  # the parent's would build its own sub-modules
        self.hidden_size = config.hidden_size
        self.self_attn = attention_class(config)(config, layer_idx)
        is_sparse = (config.mlp_layer_types or [])[layer_idx] == "sparse"
        self.mlp = KHASparseMLP(config) if is_sparse else Glm4MoeMLP(config)
        self.input_layernorm = Glm4MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Glm4MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class KHAPreTrainedModel(Glm4MoePreTrainedModel):
    """Loading, saving and initialisation shared by the models below."""

    config: KHAModelConfig
    config_class = KHAModelConfig
    _no_split_modules = ["KHADecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": KHADecoderLayer,
        "attentions": [
            KHAAttention,
            KHACollaborativeAttention,
            KHATiedAttention,
            KHALatentAttention,
        ],
        "router_logits": OutputRecorder(KHARouter, index=0),
    }
    # The parent drops the extra layers of its own releases; here that would lose layers in silence.
    _keys_to_ignore_on_load_unexpected = None

    def _sdpa_can_dispatch(self, is_init_check: bool = False) -> bool:
        """Whether torch's fused attention, which transformers prefers, computes this model.

        Raises:
            ValueError: it does not, so that eager attention is taken where none was asked for.
        """
        self._refuse_fused("sdpa")
        return super()._sdpa_can_dispatch(is_init_check)

    def _flex_attn_can_dispatch(self, is_init_check: bool = False) -> bool:
        self._refuse_fused("flex_attention")
        return super()._flex_attn_can_dispatch(is_init_check)

    def _flash_attn_can_dispatch(
        self, flash_attn_version: int, is_init_check: bool = False
    ) -> bool:
        self._refuse_fused(f"flash_attention_{flash_attn_version}")
        return super()._flash_attn_can_dispatch(flash_attn_version, is_init_check)

    def _refuse_fused(self, asked: str) -> None:
        if self.config.kha.talking is not None:
            raise ConfigError(needs_eager(asked))

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """transformers looks for a decorator in this file, which is where the experts come from:
        without this answer they would run as a loop, whatever is asked for."""
        return True

    def _grouped_mm_can_dispatch(self) -> bool:
        """Whether torch's grouped product, which transformers prefers, takes experts of this size.

        Raises:
            ValueError: its rows must fill multiples of 16 bytes; the loop is taken then.
        """
        sizes = self.config.hidden_size, self.config.moe_intermediate_size
        if any(size % 8 for size in sizes):
            raise ValueError(
                f"experts_implementation='grouped_mm' needs hidden_size and moe_intermediate_size "
                f"to be multiples of 8, not {sizes[0]} and {sizes[1]}: choose 'eager'"
            )
        return super()._grouped_mm_can_dispatch()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, HeadSharedLinear | HeadWeight | InputLinear):
            fill = {"zeros": init.zeros_, "ones": init.ones_}
            if module.start == "blocks":
                blocks = initial_weight(torch.empty_like(module.weight)[None], ("blocks",))
                init.copy_(module.weight, blocks[0])
                return
            if module.start == "identity":  # torch's own `eye_` knows no meta device, on which
                init.copy_(module.weight, torch.eye(len(module.weight)))  # vLLM builds
                return
            fill.get(module.start, partial(init.normal_, mean=0.0, std=std))(module.weight)
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
        if config._attn_implementation == "vllm" and (why := unserved(config, by_backend=True)):
            raise ConfigError(why)
        super(Glm4MoeModel, self).__init__(config)  # past its own, which builds layers
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(
            KHADecoderLayer(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = Glm4MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Glm4MoeRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    def train(self, mode: bool = True) -> "KHAModel":
        """As of any module; says once which of Megatron's losses transformers does not train on."""
        unbalanced = [m for m in self.config.kha.others if m.adds_loss]
        if mode and unbalanced:
            logger.warning_once(
                f"{unbalanced[0]} is trained on a loss of its own by Megatron and without it here: "
                "the load of its heads may drift apart"
            )
        return super().train(mode)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs,
    ) -> MoeModelOutputWithPast:
        """``[B, S]`` token ids, or ``[B, S, C]`` embeddings, to ``[B, S, C]``.

        With grouped-tied attention and QK-norm, cached keys are rotated when they are used, as if
        the tokens before these had the positions just before: so it is with padding on the left,
        and not with several sequences packed into one row of a cache.
        """
        tied = self.config.kha_attention == "gta" and self.config.use_qk_norm
        if tied and past_key_values is not None:
            new = input_ids if inputs_embeds is None else inputs_embeds
            assert new is not None
            kwargs["key_position_embeddings"] = self._of_cached(new, position_ids, past_key_values)
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )

    def _of_cached(
        self, new: Tensor, position_ids: Tensor | None, cache: Cache
    ) -> tuple[Tensor, Tensor]:
        """Cosine and sine for all that the cache holds once the ``new`` tokens are in it."""
        length = new.shape[1]
        held, _ = cache.get_mask_sizes(length, 0)
        positions = torch.arange(held, device=new.device)[None]
        if position_ids is not None:
            last = cache.get_seq_length() + length - 1
            positions = positions + position_ids[:, -1:] - last
        return self.rotary_emb(new.new_empty(0, dtype=self.dtype), positions)


class KHAForCausalLM(KHAPreTrainedModel, Glm4MoeForCausalLM):
    """The decoder with its output layer, for training and generation."""

    def __init__(self, config: KHAModelConfig) -> None:
        super(Glm4MoeForCausalLM, self).__init__(config)  # likewise
        self.model = KHAModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


__all__ = ["HeadSharedLinear", "KHAForCausalLM", "KHAModel", "KHAPreTrainedModel"]
