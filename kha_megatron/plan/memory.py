"""Memory of one rank, on paper. Nothing here is measured on a GPU.

Exact, and compared with built models in the tests: parameters, gradients, optimizer states (up to
the padding of Megatron's buffers) and what autograd keeps for KHA's torch path. The remaining
activations are those of Korthikanti et al. 2022 ("Reducing activation recomputation in large
transformer models", section 4), counted tensor by tensor for GQA, gated MLPs and experts:

- Transformer Engine's fused modules and flash attention, no dropout, no biases; local modules and
  unfused attention keep more;
- tokens spread evenly over experts;
- ``selective`` recomputes core attention: flash attention keeps only one number a row, so it saves
  little; ``full`` keeps the input of each layer and one whole layer that is being recomputed;
- row statistics of norms, indices of the router, communication buffers, the CUDA context and
  fragmentation are left out.

Bytes a parameter, Megatron's defaults: bf16 weights 2, fp32 main gradients 4, Adam's fp32 copy and
two moments 12, divided over the replicas by the distributed optimizer (ZeRO-1; Rajbhandari et al.
2020). Replicas of dense weights are the data- and context-parallel ranks, those of expert weights
the expert-data-parallel ones. FP8 keeps bf16 weights and, for linear layers, an FP8 copy and its
transpose. Training in fp32 has no second copy: 4, 4 and 8.
"""

from dataclasses import dataclass
from typing import Literal, Self

from kha_megatron.config import KHAConfig
from kha_megatron.model.layout import Batch, Layout
from kha_megatron.model.model import Model
from kha_megatron.plan.family import Attention, grouped_query

Precision = Literal["fp32", "bf16", "fp8"]
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything but the layout that memory and communication depend on."""

    model: Model
    kha: KHAConfig
    batch: Batch
    precision: Precision = "bf16"
    recompute: Recompute = "none"
    distributed_optimizer: bool = True

    @property
    def width(self) -> int:
        """Bytes of an activation, and of a weight that is not in FP8."""
        return 4 if self.precision == "fp32" else 2


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """How many parameters one rank holds."""

    dense: int
    """All but the experts', KHA's included."""
    experts: int
    kha: int
    linear: int
    """Those of linear layers, experts included: what FP8 computes with."""
    embedding: int
    """Those of the embedding and of the projection to logits."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.experts


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank."""

    weights: float = 0
    gradients: float = 0
    optimizer: float = 0
    activations: float = 0

    @property
    def total(self) -> float:
        """Sum of the four."""
        return self.weights + self.gradients + self.optimizer + self.activations

    def __add__(self, other: Self) -> "Memory":
        return Memory(
            weights=self.weights + other.weights,
            gradients=self.gradients + other.gradients,
            optimizer=self.optimizer + other.optimizer,
            activations=self.activations + other.activations,
        )


def parameters(
    model: Model,
    kha: KHAConfig,
    layout: Layout,
    stage: int = 0,
    attention: Attention | None = None,
) -> Parameters:
    """Parameters of a rank of pipeline rank ``stage``; equal on all of its ranks.

    Args:
        attention: what is no grouped-query attention; then ``layout`` must leave it whole.
    """
    tp, hidden, norm = layout.tp, model.hidden_size, model.norm_parameters
    attention = attention or grouped_query(model)
    matrices = 3 if model.swiglu else 2
    knocking = kha.parameters(attention.heads, tp)
    norms = norm * 2 * hidden + attention.norms

    linear = expert = router = count = 0
    for layer in (layer for chunk in stage_layers(model, layout, stage) for layer in chunk):
        count += 1
        linear += attention.weights // tp
        if not model.is_moe(layer):
            linear += matrices * hidden * model.ffn_hidden_size // tp
            continue
        shared = model.moe_shared_expert_intermediate_size or 0
        linear += matrices * hidden * shared // tp
        router += model.num_experts * hidden
        local = model.num_experts // layout.ep
        expert += local * matrices * hidden * model.moe_ffn_hidden_size // layout.expert_tp

    table = model.padded_vocab(tp) * hidden // tp
    first, last = stage == 0, stage == layout.pp - 1
    table *= first + (last and not (first and model.tied_embeddings))
    dense = linear + router + count * (norms + knocking) + table + last * norm * hidden
    return Parameters(
        dense=dense, experts=expert, kha=count * knocking, linear=linear + expert, embedding=table
    )


def active_parameters(model: Model, kha: KHAConfig, attention: Attention | None = None) -> int:
    """Parameters that one token passes through: of the experts, those that it is routed to."""
    whole = parameters(model, kha, Layout(), attention=attention)
    if not whole.experts:
        return whole.total
    return whole.dense + whole.experts * model.moe_router_topk // model.num_experts


def stage_layers(model: Model, layout: Layout, stage: int) -> list[list[int]]:
    """The layers (counted from 0) of each virtual stage of pipeline rank ``stage``."""
    result, start = [], 0
    for counts in layout.chunk_layers(model.num_layers):
        first = start + sum(counts[:stage])
        result.append(list(range(first, first + counts[stage])))
        start += sum(counts)
    return result


def memory(setup: Setup, layout: Layout, stage: int) -> tuple[Memory, Memory]:
    """Bytes of a rank of pipeline rank ``stage``, without KHA and of KHA alone."""
    counts = parameters(setup.model, setup.kha, layout, stage)
    activations, of_kha = _activations(setup, layout, stage)
    states = 8 if setup.precision == "fp32" else 12
    # the distributed optimizer splits its states over the ranks that hold the same weights
    split = setup.distributed_optimizer
    replicas = layout.dp * layout.cp if split else 1
    expert_replicas = layout.expert_dp if split else 1
    dense = counts.dense - counts.kha
    return Memory(
        weights=setup.width * (dense + counts.experts)
        + (2 * counts.linear if setup.precision == "fp8" else 0),
        gradients=4 * (dense + counts.experts),
        optimizer=states * (dense / replicas + counts.experts / expert_replicas),
        activations=activations,
    ), Memory(
        weights=setup.width * counts.kha,
        gradients=4 * counts.kha,
        optimizer=states * counts.kha / replicas,
        activations=of_kha,
    )


def passes_in_flight(layout: Layout, microbatches: int, stage: int) -> int:
    """Forward passes of one virtual stage that wait for their backward, at most.

    Megatron's schedules (``get_pp_rank_microbatches``): one more than the warm-up.
    """
    warm_up = layout.pp - stage - 1
    if layout.vpp:
        warm_up = 2 * warm_up + (layout.vpp - 1) * layout.pp
    return min(microbatches * (layout.vpp or 1), warm_up + 1)


def _activations(setup: Setup, layout: Layout, stage: int) -> tuple[float, float]:
    """Bytes that wait for the backward pass at the worst moment, without KHA and of KHA."""
    model, chunks = setup.model, stage_layers(setup.model, layout, stage)
    tokens, share = tokens_of(layout, setup.batch)
    whole = of_kha = 0.0
    for number in range(passes_in_flight(layout, setup.batch.microbatches(layout.dp), stage)):
        # groups of pp microbatches pass through one virtual stage after the other
        for layer in chunks[number // layout.pp % len(chunks)] if layout.vpp else chunks[0]:
            if setup.recompute == "full":
                whole += share * model.hidden_size * setup.width
            else:
                whole += layer_activations(setup, layout, model.is_moe(layer))
                of_kha += knocking_activations(setup, layout)
    if setup.recompute == "full" and (layers := [layer for chunk in chunks for layer in chunk]):
        whole += max(layer_activations(setup, layout, model.is_moe(n)) for n in layers)
        of_kha += knocking_activations(setup, layout)
    if stage == layout.pp - 1:
        # in and out of the final norm; the softmax in fp32, and the logits that it is made from
        logits = tokens * model.padded_vocab(layout.tp) / layout.tp
        whole += 2 * share * model.hidden_size * setup.width + (4 + setup.width) * logits
    return whole, of_kha


def tokens_of(layout: Layout, batch: Batch) -> tuple[float, float]:
    """Tokens of a microbatch on a rank: inside tensor-parallel regions, and between them."""
    tokens = batch.seq_length * batch.micro_batch_size / layout.cp
    return tokens, tokens / layout.tp if layout.sequence_parallel else tokens


def heads_of(model: Model, layout: Layout) -> tuple[int, int]:
    """Query and key/value heads on a rank."""
    return model.num_attention_heads // layout.tp, max(1, model.num_query_groups // layout.tp)


def knocking_activations(setup: Setup, layout: Layout) -> float:
    """Bytes that autograd keeps for KHA in one layer and microbatch."""
    tokens, _ = tokens_of(layout, setup.batch)
    sizes = grouped_query(setup.model).heads.on_rank(layout.tp)
    return tokens * setup.kha.saved(sizes) * setup.width


def layer_activations(setup: Setup, layout: Layout, moe: bool) -> float:
    """Bytes that autograd keeps for the rest of one layer and microbatch."""
    model, width = setup.model, setup.width
    entry = 1 if setup.precision == "fp8" else width  # what a linear layer keeps of its input
    tokens, share = tokens_of(layout, setup.batch)
    queries, groups = heads_of(model, layout)
    hidden, features = model.hidden_size, model.head_dim

    kept = share * hidden * (width + entry)  # the norm's input, the projection's
    if model.qk_layernorm:
        kept += tokens * (queries + groups) * features * width
    kept += tokens * (2 * queries + 2 * groups) * features * width  # q, k, v and the output
    if setup.precision == "fp8":
        kept += tokens * queries * features
    if model.attention_output_gate:
        kept += 2 * tokens * queries * features * width
    if setup.recompute != "selective":
        kept += 4 * tokens * queries  # flash attention's log-sum-exp

    between = 2 if model.swiglu else 1
    if not moe:
        width_here = model.ffn_hidden_size / layout.tp
        kept += share * hidden * (width + entry)
        return kept + tokens * width_here * (between * width + entry)
    routed = share * model.moe_router_topk * layout.expert_tp
    expert_width = model.moe_ffn_hidden_size / layout.expert_tp
    kept += 2 * share * hidden * width  # in and out of the norm, which the router keeps
    kept += share * model.num_experts * 9  # scores and probabilities in fp32, the routing map
    kept += routed * hidden * entry + routed * expert_width * (between * width + entry)
    shared = (model.moe_shared_expert_intermediate_size or 0) / layout.tp
    return kept + tokens * shared * (between * width + entry)
