"""Heads whose keys are wider or narrower than their values, under every attention backend."""

import pytest
import torch
from transformers.integrations import flash_attention

from tests.hf.conftest import LATENT, LINEAR, make_model, tokens

ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.4}
NARROW = {"kha_collaborative": {"dim": 6}, "rope_parameters": ROPE}
COLLABORATIVE = {"kha_gate": {"output": "head", "value": "element"}}
CASES = {
    "mla, narrower values": (LINEAR, LATENT | {"q_lora_rank": 9, "v_head_dim": 6}),
    "mla, wider values": (LINEAR, LATENT | {"q_lora_rank": 9, "v_head_dim": 14}),
    "gla, narrower values": (LINEAR, LATENT | {"v_head_dim": 6, "kha_attention": "gla"}),
    "collaborative, narrower values": ({}, COLLABORATIVE | {"kha_collaborative": {"dim": 14}}),
    "collaborative, wider values": ({}, COLLABORATIVE | NARROW),
}


def flash(query, key, value, mask, *, softmax_scale, is_causal, **ignored):
    """What transformers calls the kernels of flash-attn with, ``[B, S, heads, D]``, which refuse
    values of another width; there are none for a CPU."""
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert mask is None
    assert is_causal
    output = torch.nn.functional.scaled_dot_product_attention(
        *(part.transpose(1, 2) for part in (query, key, value)),
        is_causal=True,
        scale=softmax_scale,
        enable_gqa=True,
    )
    return output.transpose(1, 2)


@pytest.mark.parametrize("backend", ["sdpa", "flash_attention_2"])
@pytest.mark.parametrize("name", CASES)
def test_backends_agree_with_eager_attention(name, backend, monkeypatch):
    kha, sizes = CASES[name]
    model, ids = make_model(kha, attention="eager", **sizes), tokens()
    with torch.no_grad():
        expected = model(ids).logits
        calls = []
        monkeypatch.setattr(
            flash_attention,
            "_flash_attention_forward",
            lambda *args, **words: calls.append(1) or flash(*args, **words),
        )
        model.config._attn_implementation = backend  # asked for by name, it wants the package
        found = model(ids, use_cache=False).logits
    assert expected.std(dim=(0, 1)).mean() > 0.1
    assert len(calls) == (3 if "flash" in backend else 0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
