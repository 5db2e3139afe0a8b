"""Step time estimates, which rank layouts.

These are lower bounds, not predictions. Each GEMM takes as long as its FLOPs or its memory traffic.
With few rows (per expert), it's memory-bound, because each microbatch reads the weights, and reads
and writes their fp32 gradients. Other kernels, launch overhead and the optimizer are left out.

TP, EP (all-to-all) and PP communication is not overlapped with computation, as in our recipes. CP
is overlapped with attention, and DP with one microbatch. Groups are placed on nodes in Megatron's
order: TP, CP or EP, DP, PP.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kha_megatron.plan.communication import Communication
from kha_megatron.plan.counts import count_attention
from kha_megatron.plan.rank import Rank

ACHIEVED = 0.75
"""Fraction of each peak that is reached, as by FlashAttention-3 (arXiv 2407.08608)."""
FLOPS = {"fp32": 494e12, "bf16": 989e12, "fp8": 1979e12}
MEMORY, NVLINK = 3.35e12, 450e9
"""Peak bytes per second (and direction) of an H100 SXM, as the dense FLOPs per second above. See
https://www.nvidia.com/en-us/data-center/h100/."""
GPUS_PER_NODE, NETWORK = 8, 50e9
"""A DGX H100 has one 400 Gb/s port per GPU, see https://docs.nvidia.com/dgx/dgxh100-user-guide/."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds per optimizer step, and what they depend on (in the slowest pipeline stage)."""

    rows: float  # per GEMM: tokens per rank and microbatch
    expert_rows: float  # per GEMM of one expert
    gradient_bytes: float  # memory traffic of fp32 gradients
    node_bytes: float  # communication that leaves the node
    compute: float
    sent: float  # communication within microbatches that isn't overlapped
    data: float  # DP communication that isn't overlapped
    idle: float = 0  # pipeline bubble / total
    total: float = 0


@dataclass(frozen=True)
class Link:
    """Communicating ranks that are ``stride`` apart. A node has consecutive ranks."""

    stride: int
    size: int

    @property
    def local(self) -> int:
        """Number of these ranks on one node."""
        return min(self.size, max(1, GPUS_PER_NODE // self.stride))

    def ring(self, sent: float) -> tuple[float, float]:
        """Return the seconds to send so many bytes in rings, and the bytes that leave the node."""
        if self.local == self.size:
            return sent / NVLINK, 0
        return sent / min(NVLINK, NETWORK * self.local), sent / self.local

    def exchange(self, sent: float) -> tuple[float, float]:
        """Same as :meth:`ring`, but for an all-to-all."""
        remote = sent * (self.size - self.local) / max(1, self.size - 1)
        return max(remote / NETWORK, (sent - remote) / NVLINK), remote


def estimate_time(ranks: Sequence[Rank], sent: Sequence[Communication]) -> StepTime:
    """Estimate the step time, given a rank of the first, the second and the last stage."""
    layout, microbatches = ranks[0].layout, ranks[0].microbatches
    stages = [_time_stage(rank, volume) for rank, volume in zip(ranks, sent, strict=True)]
    busy = [stage.compute + stage.sent for stage in stages]
    slowest = max(range(len(stages)), key=busy.__getitem__)
    whole = sum(busy) + (layout.pp - len(busy)) * busy[min(1, len(busy) - 1)]
    # section 2.2 of https://arxiv.org/abs/2104.04473, but the slowest stage sets the pace
    pipeline = busy[slowest] + (whole - busy[slowest]) / microbatches / (layout.vpp or 1)
    data = max(stage.data for stage in stages)
    idle = (pipeline - whole / layout.pp) / (pipeline + data)
    return replace(stages[slowest], data=data, idle=idle, total=pipeline + data)


def _time_stage(rank: Rank, sent: Communication) -> StepTime:
    layout, microbatches, etp = rank.layout, rank.microbatches, rank.layout.expert_tp
    core = microbatches * _time_attention(rank)
    compute = core + microbatches * sum(_time_gemm(rank, *gemm) for gemm in list_gemms(rank))
    experts = Link(etp, layout.ep).exchange if layout.ep > 1 else Link(1, etp).ring
    paths = {
        "tensor": Link(1, layout.tp).ring(sent.tensor + sent.kha),
        "context": Link(layout.tp, layout.cp).ring(sent.context),
        "pipeline": Link(layout.tp * layout.cp * layout.dp, min(2, layout.pp)).ring(sent.pipeline),
        "expert": experts(sent.expert),
        "data": Link(layout.tp, layout.cp * layout.dp).ring(sent.data + sent.kha_data),
        "expert_data": Link(etp * layout.ep, layout.expert_dp).ring(sent.expert_data),
    }
    seconds = {name: path[0] / ACHIEVED for name, path in paths.items()}
    exposed = sum(seconds[name] for name in ("tensor", "pipeline", "expert"))
    return StepTime(
        rows=rank.tokens,
        expert_rows=_count_expert_rows(rank),
        gradient_bytes=8.0 * microbatches * rank.counts.linear,
        node_bytes=sum(outside for _, outside in paths.values()),
        compute=compute,
        sent=exposed + max(0, seconds["context"] - core),
        data=max(0, seconds["data"] + seconds["expert_data"] - compute / microbatches),
    )


def _count_expert_rows(rank: Rank) -> float:
    model, layout = rank.model, rank.layout
    routed = rank.sharded_tokens * layout.ep * layout.expert_tp * model.moe_router_topk
    return routed / model.experts if model.experts else 0


def list_gemms(rank: Rank) -> Iterator[tuple[float, float, float, float]]:
    """Yield ``(number, rows, inputs, outputs)`` for the linear layers of a rank."""
    model, layout, hidden, tokens = rank.model, rank.layout, rank.model.hidden_size, rank.tokens
    layers, moe = len(rank.layers), sum(map(rank.model.is_moe, rank.layers))
    attention = count_attention(model, rank.setup.kha).weights / layout.tp
    expert_width = model.expert_width / layout.expert_tp
    projected = rank.heads.query_heads * model.head_dim
    yield layers, tokens, hidden, attention / hidden - projected
    yield layers, tokens, projected, hidden
    for number, rows, width in (
        (layers - moe, tokens, model.dense_width / layout.tp),
        (moe, tokens, model.shared_width / layout.tp),
        (moe * model.experts / layout.ep, _count_expert_rows(rank), expert_width),
    ):
        yield number, rows, hidden, (2 if model.swiglu else 1) * width
        yield number, rows, width, hidden
    if rank.is_last:
        yield 1, tokens, hidden, model.padded_vocab(layout.tp) / layout.tp


def _time_gemm(rank: Rank, number: float, rows: float, inputs: float, outputs: float) -> float:
    """Return the seconds of forward and backward passes of ``number`` linear layers."""
    setup, weights = rank.setup, inputs * outputs
    multiplied = 2 * rows * weights / FLOPS[setup.precision]
    values = (1 if setup.precision == "fp8" else setup.element_size) * rows * (inputs + outputs)
    forward = max(multiplied, (values + setup.element_size * weights) / MEMORY)
    gradient = max(multiplied, (values + 8 * weights) / MEMORY)
    return number * ((rank.forwards + 1) * forward + gradient) / ACHIEVED


def _time_attention(rank: Rank) -> float:
    """Return the seconds of core attention (causal, backward 2.5 times forward) and of KHA."""
    setup, length = rank.setup, rank.setup.batch.seq_length
    forwards = rank.forwards + (setup.recompute == "selective")
    pairs = length * count_attention(rank.model).pair / rank.layout.tp
    costs = setup.kha.costs(rank.heads)
    heads = costs.flops + length * costs.pair_flops
    flops = rank.tokens * ((forwards + 2.5) * pairs + (rank.forwards + 2) * heads)
    precision = "fp32" if setup.precision == "fp32" else "bf16"
    return len(rank.layers) * flops / FLOPS[precision] / ACHIEVED
