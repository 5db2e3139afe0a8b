"""The kernels of a decoding step in eager mode, compared with the stock model of transformers."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from kha_megatron.hf.modeling_kha import KHAKnock
from tests.hf.conftest import LINEAR, SIZES, make_model
from tests.hf.operators import count_layer

FOLDED = {"kha_folded": ["value", "output"]}
HALF_FOLDED = {"kha_folded": ["value"]}
OUTPUT_GATE = {"kha_gate": {"output": "element"}}
ADDED_KERNELS = {
    "baseline": ({}, {}, 0),
    "linear on queries, keys and values": (LINEAR, {}, 3),
    "mlp": ({"value": "mlp"}, {}, 3),
    "mlp, folded": ({"value": "mlp"}, FOLDED, 1),
    "mlp, down not folded": ({"value": "mlp"}, HALF_FOLDED, 2),
    "gate": ({"value": "gate"}, {}, 4),
    "gate, folded": ({"value": "gate"}, HALF_FOLDED, 1),
    "output gate": ({}, OUTPUT_GATE, 3),
    "mlp, output gate": ({"value": "mlp"}, OUTPUT_GATE, 6),
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
    assert count(mlp) - without_kha == 3
    added = 1 if folded is FOLDED else 2
    assert count(mlp | folded) - without_kha == added


def make_knock(dim=10, rows=7):
    torch.manual_seed(0)
    knock = KHAKnock("mlp", dim)
    with torch.no_grad():
        for parameter in knock.parameters():
            parameter.copy_(torch.randn(dim, dim))
    return knock, torch.randn(2, rows, 3, dim)


def is_stacked(knock):
    return knock._stacked_weight().data_ptr() == knock.up_proj.weight.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [10, 64, 80, 128])
def test_stacked_matrices_give_the_same_bits(dim, dtype):
    knock, x = make_knock(dim)
    knock = knock.to(dtype)
    for module in knock.children():
        module.weight.data = module.weight.data.clone()
    x = x.to(dtype)
    expected = knock(x)
    assert expected.requires_grad
    with torch.no_grad():
        assert not is_stacked(knock)
        copied = knock(x)
        knock.stack_weights()
        assert is_stacked(knock)
        stacked = knock(x)
    assert torch.equal(copied, stacked)
    assert stacked.isfinite().all()
    if dim % 16:  # The CPU's matrix product adds the last columns in another order.
        torch.testing.assert_close(stacked, expected)
    else:
        assert torch.equal(stacked, expected)


def test_stacked_matrices_are_the_parameters():
    """Every change of the parameters has an effect, and they are stacked again if they move."""
    knock, x = make_knock(64)
    knock.stack_weights()
    with torch.no_grad():
        before = knock(x)
        knock.gate_proj.weight.data.mul_(3)
        knock.up_proj.weight.add_(1)
        after = knock(x)
    assert not torch.equal(before, after)
    assert torch.equal(after, knock(x.requires_grad_()))
    addresses = [parameter.data_ptr() for parameter in knock.parameters()]
    knock.eval().float().stack_weights()
    assert [parameter.data_ptr() for parameter in knock.parameters()] == addresses
    knock.double()
    assert is_stacked(knock)
    knock.up_proj.weight.data = knock.up_proj.weight.data.clone()
    assert not is_stacked(knock)
    with torch.no_grad():
        moved = knock(x.double())
    torch.testing.assert_close(moved.float(), after, rtol=1e-4, atol=1e-3)  # values up to 1e3


def test_parameters_that_are_part_of_a_larger_tensor_stay_there():
    """As with DeepSpeed and FSDP, whose optimizers update that tensor."""
    knock, _ = make_knock()
    flat = torch.randn(3 * 100)
    for parameter, values in zip(knock.parameters(), flat.split(100), strict=True):
        parameter.data = values.view(10, 10)
    knock.stack_weights()
    flat.zero_()
    assert not any(parameter.any() for parameter in knock.parameters())


def test_loaded_and_saved_models_keep_their_tensors(tmp_path):
    model = make_model({"key": "mlp", "value": "mlp"})
    model.save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for layer in loaded.model.layers:
        assert is_stacked(layer.self_attn.k_knock)
        assert is_stacked(layer.self_attn.v_knock)
    loaded.save_pretrained(tmp_path / "again")
    before, after = (load_file(tmp_path / n / "model.safetensors") for n in ("model", "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    save_file(loaded.model.layers[0].self_attn.v_knock.state_dict(), tmp_path / "direct")


def test_replaced_matrices_are_called():
    """As PEFT does: its layers add something to the product."""

    class Adapted(torch.nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.base_layer = linear

        @property
        def weight(self):
            return self.base_layer.weight

        def forward(self, x):
            return self.base_layer(x) + 1

    for name in ("up_proj", "gate_proj", "down_proj"):
        knock, x = make_knock()
        with torch.no_grad():
            before = knock(x)
            setattr(knock, name, Adapted(getattr(knock, name)))
            assert not torch.allclose(knock(x), before)
