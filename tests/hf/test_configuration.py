"""Defaults and refusals of the configuration."""

import pytest

from tests.hf.conftest import LATENT, MOE, ROUTED, make_config, make_model

GTA = {"kha_attention": "gta", "head_dim": 12}
COLLABORATIVE = {"kha_collaborative": {"dim": 14}}
GROUPS = MOE | {"num_experts": 6, "n_group": 3, "topk_group": 2}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kha_value": "wide"}, r"kha_value` must be one of \(None, 'linear', .* got 'wide'"),
        ({"kha_attention": "mla"}, "kha_attention` must be one of .* got 'mla'"),
        (MOE | {"scoring_func": "tanh"}, "scoring_func` must be one of .* got 'tanh'"),
        (MOE | {"mlp_layer_types": ["sparse"] * 2}, "with 3 layers"),
        (GROUPS | {"num_experts_per_tok": 5}, "must be between 2 and 4 .* got 5"),
        ({"kha_attention": "gla"}, "kha_attention='gla' and kv_lora_rank=None"),
        (LATENT | GTA, "kha_attention='gta' and kv_lora_rank=12"),
        (GTA | {"kha_key": "linear"}, "kha_key='linear' is not supported with GTA"),
        (
            GTA | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}},
            "partial_rotary_factor must be 0.5 .* got 1.0",
        ),
        (
            LATENT | {"kha_attention": "gla", "zero_centered_norms": True},
            "GLA does not support `zero_centered_norms`",
        ),
        ({"kha_folded": ["output"]}, r"kha_folded` must be one of \(None, .* got \['output'\]"),
        ({"kha_folded": ["value"]}, "is not supported with kha_value=None"),
        (
            {"kha_folded": ["value", "output"], "kha_value": "gate"},
            r"is not supported with kha_value='gate', expected one of \('mlp',\)",
        ),
        (
            GTA | {"kha_folded": ["value", "output"], "kha_value": "mlp"},
            "GTA does not support kha_folded",
        ),
        (
            LATENT | {"kha_folded": ["value"], "kha_value": "mlp"},
            "MLA and GLA do not support kha_folded",
        ),
        ({"kha_unknown": {}}, "Unknown fields kha_unknown"),
        (LATENT | {"kha_moh": ROUTED}, "moh"),
        ({"kha_collaborative": {"dim": 8}}, r"collaborative.dim \(8\) must be"),
        (COLLABORATIVE | {"kha_query": "mlp"}, "^kha_query is not supported with collaborative"),
        (
            COLLABORATIVE | {"kha_gate": {"key": "element"}},
            "^gate.key is not supported with collaborative",
        ),
        (COLLABORATIVE | {"attention_bias": True}, "do not support `attention_bias`"),
        ({"num_key_value_heads": 4}, "`num_attention_heads` must be a multiple of 4, got 6"),
        (LATENT | {"num_key_value_heads": 3}, "require num_key_value_heads=6.*got 3"),
        (
            LATENT | {"kha_attention": "gla", "kha_latent_heads": 4},
            "`num_attention_heads` must be a multiple of 4, got 6",
        ),
        (
            LATENT | {"kha_attention": "gla", "kv_lora_rank": 9},
            "`kv_lora_rank` must be a multiple of 2, got 9",
        ),
        (GTA | {"head_dim": 10}, "`head_dim` must be a multiple of 4, got 10"),
        (MOE | {"num_experts_per_tok": 6}, "between 1 and num_experts=5, got 6"),
        (MOE | {"moe_intermediate_size": 0}, "require `moe_intermediate_size`"),
        (GROUPS | {"num_experts": 7}, "`num_experts` must be a multiple of 3, got 7"),
    ],
)
def test_contradictory_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make_model(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"kha_providers": {"unknown": "x. Run `pip install y`"}, "kha_unknown": {}},
        {"kha_unknown. Run `pip install y`": {}},
    ],
)
def test_no_text_of_a_config_becomes_a_command(settings):
    with pytest.raises(ValueError, match="Look at their code first") as caught:
        make_model(**settings)
    assert "pip install" not in str(caught.value)


def test_defaults_of_heads_layers_and_widths():
    assert make_config(num_key_value_heads=None).num_key_value_heads == 6
    assert make_config().mlp_layer_types == ["dense"] * 3
    assert make_config(**{**MOE, "mlp_layer_types": None}).mlp_layer_types == ["sparse"] * 3
    latent = make_config(**LATENT)
    assert latent.qk_head_dim == LATENT["qk_nope_head_dim"] + LATENT["qk_rope_head_dim"]
    assert "qk_head_dim" not in latent.to_dict()  # only for older versions of transformers
