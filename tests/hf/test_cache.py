"""The arguments under which attention layers receive the KV cache."""

import pytest
import torch
from transformers import DynamicCache
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeModel

from kha_megatron.hf.modeling_kha import pop_cache
from tests.hf.conftest import TOKENS, tokens
from tests.hf.test_uses import model_of

CLASSES = {
    "dense": "KHAAttention",
    "gates": "KHAHeadsAttention",
    "gta": "KHATiedAttention",
    "mla": "KHALatentAttention",
    "collaborative": "KHASharedKeyAttention",
}
"""A model of each attention class."""


@pytest.fixture(params=CLASSES)
def layer(request):
    """Return the first attention layer of a model and its other arguments."""
    model = model_of(request.param).model
    attention = model.layers[0].self_attn
    assert type(attention).__name__ == CLASSES[request.param]
    hidden = model.embed_tokens(tokens())
    positions = torch.arange(TOKENS)[None]
    angles = model.rotary_emb(hidden, positions)
    return attention, (hidden, angles, None)


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_every_attention_class_accepts_both_names(layer, name):
    attention, arguments = layer
    cache = DynamicCache()
    attention(*arguments, **{name: cache})
    assert cache.get_seq_length() == TOKENS


def test_a_cache_under_another_name_is_refused(layer):
    attention, arguments = layer
    with pytest.raises(TypeError, match="passed as 'kv_cache', which this model does not support"):
        attention(*arguments, kv_cache=DynamicCache())


def test_a_layer_without_the_cache_that_the_model_uses_is_refused(layer):
    attention, arguments = layer
    with pytest.raises(ValueError, match="use_cache=True requires a KV cache"):
        attention(*arguments, use_cache=True)


def test_a_pass_that_does_not_lengthen_the_cache_is_refused(monkeypatch):
    """A future version could keep the cache from the layers without any trace in the arguments."""
    model = model_of("dense")
    for layer in model.model.layers:
        original = layer.self_attn.forward

        def without_cache(*args, original=original, **arguments):
            pop_cache(arguments)
            return original(*args, **arguments | {"use_cache": False})

        monkeypatch.setattr(layer.self_attn, "forward", without_cache)
    with torch.no_grad():
        assert model(tokens(), use_cache=False).logits.isfinite().all()
        with pytest.raises(RuntimeError, match=r"did not lengthen .* has 0 tokens and had 0"):
            model(tokens(), use_cache=True)
    monkeypatch.undo()
    with torch.no_grad():
        cache = model(tokens(), use_cache=True).past_key_values
        monkeypatch.setattr(Glm4MoeModel, "forward", lambda *args, **arguments: {"cache": cache})
        with pytest.raises(RuntimeError, match=rf"has {TOKENS} tokens and had {TOKENS} before"):
            model.model(tokens(), past_key_values=cache)
