"""Decoding with a cache, with padding, and what the cache holds."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from kha_megatron.heads import HeadSizes
from kha_megatron.hf import read_kha
from tests.hf.conftest import (
    MOE,
    every_projection,
    make_model,
    tokens,
)
from tests.hf.test_uses import NEW, greedy

MIXED = {"query": "linear", "key": "gate", "value": "mlp"}


def test_padding_on_the_left_changes_nothing():
    model = make_model(every_projection("mlp"))
    short, long = tokens(1, 4), tokens(1, 7)
    padded = torch.cat([torch.cat([torch.zeros(1, 3, dtype=torch.long), short], 1), long])
    mask = torch.ones_like(padded)
    mask[0, :3] = 0
    together = greedy(model, padded, attention_mask=mask)[:, -NEW:]
    alone = [greedy(model, ids)[0, -NEW:] for ids in (short, long)]
    assert torch.equal(together, torch.stack(alone))
    # The mask is what does it: without it the short prompt reads its padding.
    full = torch.ones_like(mask)
    with torch.no_grad():
        seen = model(padded, attention_mask=full).logits[0, -1]
        hidden = model(padded, attention_mask=mask).logits[0, -1]
    assert not torch.allclose(seen, hidden, atol=1e-3)


def test_cache_holds_the_knocked_value_and_a_step_knocks_one_token():
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
    """FLOPs of the token after ``length`` cached ones, and the bytes of the cache then."""
    cache = DynamicCache(config=model.config)
    counter = FlopCounterMode(display=False)
    with torch.no_grad():
        model(tokens(1, length), past_key_values=cache)
        with counter:
            model(tokens(1, 1), past_key_values=cache)
    return counter.get_total_flops(), sum(
        layer.keys.nbytes + layer.values.nbytes for layer in cache.layers
    )


# The counter knows eager attention's products and not those of the CPU's fused one.
@pytest.mark.parametrize("moe", [{}, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("kha", [{"value": "mlp"}, every_projection("linear"), MIXED])
def test_a_step_costs_the_knock_of_one_token_more_and_the_cache_nothing(kha, moe):
    knocked = make_model(kha, attention="eager", **moe)
    baseline = make_model(attention="eager", **moe)
    layers, heads, groups = 3, 6, 3
    added = layers * read_kha(knocked.config).flops(
        HeadSizes(query_heads=heads, kv_heads=groups, head_dim=10)
    )
    assert added > 0
    steps = {length: decoding_step(baseline, length) for length in (5, 40)}
    assert steps[40][0] > steps[5][0], "attention itself must be counted"
    for length, (flops, size) in steps.items():
        assert size == layers * 2 * groups * 10 * 4 * (length + 1)
        assert decoding_step(knocked, length) == (flops + added, size)
