"""What --variants understands and refuses."""

import pytest

from kha_megatron.compare import parse_variants
from kha_megatron.config import KHAConfig
from kha_megatron.errors import ConfigError
from kha_megatron.heads import Gate
from kha_megatron.recipes import get_recipe


def test_presets_the_ablation_and_own_ones():
    found = parse_variants(
        "baseline, kha_mlp,random-init,kv=--kha-key linear --kha-value=mlp,"
        "g=--kha-preset kha_linear --kha-query none --kha-init random,"
        "kha_mlp+gate_output+gate_value"
    )
    assert {variant.name: variant.kha for variant in found} == {
        "baseline": KHAConfig(),
        "kha_mlp": KHAConfig(value="mlp"),
        "random-init": KHAConfig(value="mlp", init="random"),
        "kv": KHAConfig(key="linear", value="mlp"),
        "g": KHAConfig(key="linear", value="linear", init="random"),
        "kha_mlp+gate_output+gate_value": KHAConfig(
            value="mlp", gate=Gate(output="element", value="element")
        ),
    }


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("baseline", "two or more"),
        ("kha_mlp,kha_mlp", "two or more different"),
        ("baseline,kha_mlp+kha_lin", "unknown variant 'kha_lin'"),
        ("baseline,../x=--kha-value mlp", r"'\.\./x': expected up to 40 letters"),
        ("baseline,null=--kha-value gate", "no preset's name"),
        ("baseline,a=--lr 1", "got '--lr 1'"),
        ("baseline,a=", "variant a: expected flags"),
        ("baseline,a=--kha-value swish", "unknown KHA variant 'swish'"),
        ("baseline,a=--kha-value 'mlp", "variant a: No closing quotation"),
    ],
)
def test_what_is_refused(text, match):
    with pytest.raises(ConfigError, match=match):
        parse_variants(text)


@pytest.mark.parametrize("name", ["quickstart", "gated/15b-key", "table2/mlp-v"])
def test_a_variant_replaces_whatever_the_recipe_knocks(name):
    for variant in parse_variants("baseline,kha_mlp,random-init,kha_linear+gate_value"):
        assert get_recipe(name).having(variant.kha).run.kha == variant.kha
