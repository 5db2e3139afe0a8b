"""MLA, GLA and GTA with knocking heads, compared with the float64 oracle."""

from unittest import mock

import numpy as np
import pytest
import torch

from kha_megatron.errors import ConfigError
from kha_megatron.heads import Knock
from kha_megatron.heads.config import HeadsConfig
from tests.mcore.sharded_layer import LATENT, SIZES, build, differences, on_rank, put_together

LINEAR = {"query": "linear", "key": "linear", "value": "linear"}
MLA = [HeadsConfig(), HeadsConfig(Knock(**LINEAR))]
GLA = [HeadsConfig(Knock(**LINEAR), attention="gla", latent_heads=n) for n in (2, 3)] + [
    HeadsConfig(attention="gla")
]
GTA = [
    HeadsConfig(attention="gta"),
    HeadsConfig(Knock(value="mlp"), attention="gta"),
    HeadsConfig(Knock(query="gate", value="mlp"), attention="gta"),
]
GTA_SIZES = {"kv_channels": 12}


@pytest.mark.fast
@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("kha", MLA, ids=str)
def test_mla_equals_the_oracle(ranks, kha, qk_norm):
    assert not differences(ranks, kha, **LATENT, qk_layernorm=qk_norm)


def test_mla_without_a_query_latent_equals_the_oracle(ranks):
    # Megatron's local backend has no norm for such queries
    assert not differences(ranks, MLA[1], **LATENT, q_lora_rank=None, qk_layernorm=False)


@pytest.mark.fast
@pytest.mark.parametrize("qk_norm", [True, pytest.param(False, marks=pytest.mark.whole)])
@pytest.mark.parametrize("kha", GLA, ids=str)
def test_gla_equals_the_oracle(ranks, kha, qk_norm):
    assert not differences(ranks, kha, **LATENT, qk_layernorm=qk_norm)


@pytest.mark.fast
@pytest.mark.parametrize("qk_norm", [True, pytest.param(False, marks=pytest.mark.whole)])
@pytest.mark.parametrize("kha", GTA, ids=str)
def test_gta_equals_the_oracle(ranks, kha, qk_norm):
    assert not differences(ranks, kha, **GTA_SIZES, qk_layernorm=qk_norm)


@pytest.mark.parametrize("kha", [MLA[1], GLA[0]], ids=str)
def test_recomputed_up_projections_have_the_same_gradients(ranks, kha):
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}

    def run(options):
        sizes = SIZES | LATENT | options
        return put_together(ranks(on_rank, 1, kha, 1, False, 7, sizes), 7)

    plain = run({})
    recomputed = run(recompute)
    for name, gradient in plain.gradients.items():
        assert np.array_equal(gradient, recomputed.gradients[name]), name


def prepared_for_absorption():
    """Return keys and values of trained up-projections, and of those prepared for absorption."""
    from megatron.core.transformer import multi_latent_attention as upstream

    layer, _ = build(MLA[1], 1, False, 7, SIZES | LATENT)
    latent = torch.randn(5, 2, layer.config.kv_lora_rank, dtype=torch.float64)
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
        absorbed = torch.einsum("sbc,hdc->sbhd", latent, up)
        return trained.unflatten(-1, (len(up), -1)), absorbed


def test_matrices_are_folded_into_what_megatron_absorbs(ranks):
    ((trained, folded),) = ranks(prepared_for_absorption, 1)
    torch.testing.assert_close(folded, trained, rtol=1e-12, atol=1e-12)


def wrong_rotary_embedding():
    """Run a model whose rotary embedding is applied to whole heads."""
    from tests.distributed import models

    models.initialize()
    model = models.gpt_model(models.transformer_config(kv_channels=8), GTA[0])
    model.rotary_pos_emb.inv_freq = torch.ones(4)
    tokens, positions, mask = models.batch()
    with pytest.raises(ConfigError, match=r"got 8\. Use .* --rotary-percent 0\.5"):
        model(tokens, positions, mask, labels=tokens)


def test_gta_refuses_a_rotary_embedding_of_whole_heads(ranks):
    ranks(wrong_rotary_embedding, 1)
