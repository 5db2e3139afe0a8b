"""What a configuration accepts, refuses and says."""

import re
import subprocess
import sys

import pytest
from huggingface_hub.errors import StrictDataclassFieldValidationError

from kha_megatron.config import KHAConfig
from kha_megatron.hf import read_kha
from tests.hf.conftest import LATENT, MOE, every_projection, make_config, make_model


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kha_value": "wide"}, "kha_value='wide' is unknown.*linear, mlp, gate"),
        ({"num_key_value_heads": 4}, "num_attention_heads=6.*num_key_value_heads=4"),
        ({"head_dim": 9}, "head_dim=9.*even"),
        ({**MOE, "num_experts_per_tok": 6}, "num_experts_per_tok=6.*num_experts=5"),
        ({**MOE, "scoring_func": "tanh"}, "scoring_func='tanh'.*softmax, sigmoid"),
        ({**MOE, "mlp_layer_types": ["sparse"] * 2}, "each of 3 layers"),
        ({"mlp_layer_types": ["sparse"] * 3}, "num_experts=0"),
        ({**MOE, "n_group": 2}, "n_group=2 must divide num_experts=5"),
        (
            {**MOE, "num_experts": 6, "n_group": 3, "topk_group": 2, "num_experts_per_tok": 5},
            "num_experts_per_tok=5 must be between 2 and 4",
        ),
    ],
)
def test_contradictory_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make_config(**settings)


def test_a_value_of_the_wrong_type_is_refused():
    with pytest.raises(StrictDataclassFieldValidationError, match="num_hidden_layers"):
        make_config(num_hidden_layers="three")


def test_kha_fields_become_a_kha_config():
    config = make_config({"query": "linear", "value": "mlp"}, kha_init="random")
    assert read_kha(config) == KHAConfig(query="linear", value="mlp", init="random")
    assert read_kha(make_config()) == KHAConfig()


def test_older_transformers_find_the_width_of_a_latent_head():
    """Up to 5.12 DeepSeek's attention, our parent, asks the configuration for it."""
    config = make_config(**LATENT)
    assert config.qk_head_dim == LATENT["qk_nope_head_dim"] + LATENT["qk_rope_head_dim"]
    assert "qk_head_dim" not in config.to_dict()


def test_defaults_of_heads_and_layers():
    assert make_config(num_key_value_heads=None).num_key_value_heads == 6
    assert make_config().mlp_layer_types == ["dense"] * 3
    assert make_config(**{**MOE, "mlp_layer_types": None}).mlp_layer_types == ["sparse"] * 3


@pytest.mark.parametrize("variant", ["linear", "mlp", "gate"])
def test_tensor_parallel_plan_reduces_every_shared_matrix(variant):
    model = make_model(every_projection(variant))
    plan = model.config.base_model_tp_plan
    names = {
        re.sub(r"\d+", "*", name.removeprefix("model.").removesuffix(".weight"))
        for name, _ in model.named_parameters()
        if "_knock." in name
    }
    assert names
    assert {plan.get(name) for name in names} == {"replicated_with_grad_allreduce"}


def test_the_package_alone_does_not_import_transformers():
    code = "import sys, kha_megatron; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
