"""Presets, round trips and errors of HeadsConfig."""

import pytest

import kha_megatron
from kha_megatron import announcements
from kha_megatron.errors import ConfigError
from kha_megatron.heads import Gate, HeadSizes, Knock, TalkingHeads
from kha_megatron.heads.config import PRESETS, HeadsConfig


def test_presets_have_their_settings():
    for name, settings in PRESETS.items():
        kha = HeadsConfig.from_preset(name)
        others = kha.without(Knock).mechanisms
        found = kha.variants | {m.name: m.non_defaults() for m in others}
        assert found == dict(settings)


@pytest.mark.fast
@pytest.mark.parametrize(
    "kha",
    [
        *(HeadsConfig.from_preset(name, init_seed=5) for name in PRESETS),
        HeadsConfig(Knock(query="linear", value="gate", init="random"), init_seed=7),
        HeadsConfig(Knock(value="linear"), attention="gla", latent_heads=4),
    ],
    ids=str,
)
def test_round_trip(kha):
    settings = kha.to_dict()
    assert HeadsConfig.from_dict(settings) == kha
    assert HeadsConfig.from_entries({f"kha_{name}": settings[name] for name in settings}) == kha
    assert HeadsConfig.from_options(kha.to_options()) == kha


def test_mechanisms_are_found_by_class():
    kha = HeadsConfig(Gate(output="head"), Knock(value="mlp"))
    assert [mechanism.name for mechanism in kha.mechanisms] == ["knock", "gate"]
    assert kha.get(Gate) == Gate(output="head")
    assert kha.get(TalkingHeads) is None
    assert kha.without(Knock) == HeadsConfig(Gate(output="head"))
    assert kha.updated(gate=None, value="linear") == HeadsConfig(Knock(value="linear"))


MISSPELT = """
from kha_megatron import HeadsConfig, Knock
from kha_megatron.heads import Gate
HeadsConfig(Knock(valu="mlp"))
HeadsConfig(Knock(value="mpl"))
HeadsConfig(value="mlp")
gate = HeadsConfig(Gate(output="head")).get(Gate)
gate.output
assert gate is not None
gate.outputs
"""


def test_type_checkers_find_misspelt_settings(tmp_path):
    mypy = pytest.importorskip("mypy.api")
    options = tmp_path / "mypy.ini"
    options.write_text("[mypy]\ncache_dir = /dev/null\n[mypy-torch.*]\nfollow_imports = skip\n")
    report, errors, code = mypy.run(["--config-file", str(options), "-c", MISSPELT])
    lines = [int(line.split(":")[1]) for line in report.splitlines() if ": error:" in line]
    assert (lines, code) == ([4, 5, 6, 8, 10], 1), report + errors


def test_the_name_of_version_0_1_still_works(capfd):
    announcements._logged.discard("KHAConfig")
    old = kha_megatron.KHAConfig(value="mlp", gate=Gate(output="head"))
    assert old == HeadsConfig(Knock(value="mlp"), Gate(output="head"))
    assert kha_megatron.KHAConfig.from_preset("kha_mlp") == HeadsConfig(Knock(value="mlp"))
    assert capfd.readouterr().err.count("is now HeadsConfig(") == 1
    with pytest.raises(AttributeError, match="no attribute 'KHAConfg'"):
        _ = kha_megatron.KHAConfg


@pytest.mark.fast
def test_the_papers_parameter_count():
    """Three [D, D] matrices for KHA-Linear on q, k, v and for KHA-MLP on v alike (section 3.2)."""
    sizes = HeadSizes(query_heads=32, kv_heads=8, head_dim=128)
    assert HeadsConfig.from_preset("kha_linear").parameters(sizes) == 3 * 128**2
    assert HeadsConfig.from_preset("kha_mlp").parameters(sizes, tp=4) == 3 * 128**2
    assert HeadsConfig().parameters(sizes) == 0


def test_heads_options_override_a_preset():
    heads = ["knock.value=mlp", "knock.init_seed=5", "knock.query=none"]
    asked = HeadsConfig.from_options({"preset": "kha_linear", "heads": heads, "key": "none"})
    assert asked == HeadsConfig(Knock(value="mlp"), init_seed=5)
    assert HeadsConfig.from_options({"heads": None, "init": "random", "query": None}) is None


def test_checkpoints_may_record_the_removed_argument_kha_fold():
    entries = {"kha_value": "linear", "kha_fold": "always"}
    assert HeadsConfig.from_entries(entries) == HeadsConfig(Knock(value="linear"))


def test_entries_name_a_preset_by_its_spec():
    spec = {"spec": ["kha_megatron.mcore.specs", "kha_mlp"]}
    assert HeadsConfig.from_entries(spec) == HeadsConfig(Knock(value="mlp"))
    assert HeadsConfig.from_entries(spec | {"kha_query": "gate"}) == HeadsConfig(
        Knock(query="gate")
    )
    for other in ({}, {"spec": None}, {"spec": ["local"]}, {"spec": ["other.specs", "kha_mlp"]}):
        assert HeadsConfig.from_entries(other) is None


@pytest.mark.parametrize(
    "name",
    ["kha_mlp+gate_output+gate_value", "gate_value+gate_output+kha_mlp"],
)
def test_presets_are_joined_with_a_plus(name):
    both = HeadsConfig(Knock(value="mlp"), Gate(output="element", value="element"))
    assert HeadsConfig.from_preset(name) == both
    spec = {"spec": ["kha_megatron.mcore.specs", name]}
    assert HeadsConfig.from_entries(spec) == both
    asked = HeadsConfig.from_options({"preset": name, "heads": ["gate.output=head", "moh=none"]})
    assert asked == HeadsConfig(Knock(value="mlp"), Gate(output="head", value="element"))


def ask(*words):
    return HeadsConfig.from_options({"heads": words})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: HeadsConfig(Knock(value="mpl")),
            "kha_value must be linear or mlp or gate or none, got 'mpl'",
        ),
        (lambda: HeadsConfig(Knock(init="zeros")), "kha_init .* random, got 'zeros'"),
        (
            lambda: HeadsConfig(Knock(key="linear"), attention="gta"),
            "kha_key=linear is not supported",
        ),
        (
            lambda: HeadsConfig(Knock(value="mlp"), attention="gla"),
            "only linear KHA, got value=mlp",
        ),
        (lambda: HeadsConfig(latent_heads=4), "only supported with kha_attention=gla, got 4"),
        (lambda: HeadsConfig(attention="gla", latent_heads=0), "at least 1"),
        (lambda: HeadsConfig(Knock(init="random")), "kha_init=random .* no KHA variant is enabled"),
        (lambda: HeadsConfig(Knock()), "at least one of query, key and value, e.g. value=mlp"),
        (lambda: HeadsConfig(Gate(output="head"), Gate(value="head")), "gate is configured more"),
        (lambda: HeadsConfig("kha_mlp"), "requires mechanisms.*got 'kha_mlp'"),
        (lambda: HeadsConfig.from_dict({"query": "identity"}), "kha_query must be .*'identity'"),
        (lambda: HeadsConfig.from_preset("kha"), "Unknown KHA preset 'kha'.*kha_mlp"),
        (lambda: HeadsConfig.from_preset("kha_mlp+gate_outpt"), "'gate_outpt'. Did you mean gate_"),
        (
            lambda: HeadsConfig.from_preset("kha_mlp+kha_linear_v"),
            "more than one of them sets value",
        ),
        (lambda: HeadsConfig.from_preset("talking+talking"), "preset talking more than once"),
        (lambda: HeadsConfig.from_preset("kha_mlp+"), "Unknown KHA preset ''"),
        (lambda: HeadsConfig.from_dict({"values": "mlp"}), "Unknown KHA setting values"),
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
    assert gates == HeadsConfig(Gate(output="element", value="head", dense="element"))
    assert str(gates) == "gate(output=element, value=head, dense=element)"


def test_megatrons_output_gate_is_a_gate():
    stock = Gate(output="element")
    others = HeadsConfig(Knock(value="mlp"), Gate(key="head"))
    assert HeadsConfig().with_output_gate(True) == HeadsConfig(stock)
    assert HeadsConfig().with_output_gate(False) == HeadsConfig()
    both = others.with_output_gate(True)
    assert both == HeadsConfig(Knock(value="mlp"), Gate(output="element", key="head"))
    assert both.without_output_gate() == others
    assert HeadsConfig(stock).without_output_gate() == HeadsConfig()
    assert both.to_entries()["attention_output_gate"] is True
    assert "attention_output_gate" not in both.to_entries(multi_latent=True)
    assert HeadsConfig.from_entries(both.to_entries()) == both
    assert HeadsConfig.from_entries({"attention_output_gate": True}) == HeadsConfig(stock)
    assert HeadsConfig.from_entries({"attention_output_gate": False}) is None
    other = HeadsConfig(Gate(value="head", form="add"))
    with pytest.raises(ConfigError, match=r"cannot be combined with gate\(value=head, form=add\)"):
        other.with_output_gate(True)
