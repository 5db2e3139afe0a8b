"""MLA, GLA and GTA beyond training: what a cache holds, decoding, names, and refusals."""

from dataclasses import replace

import pytest
import torch

from kha_megatron.config import KHAConfig
from kha_megatron.heads import Gate
from tests.mcore.sharded_layer import decode
from tests.mcore.test_family import GLA, GTA, MLA

EVERYWHERE = Gate(output="head", value="element", key="shared", query="element", dense="element")


def decoded(kha, latent):
    """An attention's outputs for the whole sequence at once, and token by token from a cache."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from tests.distributed import models
    from tests.mcore import family

    models.initialize()
    layer = family.attention_layer(family.config_of(kha, latent), kha).float().eval()
    hidden, mask = family.inputs()
    rotary = {}
    if not latent:
        rotary["rotary_pos_emb"] = RotaryEmbedding(
            family.HEAD_DIM, 0.5, rotary_base=family.BASE, use_cpu_initialization=True
        )(family.TOKENS)
    return decode(layer, hidden.detach().float(), mask, **rotary)


@pytest.mark.parametrize(
    ("kha", "latent"),
    [
        pytest.param(GTA[-1], False, id="gta"),
        pytest.param(GLA[0], True, id="gla"),
        pytest.param(replace(MLA[1], gate=Gate(output="element")), True, id="mla, gated"),
        pytest.param(KHAConfig(value="mlp", gate=EVERYWHERE), False, id="gates"),
    ],
)
def test_decodes_with_megatrons_static_cache(ranks, kha, latent):
    whole, steps = ranks(decoded, 1, kha, latent)[0]
    torch.testing.assert_close(steps, whole, rtol=1e-4, atol=1e-5)


def absorbed():
    """Keys and values from up-projections that were made ready for absorption, and as trained."""
    from unittest import mock

    from megatron.core.transformer import multi_latent_attention as upstream

    from tests.distributed import models
    from tests.mcore import family

    models.initialize()
    kha = MLA[1]
    config = family.config_of(kha, True)
    layer = family.attention_layer(config, kha)
    latent = torch.randn(5, 2, config.kv_lora_rank, dtype=torch.float64)
    with torch.no_grad():
        trained, _ = layer.linear_kv_up_proj(latent)
        # what splits a fused module of Transformer Engine in two, for one that is not fused
        split = mock.Mock(return_value=(torch.nn.Identity(), layer.linear_kv_up_proj))
        del layer.linear_kv_up_proj.forward  # uncovers it: around the new module's is nothing
        with mock.patch.object(upstream, "split_te_layernorm_column_parallel_linear", split):
            layer.prepare_for_absorption()
            layer.prepare_for_absorption()  # of every forward: the second time does nothing
        for hook in layer.projection_hooks:
            hook.follow(layer)  # as every forward lets them
        up = torch.cat([layer.up_k_weight, layer.up_v_weight], dim=1)
        return trained.unflatten(-1, (family.HEADS, -1)), torch.einsum("sbc,hdc->sbhd", latent, up)


def test_matrices_are_folded_into_what_megatron_absorbs(ranks):
    trained, folded = ranks(absorbed, 1)[0]
    torch.testing.assert_close(folded, trained, rtol=1e-12, atol=1e-12)


def wrong_rotary_embedding():
    """What a model whose rotary embedding turns whole heads is told at its first step."""
    from kha_megatron.errors import ConfigError
    from tests.distributed import models

    models.initialize()
    kha = GTA[0]
    model = models.gpt_model(models.transformer_config(kv_channels=8), kha)
    model.rotary_pos_emb.inv_freq = torch.ones(4)
    tokens, positions, mask = models.batch()
    with pytest.raises(ConfigError, match=r"got 8\. Use .* --rotary-percent 0\.5"):
        model(tokens, positions, mask, labels=tokens)


def test_gta_refuses_a_rotary_embedding_of_whole_heads(ranks):
    ranks(wrong_rotary_embedding, 1)


def rotary_projections():
    """The replicated projection of two layers, drawn where training on a GPU draws it."""
    from tests.distributed import models

    models.initialize(tensor_model_parallel_size=2)
    config = models.transformer_config(
        kv_channels=8, tensor_model_parallel_size=2, use_cpu_initialization=False
    )
    model = models.gpt_model(config, GTA[0])
    return [layer.self_attention.linear_k_rope.weight.detach() for layer in model.decoder.layers]


def test_the_rotary_projection_starts_the_same_on_all_ranks(ranks):
    first, second = ranks(rotary_projections, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(*first)
    assert 0.015 < first[0].std() < 0.025
