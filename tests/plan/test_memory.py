"""The estimated memory against models that Megatron builds, rank by rank.

Parameters and optimizer states are compared exactly. Gradient buffers are longer than the gradients
by Megatron's padding, at most 64 elements a parameter and one unit of 128 and the replicas a
bucket. Activations: what autograd keeps for KHA, exactly; Megatron's local modules differ from the
Transformer Engine modules that the rest of the estimate assumes, so that is not compared here.
"""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from kha_megatron.heads import Knock
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.heads.knock import MATRICES
from kha_megatron.model.layout import Batch, Layout
from kha_megatron.model.megatron import model_from_config
from kha_megatron.plan.counts import count_parameters
from kha_megatron.plan.memory import (
    _estimate_attention_activations,
    count_in_flight,
    estimate_kha_activations,
    estimate_memory,
    order_forward_passes,
)
from kha_megatron.plan.rank import Rank, Setup
from tests.plan.built import EXPERTS, MIXED, OTHERS, built

MIXED_LAYERS = {**EXPERTS, "num_layers": 4, "moe_layer_freq": [0, 1, 1, 0]}


def sizes(world, layout, overrides):
    """Return the stage of this rank, the sizes of its tensors, and the model."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    overrides = {"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16} | overrides
    chunks, config, model, stage = built(layout, MIXED, bf16=True, **overrides)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
    )
    counts = Counter()
    wrapped = []
    for chunk in chunks:
        half = Float16Module(config, chunk)
        for name, parameter in half.named_parameters():
            counts["count"] += 1
            counts["weights"] += parameter.nbytes
            counts["experts" if ".experts." in name else "dense"] += parameter.numel()
            if ".knock_" in name:
                counts["kha"] += parameter.numel()
        wrapped.append(DistributedDataParallel(config, ddp_config, half))
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
    for ddp in wrapped:
        for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers):
            counts["gradients"] += buffer.grad_data.nbytes
            counts["buckets"] += len(buffer.buckets)
    for chained in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in chained.shard_fp32_from_float16_groups:
            counts["main"] += sum(shard.numel() for shard in group if shard is not None)
    for ddp in wrapped:
        vars(ddp).clear()
    return stage, counts, model


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
    states_of_stage = Counter()
    planned_states_of_stage = Counter()
    for stage, counts, model in answers:
        planned = count_parameters(model, layout, stage)
        assert planned.dense == counts["dense"]
        assert planned.experts == counts["experts"]
        assert planned.kha == counts["kha"]
        setup = Setup(model=model, batch=batch)
        rest, of_kha = estimate_memory(Rank(setup, layout, stage))
        assert rest.weights + of_kha.weights == counts["weights"]
        unit = math.lcm(128, layout.dp * layout.cp, layout.expert_dp)
        padding = 4 * (64 * counts["count"] + unit * counts["buckets"])
        assert 0 <= counts["gradients"] - rest.gradients - of_kha.gradients <= padding
        states = 12 * counts["main"]
        planned_states = rest.optimizer + of_kha.optimizer
        # a rank's shard is its part of the padded buffers, which ends may leave shorter
        assert abs(states - planned_states) <= 3 * padding
        states_of_stage[stage] += states
        planned_states_of_stage[stage] += planned_states
    for stage, states in states_of_stage.items():
        assert states == pytest.approx(planned_states_of_stage[stage])


def parameter_counts(layout, overrides):
    """Return the parameters of this rank for each of several mechanisms, and the planned number."""
    counts = []
    for kha in OTHERS:
        if kha.own_projections and overrides.get("add_qkv_bias"):
            continue  # refused
        chunks, _, model, stage = built(layout, kha, **overrides)
        parameters = 0
        for chunk in chunks:
            parameters += sum(parameter.numel() for parameter in chunk.parameters())
        planned = count_parameters(model, layout, stage).total
        counts.append((str(kha), parameters, planned))
    return counts


@pytest.mark.parametrize("biases", [{}, {"add_qkv_bias": True}])
def test_other_heads_are_counted_with_fewer_groups_than_ranks(ranks, biases):
    """Counts rows of ``linear_qkv`` with their padding, and projections of a mechanism's own."""
    layout = Layout(tp=4, sequence_parallel=True, world_size=4)
    overrides = {"num_query_groups": 2} | biases
    for rank in ranks(parameter_counts, 4, layout, overrides):
        for kha, parameters, planned in rank:
            assert planned == parameters, kha


def kept_by_autograd(layout, kha, qk_norm):
    """Return the bytes of distinct activations that autograd keeps in the knocking modules."""
    from kha_megatron.mcore.knocking import KnockingHeads
    from tests.distributed import models

    overrides = {"params_dtype": torch.bfloat16, "bf16": True, "num_layers": 1}
    chunks, _, model, _ = built(layout, kha, qk_layernorm=qk_norm, **overrides)
    kept = {}
    weights = set()
    for name, parameter in chunks[0].named_parameters():
        if ".knock_" in name:
            weights.add(parameter.untyped_storage().data_ptr())
    forward = KnockingHeads.forward

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.data_ptr(), tensor.nbytes] = tensor  # alive, so that no address returns
        return tensor

    def watched(self, *inputs):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return forward(self, *inputs)

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
MORE = [(HeadsConfig(Knock(value=variant)), Layout(), True) for variant in MATRICES]


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
        setup = Setup(model=model, batch=batch, precision="bf16")
        assert found == estimate_kha_activations(Rank(setup, layout, 0))


def attention_weights_kept(kha, recompute):
    """Return the bytes that autograd keeps of tensors with an element per head, query and key."""
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

    kha = HeadsConfig.from_preset("talking")
    batch = Batch(
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        global_batch_size=BATCH,
    )
    ((found, model),) = ranks(attention_weights_kept, 1, kha, recompute)
    setup = Setup(model=model, batch=batch, recompute=recompute or "none")
    rank = Rank(setup, Layout(world_size=1), 0)
    _, of_kha = estimate_memory(rank)
    expected = of_kha.activations
    if recompute is not None:
        # the estimate includes the layer that the backward pass recomputes
        expected -= estimate_kha_activations(rank)
    assert found == expected


def layer_inputs_kept(pairs):
    """Return the bytes of layer inputs that a HybridModel keeps if it recomputes all layers."""
    from tests.distributed import models

    models.initialize()
    config = models.transformer_config(
        num_layers=2 * pairs,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    )
    model = models.hybrid_model(config, MIXED, pattern="*-" * pairs)
    shape = (models.SEQUENCE, models.BATCH, config.hidden_size)
    kept = {}

    def keep(tensor):
        if tensor.shape == shape:
            kept[tensor.data_ptr()] = tensor  # alive, so that no address returns
        return tensor

    tokens, positions, mask = models.batch()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(tokens, positions, mask, labels=tokens).mean()
    model_of_pairs = replace(
        model_from_config(config, MIXED),
        num_layers=pairs,
        padded_vocab_size=models.VOCAB,
    )
    return sum(tensor.nbytes for tensor in kept.values()), model_of_pairs


def test_full_recomputation_keeps_the_inputs_of_attention_and_mlp(ranks):
    from tests.distributed.models import BATCH, SEQUENCE

    batch = Batch(seq_length=SEQUENCE, micro_batch_size=BATCH, global_batch_size=BATCH)
    found = []
    planned = []
    for pairs in (2, 4):
        ((kept, model),) = ranks(layer_inputs_kept, 1, pairs)
        found.append(kept)
        setup = Setup(model=model, batch=batch, precision="fp32", recompute="full")
        memory, _ = estimate_memory(Rank(setup, Layout(world_size=1), 0))
        planned.append(memory.activations)
    assert found[1] - found[0] == planned[1] - planned[0] > 0


class FlashLike(torch.autograd.Function):
    """Saves what flash attention saves: queries, keys, values and output, ``[s, b, heads, *]``."""

    @staticmethod
    def forward(ctx, query, key, value):
        groups = query.shape[2] // value.shape[2]
        output = value.repeat_interleave(groups, dim=2).clone()
        ctx.save_for_backward(query, key, value, output)
        return output.flatten(2)


def attention_kept(kha, overrides):
    """Return the bytes of distinct activations that autograd keeps in an attention module."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from tests.distributed import models

    overrides = {"params_dtype": torch.bfloat16, "bf16": True, "num_layers": 1} | overrides
    chunks, _, model, _ = built(Layout(), kha, **overrides)
    kept = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in chunks[0].parameters()}

    def keep(tensor):
        is_weight = tensor.untyped_storage().data_ptr() in weights
        # not what local norms and RoPE keep in float32, unlike those of Transformer Engine
        is_activation = tensor.dim() > 2 and tensor.dtype == torch.bfloat16
        if is_activation and tensor.shape[1] == models.BATCH and not is_weight:
            kept[tensor.data_ptr(), tensor.nbytes] = tensor  # alive, so that no address returns
        return tensor

    attention = chunks[0].decoder.layers[0].self_attention
    forward = attention.forward

    def watched(*inputs, **options):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return forward(*inputs, **options)

    def flash(self, query, key, value, *inputs, **options):
        return FlashLike.apply(query, key, value)

    attention.forward = watched
    dot_product = DotProductAttention.forward
    DotProductAttention.forward = flash
    try:
        tokens, positions, mask = models.batch()
        chunks[0](tokens, positions, mask, labels=tokens).mean()
    finally:
        DotProductAttention.forward = dot_product
    return sum(tensor.nbytes for tensor in kept.values()), model


@pytest.mark.parametrize(
    ("kha", "overrides"),
    [
        (HeadsConfig(), {"multi_latent_attention": True}),
        (HeadsConfig(), {}),
    ],
    ids=["mla", "gqa"],
)
def test_what_autograd_keeps_for_attention(ranks, kha, overrides):
    from tests.distributed.models import BATCH, SEQUENCE

    batch = Batch(
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        global_batch_size=BATCH,
    )
    ((found, model),) = ranks(attention_kept, 1, kha, overrides)
    # without the input of the norm before attention, and the log-sum-exp
    setup = Setup(model=model, batch=batch, recompute="selective")
    rank = Rank(setup, Layout(world_size=1), 0)
    planned = _estimate_attention_activations(rank)
    planned -= rank.tokens * rank.token_bytes
    # local norms keep their inputs in float32, which we did not count
    norm_features = model.head_dim * (model.num_attention_heads + model.num_query_groups)
    if model.multi_latent_attention:
        norm_features = model.q_lora_rank + model.kv_lora_rank
    planned -= rank.tokens * norm_features * rank.element_size
    assert found == planned


class Pipeline:
    """What Megatron's schedule reads of a ``P2PCommunicator`` and its process group."""

    def __init__(self, layout, stage):
        self.virtual_pipeline_model_parallel_size = layout.vpp
        self.pp_group = self
        self.size = lambda: layout.pp
        self.rank = lambda: stage


@pytest.mark.parametrize(
    ("pp", "vpp", "group", "microbatches", "expected"),
    [
        (4, None, None, 8, 4),
        (4, None, None, 2, 2),
        (4, 3, None, 8, 15),  # Korthikanti: 1 + (p - 1) / (p v) times p v passes
        (4, 3, 16, 32, 39),
        (4, 3, 16, 24, 39),  # the second group is shorter
        (4, 3, 16, 4, 12),  # and so is the only one
    ],
)
def test_passes_in_flight_are_those_of_megatron(pp, vpp, group, microbatches, expected):
    from megatron.core.pipeline_parallel import schedules

    layout = Layout(pp=pp, vpp=vpp, microbatch_group=group)
    assert count_in_flight(layout, microbatches, 0) == expected
    chunks = vpp or 1
    for stage in range(pp):
        _, _, warm_up, remaining = schedules.get_pp_rank_microbatches(
            microbatches,
            chunks,
            group or pp,
            p2p_communicator=Pipeline(layout, stage),
        )
        in_flight = warm_up + min(remaining, 1)
        assert count_in_flight(layout, microbatches, stage) == in_flight
    table = schedules.get_schedule_table(microbatches, chunks, group or pp)
    assert list(order_forward_passes(layout, microbatches)) == [chunk for _, chunk in table]


def test_a_single_stage_has_one_pass_in_flight():
    assert count_in_flight(Layout(), 8, 0) == 1
