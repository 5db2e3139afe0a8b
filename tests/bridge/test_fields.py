"""A `kha` configuration as provider fields and back. Runs without Megatron-Bridge."""

import pytest

from kha_megatron.bridge.provider_fields import (
    check_agreement,
    hf_config_of,
    provider_fields,
)
from kha_megatron.errors import CheckpointError
from tests.bridge.models import CONFIGS, described, hf_config


def provider(fields, **overrides):
    """What Bridge's GPTModelProvider adds to Megatron's configuration, and ours to that."""
    from dataclasses import dataclass

    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch.nn.functional import silu

    @dataclass
    class Provider(TransformerConfig):
        share_embeddings_and_output_weights: bool = True
        position_embedding_type: str = "rope"
        rotary_base: float = 10000
        rotary_percent: float = 1.0
        rope_scaling: bool = False
        rope_scaling_factor: float = 8.0
        seq_len_interpolation_factor: float | None = None
        seq_length: int = 1024
        vocab_size: int | None = None
        kha_query: str | None = None
        kha_key: str | None = None
        kha_value: str | None = None
        kha_init: str = "identity"
        kha_init_seed: int = 1234
        kha_gate: dict | None = None
        kha_moh: dict | None = None
        kha_talking: dict | None = None
        kha_collaborative: dict | None = None

    same = {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": silu,
        "add_bias_linear": False,
    }
    return Provider(**same | fields | overrides)


def round_trip(name):
    """The fields that Megatron's own checks of the provider, and the way back, have changed."""
    config = hf_config(**CONFIGS[name])
    made = provider(provider_fields(config))
    check_agreement(made, config)
    before, after = described(config), described(hf_config_of(made))
    return {
        field: (before[field], after[field]) for field in before if before[field] != after[field]
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip(ranks, name):
    assert ranks(round_trip, 1, name)[0] == {}


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            "'rope_type': 'linear'",
        ),
        (CONFIGS["sigmoid"] | {"norm_topk_prob": False}, "normalised=False"),
        (CONFIGS["sigmoid"] | {"num_experts_per_tok": 1}, "normalised=True"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_megatron_cannot_compute_is_refused_by_its_name(overrides, named):
    with pytest.raises(CheckpointError, match=named):
        provider_fields(hf_config(**overrides))


def refusal(fields):
    """The message for a provider of the dense model with other fields."""
    config = hf_config(**CONFIGS["dense"])
    made = provider(provider_fields(config))
    for field, value in fields.items():
        setattr(made, field, value)
    with pytest.raises(CheckpointError) as refused:
        check_agreement(made, config)
    return str(refused.value)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"window_size": (4, 0)}, "window_size=(4, 0)"),
        ({"mtp_num_layers": 1}, "mtp_num_layers=1"),
        ({"rope_scaling": True}, "'rope_type': 'llama3'"),
        ({"position_embedding_type": "yarn"}, "position_embedding_type='yarn'"),
        ({"gated_linear_unit": False}, "swiglu=False"),
        ({"softmax_scale": 0.3}, "softmax_scale=0.3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_architecture_cannot_express_is_refused_by_its_name(ranks, fields, named):
    assert named in ranks(refusal, 1, fields)[0]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rotary_base": 500.0}, "rotary_base 500 against 20000"),
        ({"layernorm_epsilon": 1e-3}, "layernorm_epsilon 0.001 against 1e-06"),
        ({"kha_value": "gate"}, "kha_value 'gate' against 'mlp'"),
        ({"kha_query": None, "num_query_groups": 1}, "kha_query None against 'linear', num_query"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_of_other_fields_is_refused_with_those(ranks, fields, named):
    assert named in ranks(refusal, 1, fields)[0]


def no_provider():
    """A configuration of Megatron that says nothing of the embeddings."""
    from tests.distributed import models

    with pytest.raises(CheckpointError) as refused:
        hf_config_of(models.transformer_config())
    return str(refused.value)


def test_a_bare_transformer_config_is_refused(ranks):
    message = ranks(no_provider, 1)[0]
    assert "TransformerConfig has no " in message
    assert "KHAModelProvider" in message
