"""GPU memory estimates.

Bytes per parameter:

=========  ======  ========  ==========================
precision  weight  gradient  Adam (sharded with ZeRO-1)
=========  ======  ========  ==========================
fp32       4       4         8
bf16       2       4         12
fp8        2 + 2   4         12
=========  ======  ========  ==========================

For activations, we extend section 4 of https://arxiv.org/abs/2205.05198 to GQA, gated MLPs and MoE.
This assumes Transformer Engine with flash attention, no dropout, and balanced experts. Temporary
buffers, fragmentation and the CUDA context are not included, so leave some headroom. Activations
other than those of KHA have not been compared with real models yet.
"""

from dataclasses import dataclass

from kha_megatron.plan.rank import Rank


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


def estimate_memory(rank: Rank) -> tuple[Memory, Memory]:
    """Estimate peak memory. Returns the memory of the base model and the overhead of KHA."""
    setup, layout, counts = rank.setup, rank.layout, rank.counts
    activations, kha_activations = _estimate_activations(rank)
    states = 8 if setup.precision == "fp32" else 12
    copies = 2 if setup.precision == "fp8" else 0
    is_sharded = setup.distributed_optimizer
    replicas = layout.dp * layout.cp if is_sharded else 1
    expert_replicas = layout.expert_dp if is_sharded else 1
    dense = counts.dense - counts.kha
    return Memory(
        weights=setup.element_size * (dense + counts.experts) + copies * counts.linear,
        gradients=4 * (dense + counts.experts),
        optimizer=states * (dense / replicas + counts.experts / expert_replicas),
        activations=activations,
    ), Memory(
        weights=setup.element_size * counts.kha + copies * counts.kha_rows,
        gradients=4 * counts.kha,
        optimizer=states * counts.kha / replicas,
        activations=kha_activations,
    )


def count_in_flight(pp: int, vpp: int | None, microbatches: int, stage: int) -> int:
    """Maximum number of microbatches in flight.

    Megatron runs this many minus one as warmup, see ``get_pp_rank_microbatches``.
    """
    warm_up = pp - stage - 1
    if vpp:
        warm_up = 2 * warm_up + (vpp - 1) * pp
    return min(microbatches * (vpp or 1), warm_up + 1)


def _estimate_activations(rank: Rank) -> tuple[float, float]:
    """Same as :func:`estimate_memory`, but only for activations."""
    setup, model, layout, chunks = rank.setup, rank.model, rank.layout, rank.chunks
    per_layer = {
        moe: _estimate_layer_activations(rank, moe) for moe in set(map(model.is_moe, rank.layers))
    }
    kha_per_layer = estimate_kha_activations(rank)
    total = kha_total = 0.0
    for number in range(count_in_flight(layout.pp, layout.vpp, rank.microbatches, rank.stage)):
        # interleaved schedule: a virtual stage processes pp microbatches before the next one runs
        for layer in chunks[number // layout.pp % len(chunks)] if layout.vpp else chunks[0]:
            if setup.recompute == "full":
                total += rank.sharded_tokens * rank.token_bytes
            else:
                total += per_layer[model.is_moe(layer)]
                kha_total += kha_per_layer
    if setup.recompute == "full" and per_layer:
        total += max(per_layer.values())
        kha_total += kha_per_layer
    if rank.is_last:
        # final norm (input and output), logits, and fp32 softmax
        logits = rank.tokens * model.padded_vocab(layout.tp) / layout.tp
        total += 2 * rank.sharded_tokens * rank.token_bytes + (4 + rank.element_size) * logits
    return total, kha_total


def estimate_kha_activations(rank: Rank) -> float:
    """Bytes that KHA saves for the backward pass (per layer and microbatch)."""
    costs, keys = rank.setup.kha.costs(rank.heads), rank.setup.batch.seq_length
    elements = costs.activations + keys * costs.pair_activations
    between = rank.sharded_tokens * costs.sharded_activations
    return (rank.tokens * elements + between) * rank.element_size


def _estimate_layer_activations(rank: Rank, moe: bool) -> float:
    """Bytes that the rest of a layer saves for the backward pass."""
    setup, model, layout, width = rank.setup, rank.model, rank.layout, rank.element_size
    tokens, share = rank.tokens, rank.sharded_tokens
    queries, groups = rank.heads.query_heads, rank.heads.kv_heads
    input_size = 1 if setup.precision == "fp8" else width  # for inputs of linear layers
    hidden, features = model.hidden_size, model.head_dim

    saved = share * hidden * (width + input_size)  # inputs of norm and QKV projection
    if model.qk_layernorm:
        saved += tokens * (queries + groups) * features * width
    saved += tokens * (2 * queries + 2 * groups) * features * width  # core attention
    if setup.precision == "fp8":
        saved += tokens * queries * features
    if setup.recompute != "selective":
        saved += 4 * tokens * queries  # log-sum-exp of flash attention

    between = 2 if model.swiglu else 1
    if not moe:
        width_here = model.dense_width / layout.tp
        saved += share * hidden * (width + input_size)
        return saved + tokens * width_here * (between * width + input_size)
    routed = share * model.moe_router_topk * layout.expert_tp
    expert_width = model.expert_width / layout.expert_tp
    saved += 2 * share * hidden * width  # norm input, and router input
    saved += share * model.experts * 9  # fp32 scores and probabilities, routing map
    saved += routed * hidden * input_size + routed * expert_width * (between * width + input_size)
    shared = model.shared_width / layout.tp
    return saved + tokens * shared * (between * width + input_size)
