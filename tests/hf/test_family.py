"""GTA, MLA and GLA against the oracle, and in every use that grouped-query attention has."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from kha_megatron.heads.knock import MATRICES, module_name
from kha_megatron.hf import read_kha
from tests import oracle as reference
from tests.hf.conftest import (
    FAMILY,
    LATENT,
    check_layer_against_oracle,
    make_config,
    make_model,
    tokens,
)
from tests.hf.test_attention import backend

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
    # transformers' norms always compute in float32.
    check_layer_against_oracle(config, oracle, 5e-6 if config.use_qk_norm else 1e-12)


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
