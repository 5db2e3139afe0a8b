"""GTA, MLA and GLA against the oracle, and the size of their cache."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from kha_megatron.hf import read_kha
from tests import oracle as reference
from tests.hf.conftest import (
    FAMILY,
    check_layer_against_oracle,
    knock_matrices,
    make_config,
    make_model,
    norm_weights,
    tokens,
    transposed_weights,
)


def rows(linear):
    """Return the matrix of a linear layer, or of several, for row vectors."""
    if isinstance(linear, torch.nn.ModuleList):
        return torch.cat([part.weight.T for part in linear], dim=-1)
    return linear.weight.T


def oracle(layer, hidden, **gates):
    kha = read_kha(layer.config)
    config = layer.config
    matrices = knock_matrices(layer, kha.variants)
    common = {"rotary_base": 10000.0, "eps": config.rms_norm_eps, **gates}
    if config.kv_lora_rank is None:
        return reference.tied_attention(
            hidden,
            *transposed_weights(layer, "q_proj", "kv_proj", "k_rope_proj", "o_proj"),
            kha,
            matrices,
            num_query_groups=config.num_key_value_heads,
            head_dim=config.head_dim,
            **norm_weights(layer),
            **common,
        )
    down = rows(layer.kv_a_proj_with_mqa)
    rank = config.kv_lora_rank
    heads = config.num_attention_heads
    plain = config.qk_nope_head_dim
    up = rows(layer.kv_b_proj).unflatten(-1, (heads, -1))
    direct = config.q_lora_rank is None
    return reference.latent_attention(
        hidden,
        rows(layer.q_proj if direct else layer.q_b_proj),
        down[:, :rank],
        up[..., :plain].flatten(1),
        up[..., plain:].flatten(1),
        down[:, rank:],
        rows(layer.o_proj),
        kha,
        matrices,
        heads=heads,
        w_query_latent=None if direct else rows(layer.q_a_proj),
        **norm_weights(layer, "q_a_layernorm", kv_norm="kv_a_layernorm"),
        **common,
    )


@pytest.mark.parametrize("name", FAMILY)
def test_output_and_gradients_equal_the_oracle(name):
    kha, sizes = FAMILY[name]
    check_layer_against_oracle(make_config(kha, **sizes), oracle)


CACHED = {
    "collaborative": 14 + 3 * 10,
    "gta": 3 * 12 + 6,
    "mla": 12 + 4,
    "gla": 12 + 4,
}


@pytest.mark.parametrize("name", CACHED)
def test_the_cache_has_the_size_of_the_paper(name):
    """Zadouri et al. 2025 and Cordonnier et al. 2020: numbers per token and layer."""
    kha, sizes = FAMILY.get(name, ({}, {"kha_collaborative": {"dim": 14}}))
    model = make_model(kha, **sizes)
    dynamic = DynamicCache(config=model.config)
    static = StaticCache(config=model.config, max_cache_len=8)
    with torch.no_grad():
        for cache in (dynamic, static):
            model(tokens(1, 7), past_key_values=cache)
            model(tokens(1, 1), past_key_values=cache)
            stored = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
            assert stored == 3 * CACHED[name] * 4 * 8
