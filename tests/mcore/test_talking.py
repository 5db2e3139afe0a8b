"""Talking heads compared with the float64 oracle on one rank and on several."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from kha_megatron.errors import ConfigError
from kha_megatron.heads import TalkingHeads
from kha_megatron.heads.config import HeadsConfig
from tests.mcore import sharded_layer
from tests.mcore.sharded_layer import differences

BOTH = HeadsConfig(TalkingHeads())
WITHOUT_NORM = {"kv_channels": 6, "qk_layernorm": False}

SOME = [(2, False, 8), (2, True, 1), (4, False, 2)]
"""Tensor-parallel ranks, sequence parallelism, key/value heads."""
ALL = [
    pytest.param(tp, sp, groups, marks=pytest.mark.whole)
    for tp in (2, 4)
    for sp in (False, True)
    for groups in (8, 4, 2, 1)
    if (tp, sp, groups) not in SOME
]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("talking", "groups"),
    [(TalkingHeads(), 3), (TalkingHeads(post=False), 6), (TalkingHeads(pre=False), 1)],
    ids=str,
)
def test_equals_the_oracle(ranks, talking, groups):
    normed = groups == 3
    kha = HeadsConfig(talking)
    assert not differences(ranks, kha, num_query_groups=groups, qk_layernorm=normed)


@pytest.mark.parametrize(("tp", "sp", "groups"), SOME + ALL)
def test_equals_the_oracle_on_ranks(ranks, tp, sp, groups):
    """Seven query tokens on two and four ranks, and fewer key/value heads than ranks."""
    assert not differences(ranks, BOTH, tp, sp, num_query_groups=groups, **WITHOUT_NORM)


def mixed_after_the_mask():
    from kha_megatron.heads.talking import mix_heads

    def attend(self, query, key, value, weights, *, scale, mask, dropout):
        heads_of_group = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(heads_of_group, 1)
        value = value.repeat_interleave(heads_of_group, 1)
        logits = (scale * query @ key.mT).masked_fill(mask, -torch.inf)
        scores = mix_heads(logits, weights["talking_pre"]).softmax(-1)
        return mix_heads(scores, weights["talking_post"]) @ value, None

    return mock.patch.object(TalkingHeads, "attend", attend)


@contextmanager
def mixed_among_own_heads():
    from megatron.core import parallel_state

    from kha_megatron.mcore.all_heads import AllHeadsAttention

    attend = TalkingHeads.attend
    rank = parallel_state.get_tensor_model_parallel_rank()

    def of_own(self, query, key, value, weights, **options):
        own = slice(rank * query.shape[1], (rank + 1) * query.shape[1])
        weights = {name: weight[own, own] for name, weight in weights.items()}
        return attend(self, query, key, value, weights, **options)

    unsharded = {
        "_shard_queries": lambda self, x: x,
        "_shard_heads": lambda self, x, queries: x.flatten(2),
        "_all_heads": lambda self, x: x,
        "_shard_mask": lambda self, mask, queries: mask,
    }
    with (
        mock.patch.object(TalkingHeads, "attend", of_own),
        mock.patch.multiple(AllHeadsAttention, **unsharded),
    ):
        yield


def matrices_not_summed():
    from kha_megatron.mcore import knocking

    return mock.patch.object(
        knocking, "copy_to_tensor_model_parallel_region", lambda weight, group=None: weight
    )


def keys_not_summed():
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region as gather

    from kha_megatron.mcore import all_heads

    return mock.patch.object(all_heads, "all_gather_last_dim_from_tensor_parallel_region", gather)


def test_mixing_after_the_mask_gives_nan(ranks):
    assert not differences(ranks, BOTH)
    assert differences(ranks, BOTH, mutate=mixed_after_the_mask) == "not finite"


@pytest.mark.parametrize(
    ("mutate", "sp", "words"),
    [
        (mixed_among_own_heads, True, ["output"]),
        (matrices_not_summed, False, ["replicas of", "talking_"]),
        (matrices_not_summed, True, ["replicas of", "talking_"]),
        (keys_not_summed, True, ["linear_qkv.weight"]),
    ],
)
def test_without_a_rule_the_comparison_fails(ranks, mutate, sp, words):
    assert not differences(ranks, BOTH, 2, sp, **WITHOUT_NORM)
    found = differences(ranks, BOTH, 2, sp, mutate=mutate, **WITHOUT_NORM)
    assert all(word in found for word in words), found
    if mutate is keys_not_summed:
        assert "output" not in found


def refusals_of_a_layer():
    layer, _ = sharded_layer.build(BOTH, 1, False, 7, sharded_layer.SIZES)
    with pytest.raises(ConfigError, match="does not support packed sequences"):
        layer.core_attention(None, None, None, None, packed_seq_params=object())
    with pytest.raises(ConfigError, match=r"does not support dynamic batching.* static batching"):
        layer.flash_decode_and_prefill(None, None, None, None)


def test_packed_sequences_and_dynamic_batches_are_refused(ranks):
    ranks(refusals_of_a_layer, 1)
