"""Inference-only KHA model compatible with HuggingFace weights.

Everything except KHA, gates and the router (see `kha_megatron.hf`) is built from vLLM layers.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.distributed.parallel_state import (
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.glm4_moe import Glm4MoeAttention
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeDecoderLayer, Qwen3MoeMLP, Qwen3MoeModel
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    PPMissingLayer,
    WeightsMapper,
    extract_layer_index,
    maybe_prefix,
)

from kha_megatron.heads.knock import MATRICES, module_name
from kha_megatron.hf.attention_kha import KHAHeads
from kha_megatron.hf.modeling_kha import KHARouter, apply_knock


def rms_norm(config: Any, features: int) -> nn.Module:
    norm = GemmaRMSNorm if config.zero_centered_norms else RMSNorm  # Gemma: 1 + weight
    return norm(features, eps=config.rms_norm_eps)


class KHAAttention(KHAHeads, Glm4MoeAttention):
    """Attention with KHA and optional gates.

    KHA is applied before writing to the KV cache. Its matrices are replicated on all TP ranks.
    Note that they support neither quantization nor LoRA. Folded models have none, except for
    `down_proj` if there is an output gate.
    """

    value_projection = "qkv_proj"

    def __init__(
        self,
        config: Any,
        cache_config: Any,
        quant_config: Any,
        prefix: str,
    ) -> None:
        # Glm4MoeAttention defaults to 0.5.
        config.rope_parameters.setdefault("partial_rotary_factor", 1.0)
        super().__init__(
            config,
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            max_position_embeddings=config.max_position_embeddings,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            qkv_bias=config.attention_bias,
            use_qk_norm=config.use_qk_norm,
            cache_config=cache_config,
            quant_config=quant_config,
            prefix=prefix,
        )
        if self.use_qk_norm:
            self.q_norm = rms_norm(config, self.head_dim)
            self.k_norm = rms_norm(config, self.head_dim)
        self.layer_idx = extract_layer_index(prefix)
        self.quant_config = quant_config
        self.prefix = prefix
        self.add_heads(config, ranks=get_tensor_model_parallel_world_size())
        for parameter in self.parameters():
            if not hasattr(parameter, "weight_loader"):
                parameter.weight_loader = load_head_shard

    def widen_value_projection(self, config: Any) -> None:
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            self.head_dim,
            self.total_num_heads,
            self.total_num_kv_heads,
            bias=config.attention_bias,
            quant_config=self.quant_config,
            prefix=f"{self.prefix}.qkv_proj",
            v_head_size=self.value_features,
        )

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        input_projections = self.read_input(hidden_states)
        qkv, _ = self.qkv_proj(hidden_states)
        value_size = self.num_kv_heads * self.value_features
        sizes = [self.q_size, self.kv_size, value_size]
        query, key, value = qkv.split(sizes, dim=-1)
        query = query.unflatten(-1, (-1, self.head_dim))
        key = key.unflatten(-1, (-1, self.head_dim))
        value = value.unflatten(-1, (-1, self.value_features))
        query, key, value = self.apply_heads(
            "qkv",
            input_projections,
            query=apply_knock(self.q_knock, query),
            key=apply_knock(self.k_knock, key),
            value=apply_knock(self.v_knock, value),
        )
        if self.use_qk_norm:
            query = self.q_norm(query.contiguous())
            key = self.k_norm(key.contiguous())
        query, key = self.rotary_emb(positions, query.flatten(-2), key.flatten(-2))
        heads = self.attn(query, key, value.flatten(-2))
        heads = heads.unflatten(-1, (-1, self.head_dim))
        (heads,) = self.apply_heads("output", input_projections, output=heads)
        output, _ = self.o_proj(heads.flatten(-2))
        (output,) = self.apply_heads("dense", input_projections, dense=output)
        return output


def load_head_shard(parameter: nn.Parameter, weight: Tensor) -> None:
    """Weight loader for per-head parameters. KV heads are replicated if there are more TP ranks."""
    ranks = get_tensor_model_parallel_world_size()
    shard_size = len(parameter)
    shards = len(weight) // shard_size  # can be less than ranks, which then share them
    if len(weight) % shard_size or not 1 <= shards <= ranks:
        raise ValueError(
            f"Cannot shard a weight of shape {tuple(weight.shape)} into {tuple(parameter.shape)} "
            f"on {ranks} ranks. Please check that config.json belongs to this model."
        )
    shard_index = get_tensor_model_parallel_rank() * shards // ranks
    start = shard_index * shard_size
    parameter.data.copy_(weight[start : start + shard_size])


class KHASparseMLP(nn.Module):
    def __init__(self, config: Any, quant_config: Any, prefix: str) -> None:
        super().__init__()
        self.gate = KHARouter(config)
        self.shared_expert_gate = None
        self.shared_experts = None
        if config.shared_expert_gate:
            self.shared_expert_gate = ReplicatedLinear(
                config.hidden_size,
                1,
                bias=False,
                prefix=f"{prefix}.shared_expert_gate",
            )
        if config.shared_expert_intermediate_size:
            self.shared_experts = Qwen3MoeMLP(
                config.hidden_size,
                config.shared_expert_intermediate_size,
                config.hidden_act,
                quant_config,
                reduce_results=False,  # all-reduced together with the routed experts
                expert_gate=self.shared_expert_gate,
                prefix=f"{prefix}.shared_experts",
            )
        self.experts = FusedMoEFactory(
            shared_experts=self.shared_experts,
            num_experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            hidden_size=config.hidden_size,
            intermediate_size=config.moe_intermediate_size,
            renormalize=config.norm_topk_prob,
            quant_config=quant_config,
            prefix=f"{prefix}.experts",
            custom_routing_function=self._choose,
            router_logits_dtype=torch.float32,
        )

    def _choose(
        self,
        hidden_states: Tensor,
        gating_output: Tensor,
        topk: int,
        renormalize: bool,
    ) -> tuple[Tensor, Tensor]:
        weights, experts = self.gate.choose(gating_output)
        return weights, experts.to(torch.int32)

    def forward(self, hidden_states: Tensor) -> Tensor:
        logits = self.gate.logits(hidden_states)
        return self.experts(hidden_states=hidden_states, router_logits=logits.float())


class KHADecoderLayer(Qwen3MoeDecoderLayer):
    def __init__(self, vllm_config: Any, prefix: str = "") -> None:
        nn.Module.__init__(self)  # Skip the parent, which builds other submodules.
        config = vllm_config.model_config.hf_config
        quant_config = vllm_config.quant_config
        self.hidden_size = config.hidden_size
        self.self_attn = KHAAttention(
            config,
            cache_config=vllm_config.cache_config,
            quant_config=quant_config,
            prefix=f"{prefix}.self_attn",
        )
        if config.mlp_layer_types[extract_layer_index(prefix)] == "sparse":
            self.mlp = KHASparseMLP(config, quant_config, f"{prefix}.mlp")
        else:
            self.mlp = Qwen3MoeMLP(
                config.hidden_size,
                config.intermediate_size,
                config.hidden_act,
                quant_config,
                prefix=f"{prefix}.mlp",
            )
        self.input_layernorm = rms_norm(config, config.hidden_size)
        self.post_attention_layernorm = rms_norm(config, config.hidden_size)


_KNOCK_ADAPTERS = {
    f"_knock.{module_name(matrix)}.lora_": f"_knock.{matrix}.lora_" for matrix in MATRICES["mlp"]
}
"""Renames LoRA weights of KHA matrices, e.g. from ``_knock.up_proj.lora_`` to ``_knock.up.lora_``.
vLLM would silently ignore some of them under their old names."""


@support_torch_compile
class KHAModel(Qwen3MoeModel):
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_substr=_KNOCK_ADAPTERS,
        # Match on `.mlp.` and `.shared_experts.`, because KHA also has a `gate_proj`.
        orig_to_new_stacked={
            ".q_proj": (".qkv_proj", "q"),
            ".k_proj": (".qkv_proj", "k"),
            ".v_proj": (".qkv_proj", "v"),
            ".mlp.gate_proj": (".mlp.gate_up_proj", 0),
            ".mlp.up_proj": (".mlp.gate_up_proj", 1),
            ".shared_experts.gate_proj": (".shared_experts.gate_up_proj", 0),
            ".shared_experts.up_proj": (".shared_experts.gate_up_proj", 1),
        },
    )

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(
            vllm_config=vllm_config,
            prefix=prefix,
            decoder_layer_type=KHADecoderLayer,
        )
        if get_pp_group().is_last_rank:
            config = vllm_config.model_config.hf_config
            self.norm = rms_norm(config, config.hidden_size)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        # The parent class skips biases, but we need them.
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)


class KHAForCausalLM(Qwen3ForCausalLM):
    hf_to_vllm_mapper = KHAModel.hf_to_vllm_mapper

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        nn.Module.__init__(self)  # Skip the parent, which builds another model.
        config = vllm_config.model_config.hf_config
        quant_config = vllm_config.quant_config
        self.config = config
        self.vllm_config = vllm_config
        self.quant_config = quant_config
        self.model = KHAModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = PPMissingLayer()
        if get_pp_group().is_last_rank:
            self.lm_head = ParallelLMHead(
                config.vocab_size,
                config.hidden_size,
                quant_config=quant_config,
                prefix=maybe_prefix(prefix, "lm_head"),
            )
            if config.tie_word_embeddings:
                self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors
