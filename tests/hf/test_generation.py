"""Decoding with a cache, with padding, and what the cache holds."""

import pytest
import torch
from transformers import DynamicCache

from tests.hf.conftest import MOE, every_projection, make_model, tokens

NEW = 6
MIXED = {"query": "linear", "key": "gate", "value": "mlp"}


def greedy(model, ids, **settings):
    # No end token: every sequence runs to its full length.
    return model.generate(
        ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0, **settings
    )


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("moe", [{}, MOE], ids=["dense", "moe"])
def test_greedy_with_and_without_cache_agree(moe, cache):
    model = make_model(MIXED, initializer_range=0.5, **moe)
    ids = tokens()
    without = greedy(model, ids, use_cache=False)
    assert without.shape == (2, ids.shape[1] + NEW)
    assert without[:, ids.shape[1] :].unique().numel() > 3, "a constant output proves nothing"
    assert torch.equal(greedy(model, ids, cache_implementation=cache), without)


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


@pytest.mark.parametrize("moe", [{}, MOE], ids=["dense", "moe"])
def test_gradient_checkpointing_gives_the_same_gradients(moe):
    ids = tokens()
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(1)
        model = make_model(MIXED, **moe).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        runs = []
        model.model.layers[0].self_attn.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        model(ids, labels=ids).loss.backward()
        assert len(runs) == (2 if checkpointing else 1)
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    plain, recomputed = gradients
    assert all(grad is not None and grad.abs().max() > 0 for grad in plain.values())
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)
