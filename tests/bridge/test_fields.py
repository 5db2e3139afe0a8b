"""A `kha` configuration as provider fields and back, without Megatron-Bridge."""

from pathlib import Path

import pytest

from kha_megatron.bridge.provider_fields import (
    compare_fields,
    provider_to_hf_config,
    read_heads,
    to_provider_fields,
)
from kha_megatron.errors import CheckpointError
from kha_megatron.heads.registry import use_files
from tests.bridge.models import CONFIGS, described, hf_config


def provider(fields, **overrides):
    """Return a provider: Megatron's configuration with the fields of Bridge and ours."""
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
        kha_others: dict | None = None

    same = {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": silu,
        "add_bias_linear": False,
    }
    return Provider(**same | fields | overrides)


def round_trip(name):
    """Return the fields that a round trip through a provider changes."""
    config = hf_config(**CONFIGS[name])
    made = provider(to_provider_fields(config))
    before = described(config)
    after = described(provider_to_hf_config(made))
    changed = {field for field in before if before[field] != after[field]}
    return changed, compare_fields(made, config)


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip(ranks, name):
    assert ranks(round_trip, 1, name)[0] == (set(), [])


TOY = Path(__file__).parents[1] / "mechanisms" / "toy.py"


def round_trip_of_a_file():
    use_files([TOY])
    config = hf_config(kha_value="mlp", kha_toy={"strength": 3.0})
    made = provider(to_provider_fields(config))
    return made.kha_others, str(read_heads(made)), compare_fields(made, config)


def test_mechanisms_of_others_share_a_field(ranks):
    (result,) = ranks(round_trip_of_a_file, 1)
    assert result == ({"toy": {"strength": 3.0}}, "value=mlp toy(strength=3.0)", [])


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            "'rope_type': 'linear'",
        ),
        (CONFIGS["sigmoid"] | {"norm_topk_prob": False}, "normalizes_topk=False"),
        (CONFIGS["sigmoid"] | {"num_experts_per_tok": 1}, "normalizes_topk=True"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_configurations_that_megatron_does_not_support_are_refused(overrides, named):
    with pytest.raises(CheckpointError, match=named):
        to_provider_fields(hf_config(**overrides))


def compare_or_refuse(fields):
    """Return the differences from the dense model, or the error message."""
    config = hf_config(**CONFIGS["dense"])
    made = provider(to_provider_fields(config))
    for field, value in fields.items():
        setattr(made, field, value)
    try:
        return ", ".join(compare_fields(made, config))
    except CheckpointError as error:
        return str(error)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        # Not supported by the architecture.
        ({"window_size": (4, 0)}, "window_size=a tuple"),
        ({"mtp_num_layers": 1}, "mtp_num_layers=1"),
        ({"rope_scaling": True}, "'rope_type': 'llama3'"),
        ({"position_embedding_type": "yarn"}, "position_embedding_type='yarn'"),
        ({"gated_linear_unit": False}, "swiglu=False"),
        ({"softmax_scale": 0.3}, "softmax_scale=0.3 is not supported"),
        # Another model.
        ({"rotary_base": 500.0}, "rotary_base is 500 and 20000"),
        ({"layernorm_epsilon": 1e-3}, "layernorm_epsilon is 0.001 and 1e-06"),
        (
            {"layernorm_zero_centered_gamma": True},
            "layernorm_zero_centered_gamma is True and False",
        ),
        ({"kha_value": "gate"}, "kha_value is 'gate' and 'mlp'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_providers_are_refused_with_the_field(ranks, fields, named):
    assert named in ranks(compare_or_refuse, 1, fields)[0]
