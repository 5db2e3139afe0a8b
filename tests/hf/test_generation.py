"""Content of the cache, and the cost of a decoding step."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from kha_megatron.heads import HeadSizes
from kha_megatron.hf import read_kha
from tests.hf.conftest import MIXED, MOE, make_model, tokens


def test_the_cache_holds_knocked_values_and_a_step_knocks_one_token():
    model = make_model({"value": "mlp"})
    attention = model.model.layers[1].self_attn
    knocked = []
    attention.v_knock.register_forward_hook(lambda _m, _x, y: knocked.append(y))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens(1, 7), past_key_values=cache)
        model(tokens(1, 1), past_key_values=cache)
    assert [y.shape[1] for y in knocked] == [7, 1]
    stored = cache.layers[1].values
    assert torch.equal(stored, torch.cat(knocked, 1).transpose(1, 2))


def decoding_step(model, length: int) -> tuple[int, int]:
    """Return the FLOPs of the token after ``length`` cached ones, and the bytes of the cache."""
    cache = DynamicCache(config=model.config)
    counter = FlopCounterMode(display=False)
    with torch.no_grad():
        model(tokens(1, length), past_key_values=cache)
        with counter:
            model(tokens(1, 1), past_key_values=cache)
    return counter.get_total_flops(), sum(
        layer.keys.nbytes + layer.values.nbytes for layer in cache.layers
    )


# The FLOP counter does not support the CPU's fused attention.
@pytest.mark.parametrize("moe", [{}, MOE], ids=["dense", "moe"])
def test_a_step_adds_the_flops_of_one_knocked_token_and_no_cache(moe):
    knocked = make_model(MIXED, attention="eager", **moe)
    baseline = make_model(attention="eager", **moe)
    layers, heads, groups = 3, 6, 3
    added = layers * read_kha(knocked.config).flops(
        HeadSizes(query_heads=heads, kv_heads=groups, head_dim=10)
    )
    assert added > 0
    steps = {length: decoding_step(baseline, length) for length in (5, 40)}
    assert steps[40][0] > steps[5][0]
    for length, (flops, size) in steps.items():
        assert size == layers * 2 * groups * 10 * 4 * (length + 1)
        assert decoding_step(knocked, length) == (flops + added, size)
