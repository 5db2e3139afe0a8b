"""Configurations that KHA does not support are refused before training."""

import re

import pytest

from kha_megatron.heads import CollaborativeHeads, Gate, Knock, TalkingHeads
from kha_megatron.heads.config import HeadsConfig

LATENT = {"multi_latent_attention": True}
VALUE = HeadsConfig(Knock(value="mlp"))
GLA = HeadsConfig(attention="gla", latent_heads=2)
OUTPUT = HeadsConfig(Gate(output="element"))
SHARED = HeadsConfig(CollaborativeHeads(dim=10))
TALKING = HeadsConfig(TalkingHeads())


def refusal(kha, overrides):
    """Return the message with which a layer refuses its configuration."""
    from kha_megatron.errors import KHAError
    from tests.distributed import models

    models.initialize()
    config = models.transformer_config(multi_latent_attention=bool(overrides.keys() & LATENT))
    for name, value in overrides.items():  # Megatron accepts some of them with a GPU only
        setattr(config, name, value)
    with pytest.raises(KHAError) as caught:
        models.attention(config, kha)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kha", "overrides", "message"),
    [
        (VALUE, {"fused_single_qkv_rope": True}, "fused_single_qkv_rope.*Remove"),
        (
            VALUE,
            {"transformer_impl": "inference_optimized"},
            "KHA does not support transformer_impl",
        ),
        (VALUE, LATENT, "value=mlp.*linear"),
        (GLA, LATENT | {"cache_mla_latents": True}, "cache_mla_latents=True. Disable it"),
        (GLA, LATENT | {"normalization": "LayerNorm"}, "LayerNorm.*Use RMSNorm"),
        (
            HeadsConfig(attention="gta"),
            {"attention_output_gate": True, "kv_channels": 8},
            "attention_output_gate=True. Disable it",
        ),
        (OUTPUT, {"qk_clip": True}, r"qk-clip.*gate\(output=element\).*Remove --qk-clip"),
        (HeadsConfig(Knock(key="gate")), {"qk_clip": True}, "qk-clip.*key=gate.*linear matrices"),
        (VALUE, {"tensor_parallel_num_weight_shards": 2}, "num-weight-shards 2 is.*Remove"),
        (
            HeadsConfig(Gate(query="head")),
            {"qk_layernorm": True},
            "gate.query=head has no effect.*Use gate.query=element or remove --qk-layernorm",
        ),
        (
            HeadsConfig(Gate(output="head")),
            {"attention_output_gate": True},
            r"--attention-output-gate.*cannot be combined with gate\(output=head\).*Use only one",
        ),
        (
            HeadsConfig(Gate(output="element", value="head")),
            LATENT,
            "Multi-latent attention supports only gate.output",
        ),
        (
            HeadsConfig.from_preset("moh_50"),
            {"heterogeneous_block_specs": True},
            "does not support the auxiliary loss of moh",
        ),
        (
            HeadsConfig(CollaborativeHeads(dim=6)),
            {},
            "collaborative.dim .6. must be at least .*8.*start=ones",
        ),
        (SHARED, {"add_qkv_bias": True}, "no biases. Remove --add-qkv-bias"),
        (SHARED, LATENT, "Use MHA, MQA or GQA"),
        (TALKING, {"window_size": (3, 0)}, "window_size=.*Remove it"),
        (TALKING, {"softmax_type": "learnable"}, "softmax_type=learnable.*Remove it"),
    ],
    ids=str,
)
def test_unsupported_configurations_are_refused(ranks, kha, overrides, message):
    found = ranks(refusal, 1, kha, overrides)[0]
    assert re.search(message, found), found
    assert "\n" not in found
