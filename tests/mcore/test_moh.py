"""Mixture-of-Head attention compared with the float64 oracle on one rank and on several.

The balance weight is 5 throughout: at the 0.01 of the paper a load-balance loss that counts twice
moves no gradient by more than 1e-4. Each rule for gradients and choices is taken out once, and the
same comparison must then fail.
"""

from unittest import mock

import pytest
import torch

from kha_megatron.errors import ConfigError
from kha_megatron.heads import Knock
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.heads.gate import Gate
from kha_megatron.heads.moh import MixtureOfHeads
from tests.mcore import sharded_layer
from tests.mcore.sharded_layer import build, differences, draw

HEADS = 8
SIZES = sharded_layer.SIZES | {"num_attention_heads": HEADS, "num_query_groups": 2}


def moh(**settings):
    return MixtureOfHeads(**{"shared": 3, "active": 2, "balance": 5.0} | settings)


LEARNED = moh()
NORMS = moh(router="query_norm")
QUANTIZED = moh(router="query_norm", quantized=True)
KINDS = (
    HeadsConfig(LEARNED),
    HeadsConfig(moh(scale="paper", balance_scale="paper")),
    HeadsConfig(moh(quantized=True)),
    HeadsConfig(NORMS),
    HeadsConfig(moh(router="query_norm", scale="paper", balance_scale="paper")),
    HeadsConfig(Knock(query="mlp"), QUANTIZED),
    HeadsConfig(Knock(value="linear"), moh(active=[5, 1])),
    HeadsConfig(Knock(query="linear", value="mlp"), moh(shared=None, active=None, share=0.75)),
)
GATED = HeadsConfig(NORMS, Gate(query="head", value="element", output="shared"))


@pytest.mark.fast
def test_equals_the_oracle(ranks):
    for kha in KINDS:
        assert not differences(ranks, kha, **SIZES), kha


@pytest.mark.parametrize(("tp", "sp"), [(2, False), pytest.param(4, True, marks=pytest.mark.whole)])
def test_equals_the_oracle_on_ranks(ranks, tp, sp):
    """At TP 4 there are fewer key/value heads than ranks."""
    for kha in KINDS:
        assert not differences(ranks, kha, tp, sp, **SIZES), kha
    assert not differences(ranks, GATED, tp, sp, qk_layernorm=False, **SIZES)


def outside_of_megatrons_loop():
    layer, options = build(HeadsConfig(moh(anneal=3)), 1, False, 7, SIZES)
    trained, _ = build(HeadsConfig(moh()), 1, False, 7, SIZES)
    hidden, _ = draw(7)
    with torch.no_grad():
        outputs = [x(hidden, None, **options)[0] for x in (layer, trained)]
    assert torch.equal(*outputs)
    with pytest.raises(ConfigError, match=r"moh\.anneal requires"):
        layer(hidden, None, **options)


def test_annealing_needs_counted_iterations_in_training_and_none_in_inference(ranks):
    ranks(outside_of_megatrons_loop, 1)


def _projected(self, hidden, weight):
    """Return the output of a router's projection with another weight."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    scores = torch.nn.functional.linear(hidden, weight)
    if not self.config.sequence_parallel:
        return scores
    return gather_from_sequence_parallel_region(
        scores,
        tensor_parallel_output_grad=False,
        group=self.tp_group,
    )


def with_the_knocks_rule_on_the_router():
    from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

    from kha_megatron.mcore.head_inputs import InputProjection

    def forward(self, hidden):
        weight = copy_to_tensor_model_parallel_region(self.weight, group=self.tp_group)
        return _projected(self, hidden, weight)

    return mock.patch.object(InputProjection, "forward", forward)


def without_the_sum_over_parts_of_the_sequence():
    from kha_megatron.mcore.head_inputs import InputProjection

    return mock.patch.object(
        InputProjection, "forward", lambda self, hidden: _projected(self, hidden, self.weight)
    )


def with_whole_gradients_reduced_and_scattered():
    from kha_megatron.mcore import head_inputs

    gather = head_inputs.gather_from_sequence_parallel_region

    def summing(x, tensor_parallel_output_grad=True, group=None):
        return gather(x, tensor_parallel_output_grad=True, group=group)

    return mock.patch.object(head_inputs, "gather_from_sequence_parallel_region", summing)


def with_slices_in_place_of_scattered_weights():
    from kha_megatron.mcore.head_ranks import HeadRanks

    return mock.patch.object(
        HeadRanks, "own_heads", lambda self, x: x.chunk(self.tp.size(), -1)[self.tp.rank()]
    )


def with_each_rank_choosing_of_its_own_heads():
    from megatron.core import parallel_state

    from kha_megatron.heads import moh

    route = moh.route

    def local(scores, *settings):
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        each = HEADS // ranks
        rank = parallel_state.get_tensor_model_parallel_rank()
        mine = torch.zeros(scores.shape[-1], dtype=torch.bool)
        mine[rank * each : (rank + 1) * each] = True
        mine[:3] = mine[HEADS:] = True  # shared heads and kinds are no choice
        return route(scores.masked_fill(~mine, -1e9), *settings)

    return mock.patch.object(moh, "route", local)


@pytest.mark.parametrize(
    ("mutate", "routing", "tp", "sp", "caught"),
    [
        (with_the_knocks_rule_on_the_router, LEARNED, 2, False, "moh_router.weight"),
        (without_the_sum_over_parts_of_the_sequence, LEARNED, 2, True, "replicas of moh_router"),
        (with_whole_gradients_reduced_and_scattered, LEARNED, 2, True, "moh_router.weight"),
        (with_slices_in_place_of_scattered_weights, LEARNED, 2, False, "replicas of "),
        # at TP 2 a rank has all of the routed heads, and is right by accident
        (with_slices_in_place_of_scattered_weights, NORMS, 4, False, "input gradient"),
        (with_each_rank_choosing_of_its_own_heads, LEARNED, 2, False, "replicas of "),
    ],
)
def test_without_a_rule_the_comparison_fails(ranks, mutate, routing, tp, sp, caught):
    right, wrong = (
        differences(ranks, HeadsConfig(routing), tp, sp, mutate=change, **SIZES)
        for change in (None, mutate)
    )
    assert not right
    assert caught in wrong, wrong
