"""Parsing of ``--variants``."""

import pytest

from kha_megatron.compare.variants import parse_variants
from kha_megatron.errors import ConfigError
from kha_megatron.heads import Gate, Knock
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.recipes import get_recipe


def test_variants_are_presets_the_ablation_or_flags():
    found = parse_variants(
        "baseline, kha_mlp,random-init,kv=--kha-key linear --kha-value=mlp,"
        "g=--kha-preset kha_linear --kha-query none --kha-init random,"
        "kha_mlp+gate_output+gate_value"
    )
    assert {variant.name: variant.kha for variant in found} == {
        "baseline": HeadsConfig(),
        "kha_mlp": HeadsConfig(Knock(value="mlp")),
        "random-init": HeadsConfig(Knock(value="mlp", init="random")),
        "kv": HeadsConfig(Knock(key="linear", value="mlp")),
        "g": HeadsConfig(Knock(key="linear", value="linear", init="random")),
        "kha_mlp+gate_output+gate_value": HeadsConfig(
            Knock(value="mlp"),
            Gate(output="element", value="element"),
        ),
    }


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("kha_mlp,kha_mlp", "two or more different"),
        ("baseline,kha_mlp+kha_lin", "'kha_mlp.kha_lin'. Unknown KHA preset 'kha_lin'"),
        ("baseline,../x=--kha-value mlp", r"Invalid variant name '\.\./x'"),
        ("baseline,null=--kha-value gate", "Invalid variant name 'null'"),
        ("baseline,a=--lr 1", "Invalid flags '--lr 1'"),
        ("baseline,a=--kha-value 'mlp", "Variant a: No closing quotation"),
    ],
)
def test_bad_variants_are_refused(text, match):
    with pytest.raises(ConfigError, match=match):
        parse_variants(text)


def test_a_variant_replaces_the_mechanisms_of_the_recipe():
    for variant in parse_variants("baseline,kha_mlp,random-init,kha_linear+gate_value"):
        assert get_recipe("gated/15b-key").with_heads(variant.kha).run.kha == variant.kha
