"""GTA, MLA and GLA against the oracle, and in every use that grouped-query attention has."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from kha_megatron.heads.knock import MATRICES, module_name
from kha_megatron.hf import read_kha
from kha_megatron.hf.modeling_kha import attention_class
from tests import oracle as reference
from tests.hf.conftest import (
    FAMILY,
    LATENT,
    MOE,
    SIZES,
    TOKENS,
    check_checkpointing,
    check_decoding_is_one_graph,
    make_config,
    make_model,
    tokens,
)
from tests.hf.generating import check_greedy, check_padding, check_pieces
from tests.hf.packed import check_packed
from tests.hf.test_attention import backend, rotary

every_attention = pytest.mark.parametrize("name", FAMILY)


def model_of(name, **settings):
    kha, sizes = FAMILY[name]
    return make_model(kha, **(sizes | settings))


def rows(linear):
    """The matrix of a linear layer for row vectors; several of them side by side."""
    if isinstance(linear, torch.nn.ModuleList):
        return torch.cat([part.weight.T for part in linear], dim=-1)
    return linear.weight.T


def oracle(layer, hidden, **gates):
    kha, config = read_kha(layer.config), layer.config
    matrices = {
        p: [
            getattr(layer, f"{p[0]}_knock").get_submodule(module_name(m)).weight.T
            for m in MATRICES[v]
        ]
        for p, v in kha.variants.items()
    }
    names = {"q_norm": "q_norm", "k_norm": "k_norm"}
    if config.kv_lora_rank is not None:
        names = {"q_norm": "q_a_layernorm", "kv_norm": "kv_a_layernorm"}
    found = {ours: getattr(layer, theirs, None) for ours, theirs in names.items()}
    norms = {name: m.weight for name, m in found.items() if hasattr(m, "weight")}
    common = {"rotary_base": 10000.0, "eps": config.rms_norm_eps, **norms, **gates}
    if config.kv_lora_rank is None:
        weights = (layer.q_proj, layer.kv_proj, layer.k_rope_proj, layer.o_proj)
        return reference.tied_attention(
            hidden,
            *map(rows, weights),
            kha,
            matrices,
            num_query_groups=config.num_key_value_heads,
            head_dim=config.head_dim,
            **common,
        )
    down, rank = rows(layer.kv_a_proj_with_mqa), config.kv_lora_rank
    heads, plain = config.num_attention_heads, config.qk_nope_head_dim
    up = rows(layer.kv_b_proj).unflatten(-1, (heads, -1))
    direct = config.q_lora_rank is None
    return reference.latent_attention(
        hidden,
        rows(layer.q_proj if direct else layer.q_b_proj),
        down[:, :rank],
        up[..., :plain].flatten(1),
        up[..., plain:].flatten(1),
        down[:, rank:],
        rows(layer.o_proj),
        kha,
        matrices,
        heads=heads,
        w_query_latent=None if direct else rows(layer.q_a_proj),
        **common,
    )


@every_attention
def test_output_and_gradients_equal_the_oracle(name):
    kha, sizes = FAMILY[name]
    config = make_config(kha, **sizes)
    config._attn_implementation = "sdpa"
    layer = attention_class(config)(config, layer_idx=0).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.4 * torch.randn_like(parameter))
    hidden = torch.randn(2, TOKENS, SIZES["hidden_size"], dtype=torch.float64, requires_grad=True)
    out_grad = torch.randn_like(hidden)
    leaves = {"hidden": hidden, **dict(layer.named_parameters())}

    expected = oracle(layer, hidden)
    expected_grads = torch.autograd.grad(expected, leaves.values(), out_grad)
    actual, _ = layer(hidden, rotary(10000.0, TOKENS, config.qk_rope_head_dim), None)
    actual_grads = torch.autograd.grad(actual, leaves.values(), out_grad)

    # norms compute in float32 whatever they are given; all else is float64
    tolerance = 5e-6 if any("norm" in leaf for leaf in leaves) else 1e-12
    pairs = zip((actual, *actual_grads), (expected, *expected_grads), strict=True)
    for leaf, (ours, theirs) in zip(["output", *leaves], pairs, strict=True):
        assert theirs.abs().max() > 1e-4, f"{leaf} is too small to prove anything"
        error = (ours - theirs).abs().max() / theirs.abs().max()
        assert error < tolerance, f"{leaf}: {error:.1e}"


def paper_size(config):
    """Numbers that one layer must keep of a token (DESIGN section 2; Zadouri et al. 2025)."""
    if config.kv_lora_rank is None:
        return config.num_key_value_heads * config.head_dim + config.head_dim // 2
    return config.kv_lora_rank + config.qk_rope_head_dim


@every_attention
def test_the_cache_has_its_paper_size(name):
    model = model_of(name)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens(1, 7), past_key_values=cache)
        model(tokens(1, 1), past_key_values=cache)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    expected = {"gta": 3 * 12 + 6, "mla": 12 + 4, "gla": 12 + 4}[name[:3]]
    assert paper_size(model.config) == expected
    assert held == 3 * expected * 4 * 8
    static = StaticCache(config=model.config, max_cache_len=8)
    with torch.no_grad():
        model(tokens(1, 7), past_key_values=static)
    assert sum(layer.keys.nbytes + layer.values.nbytes for layer in static.layers) == held


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@every_attention
def test_greedy_with_and_without_cache_agree(name, cache):
    model = model_of(name, initializer_range=0.5, **MOE if name == "gla" else {})
    check_greedy(model, cache)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@every_attention
def test_logits_with_a_cache_are_those_without(name, static):
    """In pieces of several tokens; padding on the left of one sequence changes nothing either."""
    model = model_of(name)
    check_pieces(model, static, (5, 3, 1))


@every_attention
def test_generation_with_padding_on_the_left(name):
    model = model_of(name, initializer_range=0.5)
    check_padding(model)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("other", ["eager", "flex"])
@every_attention
def test_attention_backends_agree(name, other, monkeypatch):
    kha, sizes = FAMILY[name]
    if "kv_lora_rank" in sizes:  # the flexible one demands 16 features a head
        sizes = sizes | {"qk_nope_head_dim": 12, "v_head_dim": 16}
    else:
        sizes = sizes | {"head_dim": 16}
    ours = make_model(kha, **sizes)
    theirs = make_model(kha, attention=backend(other, monkeypatch), **sizes)
    theirs.load_state_dict(ours.state_dict())
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.no_grad():
        logits, others = (m(ids, attention_mask=mask).logits[mask.bool()] for m in (ours, theirs))
    torch.testing.assert_close(others, logits, rtol=1e-5, atol=2e-5)


@every_attention
def test_eager_gives_the_attention_weights(name):
    model = model_of(name, attention="eager")
    with torch.no_grad():
        weights = model(tokens(), output_attentions=True).attentions
    assert [w.shape for w in weights] == [(2, 6, TOKENS, TOKENS)] * 3
    torch.testing.assert_close(weights[1].sum(-1), torch.ones(2, 6, TOKENS))


@every_attention
def test_gradient_checkpointing_gives_the_same_gradients(name):
    check_checkpointing(lambda: model_of(name))


@every_attention
def test_new_matrices_change_nothing(name):
    """At the identity, bit for bit, in both dtypes."""
    _, sizes = FAMILY[name]
    for dtype in (torch.float32, torch.bfloat16):
        knocked = model_of(name, learnt=False, dtype=dtype)
        baseline = make_model(learnt=False, dtype=dtype, **sizes)
        report = baseline.load_state_dict(knocked.state_dict(), strict=False)
        assert not report.missing_keys
        assert all("_knock." in key for key in report.unexpected_keys)
        ids = tokens()
        with torch.no_grad():
            assert torch.equal(knocked(ids).logits, baseline(ids).logits)


@every_attention
def test_a_decoding_step_is_one_graph(name):
    check_decoding_is_one_graph(model_of(name))


@every_attention
def test_a_saved_folder_loads_to_the_same(name, tmp_path):
    model = model_of(name)
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, trust_remote_code=False
    )
    assert not any(info.values())
    assert read_kha(loaded.config) == read_kha(model.config)
    assert loaded.config.base_model_tp_plan == model.config.base_model_tp_plan
    state = model.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[n]) for n, tensor in loaded.state_dict().items())
    ids = tokens()
    with torch.no_grad():  # a copy, because loaded tensors lie unaligned
        assert torch.equal(deepcopy(loaded)(ids).logits, model(ids).logits)


@every_attention
def test_another_attention_function_serves_packed_sequences(name):
    check_packed(partial(model_of, name))


GTA = {"kha_attention": "gta", "head_dim": 12}
REFUSED = {
    "an mlp on MLA": (LATENT | {"kha_value": "mlp"}, "must be linear or None"),
    "a knocked key on GTA": (GTA | {"kha_key": "linear"}, "kha_key must be None"),
    "an unknown kind": ({"kha_attention": "mla"}, "kha_attention='mla' is unknown.*gta, gla"),
    "GLA without a latent": ({"kha_attention": "gla"}, "needs kv_lora_rank"),
    "GTA with a latent": (LATENT | GTA, "exclude each other"),
    "a missing size": (LATENT | {"v_head_dim": None}, "v_head_dim of at least 1"),
    "grouped keys of MLA": (LATENT | {"num_key_value_heads": 3}, "num_key_value_heads=3"),
    "latent heads that do not divide": (
        LATENT | {"kha_attention": "gla", "kha_latent_heads": 5},
        "kha_latent_heads=5 must divide kv_lora_rank=12",
    ),
    "half a head that is odd": (GTA | {"head_dim": 10}, "head_dim=10 .* multiple of 4"),
    "all of GTA rotated": (
        GTA | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}},
        "partial_rotary_factor=1.0.*0.5",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_contradictory_settings_are_refused(case):
    settings, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        make_model(**settings)
