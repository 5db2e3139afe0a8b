"""Presets, round trips and errors of KHAConfig."""

import pytest

from kha_megatron.config import PRESETS, KHAConfig
from kha_megatron.errors import ConfigError
from kha_megatron.heads import Gate, HeadSizes


def test_presets_have_their_settings():
    for name, settings in PRESETS.items():
        kha = KHAConfig.from_preset(name)
        found = kha.variants | {m.name: m.non_defaults() for m in kha.other_mechanisms}
        assert found == dict(settings)


@pytest.mark.fast
@pytest.mark.parametrize(
    "kha",
    [
        *(KHAConfig.from_preset(name, init_seed=5) for name in PRESETS),
        KHAConfig(query="linear", value="gate", init="random", init_seed=7),
        KHAConfig(attention="gla", latent_heads=4, value="linear"),
    ],
    ids=str,
)
def test_round_trip(kha):
    settings = kha.to_dict()
    assert KHAConfig.from_dict(settings) == kha
    assert KHAConfig.from_entries({f"kha_{name}": settings[name] for name in settings}) == kha
    assert KHAConfig.from_options(kha.to_options()) == kha


@pytest.mark.fast
def test_the_papers_parameter_count():
    """Three [D, D] matrices for KHA-Linear on q, k, v and for KHA-MLP on v alike (section 3.2)."""
    sizes = HeadSizes(query_heads=32, kv_heads=8, head_dim=128)
    assert KHAConfig.from_preset("kha_linear").parameters(sizes) == 3 * 128**2
    assert KHAConfig.from_preset("kha_mlp").parameters(sizes, tp=4) == 3 * 128**2
    assert KHAConfig().parameters(sizes) == 0


def test_heads_options_override_a_preset():
    heads = ["knock.value=mlp", "knock.init_seed=5", "knock.query=none"]
    asked = KHAConfig.from_options({"preset": "kha_linear", "heads": heads, "key": "none"})
    assert asked == KHAConfig(value="mlp", init_seed=5)
    assert KHAConfig.from_options({"heads": None, "init": "random", "query": None}) is None


def test_checkpoints_may_record_the_removed_argument_kha_fold():
    entries = {"kha_value": "linear", "kha_fold": "always"}
    assert KHAConfig.from_entries(entries) == KHAConfig(value="linear")


def test_entries_name_a_preset_by_its_spec():
    spec = {"spec": ["kha_megatron.mcore.specs", "kha_mlp"]}
    assert KHAConfig.from_entries(spec) == KHAConfig(value="mlp")
    assert KHAConfig.from_entries(spec | {"kha_query": "gate"}) == KHAConfig(query="gate")
    for other in ({}, {"spec": None}, {"spec": ["local"]}, {"spec": ["other.specs", "kha_mlp"]}):
        assert KHAConfig.from_entries(other) is None


@pytest.mark.parametrize(
    "name",
    ["kha_mlp+gate_output+gate_value", "gate_value+gate_output+kha_mlp"],
)
def test_presets_are_joined_with_a_plus(name):
    both = KHAConfig(value="mlp", gate=Gate(output="element", value="element"))
    assert KHAConfig.from_preset(name) == KHAConfig.from_presets(name.split("+")) == both
    spec = {"spec": ["kha_megatron.mcore.specs", name]}
    assert KHAConfig.from_entries(spec) == both
    asked = KHAConfig.from_options({"preset": name, "heads": ["gate.output=head", "moh=none"]})
    assert asked == KHAConfig(value="mlp", gate=Gate(output="head", value="element"))


def ask(*words):
    return KHAConfig.from_options({"heads": words})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: KHAConfig(value="mpl"),
            "kha_value must be linear or mlp or gate or none, got 'mpl'",
        ),
        (lambda: KHAConfig(init="zeros"), "kha_init .* random, got 'zeros'"),
        (lambda: KHAConfig(attention="gta", key="linear"), "kha_key=linear is not supported"),
        (lambda: KHAConfig(attention="gla", value="mlp"), "only linear KHA, got value=mlp"),
        (lambda: KHAConfig(latent_heads=4), "only supported with kha_attention=gla, got 4"),
        (lambda: KHAConfig(attention="gla", latent_heads=0), "at least 1"),
        (lambda: KHAConfig(init="random"), "kha_init=random .* no KHA variant is enabled"),
        (lambda: KHAConfig.from_preset("kha"), "Unknown KHA preset 'kha'.*kha_mlp"),
        (lambda: KHAConfig.from_preset("kha_mlp+gate_outpt"), "'gate_outpt'. Did you mean gate_"),
        (lambda: KHAConfig.from_preset("kha_mlp+kha_linear_v"), "more than one of them sets value"),
        (lambda: KHAConfig.from_preset("talking+talking"), "preset talking more than once"),
        (lambda: KHAConfig.from_preset("kha_mlp+"), "Unknown KHA preset ''"),
        (lambda: KHAConfig.from_dict({"values": "mlp"}), "Unknown KHA setting values"),
        (lambda: ask("knok.value=mlp"), "'knok.value=mlp'.*NAME.FIELD=VALUE.*knock"),
        (lambda: ask("knock.values=mlp"), "Invalid value 'knock.values=mlp'"),
        (lambda: ask("gate.output=each"), "gate.output must be .*element.*got 'each'"),
        (lambda: ask("gate"), "at least one position .output.*gate.output=element"),
        (lambda: ask("talking.pre=false", "talking.post=false"), "At least one of talking.pre and"),
        (lambda: ask("gate.g1=head", "gate.output=head"), "both gate.output and its alias gate.g1"),
        (lambda: ask("gate.g6=head"), "Unknown setting g6 for gate. Available settings: output"),
    ],
)
def test_invalid_settings_raise_an_error_with_value_and_remedy(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_numbers_of_gates_are_those_of_the_paper():
    gates = ask("gate.g1=element", "gate.g2=head", "gate.g5=element")
    assert gates == KHAConfig(gate=Gate(output="element", value="head", dense="element"))
    assert str(gates) == "gate(output=element, value=head, dense=element)"


def test_megatrons_output_gate_is_a_gate():
    stock, others = Gate(output="element"), KHAConfig(value="mlp", gate=Gate(key="head"))
    assert KHAConfig().with_output_gate(True) == KHAConfig(gate=stock)
    assert KHAConfig().with_output_gate(False) == KHAConfig()
    both = others.with_output_gate(True)
    assert both == KHAConfig(value="mlp", gate=Gate(output="element", key="head"))
    assert both.without_output_gate() == others
    assert KHAConfig(gate=stock).without_output_gate() == KHAConfig()
    assert both.to_entries()["attention_output_gate"] is True
    assert "attention_output_gate" not in both.to_entries(multi_latent=True)
    assert KHAConfig.from_entries(both.to_entries()) == both
    assert KHAConfig.from_entries({"attention_output_gate": True}) == KHAConfig(gate=stock)
    assert KHAConfig.from_entries({"attention_output_gate": False}) is None
    other = KHAConfig(gate=Gate(value="head", form="add"))
    with pytest.raises(ConfigError, match=r"cannot be combined with gate\(value=head, form=add\)"):
        other.with_output_gate(True)
