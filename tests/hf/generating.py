"""What generating promises of any model: with a cache, in pieces, and with padding."""

import torch
from transformers import DynamicCache, StaticCache

from tests.hf.conftest import tokens

NEW = 6


def greedy(model, ids, **settings):
    """``NEW`` tokens more; no end token: every sequence runs to its full length."""
    return model.generate(
        ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0, **settings
    )


def check_greedy(model, cache):
    """The same tokens with a cache (``dynamic``, ``static``) and without."""
    ids = tokens()
    without = greedy(model, ids, use_cache=False)
    assert without[:, ids.shape[1] :].unique().numel() > 3, "a constant output proves nothing"
    assert torch.equal(greedy(model, ids, cache_implementation=cache), without)


def check_pieces(model, static, lengths=(5, 2, 1, 1)):
    """The same logits in pieces with a cache, beside a sequence that is padded on the left."""
    ids = tokens(2, sum(lengths))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    if static:
        cache = StaticCache(config=model.config, max_cache_len=12)
    parts, start = [], 0
    with torch.no_grad():
        alone = [model(ids[:1, 3:]).logits[0], model(ids[1:]).logits[0]]
        for length in lengths:
            end = start + length
            parts.append(
                model(
                    ids[:, start:end],
                    attention_mask=mask[:, :end],
                    position_ids=positions[:, start:end],
                    past_key_values=cache,
                ).logits
            )
            start = end
    expected = torch.cat(alone)
    assert expected.std(dim=0).mean() > 0.3, "alike logits prove nothing"
    torch.testing.assert_close(torch.cat(parts, 1)[mask.bool()], expected, rtol=1e-5, atol=2e-5)


def check_padding(model):
    """Two prompts in one batch, the shorter padded on the left, go on as each alone."""
    short, long = (tokens(1, length).clamp(min=1) for length in (4, 7))  # 0 would be padding
    padded = torch.cat([torch.cat([torch.zeros(1, 3, dtype=torch.long), short], 1), long])
    together = greedy(model, padded, attention_mask=(padded != 0).long())[:, -NEW:]
    alone = [greedy(model, ids)[0, -NEW:] for ids in (short, long)]
    assert torch.equal(together, torch.stack(alone))
