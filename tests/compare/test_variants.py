"""What --variants understands and refuses."""

import pytest

from kha_megatron.compare import parse_variants
from kha_megatron.config import KHAConfig
from kha_megatron.errors import ConfigError
from kha_megatron.heads import Gate
from kha_megatron.recipes import RECIPES, get_recipe


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
        ("baseline", "names 1"),
        ("", "names 0"),
        ("baseline,kha_mpl", "unknown variant 'kha_mpl'"),
        ("kha_mlp,kha_mlp", "kha_mlp twice"),
        ("baseline,kha_mlp+kha_lin", "unknown variant 'kha_lin'"),
        ("baseline,gate_output+gate_output_head", "say gate twice"),
        ("baseline,../x=--kha-value mlp", "cannot name a folder"),
        ("baseline,.x=--kha-value mlp", "cannot name a folder"),
        ("baseline,kha_mlp=--kha-value gate", "kha_mlp= has a name that is taken"),
        ("baseline,null=--kha-value gate", "null= has a name that is taken"),
        ("baseline,null", "unknown variant 'null'"),
        ("baseline,a=--lr 1", "--lr is none of its flags"),
        ("baseline,a=", "has no flags"),
        ("baseline,a=--kha-value swish", "unknown KHA variant 'swish'"),
        ("baseline,a=--kha-value mlp --kha-init zero", "variant a: unknown KHA init 'zero'"),
        ("baseline,a=--kha-value 'mlp", "variant a: No closing quotation"),
        ("baseline,a=kha_mlp", "unexpected argument"),
    ],
)
def test_what_is_refused(text, match):
    with pytest.raises(ConfigError, match=match):
        parse_variants(text)


@pytest.mark.parametrize(
    "name",
    [
        *("quickstart", "gated/15b-key"),
        *(n for n in RECIPES if "--kha-value" in RECIPES[n].run.flags),
    ],
)
def test_a_variant_replaces_whatever_the_recipe_knocks(name):
    for variant in parse_variants("baseline,kha_mlp,random-init,kha_linear+gate_value"):
        assert get_recipe(name).having(variant.kha).run.kha == variant.kha
