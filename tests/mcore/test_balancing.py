"""Balancing by a bias: fixed points, convergence, and the same bits under every layout."""

from typing import NamedTuple

import pytest
import torch

from kha_megatron.mcore.balancing import compute_bias_update, violation
from tests.versions import on_this_cp_rank

UPDATES = ("sign", "rms")


@pytest.mark.parametrize("update", UPDATES)
def test_a_perfect_balance_is_the_fixed_point(update):
    loads = torch.tensor([[7.0] * 5, [0.0] * 5, [3.0] * 5])
    assert torch.equal(compute_bias_update(loads, update), torch.zeros(3, 5))
    moved = compute_bias_update(torch.tensor([7.0, 7.0, 8.0, 6.0, 7.0]), update)
    assert moved[2] < 0 < moved[3]
    assert torch.equal(moved[[0, 1, 4]], torch.zeros(3))


@pytest.mark.fast
def test_the_rms_form_is_sus_in_float64():
    loads = torch.tensor([[5.0, 0.0, 11.0, 2.0, 3.0], [1e7, 1.0, 0.0, 3.0, 1e6]])
    exact = loads.double()
    offset = exact.mean(dim=-1, keepdim=True) - exact
    expected = offset / offset.square().mean(dim=-1, keepdim=True).sqrt()
    got = compute_bias_update(loads, "rms")
    # five roundings of float32
    torch.testing.assert_close(
        got.double(),
        expected,
        rtol=5 * 2**-23,
        atol=5 * 2**-23,
    )
    torch.testing.assert_close(got.sum(dim=-1), torch.zeros(2), rtol=0, atol=1e-5)
    torch.testing.assert_close(got.square().mean(dim=-1), torch.ones(2))
    # the step for one token more is small, but a full step in the sign form
    near = torch.tensor([100.0, 100.0, 101.0, 90.0, 109.0])
    rms_step = compute_bias_update(near, "rms")[2]
    sign_step = compute_bias_update(near, "sign")[2]
    assert rms_step.abs() < 0.2
    assert sign_step == -1


SKEWED = {
    "num_moe_experts": 6,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.02,
    "moe_router_load_balancing_type": "none",
    "moe_router_dtype": "fp32",
    "moe_token_dispatcher_type": "alltoall",
    "expert_tensor_parallel_size": 1,
}
SEQUENCES = 4
STEPS = 12
MICROBATCHES = 3


def biases(layout, update, sequence_parallel=False):
    """Return the reported layers, and the loads and biases ``[STEPS, layers, E]`` on this rank.

    The weights do not change. The biases start skewed.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from kha_megatron.heads import Knock
    from kha_megatron.heads.config import HeadsConfig
    from kha_megatron.mcore.balancing import balance_experts
    from tests.distributed import models, pieces

    models.initialize(7, **layout, expert_tensor_parallel_size=1)
    config = models.transformer_config(
        **layout,
        **SKEWED,
        sequence_parallel=sequence_parallel,
    )
    model = models.gpt_model(config, HeadsConfig(Knock(value="mlp")), perturbed=False)
    ddp = [DistributedDataParallel(config, DistributedDataParallelConfig(), model)]
    pieces.fill(ddp)
    for module in model.modules():
        if hasattr(module, "expert_bias"):
            module.expert_bias.copy_(torch.linspace(-0.3, 0.3, 6))
    reported_layers = []
    reported_loads = []
    reported_biases = []

    def report(layers, loads, biases):
        reported_layers.append(layers)
        reported_loads.append(loads)
        reported_biases.append(biases)

    balance_experts(ddp, update, report)
    replicas = parallel_state.get_data_parallel_world_size()
    replica = parallel_state.get_data_parallel_rank()
    has_context_parallelism = layout.get("context_parallel_size", 1) > 1
    positions = torch.arange(models.SEQUENCE)[None].expand(1, -1)
    _, _, mask = models.batch()
    model.train()
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        shape = (SEQUENCES, models.SEQUENCE)
        tokens = torch.randint(0, models.VOCAB, shape, generator=generator)
        for sequence in tokens.chunk(replicas)[replica].split(1):
            batch = {
                "tokens": sequence,
                "position_ids": positions,
                "labels": sequence,
            }
            if has_context_parallelism:
                mask = None
                batch = on_this_cp_rank(batch, parallel_state.get_context_parallel_group())
            ddp[0](batch["tokens"], batch["position_ids"], mask, labels=batch["labels"])
        config.finalize_model_grads_func(ddp, None)
    return reported_layers[0], torch.stack(reported_loads), torch.stack(reported_biases)


LAYOUTS = {
    "tp2": ({"tensor_model_parallel_size": 2}, 2),
    "cp2": ({"context_parallel_size": 2}, 2),
    "ep2": ({"expert_model_parallel_size": 2}, 2),
    "tp2-dp2-ep2": ({"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}, 4),
}
_ALONE = {}


@pytest.mark.parametrize(
    ("name", "update"),
    [
        ("tp2", "rms"),
        ("cp2", "rms"),
        pytest.param("ep2", "sign", marks=pytest.mark.whole),
        pytest.param("tp2-dp2-ep2", "rms", marks=pytest.mark.whole),
    ],
)
def test_every_layout_moves_biases_by_the_same_bits(name, update, ranks):
    if update not in _ALONE:
        (_ALONE[update],) = ranks(biases, 1, {}, update)
    layers, loads, expected = _ALONE[update]
    assert layers == [1, 2]
    assert loads.sum(dim=-1).unique().tolist() == [SEQUENCES * 12 * 2]
    assert violation(loads[0]).min() > 1  # skewed at first, not at last: noise of 16 an expert
    assert violation(loads[-3:].sum(dim=0)).max() < 0.75
    layout, world = LAYOUTS[name]
    parallel = "tensor_model_parallel_size" in layout
    results = ranks(biases, world, layout, update, sequence_parallel=parallel)
    for layers_of_rank, loads_of_rank, biases_of_rank in results:
        assert layers_of_rank == layers
        assert torch.equal(loads_of_rank, loads)
        assert torch.equal(biases_of_rank, expected)


def signs_of_megatron(loads, bias):
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias

    parallel_state.initialize_model_parallel()
    return get_updated_expert_bias(loads, bias, 1e-3)


def test_the_sign_form_equals_megatrons_update(ranks):
    loads = torch.randint(0, 9, (3, 5)).float()
    bias = torch.randn(3, 5)
    (theirs,) = ranks(signs_of_megatron, 1, loads, bias)
    assert torch.equal(theirs, bias + 1e-3 * compute_bias_update(loads, "sign"))


def count_routed_tokens(router):
    """Return a tensor to which the router adds its routing maps in int64."""
    count = torch.zeros(6, dtype=torch.int64)

    def add(module, inputs, outputs):
        count.add_(outputs[1].sum(0))

    router.register_forward_hook(add)
    return count


class Counted(NamedTuple):
    """Tokens of each expert that a rank counted in one step, and the biases after the step."""

    counts: torch.Tensor
    """Of the routing maps in int64."""
    read: list
    """Counters of the routers on this rank."""
    read_globally: list
    """Counters of the loss over all ranks."""
    biases: torch.Tensor


def half_precision_steps(precision, update):
    """Train two steps of a model in ``Float16Module``, with the expert biases of the GPU recipes.

    Args:
        update: None for Megatron's own update, as in a stock script.

    Returns:
        A :class:`Counted` for each step, and the reported loads.
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.transformer.module import Float16Module

    from kha_megatron.heads import Knock
    from kha_megatron.heads.config import HeadsConfig
    from kha_megatron.mcore.balancing import balance_experts
    from tests.distributed import models, pieces

    models.initialize()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    options = SKEWED | GLOBAL_LOSS | {precision: True, "params_dtype": dtype}
    config = models.transformer_config(**options)
    model = models.gpt_model(config, HeadsConfig(Knock(value="mlp")), perturbed=False)
    routers = [module for module in model.modules() if hasattr(module, "expert_bias")]
    counts = [count_routed_tokens(router) for router in routers]
    wrapped = Float16Module(config, model)
    ddp = [DistributedDataParallel(config, DistributedDataParallelConfig(), wrapped)]
    pieces.fill(ddp)
    for router in routers:
        router.expert_bias.zero_()
    reported = []
    if update:
        balance_experts(ddp, update, lambda *report: reported.append(report[1].tolist()))
    steps = []
    for step in range(2):
        for microbatch in range(MICROBATCHES):
            seed = 100 * torch.distributed.get_rank() + 10 * step + microbatch
            tokens, positions, mask = models.batch(seed, size=(256, models.SEQUENCE))
            ddp[0](tokens, positions, mask, labels=tokens)
        read = [router.local_tokens_per_expert.tolist() for router in routers]
        read_globally = [router.global_tokens_per_expert.tolist() for router in routers]
        assert [router.ga_steps.item() for router in routers] == [MICROBATCHES] * 2
        counted = torch.stack(counts)
        for count in counts:
            count.zero_()
        finalize = config.finalize_model_grads_func or finalize_model_grads
        finalize(ddp, None)
        biases = torch.stack([router.expert_bias for router in routers])
        assert biases.dtype == torch.float32
        assert not any(router.local_tokens_per_expert.any() for router in routers)
        steps.append(Counted(counted, read, read_globally, biases))
    return steps, reported


GLOBAL_LOSS = {
    "moe_router_load_balancing_type": ["global_aux_loss"],
    "moe_aux_loss_coeff": [0.01],
    "hidden_dropout": 0.0,
}
"""The loss over all ranks has counters of its own."""


@pytest.mark.parametrize(
    ("precision", "update"),
    [
        ("bf16", "rms"),
        ("fp16", None),
        pytest.param("bf16", None, marks=pytest.mark.whole),
        pytest.param("fp16", "rms", marks=pytest.mark.whole),
    ],
)
def test_half_precision_models_count_exactly(ranks, precision, update):
    """The counts of Megatron's routing maps in int64 are those that move the biases.

    Bfloat16 has no odd integers above 256 and float16 none above 2048.
    """
    results = ranks(half_precision_steps, 2, precision, update)
    rate = SKEWED["moe_router_bias_update_rate"]
    expected = torch.zeros(2, 6, dtype=torch.float64)
    for step in range(2):
        loads = torch.zeros(2, 6, dtype=torch.int64)
        for steps, _ in results:
            counts = steps[step].counts
            assert steps[step].read == counts.tolist()
            loads += counts
        assert loads.sum(-1).tolist() == [2 * MICROBATCHES * 256 * 12 * 2] * 2
        assert (loads % 2).any()
        assert loads.max() > 4096
        offset = loads.double().mean(-1, keepdim=True) - loads.double()
        rms = offset.square().mean(-1, keepdim=True).sqrt()
        expected += rate * (offset / rms if update else offset.sign())
        for steps, reported in results:
            if step == 0:  # this loss ignores the biases, which are still zero here
                assert steps[step].read_globally == loads.tolist()
            # float32 of two steps of 0.02
            torch.testing.assert_close(
                steps[step].biases.double(),
                expected,
                rtol=0,
                atol=1e-8,
            )
            if update:
                assert reported[step] == loads.tolist()
