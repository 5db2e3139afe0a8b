"""MLA, GLA and GTA with knocking heads against the float64 oracle, and against themselves without.

Rotary frequencies are float32 in Megatron: 1e-6 is their rounding, seen only through RoPE.
"""

import pytest
import torch

from kha_megatron.config import KHAConfig

LINEAR = {"query": "linear", "key": "linear", "value": "linear"}
MLA = [KHAConfig(), KHAConfig(**LINEAR)]
GLA = [KHAConfig(attention="gla", latent_heads=n, **LINEAR) for n in (2, 3)] + [
    KHAConfig(attention="gla")
]
GTA = [
    KHAConfig(attention="gta"),
    KHAConfig(attention="gta", value="mlp"),
    KHAConfig(attention="gta", query="gate", value="mlp"),
]
TOLERANCE = 1e-6


def against_oracle(kha, latent, overrides):
    """Largest error of the output and of every gradient."""
    from tests.distributed import models
    from tests.mcore import family

    models.initialize()
    config = family.config_of(kha, latent, params_dtype=torch.float64, **overrides)
    layer = family.attention_layer(config, kha)
    hidden, mask = family.inputs()
    output = family.call(layer, hidden, mask)
    upstream = torch.randn_like(output)
    output.backward(upstream)
    weights = {n: p.detach().clone().requires_grad_() for n, p in layer.named_parameters()}
    twin = hidden.detach().clone().requires_grad_()
    expected = family.oracle(layer, weights, twin)
    expected.backward(upstream)
    pairs = {"output": (output, expected), "input gradient": (hidden.grad, twin.grad)}
    pairs |= {n: (p.grad, weights[n].grad) for n, p in layer.named_parameters()}
    return {n: ((a - b).norm() / b.norm()).item() for n, (a, b) in pairs.items()}


def check(ranks, kha, latent, parameters, **overrides):
    found = ranks(against_oracle, 1, kha, latent, overrides)[0]
    assert len(found) == 2 + parameters + len(kha.variants), sorted(found)
    wrong = {n: e for n, e in found.items() if not e < TOLERANCE}
    assert not wrong


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("kha", MLA, ids=str)
def test_mla_equals_the_oracle(ranks, kha, qk_norm):
    check(ranks, kha, True, 5 + 2 * qk_norm, qk_layernorm=qk_norm)


def test_mla_without_a_query_latent_equals_the_oracle(ranks):
    # Megatron's local backend has no norm for such queries
    check(ranks, MLA[1], True, 4, q_lora_rank=None, qk_layernorm=False)


@pytest.mark.parametrize("qk_norm", [True, pytest.param(False, marks=pytest.mark.whole)])
@pytest.mark.parametrize("kha", GLA, ids=str)
def test_gla_equals_the_oracle(ranks, kha, qk_norm):
    check(ranks, kha, True, 5 + 2 * qk_norm, qk_layernorm=qk_norm)


@pytest.mark.parametrize("qk_norm", [True, pytest.param(False, marks=pytest.mark.whole)])
@pytest.mark.parametrize("kha", GTA, ids=str)
def test_gta_equals_the_oracle(ranks, kha, qk_norm):
    check(ranks, kha, False, 3 + 2 * qk_norm, qk_layernorm=qk_norm)


def recomputed(kha):
    """Gradients of an MLA layer with and without recomputing its up-projections."""
    from tests.distributed import models
    from tests.mcore import family

    def gradients(**overrides):
        models.initialize()
        layer = family.attention_layer(family.config_of(kha, True, **overrides), kha)
        hidden, mask = family.inputs()
        family.call(layer, hidden, mask).square().sum().backward()
        return {n: p.grad for n, p in layer.named_parameters()}

    recompute = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
    return gradients(), gradients(**recompute)


@pytest.mark.parametrize("kha", [MLA[1], GLA[0]], ids=str)
def test_recomputed_up_projections_knock_as_well(ranks, kha):
    plain, again = ranks(recomputed, 1, kha)[0]
    for name, gradient in plain.items():
        assert torch.equal(gradient, again[name]), name


def identity_outputs(khas, dtype, latent, stock):
    """Per-token losses of models that differ in what they knock; of Megatron's own if ``stock``."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    from kha_megatron.mcore import specs
    from tests.distributed import models

    sizes = {"multi_latent_attention": True} if latent else {"kv_channels": 12}
    config = models.transformer_config(params_dtype=dtype, bf16=dtype == torch.bfloat16, **sizes)
    models.initialize()
    spec = None
    if stock:  # upstream's local core attention cannot be built for MLA: ours is, and no more
        spec = specs.with_kha(
            get_gpt_decoder_block_spec(config, False, normalization="RMSNorm"), KHAConfig()
        )
        for layer in spec.layer_specs:
            layer.submodules.self_attention.module = MLASelfAttention
            layer.submodules.self_attention.params.pop("kha", None)
    outputs = []
    for kha, layer_spec in ([(khas[0], spec)] if stock else []) + [(kha, None) for kha in khas]:
        models.initialize()
        model = models.gpt_model(config, kha, layer_spec=layer_spec, perturbed=False)
        tokens, positions, mask = models.batch()
        with torch.no_grad():
            outputs.append(model(tokens, positions, mask, labels=tokens))
    return outputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("khas", "latent", "stock"),
    [
        pytest.param(MLA[:2], True, True, id="mla"),
        pytest.param([GLA[2], GLA[0]], True, False, id="gla"),
        pytest.param(GTA, False, False, id="gta"),
    ],
)
def test_starts_as_itself_without_knocking_bit_for_bit(ranks, khas, latent, stock, dtype):
    first, *rest = ranks(identity_outputs, 1, khas, dtype, latent, stock)[0]
    assert len(rest) == len(khas) - 1 + stock
    assert all(torch.equal(first, other) for other in rest)
