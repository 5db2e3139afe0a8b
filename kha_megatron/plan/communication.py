"""Estimate the bytes that one rank sends in one optimizer step.

Collectives are counted by the ring algorithm: of ``S`` bytes on ``n`` ranks an all-gather, a
reduce-scatter or an all-to-all sends ``(n - 1) / n * S``, an all-reduce twice as much. The numbers
of calls are Megatron's:

- **tensor**: Korthikanti et al. 2022, section 4.2, for attention, MLP, embedding, logits and loss;
  the QKV if there are fewer key/value heads than ranks; gradients of replicated parameters.
- **KHA**: one all-reduce of the gradient for each head-shared matrix, layer and microbatch, the
  results of shared gates and routers, and what mechanisms exchange (``Mechanism.sent``).
- **context**: keys, values and their gradients in a ring (Transformer Engine's ``p2p``).
- **pipeline**: Narayanan et al. 2021, section 2.2, and the gradient of the tied embedding.
- **expert**: the all-to-all dispatcher, gathered over expert-tensor-parallel ranks.
- **data**: reduce-scatter of the fp32 gradients and all-gather of the weights (ZeRO-1), or one
  all-reduce of the gradients without the distributed optimizer.

Full recomputation repeats the collectives of forward. Messages of a few kilobytes are left out.
"""

from dataclasses import dataclass, fields, replace

from kha_megatron.plan.rank import Rank


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Bytes that a rank sends in a step."""

    tensor: float = 0
    kha: float = 0
    """Bytes of head mechanisms between tensor-parallel ranks, not in ``tensor``."""
    context: float = 0
    pipeline: float = 0
    expert: float = 0
    data: float = 0
    kha_data: float = 0
    """Bytes of head-shared matrices, not in ``data``."""

    @property
    def total(self) -> float:
        """Sum of all kinds."""
        return sum(getattr(self, field.name) for field in fields(self))


def ring(ranks: int) -> float:
    """Return the fraction of a tensor that a rank sends in an all-gather or reduce-scatter."""
    return (ranks - 1) / ranks


def communication(rank: Rank) -> Communication:
    """Return the bytes that a rank sends in one step."""
    setup, layout, counts = rank.setup, rank.layout, rank.counts
    microbatches, layers = rank.microbatches, rank.layers
    moe = sum(map(rank.model.is_moe, layers))
    reduced = 2 * ring(layout.tp)
    tensor = microbatches * (
        len(layers) * _attention(rank)
        + (len(layers) - moe) * _block(rank)
        + moe * (_block(rank) if rank.model.shared_width else 0)
        + _ends(rank)
    )
    tensor += reduced * 4 * _summed(rank)
    dense = layout.dp * layout.cp
    keys_and_values = 2 * rank.tokens * rank.heads.kv_heads * rank.model.head_dim * rank.width
    context = (layout.cp - 1) * keys_and_values * (rank.forwards + 2)
    a_parameter = 4 + rank.width if setup.distributed_optimizer else 8
    return Communication(
        tensor=tensor,
        kha=microbatches
        * (
            reduced * rank.width * counts.kha_summed
            + len(layers) * (_scores(rank) + _exchanged(rank))
        ),
        context=microbatches * len(layers) * context,
        pipeline=_pipeline(rank),
        expert=microbatches * moe * _experts(rank),
        data=a_parameter
        * (ring(dense) * (counts.dense - counts.kha) + ring(layout.expert_dp) * counts.experts),
        kha_data=a_parameter * ring(dense) * counts.kha,
    )


def _block(rank: Rank) -> float:
    """Count one region between a column-parallel and a row-parallel layer."""
    size, once = rank.tokens * rank.row, ring(rank.layout.tp)
    if rank.layout.sequence_parallel:
        return once * size * (2 * rank.forwards + 3)
    return 2 * once * size * (rank.forwards + 1)


def _attention(rank: Rank) -> float:
    sent, tp = _block(rank), rank.layout.tp
    if rank.model.num_query_groups < tp:
        qkv = replace(rank.model, kha=rank.setup.kha).qkv
        size = rank.tokens * qkv.rows * rank.width
        sent += ring(tp) * size * (rank.forwards + 1)
    return sent


def _scores(rank: Rank) -> float:
    """Count the results of projections that are shared by heads or computed on all ranks."""
    sent, once = 0.0, ring(rank.layout.tp)
    for tensor in rank.setup.kha.tensors(rank.model.head_sizes):
        if not tensor.reads_input or tensor.per_head or tensor.gradient == "tokens":
            continue
        size = rank.tokens * tensor.shape[0] * rank.width
        if rank.layout.sequence_parallel:
            sent += once * size * (rank.forwards + (tensor.gradient == "heads"))
        elif tensor.gradient == "heads":
            sent += 2 * once * size
    return sent


def _exchanged(rank: Rank) -> float:
    """Count what mechanisms exchange between heads. Recomputing attention repeats it."""
    model, tp = replace(rank.model, kha=rank.setup.kha), rank.layout.tp
    sizes = replace(model.head_sizes, head_dim=model.normed_dim, value_dim=model.head_dim)
    sent = 0
    for mechanism in rank.setup.kha.mechanisms:
        forward, backward = mechanism.communication(sizes, tp, rank.width)
        again = "core" in mechanism.stages and rank.setup.recompute == "selective"
        sent += forward * (rank.forwards + again) + backward
    return ring(tp) * rank.tokens * sent


def _ends(rank: Rank) -> float:
    """Count the embedding on the first pipeline rank, and logits and loss on the last."""
    size, once, sent = rank.tokens * rank.row, ring(rank.layout.tp), 0.0
    if rank.stage == 0:
        sent += 2 * once * size
    if rank.is_last:
        sent += once * size * (3 if rank.layout.sequence_parallel else 2)
        sent += 3 * 2 * once * 4 * rank.tokens  # maximum, target's logit, sum of exponents
    return sent


def _summed(rank: Rank) -> int:
    """Count replicated parameters whose gradients Megatron sums over tensor-parallel ranks.

    With sequence parallelism all but KHA's; without it only the norms of queries and keys.
    """
    model, counts = rank.model, rank.counts
    if not rank.layout.sequence_parallel:
        return len(rank.layers) * 2 * model.head_dim * model.norm_parameters * model.qk_layernorm
    split = counts.linear - counts.experts + counts.embedding
    return counts.dense - counts.kha - split


def _pipeline(rank: Rank) -> float:
    if rank.layout.pp == 1:
        return 0
    passes = rank.microbatches * (rank.layout.vpp or 1)
    first, last = rank.stage == 0, rank.is_last
    # the last virtual stage sends nothing on, the first nothing back
    messages = 2 * passes - rank.microbatches * (first + last)
    sent = messages * rank.share * rank.row
    if rank.model.tied_embeddings and (first or last):
        sent += 2 * ring(2) * 4 * rank.counts.embedding
    return sent


def _experts(rank: Rank) -> float:
    layout = rank.layout
    routed = rank.share * rank.model.moe_router_topk
    times = 2 * rank.forwards + 2  # there and back again, and the same for the gradients
    a_token = rank.row * times + 4 * (rank.forwards + 1)  # with its probability
    gathered = routed * layout.expert_tp
    return (ring(layout.ep) * routed + ring(layout.expert_tp) * gathered) * a_token
