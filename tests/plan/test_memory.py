"""The estimated memory against models that Megatron builds, rank by rank.

Parameters and optimizer states are compared exactly. Gradient buffers are longer than the gradients
by Megatron's padding, at most 64 elements a parameter and one unit of 128 and the replicas a
bucket. Activations: what autograd keeps for KHA, exactly; Megatron's local modules differ from the
Transformer Engine modules that the rest of the estimate assumes, so that is not compared here.
"""

import math
from dataclasses import replace

import pytest
import torch

from kha_megatron.config import KHAConfig
from kha_megatron.heads.knock import MATRICES
from kha_megatron.model.layout import Batch, Layout
from kha_megatron.plan.counts import count_parameters
from kha_megatron.plan.memory import count_in_flight, estimate_kha_activations, estimate_memory
from kha_megatron.plan.rank import Rank, Setup
from tests.plan.built import EXPERTS, MIXED, OTHERS, built

MIXED_LAYERS = {**EXPERTS, "num_layers": 4, "moe_layer_freq": [0, 1, 1, 0]}


def sizes(world, layout, overrides):
    """Return what this rank holds, counted in its tensors, and the model."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    overrides = {"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16} | overrides
    chunks, config, model, stage = built(layout, MIXED, bf16=True, **overrides)
    chunks = [Float16Module(config, chunk) for chunk in chunks]
    parameters = [(n, p) for chunk in chunks for n, p in chunk.named_parameters()]
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
    )
    wrapped = [DistributedDataParallel(config, ddp_config, chunk) for chunk in chunks]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=0.1,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
        ),
        wrapped,
    )
    buffers = [b for ddp in wrapped for b in (*ddp.buffers, *ddp.expert_parallel_buffers)]
    found = {
        "stage": stage,
        "weights": sum(p.numel() * p.element_size() for _, p in parameters),
        "dense": sum(p.numel() for n, p in parameters if ".experts." not in n),
        "experts": sum(p.numel() for n, p in parameters if ".experts." in n),
        "kha": sum(p.numel() for n, p in parameters if ".knock_" in n),
        "gradients": sum(b.grad_data.numel() * b.grad_data.element_size() for b in buffers),
        "count": len(parameters),
        "buckets": sum(len(b.buckets) for b in buffers),
        "main": sum(
            p.numel()
            for part in getattr(optimizer, "chained_optimizers", [optimizer])
            for group in part.shard_fp32_from_float16_groups
            for p in group
            if p is not None
        ),
    }
    for ddp in wrapped:
        vars(ddp).clear()
    return found, model


LAYOUTS = [
    (2, Layout(pp=2, vpp=2), MIXED_LAYERS),
    (4, Layout(tp=2, ep=2, etp=1, sequence_parallel=True), MIXED_LAYERS),
]
REST = [
    (4, Layout(tp=4), {"num_query_groups": 2}),  # fewer key/value heads than ranks
    (4, Layout(pp=2), {"tied": False}),
    (2, Layout(pp=2, loss_as_layer=True), {"num_layers": 3}),
    (2, Layout(), {}),  # two replicas
    (2, Layout(ep=2), {**EXPERTS, "tied": False}),
    (4, Layout(tp=2, ep=2, etp=2, sequence_parallel=True), EXPERTS),
]


@pytest.mark.parametrize(
    ("world", "layout", "overrides"),
    [*LAYOUTS, *(pytest.param(*case, marks=pytest.mark.whole) for case in REST)],
    ids=lambda v: None,
)
def test_every_rank_holds_what_the_plan_says(ranks, world, layout, overrides):
    layout = Layout(**{**vars(layout), "world_size": world})
    answers = ranks(sizes, world, world, layout, overrides)
    batch = Batch(seq_length=12, micro_batch_size=1, global_batch_size=12)
    optimizer_states = {}
    for found, model in answers:
        stage = found["stage"]
        planned = count_parameters(model, MIXED, layout, stage)
        assert planned.dense == found["dense"]
        assert planned.experts == found["experts"]
        assert planned.kha == found["kha"]
        rest, of_kha = estimate_memory(
            Rank(Setup(model=model, kha=MIXED, batch=batch), layout, stage)
        )
        assert rest.weights + of_kha.weights == found["weights"]
        unit = math.lcm(128, layout.dp * layout.cp, layout.expert_dp)
        padding = 4 * (64 * found["count"] + unit * found["buckets"])
        assert 0 <= found["gradients"] - rest.gradients - of_kha.gradients <= padding
        planned_states = rest.optimizer + of_kha.optimizer
        optimizer_states.setdefault(stage, []).append((12 * found["main"], planned_states))
        # a rank's shard is its part of the padded buffers, which ends may leave shorter
        assert abs(12 * found["main"] - planned_states) <= 3 * padding
    for states in optimizer_states.values():
        held, planned = zip(*states, strict=True)
        assert sum(held) == pytest.approx(sum(planned))


def parameter_counts(layout, overrides):
    """Return the parameters of this rank for each of several mechanisms, and the planned number."""
    found = []
    for kha in OTHERS:
        chunks, _, model, stage = built(layout, kha, **overrides)
        has = sum(p.numel() for chunk in chunks for p in chunk.parameters())
        found.append((str(kha), has, count_parameters(model, kha, layout, stage).total))
    return found


def test_other_heads_are_counted_with_fewer_groups_than_ranks(ranks):
    """Rows in the projection of queries, keys and values, what fills them up, own projections."""
    layout = Layout(tp=4, sequence_parallel=True, world_size=4)
    for rank in ranks(parameter_counts, 4, layout, {"num_query_groups": 2}):
        for kha, has, planned in rank:
            assert planned == has, kha


def kept_by_autograd(layout, kha, qk_norm):
    """Bytes of distinct activations that autograd keeps inside this rank's knocking modules."""
    from kha_megatron.mcore.knocking import KnockingHeads
    from tests.distributed import models

    overrides = {"params_dtype": torch.bfloat16, "bf16": True, "num_layers": 1}
    chunks, _, model, _ = built(layout, kha, qk_layernorm=qk_norm, **overrides)
    kept = {}
    weights = {p.data_ptr() for n, p in chunks[0].named_parameters() if ".knock_" in n}
    forward = KnockingHeads.forward

    def keep(tensor):
        stacked = {w + i * tensor.nbytes for w in weights for i in range(3)}
        if tensor.data_ptr() not in stacked:
            kept[tensor.data_ptr(), tensor.nbytes] = tensor  # alive, so that no address returns
        return tensor

    def watched(self, *x):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return forward(self, *x)

    KnockingHeads.forward = watched
    try:
        tokens, positions, mask = models.batch()
        chunks[0](tokens, positions, mask, labels=tokens).mean()
    finally:
        KnockingHeads.forward = forward
    return sum(tensor.nbytes for tensor in kept.values()), model


CASES = [
    (MIXED, Layout(), False),
    (MIXED, Layout(tp=2, world_size=2, sequence_parallel=True), True),
]
MORE = [(KHAConfig(value=variant), Layout(), True) for variant in MATRICES]


@pytest.mark.parametrize(
    ("kha", "layout", "qk_norm"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.whole) for case in MORE)],
    ids=str,
)
def test_what_autograd_keeps_for_kha(ranks, kha, layout, qk_norm):
    from tests.distributed.models import BATCH, SEQUENCE

    batch = Batch(
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        global_batch_size=BATCH,
    )
    layout = replace(layout, world_size=layout.tp)
    for found, model in ranks(kept_by_autograd, layout.tp, layout, kha, qk_norm):
        setup = Setup(model=model, kha=kha, batch=batch, precision="bf16")
        assert found == estimate_kha_activations(Rank(setup, layout, 0))


def attention_weights_kept(kha, recompute):
    """Bytes that autograd keeps of tensors with an element for each head, query and key."""
    from tests.distributed import models

    overrides = {
        "params_dtype": torch.bfloat16,
        "bf16": True,
        "recompute_granularity": recompute,
    }
    chunks, config, model, _ = built(Layout(), kha, **overrides)
    pairs = config.num_attention_heads * models.BATCH * models.SEQUENCE**2
    kept = {}

    def keep(tensor):
        if tensor.numel() == pairs:
            kept[tensor.data_ptr(), tensor.nbytes] = tensor  # alive, so that no address returns
        return tensor

    tokens, positions, mask = models.batch()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        chunks[0](tokens, positions, mask, labels=tokens).mean()
    return sum(tensor.nbytes for tensor in kept.values()), model


@pytest.mark.parametrize("recompute", [None, "selective"])
def test_selective_recomputation_keeps_no_attention_weights(ranks, recompute):
    from tests.distributed.models import BATCH, SEQUENCE

    kha = KHAConfig.from_preset("talking")
    batch = Batch(
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        global_batch_size=BATCH,
    )
    ((found, model),) = ranks(attention_weights_kept, 1, kha, recompute)
    setup = Setup(model=model, kha=kha, batch=batch, recompute=recompute or "none")
    rank = Rank(setup, Layout(world_size=1), 0)
    planned = estimate_memory(rank)[1].activations
    # the estimate includes the layer that the backward pass recomputes
    backward = 0 if recompute is None else estimate_kha_activations(rank)
    assert found == planned - backward


@pytest.mark.parametrize(
    ("pp", "vpp", "stage", "microbatches", "expected"),
    [
        (1, None, 0, 8, 1),
        (4, None, 0, 8, 4),
        (4, None, 3, 8, 1),
        (4, None, 0, 2, 2),
        (4, 3, 0, 8, 15),  # Korthikanti: 1 + (p - 1) / (p v) times p v passes
        (4, 3, 3, 8, 9),
    ],
)
def test_passes_in_flight(pp, vpp, stage, microbatches, expected):
    assert count_in_flight(pp, vpp, microbatches, stage) == expected
