"""GPU memory estimates.

Bytes per parameter:

==========  ======  ========  ==========================
precision   weight  gradient  Adam (sharded with ZeRO-1)
==========  ======  ========  ==========================
fp32        4       4         8
bf16, fp16  2       4         12
fp8         2 + 2   4         12
==========  ======  ========  ==========================

For activations, we extend section 4 of https://arxiv.org/abs/2205.05198 to GQA, gated MLPs and MoE.
This assumes Transformer Engine with flash attention, no dropout, and balanced experts. Temporary
buffers, fragmentation and the CUDA context are not included, so leave some headroom. Activations
other than those of KHA have not been compared with real models yet.
"""

from dataclasses import dataclass
from typing import NamedTuple

from kha_megatron.plan.rank import Precision, Rank

_GRADIENT_SIZE = 4
"""Bytes per gradient: Megatron accumulates gradients in float32 (see the table above)."""
_FP32_SIZE = 4


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory usage of a rank in bytes."""

    weights: float = 0
    gradients: float = 0
    optimizer: float = 0
    activations: float = 0

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations


class RankMemory(NamedTuple):
    """Memory usage of the base model and the overhead of KHA."""

    base: Memory
    kha: Memory

    @property
    def total(self) -> float:
        return self.base.total + self.kha.total


def estimate_memory(rank: Rank) -> RankMemory:
    """Estimate the peak memory of a rank."""
    setup = rank.setup
    layout = rank.layout
    counts = rank.counts
    optimizer_size = _optimizer_size(setup.precision)
    fp8_copy_size = 2 if setup.precision == "fp8" else 0
    # number of ranks that share the optimizer state of a parameter
    state_ranks = 1
    expert_state_ranks = 1
    if setup.distributed_optimizer:
        state_ranks = layout.dp * layout.cp
        expert_state_ranks = layout.expert_dp

    dense = counts.dense - counts.kha
    parameters = dense + counts.experts
    local_states = dense / state_ranks + counts.experts / expert_state_ranks
    weights = setup.element_size * parameters
    fp8_copies = fp8_copy_size * counts.linear
    base = Memory(
        weights=weights + fp8_copies,
        gradients=_GRADIENT_SIZE * parameters,
        optimizer=optimizer_size * local_states,
        activations=_estimate_base_activations(rank),
    )

    kha_weights = setup.element_size * counts.kha
    kha_fp8_copies = fp8_copy_size * counts.kha_rows
    kha = Memory(
        weights=kha_weights + kha_fp8_copies,
        gradients=_GRADIENT_SIZE * counts.kha,
        optimizer=optimizer_size * counts.kha / state_ranks,
        activations=_estimate_kha_in_flight(rank),
    )
    return RankMemory(base, kha)


def _optimizer_size(precision: Precision) -> int:
    """Return the bytes per parameter of Adam's two moments and of the float32 main weights."""
    moments = 2 * _FP32_SIZE
    main_weight = 0 if precision == "fp32" else _FP32_SIZE
    return moments + main_weight


def count_in_flight(
    pp: int,
    vpp: int | None,
    microbatches: int,
    stage: int,
) -> int:
    """Count the forward passes of (virtual) stages whose backward pass has not started yet.

    This is the maximum on a pipeline rank. Megatron runs this many minus one as warmup, see
    ``get_pp_rank_microbatches``.
    """
    later_stages = pp - stage - 1
    if not vpp:
        warm_up = later_stages
        return min(microbatches, warm_up + 1)
    warm_up = 2 * later_stages + (vpp - 1) * pp
    forward_passes = microbatches * vpp
    return min(forward_passes, warm_up + 1)


def _list_layers_in_flight(rank: Rank) -> list[int]:
    """Return the index of a layer once for each microbatch whose activations it holds."""
    pp = rank.layout.pp
    in_flight = count_in_flight(pp, rank.layout.vpp, rank.microbatches, rank.stage)
    layers = []
    for forward_pass in range(in_flight):
        # interleaved schedule: a virtual stage processes pp microbatches before the next one runs
        microbatch_group = forward_pass // pp
        virtual_stage = microbatch_group % len(rank.chunks)
        layers += rank.chunks[virtual_stage]
    return layers


def _estimate_base_activations(rank: Rank) -> float:
    """Bytes of all activations in flight, excluding KHA."""
    output_bytes = _estimate_output_activations(rank)
    if not rank.layers:
        return output_bytes
    layer_bytes = {}
    for layer in rank.layers:
        layer_bytes[layer] = _estimate_layer_activations(rank, layer)
    in_flight = _list_layers_in_flight(rank)
    if rank.setup.recompute == "full":
        # the inputs of all layers, and everything for the one that is recomputed
        input_bytes = rank.sharded_tokens * rank.token_bytes
        saved = len(in_flight) * input_bytes
        saved += max(layer_bytes.values())
        return saved + output_bytes
    saved = 0.0
    for layer in in_flight:
        saved += layer_bytes[layer]
    return saved + output_bytes


def _estimate_kha_in_flight(rank: Rank) -> float:
    """Bytes of all activations of KHA in flight."""
    if not rank.layers:
        return 0.0
    layer_bytes = estimate_kha_activations(rank)
    recompute = rank.setup.recompute
    if recompute == "full":  # one layer at a time
        return layer_bytes
    in_flight = len(_list_layers_in_flight(rank))
    saved = in_flight * layer_bytes
    if recompute == "selective":
        # core attention is recomputed in one layer at a time
        recomputed_layers = max(0, in_flight - 1)
        core_bytes = _estimate_kha_core_activations(rank)
        saved -= recomputed_layers * core_bytes
    return saved


def _estimate_output_activations(rank: Rank) -> float:
    """Bytes that the final norm and the loss save."""
    if not rank.is_last:
        return 0.0
    tp = rank.layout.tp
    local_vocab_size = rank.model.padded_vocab(tp) / tp
    norm_bytes = 2 * rank.sharded_tokens * rank.token_bytes  # input and output
    logits = rank.tokens * local_vocab_size
    softmax_size = _FP32_SIZE
    loss_bytes = logits * (rank.element_size + softmax_size)
    return norm_bytes + loss_bytes


def estimate_kha_activations(rank: Rank) -> float:
    """Bytes that KHA saves for the backward pass (per layer and microbatch)."""
    costs = rank.model.kha.costs(rank.heads)
    elements = rank.tokens * costs.activations
    elements += rank.sharded_tokens * costs.sharded_activations
    saved = elements * rank.element_size
    return saved + _estimate_kha_core_activations(rank)


def _estimate_kha_core_activations(rank: Rank) -> float:
    """Part of :func:`estimate_kha_activations` that core attention saves."""
    costs = rank.model.kha.costs(rank.heads)
    pairs = rank.tokens * rank.setup.batch.seq_length
    elements = pairs * costs.pair_activations
    return elements * rank.element_size


def _estimate_layer_activations(rank: Rank, layer: int) -> float:
    """Bytes that a layer without KHA saves for the backward pass."""
    attention = _estimate_attention_activations(rank)
    if rank.model.is_moe(layer):
        return attention + _estimate_moe_activations(rank)
    return attention + _estimate_mlp_activations(rank)


def _estimate_attention_activations(rank: Rank) -> float:
    model = rank.model
    query_heads = rank.heads.query_heads
    if model.multi_latent_attention:
        features = _count_latent_features(rank)
        output_features = query_heads * model.v_head_dim
    else:
        features = _count_head_features(rank)
        output_features = query_heads * model.head_dim
    token_bytes = features * rank.element_size
    if rank.setup.precision == "fp8":
        token_bytes += output_features  # input of the output projection
    if rank.setup.recompute != "selective":
        token_bytes += query_heads * _FP32_SIZE  # log-sum-exp of flash attention
    return _estimate_input_activations(rank) + rank.tokens * token_bytes


def _estimate_input_activations(rank: Rank) -> float:
    """Bytes of the inputs that are saved by a norm and by the linear layer that follows."""
    bytes_per_feature = rank.element_size + rank.input_size
    token_bytes = rank.model.hidden_size * bytes_per_feature
    return rank.sharded_tokens * token_bytes


def _count_head_features(rank: Rank) -> int:
    """Elements per token that MHA, MQA, GQA and GTA save between their projections."""
    model = rank.model
    queries = rank.heads.query_heads * model.head_dim
    keys = rank.heads.kv_heads * model.head_dim
    features = 2 * queries + 2 * keys  # inputs and output of core attention
    if model.qk_layernorm:
        features += queries + keys
    return features


def _count_latent_features(rank: Rank) -> int:
    """Elements per token that MLA and GLA save between the down-projections and the output.

    The latents are saved by their norms and by the up-projections. Keys and values of all heads are
    saved by core attention.
    """
    model = rank.model
    latents = 2 * (model.query_rank + model.kv_lora_rank)
    query_features = model.qk_head_dim + model.qk_pos_emb_head_dim
    head_features = 2 * query_features  # query and key
    head_features += 2 * model.v_head_dim  # value and output
    return latents + rank.heads.query_heads * head_features


def _count_mlp_bytes(rank: Rank, width: float) -> float:
    """Bytes per token that an MLP of this width saves, except for its input."""
    # inputs of the activation function (SwiGLU also has a gate), and of the second linear layer
    activation_inputs = 2 if rank.model.swiglu else 1
    bytes_per_feature = activation_inputs * rank.element_size + rank.input_size
    return width * bytes_per_feature


def _estimate_mlp_activations(rank: Rank) -> float:
    local_width = rank.model.dense_width / rank.layout.tp
    mlp_bytes = _count_mlp_bytes(rank, local_width)
    return _estimate_input_activations(rank) + rank.tokens * mlp_bytes


def _estimate_moe_activations(rank: Rank) -> float:
    model = rank.model
    layout = rank.layout
    norm_bytes = 2 * model.hidden_size * rank.element_size  # inputs of norm and router
    score_size = 2 * _FP32_SIZE  # scores and probabilities
    routing_map_size = 1  # booleans
    router_bytes = model.experts * (score_size + routing_map_size)
    expert_width = model.expert_width / layout.expert_tp
    shared_width = model.shared_width / layout.tp
    input_bytes = model.hidden_size * rank.input_size
    expert_bytes = input_bytes + _count_mlp_bytes(rank, expert_width)
    shared_bytes = _count_mlp_bytes(rank, shared_width)
    # a token is sent once to each of its experts, and to all ranks that share such an expert
    routed_tokens = rank.sharded_tokens * model.moe_router_topk * layout.expert_tp
    saved = rank.sharded_tokens * (norm_bytes + router_bytes)
    saved += routed_tokens * expert_bytes
    saved += rank.tokens * shared_bytes
    return saved
