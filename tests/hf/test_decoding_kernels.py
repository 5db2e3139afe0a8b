"""The kernels of a decoding step in eager mode, compared with the stock model of transformers."""

import pytest
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.hf.conftest import LINEAR, SIZES, make_model
from tests.hf.operators import count_layer

FOLDED = {"kha_folded": ["value", "output"]}
HALF_FOLDED = {"kha_folded": ["value"]}
OUTPUT_GATE = {"kha_gate": {"output": "element"}}
ADDED_KERNELS = {
    "baseline": ({}, {}, 0),
    "linear on queries, keys and values": (LINEAR, {}, 3),
    "mlp": ({"value": "mlp"}, {}, 6),
    "mlp, folded": ({"value": "mlp"}, FOLDED, 1),
    "mlp, down not folded": ({"value": "mlp"}, HALF_FOLDED, 2),
    "gate": ({"value": "gate"}, {}, 4),
    "gate, folded": ({"value": "gate"}, HALF_FOLDED, 1),
    "output gate": ({}, OUTPUT_GATE, 3),
    "mlp, output gate": ({"value": "mlp"}, OUTPUT_GATE, 9),
    "mlp, output gate, folded": ({"value": "mlp"}, OUTPUT_GATE | HALF_FOLDED, 5),
}
"""KHA variants, settings, and how many kernels a layer has more than one of Qwen3."""


def build_stock(layers):
    config = Qwen3Config(**SIZES | {"num_hidden_layers": layers}, tie_word_embeddings=True)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.fast
@pytest.mark.parametrize("name", ADDED_KERNELS)
def test_kernels_per_layer_over_stock(name, tmp_path):
    kha, settings, added = ADDED_KERNELS[name]

    def build(layers):
        model = make_model(kha, **settings, num_hidden_layers=layers, tie_word_embeddings=True)
        model.save_pretrained(tmp_path / str(layers))
        return AutoModelForCausalLM.from_pretrained(tmp_path / str(layers))

    stock = count_layer(build_stock)
    counts = count_layer(build)
    differences = {n: counts[n] - stock[n] for n in counts | stock if counts[n] != stock[n]}
    assert sum(differences.values()) == added, differences


@pytest.mark.fast
@pytest.mark.parametrize("settings", [{}, FOLDED | {"kha_value": "mlp"}], ids=["baseline", "mlp"])
def test_views_per_layer_are_those_of_stock(settings):
    def build(layers):
        return make_model(**settings, num_hidden_layers=layers, tie_word_embeddings=True)

    assert count_layer(build, views=True) == count_layer(build_stock, views=True)


OTHER_HEADS = {
    "moh": ({"kha_moh": {"share": 0.75}}, FOLDED),
    "talking": ({"kha_talking": {}}, FOLDED),
    "collaborative": ({"kha_collaborative": {"dim": 14}}, FOLDED),
    "gta": ({"kha_attention": "gta", "head_dim": 12}, HALF_FOLDED),
}


@pytest.mark.parametrize("name", OTHER_HEADS)
def test_kernels_per_layer_with_other_heads(name, tmp_path):
    heads, folded = OTHER_HEADS[name]

    def count(settings):
        def build(layers):
            model = make_model(**heads | settings, num_hidden_layers=layers)
            model.save_pretrained(tmp_path / str(layers))
            eager = "eager" if name == "talking" else None
            return AutoModelForCausalLM.from_pretrained(
                tmp_path / str(layers), attn_implementation=eager
            )

        return sum(count_layer(build).values())

    without_kha = count({})
    mlp = {"kha_value": "mlp"}
    assert count(mlp) - without_kha == 6
    added = 1 if folded is FOLDED else 2
    assert count(mlp | folded) - without_kha == added
