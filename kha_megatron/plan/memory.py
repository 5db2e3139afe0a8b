"""Estimate the memory of one rank. Nothing here is measured on a GPU.

Tests compare parameters, gradients, optimizer states (up to the padding of Megatron's buffers) and
the activations of KHA's torch path with built models. Other activations follow Korthikanti et al.
2022, section 4, for GQA, gated MLPs and experts, and assume Transformer Engine's fused modules and
flash attention without dropout or biases, tokens spread evenly over experts, and unfolded
KHA-Linear. ``selective`` recomputes core attention; ``full`` keeps the input of each layer. Row
statistics of norms, communication buffers, the CUDA context and fragmentation are left out.

Bytes per parameter: bf16 weights 2, fp32 main gradients 4, Adam's fp32 copy and two moments 12,
which the distributed optimizer (ZeRO-1; Rajbhandari et al. 2020) divides over the replicas. FP8
keeps bf16 weights and, for linear layers, an FP8 copy and its transpose. fp32 takes 4, 4 and 8.
"""

from dataclasses import dataclass

from kha_megatron.plan.rank import Rank


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank."""

    weights: float = 0
    gradients: float = 0
    optimizer: float = 0
    activations: float = 0

    @property
    def total(self) -> float:
        """Sum of all kinds."""
        return self.weights + self.gradients + self.optimizer + self.activations


def memory(rank: Rank) -> tuple[Memory, Memory]:
    """Return the bytes of a rank without KHA, and of KHA alone."""
    setup, layout, counts = rank.setup, rank.layout, rank.counts
    activations, of_kha = _activations(rank)
    states = 8 if setup.precision == "fp32" else 12
    copies = 2 if setup.precision == "fp8" else 0
    # the distributed optimizer splits its states over the ranks that hold the same weights
    split = setup.distributed_optimizer
    replicas = layout.dp * layout.cp if split else 1
    expert_replicas = layout.expert_dp if split else 1
    dense = counts.dense - counts.kha
    return Memory(
        weights=setup.width * (dense + counts.experts) + copies * counts.linear,
        gradients=4 * (dense + counts.experts),
        optimizer=states * (dense / replicas + counts.experts / expert_replicas),
        activations=activations,
    ), Memory(
        weights=setup.width * counts.kha + copies * counts.kha_rows,
        gradients=4 * counts.kha,
        optimizer=states * counts.kha / replicas,
        activations=of_kha,
    )


def passes_in_flight(pp: int, vpp: int | None, microbatches: int, stage: int) -> int:
    """Return the largest number of forward passes that wait for their backward.

    One more than the warm-up of Megatron's schedules (``get_pp_rank_microbatches``).
    """
    warm_up = pp - stage - 1
    if vpp:
        warm_up = 2 * warm_up + (vpp - 1) * pp
    return min(microbatches * (vpp or 1), warm_up + 1)


def _activations(rank: Rank) -> tuple[float, float]:
    """Return the peak bytes kept for backward, without KHA and of KHA alone."""
    setup, model, layout, chunks = rank.setup, rank.model, rank.layout, rank.chunks
    of_layer = {moe: layer_activations(rank, moe) for moe in set(map(model.is_moe, rank.layers))}
    knocking = knocking_activations(rank)
    whole = of_kha = 0.0
    for number in range(passes_in_flight(layout.pp, layout.vpp, rank.microbatches, rank.stage)):
        # groups of pp microbatches pass through one virtual stage after the other
        for layer in chunks[number // layout.pp % len(chunks)] if layout.vpp else chunks[0]:
            if setup.recompute == "full":
                whole += rank.share * rank.row
            else:
                whole += of_layer[model.is_moe(layer)]
                of_kha += knocking
    if setup.recompute == "full" and of_layer:
        whole += max(of_layer.values())
        of_kha += knocking
    if rank.is_last:
        # in and out of the final norm; the softmax in fp32, and the logits that it is made from
        logits = rank.tokens * model.padded_vocab(layout.tp) / layout.tp
        whole += 2 * rank.share * rank.row + (4 + rank.width) * logits
    return whole, of_kha


def knocking_activations(rank: Rank) -> float:
    """Return the bytes that autograd keeps for KHA in one layer and microbatch."""
    kha, keys = rank.setup.kha, rank.setup.batch.seq_length
    elements = kha.activations(rank.heads) + keys * kha.pair_activations(rank.heads)
    between = rank.share * kha.sharded_activations(rank.heads)
    return (rank.tokens * elements + between) * rank.width


def layer_activations(rank: Rank, moe: bool) -> float:
    """Return the bytes that autograd keeps for the rest of one layer and microbatch."""
    setup, model, layout, width = rank.setup, rank.model, rank.layout, rank.width
    tokens, share = rank.tokens, rank.share
    queries, groups = rank.heads.query_heads, rank.heads.kv_heads
    entry = 1 if setup.precision == "fp8" else width  # what a linear layer keeps of its input
    hidden, features = model.hidden_size, model.head_dim

    kept = share * hidden * (width + entry)  # the norm's input, the projection's
    if model.qk_layernorm:
        kept += tokens * (queries + groups) * features * width
    kept += tokens * (2 * queries + 2 * groups) * features * width  # q, k, v and the output
    if setup.precision == "fp8":
        kept += tokens * queries * features
    if setup.recompute != "selective":
        kept += 4 * tokens * queries  # flash attention's log-sum-exp

    between = 2 if model.swiglu else 1
    if not moe:
        width_here = model.dense_width / layout.tp
        kept += share * hidden * (width + entry)
        return kept + tokens * width_here * (between * width + entry)
    routed = share * model.moe_router_topk * layout.expert_tp
    expert_width = model.expert_width / layout.expert_tp
    kept += 2 * share * hidden * width  # in and out of the norm, which the router keeps
    kept += share * model.experts * 9  # scores and probabilities in fp32, the routing map
    kept += routed * hidden * entry + routed * expert_width * (between * width + entry)
    shared = model.shared_width / layout.tp
    return kept + tokens * shared * (between * width + entry)
