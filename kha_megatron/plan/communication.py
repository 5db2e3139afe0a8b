"""Bytes that one rank sends in one optimizer step, on paper.

Collectives are counted by the ring algorithm: of ``S`` bytes on ``n`` ranks an all-gather or a
reduce-scatter sends ``(n - 1) / n * S``, an all-reduce twice as much, an all-to-all
``(n - 1) / n * S``. The counts of calls are Megatron's:

- **tensor**: Korthikanti et al. 2022, section 4.2: around attention and around the MLP an
  all-gather and a reduce-scatter, as many in backward, and an all-gather of the kept input for the
  weight gradient; without sequence parallelism an all-reduce each way. With fewer key/value heads
  than ranks, the QKV is gathered as well. Embedding, logits and loss; gradients of the norms of
  queries and keys and, with sequence parallelism, of the other norms and the routers.
- **KHA**: one all-reduce of the shared matrices' gradient for each knocked tensor, layer and
  microbatch.
- **context**: keys and values pass round the ring once in forward, and they and their gradients in
  backward (Transformer Engine's ``p2p``).
- **pipeline**: Narayanan et al. 2021, section 2.2: the activations of a stage's border for each
  microbatch and virtual stage, and their gradients; the tied embedding's gradient.
- **expert**: the all-to-all dispatcher: tokens and probabilities to the experts, tokens back, and
  the same in backward; gathered over expert-tensor-parallel ranks.
- **data**: reduce-scatter of the fp32 gradients and all-gather of the weights (ZeRO-1), or one
  all-reduce of the gradients without the distributed optimizer.

Full recomputation runs forward, and so its collectives, twice. Counts of tokens per expert and
other messages of a few kilobytes are left out.
"""

from dataclasses import dataclass, fields

from kha_megatron.model.layout import Layout
from kha_megatron.plan.memory import (
    Setup,
    heads_of,
    parameters,
    stage_layers,
    tokens_of,
)


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Bytes that a rank sends in a step."""

    tensor: float = 0
    kha: float = 0
    """Over tensor-parallel ranks, for the shared matrices alone; not in ``tensor``."""
    context: float = 0
    pipeline: float = 0
    expert: float = 0
    data: float = 0
    kha_data: float = 0
    """The shared matrices' part of ``data``, not in it."""

    @property
    def total(self) -> float:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))


def ring(ranks: int) -> float:
    """Share of the whole tensor that a rank sends in an all-gather or a reduce-scatter."""
    return (ranks - 1) / ranks


def communication(setup: Setup, layout: Layout, stage: int) -> Communication:
    """What a rank of pipeline rank ``stage`` sends in one step."""
    microbatches = setup.batch.microbatches(layout.dp)
    layers = [layer for chunk in stage_layers(setup.model, layout, stage) for layer in chunk]
    moe = sum(map(setup.model.is_moe, layers))
    counts = parameters(setup.model, setup.kha, layout, stage)
    reduced = 2 * ring(layout.tp)
    tensor = microbatches * (
        len(layers) * _attention(setup, layout)
        + (len(layers) - moe) * _block(setup, layout)
        + moe * _shared_expert(setup, layout)
        + _ends(setup, layout, stage)
    )
    tensor += reduced * 4 * _summed(setup, layout, stage)
    dense = layout.dp * layout.cp
    a_parameter = 4 + setup.width if setup.distributed_optimizer else 8
    return Communication(
        tensor=tensor,
        kha=microbatches * reduced * setup.width * counts.kha,
        context=microbatches * len(layers) * _context(setup, layout),
        pipeline=_pipeline(setup, layout, stage, microbatches),
        expert=microbatches * moe * _experts(setup, layout),
        data=a_parameter
        * (ring(dense) * (counts.dense - counts.kha) + ring(layout.expert_dp) * counts.experts),
        kha_data=a_parameter * ring(dense) * counts.kha,
    )


def _forwards(setup: Setup) -> int:
    return 2 if setup.recompute == "full" else 1


def _block(setup: Setup, layout: Layout) -> float:
    """One region between a column- and a row-parallel layer: into it, out of it, and back."""
    tokens, _ = tokens_of(layout, setup.batch)
    size = tokens * setup.model.hidden_size * setup.width
    if layout.sequence_parallel:
        return ring(layout.tp) * size * (2 * _forwards(setup) + 3)
    return 2 * ring(layout.tp) * size * (_forwards(setup) + 1)


def _attention(setup: Setup, layout: Layout) -> float:
    model = setup.model
    sent = _block(setup, layout)
    if model.num_query_groups < layout.tp:
        tokens, _ = tokens_of(layout, setup.batch)
        sent += ring(layout.tp) * tokens * model.qkv.rows * setup.width * (_forwards(setup) + 1)
    return sent


def _shared_expert(setup: Setup, layout: Layout) -> float:
    return _block(setup, layout) if setup.model.moe_shared_expert_intermediate_size else 0


def _ends(setup: Setup, layout: Layout, stage: int) -> float:
    """Embedding on the first pipeline rank; logits and loss on the last."""
    tokens, _ = tokens_of(layout, setup.batch)
    size, sent = tokens * setup.model.hidden_size * setup.width, 0.0
    if stage == 0:
        sent += 2 * ring(layout.tp) * size
    if stage == layout.pp - 1:
        sent += ring(layout.tp) * size * (3 if layout.sequence_parallel else 2)
        sent += 3 * 2 * ring(layout.tp) * 4 * tokens  # maximum, target's logit, sum of exponents
    return sent


def _summed(setup: Setup, layout: Layout, stage: int) -> int:
    """Parameters that are whole on every tensor-parallel rank and whose gradients Megatron sums.

    With sequence parallelism all but KHA's; without, only the norms of queries and keys.
    """
    model = setup.model
    counts = parameters(model, setup.kha, layout, stage)
    if not layout.sequence_parallel:
        layers = sum(map(len, stage_layers(model, layout, stage)))
        return layers * 2 * model.head_dim * model.norm_parameters * model.qk_layernorm
    split = counts.linear - counts.experts + counts.embedding
    return counts.dense - counts.kha - split


def _context(setup: Setup, layout: Layout) -> float:
    tokens, _ = tokens_of(layout, setup.batch)
    _, groups = heads_of(setup.model, layout)
    keys_and_values = 2 * tokens * groups * setup.model.head_dim * setup.width
    return (layout.cp - 1) * keys_and_values * (_forwards(setup) + 2)


def _pipeline(setup: Setup, layout: Layout, stage: int, microbatches: int) -> float:
    if layout.pp == 1:
        return 0
    _, share = tokens_of(layout, setup.batch)
    passes = microbatches * (layout.vpp or 1)
    first, last = stage == 0, stage == layout.pp - 1
    # the last virtual stage sends nothing on, the first nothing back
    messages = 2 * passes - microbatches * (first + last)
    sent = messages * share * setup.model.hidden_size * setup.width
    if setup.model.tied_embeddings and (first or last):
        table = setup.model.padded_vocab(layout.tp) * setup.model.hidden_size / layout.tp
        sent += 2 * ring(2) * 4 * table
    return sent


def _experts(setup: Setup, layout: Layout) -> float:
    model = setup.model
    _, share = tokens_of(layout, setup.batch)
    routed = share * model.moe_router_topk
    row = model.hidden_size * setup.width
    times = 2 * _forwards(setup) + 2  # there and back again, and the same for the gradients
    probabilities = 4 * (_forwards(setup) + 1)
    sent = ring(layout.ep) * routed * (row * times + probabilities)
    gathered = routed * layout.expert_tp
    return sent + ring(layout.expert_tp) * gathered * (row * times + probabilities)
