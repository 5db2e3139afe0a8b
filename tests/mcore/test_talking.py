"""Talking heads against the float64 oracle on any number of ranks, and bit for bit at their start.

Tolerance: results travel in float32, and Megatron's rotary frequencies are float32 too.
"""

from contextlib import ExitStack, contextmanager

import pytest
import torch

from kha_megatron.config import KHAConfig
from kha_megatron.errors import ConfigError
from kha_megatron.heads import HeadFacts, TalkingHeads
from tests import oracle
from tests.mcore import sharded_layer
from tests.mcore.test_attention import identity_outputs

BOTH = KHAConfig(talking=TalkingHeads())
TOLERANCE = 1e-6

SOME = [(2, False, 8), (2, True, 1), (4, False, 2)]
"""Tensor-parallel ranks, sequence parallelism, key/value heads."""
ALL = [
    pytest.param(tp, sp, groups, marks=pytest.mark.whole)
    for tp in (2, 4)
    for sp in (False, True)
    for groups in (8, 4, 2, 1)
    if (tp, sp, groups) not in SOME
]


def twin(groups, head_dim):
    def layer(hidden, weights):
        blocks = weights["linear_qkv.weight"].view(groups, -1, head_dim, sharded_layer.HIDDEN)
        query, key, value = blocks[:, :-2], blocks[:, -2], blocks[:, -1]
        return oracle.mixed_attention(
            hidden,
            *(x.reshape(-1, sharded_layer.HIDDEN).T for x in (query, key, value)),
            weights["linear_proj.weight"].T,
            num_query_groups=groups,
            pre=weights.get("talking_pre.weight"),
            post=weights.get("talking_post.weight"),
            q_norm=weights.get("q_layernorm.weight"),
            k_norm=weights.get("k_layernorm.weight"),
            rotary_base=sharded_layer.BASE,
        )

    return layer


def wrong(ranks, kha, tp, sp, groups, qk_norm=False, mutate=None):
    """What differs from the oracle, and by how much; or what ranks disagree on."""
    heads, head_dim, tokens = (6, 10, 7) if tp == 1 else (8, 6, 12 if sp else 7)
    sizes = {
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": head_dim,
        "qk_layernorm": qk_norm,
    }
    parts = ranks(sharded_layer.on_rank, tp, kha, tp, sp, tokens, sizes, mutate)
    try:
        found = sharded_layer.errors(
            sharded_layer.put_together(parts, tokens), twin(groups, head_dim)
        )
    except AssertionError as difference:
        return str(difference)
    mixings = len(kha.talking.mixings)
    assert len(found) == 4 + mixings + 2 * qk_norm, sorted(found)
    return {name: error for name, error in found.items() if not error < TOLERANCE}


@pytest.mark.parametrize(
    ("talking", "groups"),
    [(TalkingHeads(), 3), (TalkingHeads(post=False), 6), (TalkingHeads(pre=False), 1)],
    ids=str,
)
def test_equals_the_oracle(ranks, talking, groups):
    assert not wrong(ranks, KHAConfig(talking=talking), 1, False, groups, qk_norm=groups == 3)


@pytest.mark.parametrize(("tp", "sp", "groups"), SOME + ALL)
def test_equals_the_oracle_on_ranks(ranks, tp, sp, groups):
    """Seven query tokens on two and four ranks, and fewer key/value heads than ranks."""
    assert not wrong(ranks, BOTH, tp, sp, groups)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_starts_as_ordinary_attention_bit_for_bit(ranks, dtype):
    stock, baseline, talking = ranks(identity_outputs, 1, BOTH, dtype, {})[0]
    assert torch.equal(stock, baseline)
    assert torch.equal(stock, talking)


@contextmanager
def replaced(owner, **names):
    kept = {name: getattr(owner, name) for name in names}
    for name, value in names.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(owner, name, value)


def mixed_after_the_mask():
    from kha_megatron.heads.talking import mix_heads

    def attend(self, query, key, value, weights, *, scale, mask, dropout):
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        logits = (scale * query @ key.mT).masked_fill(mask, -torch.inf)
        scores = mix_heads(logits, weights["talking_pre"]).softmax(-1)
        return mix_heads(scores, weights["talking_post"]) @ value, None

    return replaced(TalkingHeads, attend=attend)


def mixed_among_own_heads():
    from megatron.core import parallel_state

    from kha_megatron.mcore import talking

    attend, rank = TalkingHeads.attend, parallel_state.get_tensor_model_parallel_rank()

    def of_own(self, query, key, value, weights, **options):
        own = slice(rank * query.shape[1], (rank + 1) * query.shape[1])
        weights = {name: weight[own, own] for name, weight in weights.items()}
        return attend(self, query, key, value, weights, **options)

    stack = ExitStack()
    stack.enter_context(replaced(TalkingHeads, attend=of_own))
    stack.enter_context(
        replaced(
            talking.TalkingAttention,
            _shard_queries=lambda self, x: x,
            _shard_heads=lambda self, x, queries: x.flatten(2),
            _all_heads=lambda self, x: x,
            _mask=lambda self, given, causal, queries, keys: torch.ones(
                queries, keys, dtype=torch.bool
            ).triu(1),
        )
    )
    return stack


def matrices_not_summed():
    from kha_megatron.mcore import knocking

    return replaced(
        knocking, copy_to_tensor_model_parallel_region=lambda weight, group=None: weight
    )


def keys_not_summed():
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region as gather

    from kha_megatron.mcore import talking

    return replaced(talking, all_gather_last_dim_from_tensor_parallel_region=gather)


def test_what_is_mixed_after_the_mask_is_not_a_number(ranks):
    assert wrong(ranks, BOTH, 1, False, 3, mutate=mixed_after_the_mask) == "not finite"


def test_without_all_heads_on_a_rank_heads_talk_to_their_neighbours_only(ranks):
    assert "output" in wrong(ranks, BOTH, 2, True, 4, mutate=mixed_among_own_heads)


@pytest.mark.parametrize("sp", [False, True])
def test_without_the_sum_over_query_tokens_replicas_drift(ranks, sp):
    found = wrong(ranks, BOTH, 2, sp, 4, mutate=matrices_not_summed)
    assert "replicas of" in found
    assert "talking_" in found


def test_without_the_sum_over_ranks_that_ask_keys_learn_from_a_part(ranks):
    found = wrong(ranks, BOTH, 2, True, 4, mutate=keys_not_summed)
    assert "linear_qkv.weight" in found
    assert "output" not in found


def refusals_of_a_layer():
    layer, _ = sharded_layer.build(BOTH, 1, False, 7, {})
    short = KHAConfig(talking=TalkingHeads(max_tokens=6))
    with pytest.raises(ConfigError, match=r"max_tokens=6 tokens, got 7.*talking.max_tokens=7"):
        sharded_layer.on_rank(short, 1, False, 7, {})
    with pytest.raises(ConfigError, match="do not support packed sequences"):
        layer.core_attention(None, None, None, None, packed_seq_params=object())
    with pytest.raises(ConfigError, match=r"does not support dynamic batching.* static batching"):
        layer.flash_decode_and_prefill(None, None, None, None)


def test_long_or_packed_sequences_and_dynamic_batches_are_refused(ranks):
    ranks(refusals_of_a_layer, 1)


def test_longer_sequences_are_refused_before_anything_is_built():
    kha = KHAConfig(talking=TalkingHeads())
    with pytest.raises(ConfigError, match=r"talking.max_tokens=2048 tokens, got 4096"):
        kha.check(HeadFacts(tokens=4096))
    asked = KHAConfig.from_options({"heads": ["talking.max_tokens=4096"]})
    asked.check(HeadFacts(tokens=4096))
    assert KHAConfig.from_options(asked.to_options()).talking.max_tokens == 4096
    assert asked == kha  # how it is run, not what it is


@pytest.mark.parametrize(
    "settings", [{"pre": False, "post": False}, {"pre": 1}, {"max_tokens": -1}], ids=str
)
def test_settings_that_mean_nothing_are_refused(settings):
    with pytest.raises(ConfigError, match="talking"):
        TalkingHeads(**settings)
