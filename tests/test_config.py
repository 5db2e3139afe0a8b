"""The configuration object: presets, round trip, refusals, and the legal divisions of heads."""

import pytest

from kha_megatron.config import PRESETS, KHAConfig, check_head_layout
from kha_megatron.errors import ConfigError


@pytest.mark.parametrize("name", PRESETS)
def test_round_trip(name):
    kha = KHAConfig.from_preset(name, init="random", init_seed=5)
    assert KHAConfig.from_dict(kha.to_dict()) == kha
    assert kha.variants == dict(PRESETS[name])


def test_the_papers_parameter_count():
    """Three [D, D] matrices for KHA-Linear on q, k, v and for KHA-MLP on v alike (section 3.2)."""
    assert KHAConfig.from_preset("kha_linear").parameters_per_layer(128) == 3 * 128**2
    assert KHAConfig.from_preset("kha_mlp").parameters_per_layer(128) == 3 * 128**2
    assert KHAConfig().parameters_per_layer(128) == 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: KHAConfig(value="mpl"), ["'mpl'", "linear, mlp, gate"]),
        (lambda: KHAConfig(value="none"), ["write None"]),
        (lambda: KHAConfig(init="zeros"), ["'zeros'", "identity, random"]),
        (lambda: KHAConfig.from_preset("kha"), ["'kha'", "kha_mlp"]),
        (lambda: KHAConfig.from_dict({"values": "mlp"}), ["values", "another version"]),
    ],
)
def test_refusals_name_value_and_remedy(make, words):
    with pytest.raises(ConfigError) as caught:
        make()
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(("heads", "groups", "tp"), [(8, 8, 4), (8, 1, 8), (32, 4, 16), (6, 3, 3)])
def test_legal_head_layouts(heads, groups, tp):
    check_head_layout(heads, groups, tp)


@pytest.mark.parametrize(
    ("heads", "groups", "tp", "words"),
    [
        (8, 4, 3, ["8 query heads", "3 tensor", "[1, 2, 4, 8]"]),
        (12, 6, 4, ["6 key/value heads", "4 tensor", "[1, 2, 3, 6, 12]"]),
        (8, 3, 1, ["8 query heads", "3 key/value heads", "[1, 2, 4, 8]"]),
    ],
)
def test_illegal_head_layouts_name_legal_ones(heads, groups, tp, words):
    with pytest.raises(ConfigError) as caught:
        check_head_layout(heads, groups, tp)
    assert all(word in str(caught.value) for word in words)
