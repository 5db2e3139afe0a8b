"""Communication volume estimates.

We count the collectives that Megatron issues and assume ring algorithms: an all-gather,
reduce-scatter or all-to-all sends ``(ranks - 1) / ranks`` of the tensor, and an all-reduce twice as
much. Small messages are ignored.

- TP: attention, MLP, embedding and loss, see section 4.2 of https://arxiv.org/abs/2205.05198.
  Also includes gradients of replicated parameters, and the all-gather of QKV that Megatron does if
  there are fewer KV heads than ranks.
- KHA: gradient all-reduces for the shared matrices (once per microbatch), outputs of shared gates
  and routers, and whatever a mechanism returns from ``Mechanism.communication``.
- CP: keys and values, and their gradients (``--cp-comm-type p2p``)
- PP: point-to-point messages, plus the gradient of tied embeddings
- EP: all-to-all dispatcher, including the all-gather over ETP ranks
- DP: reduce-scatter (fp32 gradients) and all-gather (weights). Without the distributed optimizer,
  it's a gradient all-reduce.
"""

from dataclasses import dataclass, fields, replace

from kha_megatron.plan.rank import Rank


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Bytes that one rank sends per optimizer step."""

    tensor: float = 0
    kha: float = 0  # TP communication for head mechanisms, not included in tensor
    context: float = 0
    pipeline: float = 0
    expert: float = 0
    data: float = 0
    expert_data: float = 0  # DP communication for experts, not included in data
    kha_data: float = 0  # DP communication for head mechanisms, not included in data

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


def _ring(ranks: int) -> float:
    return (ranks - 1) / ranks


def estimate_communication(rank: Rank) -> Communication:
    """Estimate the communication volume of a rank (see the module docstring)."""
    setup, layout, counts = rank.setup, rank.layout, rank.counts
    microbatches, layers = rank.microbatches, rank.layers
    moe = sum(map(rank.model.is_moe, layers))
    reduced = 2 * _ring(layout.tp)
    tensor = microbatches * (
        len(layers) * _attention_region(rank)
        + (len(layers) - moe) * _parallel_region(rank)
        + moe * (_parallel_region(rank) if rank.model.shared_width else 0)
        + _embedding_and_loss(rank)
    )
    tensor += reduced * 4 * _replicated_parameters(rank)
    dense = layout.dp * layout.cp
    keys_and_values = (
        2 * rank.tokens * rank.heads.kv_heads * rank.model.head_dim * rank.element_size
    )
    context = (layout.cp - 1) * keys_and_values * (rank.forwards + 2)
    bytes_per_parameter = 4 + rank.element_size if setup.distributed_optimizer else 8
    return Communication(
        tensor=tensor,
        kha=microbatches
        * (
            reduced * rank.element_size * counts.kha_summed
            + len(layers) * (_shared_projections(rank) + _head_exchange(rank))
        ),
        context=microbatches * len(layers) * context,
        pipeline=_pipeline(rank),
        expert=microbatches * moe * _experts(rank),
        data=bytes_per_parameter * _ring(dense) * (counts.dense - counts.kha),
        expert_data=bytes_per_parameter * _ring(layout.expert_dp) * counts.experts,
        kha_data=bytes_per_parameter * _ring(dense) * counts.kha,
    )


def _parallel_region(rank: Rank) -> float:
    """A column-parallel layer followed by a row-parallel layer."""
    size, once = rank.tokens * rank.token_bytes, _ring(rank.layout.tp)
    if rank.layout.sequence_parallel:
        return once * size * (2 * rank.forwards + 3)
    return 2 * once * size * (rank.forwards + 1)


def _attention_region(rank: Rank) -> float:
    sent, tp = _parallel_region(rank), rank.layout.tp
    if rank.model.num_query_groups < tp:
        qkv = replace(rank.model, kha=rank.setup.kha).qkv
        size = rank.tokens * qkv.rows * rank.element_size
        sent += _ring(tp) * size * (rank.forwards + 1)
    return sent


def _shared_projections(rank: Rank) -> float:
    """Outputs of gates and routers that are computed once for all heads."""
    sent, once = 0.0, _ring(rank.layout.tp)
    for tensor in rank.setup.kha.tensors(rank.model.head_sizes):
        if not tensor.reads_input or tensor.per_head or tensor.gradient == "tokens":
            continue
        size = rank.tokens * tensor.shape[0] * rank.element_size
        if rank.layout.sequence_parallel:
            sent += once * size * (rank.forwards + (tensor.gradient == "heads"))
        elif tensor.gradient == "heads":
            sent += 2 * once * size
    return sent


def _head_exchange(rank: Rank) -> float:
    """Collective operations of head mechanisms, including those repeated by recomputation."""
    model, tp = replace(rank.model, kha=rank.setup.kha), rank.layout.tp
    sizes = replace(model.head_sizes, head_dim=model.normed_dim, value_dim=model.head_dim)
    sent = 0
    for mechanism in rank.setup.kha.mechanisms:
        forward, backward = mechanism.communication(sizes, tp, rank.element_size)
        again = "core" in mechanism.stages and rank.setup.recompute == "selective"
        sent += forward * (rank.forwards + again) + backward
    return _ring(tp) * rank.tokens * sent


def _embedding_and_loss(rank: Rank) -> float:
    size, once, sent = rank.tokens * rank.token_bytes, _ring(rank.layout.tp), 0.0
    if rank.stage == 0:
        sent += 2 * once * size
    if rank.is_last:
        sent += once * size * (3 if rank.layout.sequence_parallel else 2)
        sent += 3 * 2 * once * 4 * rank.tokens  # three all-reduces in vocab-parallel cross entropy
    return sent


def _replicated_parameters(rank: Rank) -> int:
    # With sequence parallelism, gradients of all norms and routers are all-reduced over TP ranks,
    # otherwise only those of the QK-norms. KHA is counted separately.
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
    # nothing to send after the last virtual stage, or (in backward) before the first one
    messages = 2 * passes - rank.microbatches * (first + last)
    sent = messages * rank.sharded_tokens * rank.token_bytes
    if rank.model.tied_embeddings and (first or last):
        sent += 2 * _ring(2) * 4 * rank.counts.embedding
    return sent


def _experts(rank: Rank) -> float:
    layout = rank.layout
    routed = rank.sharded_tokens * rank.model.moe_router_topk
    times = 2 * rank.forwards + 2  # dispatch and combine, in forward and backward
    token_bytes = rank.token_bytes * times + 4 * (rank.forwards + 1)  # fp32 probability
    gathered = routed * layout.expert_tp
    return (_ring(layout.ep) * routed + _ring(layout.expert_tp) * gathered) * token_bytes
