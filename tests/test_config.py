"""The configuration object: presets, round trip, refusals."""

import pytest

from kha_megatron.config import PRESETS, KHAConfig, parse_heads
from kha_megatron.errors import ConfigError
from kha_megatron.heads import Gate, HeadFacts, HeadSizes


@pytest.mark.parametrize("name", PRESETS)
def test_round_trip(name):
    kha = KHAConfig.from_preset(name, init="random", init_seed=5)
    assert KHAConfig.from_dict(kha.to_dict()) == kha
    settings = kha.variants | {m.name: m.non_defaults() for m in kha.other_mechanisms}
    assert settings == dict(PRESETS[name])


def test_the_papers_parameter_count():
    """Three [D, D] matrices for KHA-Linear on q, k, v and for KHA-MLP on v alike (section 3.2)."""
    sizes = HeadSizes(query_heads=32, kv_heads=8, head_dim=128)
    assert KHAConfig.from_preset("kha_linear").parameters(sizes) == 3 * 128**2
    assert KHAConfig.from_preset("kha_mlp").parameters(sizes, tp=4) == 3 * 128**2
    assert KHAConfig().parameters(sizes) == 0


def test_parameters_of_latent_attention_follow_both_widths():
    kha = KHAConfig.from_preset("kha_linear")
    sizes = HeadSizes(query_heads=8, kv_heads=8, head_dim=6, value_dim=5)
    assert kha.parameters(sizes) == 2 * 6**2 + 5**2
    assert kha.flops(sizes) == 2 * 8 * (2 * 6**2 + 5**2)
    assert kha.activations(sizes) == 8 * (6 + 6 + 5)


@pytest.mark.parametrize(
    "kha",
    [
        *(KHAConfig.from_preset(name) for name in PRESETS),
        KHAConfig(query="linear", value="gate", init="random", init_seed=7, fold="always"),
        KHAConfig(attention="gla", latent_heads=4, value="linear"),
    ],
    ids=str,
)
def test_what_is_asked_for_in_its_own_words_is_the_same(kha):
    asked = KHAConfig.from_options(kha.to_options())
    assert asked == kha
    assert asked.fold == kha.fold


def test_a_command_line_may_name_each_setting_of_a_mechanism():
    heads = ["knock.value=mlp", "knock.init_seed=5", "knock.query=none"]
    asked = KHAConfig.from_options({"preset": "kha_linear", "heads": heads, "key": "none"})
    assert asked == KHAConfig(value="mlp", init_seed=5)
    assert KHAConfig.from_options({"heads": None, "init": "random", "query": None}) is None


def test_each_tensor_is_described_once():
    sizes = HeadSizes(query_heads=8, kv_heads=4, head_dim=6, value_dim=5)
    query, value = KHAConfig(query="linear", value="mlp").tensors(sizes)
    assert (query.key, query.shape) == ("self_attention.knock_query.weight", (1, 6, 6))
    assert (value.key, value.shape) == ("self_attention.knock_value.weight", (3, 5, 5))
    assert value.hf_names == tuple(
        f"self_attn.v_knock.{matrix}_proj.weight" for matrix in ("up", "gate", "down")
    )
    assert query.hf_names == ("self_attn.q_knock.proj.weight",)
    assert value.starts == ("identity", "zeros", "identity")
    assert {query.gradient, value.gradient} == {"heads"}


def test_the_kind_of_attention_goes_round_and_into_the_log():
    kha = KHAConfig(attention="gla", latent_heads=4, value="linear")
    assert KHAConfig.from_dict(kha.to_dict()) == kha
    entries = {f"kha_{name}": value for name, value in kha.to_dict().items()}
    assert KHAConfig.from_entries(entries) == kha
    assert str(kha) == "value=linear in gla of 4"
    assert str(KHAConfig(attention="gta")) == "nothing (baseline) in gta"


def test_how_a_model_is_run_is_no_part_of_what_it_is():
    kha = KHAConfig(value="linear", fold="always")
    assert kha == KHAConfig(value="linear")
    assert "fold" not in kha.to_dict()
    assert KHAConfig.from_dict(kha.to_dict() | {"fold": "never"}).fold == "never"
    entries = {"kha_value": "linear", "kha_fold": "always"}
    assert KHAConfig.from_entries(entries).fold == "auto"


@pytest.mark.parametrize(
    ("kha", "latent", "words"),
    [
        (KHAConfig(attention="gta"), True, "attention=gta and --multi-latent-attention"),
        (KHAConfig(attention="gla"), False, "add --multi-latent-attention"),
        (KHAConfig(value="mlp"), True, "value=mlp on multi-latent attention: MLA never forms"),
    ],
)
def test_a_kind_that_megatrons_flags_contradict_is_refused(kha, latent, words):
    with pytest.raises(ConfigError, match=words):
        kha.check(HeadFacts(multi_latent=latent))
    KHAConfig(query="linear").check(HeadFacts(multi_latent=latent))


@pytest.mark.parametrize("preset", ["kha_linear", "kha_mlp"])
def test_the_papers_flops(preset):
    """Equations 10 to 12 with L = 2048, d = 1024, n = 32: 0.55 % of a layer, 1.17 % of its MHA."""
    length, d, n = 2048, 1024, 32
    added = length * KHAConfig.from_preset(preset).flops(
        HeadSizes(query_heads=n, kv_heads=n, head_dim=d // n)
    )
    assert added == 6 * length * d**2 // n
    attention = 8 * length * d**2 + 4 * length**2 * d
    layer = attention + 18 * length * d**2
    assert f"{added / layer:.2%} {added / attention:.2%}" == "0.55% 1.17%"


def test_flops_follow_the_heads_of_each_tensor():
    kha = KHAConfig(query="linear", key="gate", value="mlp")
    # 2 D^2 for each of 1 matrix on 12 heads, 1 on 3 heads and 3 on 3 heads
    sizes = HeadSizes(query_heads=12, kv_heads=3, head_dim=7)
    assert kha.flops(sizes) == 2 * 7**2 * (12 + 3 + 9)
    assert KHAConfig().flops(sizes) == 0


def test_megatrons_arguments_name_a_preset_by_its_spec():
    spec = {"spec": ["kha_megatron.mcore.specs", "kha_mlp"]}
    assert KHAConfig.from_entries(spec) == KHAConfig(value="mlp")
    assert KHAConfig.from_entries(spec | {"kha_query": "gate"}) == KHAConfig(query="gate")
    for other in ({}, {"spec": None}, {"spec": ["local"]}, {"spec": ["other.specs", "kha_mlp"]}):
        assert KHAConfig.from_entries(other) is None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: KHAConfig(value="mpl"), ["'mpl'", "linear, mlp, gate"]),
        (lambda: KHAConfig(init="zeros"), ["'zeros'", "identity, random"]),
        (lambda: KHAConfig(attention="mla"), ["'mla'", "gta, gla"]),
        (lambda: KHAConfig(attention="gta", key="linear"), ["key=linear", "value=", "leave key"]),
        (lambda: KHAConfig(attention="gla", value="mlp"), ["value=mlp", "use linear"]),
        (lambda: KHAConfig(latent_heads=4), ["latent_heads=4", "attention=gla"]),
        (lambda: KHAConfig(attention="gla", latent_heads=0), ["latent_heads 0", "1 or more"]),
        (lambda: KHAConfig(fold="yes"), ["'yes'", "auto, always, never"]),
        (lambda: KHAConfig(value="mlp", fold="always"), ["fold=always", "value=mlp", "use auto"]),
        (lambda: KHAConfig.from_preset("kha"), ["'kha'", "kha_mlp"]),
        (lambda: KHAConfig.from_options({"value": "mpl"}), ["'mpl'", "or none"]),
        (lambda: parse_heads(["knok.value=mlp"]), ["knok.value=mlp", "NAME.FIELD=VALUE", "knock"]),
        (lambda: parse_heads(["knock.values=mlp"]), ["knock.values=mlp", "value, init"]),
        (lambda: KHAConfig.from_dict({"values": "mlp"}), ["values", "another version"]),
    ],
)
def test_refusals_name_value_and_remedy(make, words):
    with pytest.raises(ConfigError) as caught:
        make()
    assert all(word in str(caught.value) for word in words)


def test_numbers_of_gates_are_those_of_the_papers_text():
    """Values before G2, as its ranks of W_V W_O say; notes on it number otherwise."""
    asked = KHAConfig.from_options(
        {"heads": ["gate.g1=element", "gate.g2=head", "gate.g5=element"]}
    )
    assert asked == KHAConfig(gate=Gate(output="element", value="head", dense="element"))
    assert str(asked) == "gate(output=element, value=head, dense=element)"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gate.output=each"], r"gate output='each': choose one of element, head, shared"),
        (["gate.output=head", "gate.form=divide"], r"form='divide': choose one of multiply, add"),
        (["gate.output=head", "gate.reads_input=3"], r"reads_input=3: choose true or false"),
        (["gate"], r"gate at no position: say where, output, value, .*gate.output=element"),
        (["gate.g1=head", "gate.output=head"], r"is gate.output, which is given too"),
        (["gate.g6=head"], r"unknown setting g6 of gate: it has output, value"),
    ],
)
def test_unknown_words_of_gates_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        KHAConfig.from_options({"heads": words})


def test_megatrons_output_gate_is_one_of_ours():
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
    with pytest.raises(ConfigError, match=r"gate\(value=head, form=add\) asks for another"):
        other.with_output_gate(True)
