"""GPU memory estimates.

Bytes per parameter:

==========  ======  ========  ==========================
precision   weight  gradient  Adam (sharded with ZeRO-1)
==========  ======  ========  ==========================
fp32        4       4         8
bf16, fp16  2       4 or 2    12
fp8         2 + 2   4 or 2    12
==========  ======  ========  ==========================

Gradients take 2 bytes with ``--fp16`` (unless they are accumulated in float32) and with
``--grad-reduce-in-bf16``.

For activations, we extend section 4 of https://arxiv.org/abs/2205.05198 to GQA, gated MLPs and MoE.
This assumes Transformer Engine with flash attention, no dropout, and balanced experts. Temporary
buffers, fragmentation and the CUDA context are not included, so leave some headroom. Activations
other than those of KHA have not been compared with real models yet.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, repeat
from typing import NamedTuple

from kha_megatron.model.layout import Layout
from kha_megatron.plan.rank import Precision, Rank

_FP8_COPIES_SIZE = 2
"""Bytes per weight of a linear layer, in addition to the weight itself."""
_FP8_SIZE = 1
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
    counts = rank.counts
    base = _estimate_part(
        rank,
        dense=counts.dense - counts.kha,
        experts=counts.experts,
        with_fp8_copies=counts.linear,
        activations=_estimate_base_activations(rank),
    )
    kha = _estimate_part(
        rank,
        dense=counts.kha,
        experts=0,
        with_fp8_copies=counts.kha_rows,
        activations=_estimate_kha_in_flight(rank),
    )
    return RankMemory(base, kha)


def _estimate_part(
    rank: Rank,
    *,
    dense: int,
    experts: int,
    with_fp8_copies: int,
    activations: float,
) -> Memory:
    """Estimate the memory of a part of the model.

    Args:
        dense: Number of parameters outside experts.
        experts: Number of parameters of experts.
        with_fp8_copies: How many of these parameters have copies in FP8, if training uses FP8.
        activations: Bytes of activations.
    """
    setup = rank.setup
    layout = rank.layout
    parameters = dense + experts
    weights = setup.element_size * parameters
    if setup.precision == "fp8":
        weights += _FP8_COPIES_SIZE * with_fp8_copies
    # number of ranks that share the optimizer state of a parameter
    dense_ranks = 1
    expert_ranks = 1
    if setup.distributed_optimizer:
        dense_ranks = layout.dp * layout.cp
        expert_ranks = layout.expert_dp
    local_states = dense / dense_ranks + experts / expert_ranks
    return Memory(
        weights=weights,
        gradients=setup.gradient_size * parameters,
        optimizer=_optimizer_size(setup.precision) * local_states,
        activations=activations,
    )


def _optimizer_size(precision: Precision) -> int:
    """Return the bytes per parameter of Adam's two moments and of the float32 main weights."""
    moments_size = 2 * _FP32_SIZE
    if precision == "fp32":  # the weights themselves are the main weights
        return moments_size
    return moments_size + _FP32_SIZE


def count_in_flight(layout: Layout, microbatches: int, stage: int) -> int:
    """Count the forward passes of (virtual) stages whose backward pass has not started yet.

    This is the maximum on a pipeline rank. Megatron runs this many minus one as warmup, see
    ``get_pp_rank_microbatches``.
    """
    later_stages = layout.pp - stage - 1
    if not layout.vpp:
        warm_up = later_stages
        return min(microbatches, warm_up + 1)
    later_virtual_stages = layout.vpp - 1
    warm_up = 2 * later_stages + later_virtual_stages * _microbatch_group(layout)
    forward_passes = microbatches * layout.vpp
    return min(forward_passes, warm_up + 1)


def _microbatch_group(layout: Layout) -> int:
    """Return how many microbatches a virtual stage processes before the next one runs."""
    return layout.microbatch_group or layout.pp


def order_forward_passes(layout: Layout, microbatches: int) -> Iterator[int]:
    """Yield the virtual stage of each forward pass on a rank, see ``get_schedule_table``."""
    group = _microbatch_group(layout)
    for first_microbatch in range(0, microbatches, group):
        remaining_microbatches = microbatches - first_microbatch
        for virtual_stage in range(layout.vpp or 1):
            yield from repeat(virtual_stage, min(group, remaining_microbatches))


def _list_layers_in_flight(rank: Rank) -> list[int]:
    """Return the layers of all forward passes in flight.

    A layer occurs once for each microbatch whose activations are in memory. For example, the first
    of two ranks with the virtual stages ``[[0], [2]]`` has up to five forward passes in flight: two
    in layer 0, two in layer 2, and again one in layer 0.
    """
    microbatches = rank.microbatches
    in_flight = count_in_flight(rank.layout, microbatches, rank.stage)
    forward_passes = order_forward_passes(rank.layout, microbatches)
    layers = []
    for virtual_stage in islice(forward_passes, in_flight):
        layers += rank.virtual_stages[virtual_stage]
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
        # Only the inputs of attention and MLP are saved, which are different layers in HybridModel.
        # One layer at a time is recomputed.
        input_bytes = rank.sharded_tokens * rank.token_bytes
        saved_inputs = 2 * len(in_flight) * input_bytes
        recomputed_layer = max(layer_bytes.values())
        return saved_inputs + recomputed_layer + output_bytes
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
    if recompute == "full":  # nothing is saved, and one layer at a time is recomputed
        return layer_bytes
    in_flight = len(_list_layers_in_flight(rank))
    if recompute == "selective":  # core attention is recomputed in one layer at a time
        core_bytes = _estimate_kha_core_activations(rank)
        saved_bytes = layer_bytes - core_bytes
        return in_flight * saved_bytes + core_bytes
    return in_flight * layer_bytes


def _estimate_output_activations(rank: Rank) -> float:
    """Bytes that the final norm and the loss save."""
    if not rank.is_last:
        return 0.0
    tp = rank.layout.tp
    norm_bytes = 2 * rank.sharded_tokens * rank.token_bytes  # input and output
    vocab_size = rank.model.padded_vocab(tp)
    local_vocab_size = vocab_size / tp
    logits = rank.tokens * local_vocab_size
    logits_bytes = logits * rank.element_size
    softmax_bytes = logits * _FP32_SIZE
    return norm_bytes + logits_bytes + softmax_bytes


def estimate_kha_activations(rank: Rank) -> float:
    """Bytes that KHA saves for the backward pass (per layer and microbatch)."""
    costs = rank.model.kha.costs(rank.heads)
    elements = rank.tokens * costs.activations
    elements += rank.sharded_tokens * costs.sharded_activations
    saved_bytes = elements * rank.element_size
    core_bytes = _estimate_kha_core_activations(rank)
    return saved_bytes + core_bytes


def _estimate_kha_core_activations(rank: Rank) -> float:
    """Part of :func:`estimate_kha_activations` that core attention saves."""
    costs = rank.model.kha.costs(rank.heads)
    batch = rank.setup.batch
    pairs = rank.tokens * batch.seq_length
    elements = pairs * costs.pair_activations
    return elements * rank.element_size


def _estimate_layer_activations(rank: Rank, layer: int) -> float:
    """Bytes that a layer without KHA saves for the backward pass."""
    attention = _estimate_attention_activations(rank)
    if rank.model.is_moe(layer):
        mlp = _estimate_moe_activations(rank)
    else:
        mlp = _estimate_mlp_activations(rank)
    return attention + mlp


def _estimate_attention_activations(rank: Rank) -> float:
    """Bytes that the norm, the projections and core attention of a layer save, without KHA."""
    model = rank.model
    query_heads = rank.heads.query_heads
    if model.multi_latent_attention:
        features = _count_latent_features(rank)
        output_dim = model.v_head_dim
    else:
        features = _count_head_features(rank)
        output_dim = model.head_dim
    output_features = query_heads * output_dim
    bytes_per_token = features * rank.element_size
    if rank.setup.precision == "fp8":
        bytes_per_token += output_features * _FP8_SIZE  # input of the output projection
    if rank.setup.recompute != "selective":
        bytes_per_token += query_heads * _FP32_SIZE  # log-sum-exp of flash attention
    input_bytes = _estimate_input_activations(rank)
    return input_bytes + rank.tokens * bytes_per_token


def _estimate_input_activations(rank: Rank) -> float:
    """Bytes of the inputs that are saved by a norm and by the linear layer that follows."""
    norm_input_bytes = rank.token_bytes
    linear_input_bytes = rank.model.hidden_size * rank.linear_input_size
    return rank.sharded_tokens * (norm_input_bytes + linear_input_bytes)


def _count_head_features(rank: Rank) -> int:
    """Elements per token that MHA, MQA, GQA and GTA save between their projections."""
    model = rank.model
    queries = rank.heads.query_heads * model.head_dim
    keys = rank.heads.kv_heads * model.head_dim
    values = keys
    output = queries
    features = queries + keys + values + output
    if model.qk_layernorm:  # inputs of the norms
        features += queries + keys
    return features


def _count_latent_features(rank: Rank) -> int:
    """Elements per token that MLA and GLA save between the down-projections and the output.

    The latents are saved by their norms and by the up-projections. Keys and values of all heads are
    saved by core attention.
    """
    model = rank.model
    latents = model.query_rank + model.kv_lora_rank
    query_features = model.qk_head_dim + model.qk_pos_emb_head_dim
    head_features = 2 * query_features  # query and key
    head_features += 2 * model.v_head_dim  # value and output
    features = 2 * latents
    features += rank.heads.query_heads * head_features
    return features


def _count_mlp_bytes(rank: Rank, width: float) -> float:
    """Bytes per token that an MLP of this width saves, except for its input."""
    activation_inputs = 2 if rank.model.swiglu else 1  # SwiGLU also has a gate
    bytes_per_feature = activation_inputs * rank.element_size
    bytes_per_feature += rank.linear_input_size  # input of the second linear layer
    return width * bytes_per_feature


def _estimate_mlp_activations(rank: Rank) -> float:
    local_width = rank.model.dense_width / rank.layout.tp
    mlp_bytes = _count_mlp_bytes(rank, local_width)
    input_bytes = _estimate_input_activations(rank)
    return input_bytes + rank.tokens * mlp_bytes


def _estimate_moe_activations(rank: Rank) -> float:
    """Bytes that the norm, the router, the routed experts and the shared experts save."""
    local_shared_width = rank.model.shared_width / rank.layout.tp
    router_bytes = _count_router_bytes(rank)
    expert_bytes = _count_expert_bytes(rank)
    shared_bytes = _count_mlp_bytes(rank, local_shared_width)

    routed_tokens = rank.sharded_tokens * rank.model.moe_router_topk
    routed_tokens *= rank.layout.expert_tp  # all ranks that share an expert get its tokens
    saved = rank.sharded_tokens * router_bytes
    saved += routed_tokens * expert_bytes
    saved += rank.tokens * shared_bytes
    return saved


def _count_router_bytes(rank: Rank) -> int:
    """Bytes per token that the norm and the router save."""
    experts = rank.model.experts
    inputs = 2 * rank.token_bytes  # of the norm and of the router
    scores = experts * _FP32_SIZE
    probabilities = experts * _FP32_SIZE
    routing_map = experts  # booleans
    return inputs + scores + probabilities + routing_map


def _count_expert_bytes(rank: Rank) -> float:
    """Bytes that a routed expert saves for each of its tokens."""
    local_width = rank.model.expert_width / rank.layout.expert_tp
    input_bytes = rank.model.hidden_size * rank.linear_input_size
    return input_bytes + _count_mlp_bytes(rank, local_width)
