"""Attention with KHA against the oracle (output and all gradients), and attention backends."""

import itertools

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention as FLEX
from transformers import Qwen3Config, Qwen3ForCausalLM, masking_utils
from transformers.integrations import flash_attention, flex_attention

from kha_megatron.heads.knock import MATRICES, PROJECTIONS, fold
from kha_megatron.hf import read_kha
from tests import oracle as reference
from tests.hf.conftest import (
    FAMILY,
    LATENT,
    LINEAR,
    SIZES,
    check_layer_against_oracle,
    every_projection,
    knock_matrices,
    make_config,
    make_model,
    norm_weights,
    tokens,
    transposed_weights,
)

CASES = [
    *({p: v} for p, v in itertools.product(PROJECTIONS, MATRICES)),
    {"query": "gate", "key": "linear", "value": "mlp"},
    {},
]


def oracle(layer, hidden, kha, **gates):
    return reference.attention(
        hidden,
        *transposed_weights(layer, "q_proj", "k_proj", "v_proj", "o_proj"),
        read_kha(layer.config),
        knock_matrices(layer, kha),
        num_query_groups=SIZES["num_key_value_heads"],
        head_dim=SIZES["head_dim"],
        eps=layer.config.rms_norm_eps,
        rotary_base=10000.0,
        **norm_weights(layer),
        **gates,
    )


@pytest.mark.fast
@pytest.mark.parametrize("use_qk_norm", [False, True], ids=["no_norm", "qk_norm"])
@pytest.mark.parametrize("kha", CASES, ids=lambda kha: "-".join(f"{p}_{kha[p]}" for p in kha))
def test_output_and_gradients_equal_the_oracle(kha, use_qk_norm):
    config = make_config(kha, use_qk_norm=use_qk_norm)
    check_layer_against_oracle(config, lambda *given: oracle(*given, kha))


@pytest.mark.fast
def test_linear_folds_into_a_stock_qwen3():
    ours = make_model(every_projection("linear"), rms_norm_eps=1e-6)
    stock = Qwen3ForCausalLM(Qwen3Config(**SIZES, rms_norm_eps=1e-6)).eval()
    state = ours.state_dict()
    folded = {name: tensor for name, tensor in state.items() if "_knock" not in name}
    for name in (name for name in state if "_knock" in name):
        projection = name.replace("_knock.proj", "_proj")
        folded[projection] = fold(state[projection], state[name].T[None])
    stock.load_state_dict(folded, strict=True)
    ids = tokens()
    with torch.no_grad():
        expected = ours(ids).logits
        actual = stock(ids).logits
    assert expected.abs().max() > 1
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)


@pytest.fixture
def flex(monkeypatch):
    """Run transformers' flexible attention without the compiler, which takes a minute."""
    monkeypatch.setattr(flex_attention.WrappedFlexAttention, "__call__", lambda self: FLEX)
    compiled = masking_utils.create_block_mask
    monkeypatch.setattr(
        masking_utils,
        "create_block_mask",
        lambda *args, **settings: compiled(*args, **{**settings, "_compile": False}),
    )


# Flexible attention needs heads of at least 16 features.
WIDE = {"qk_nope_head_dim": 12, "v_head_dim": 16, "head_dim": 16}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("backend", ["eager", "flex_attention"])
@pytest.mark.parametrize("name", ["mlp", *FAMILY])
def test_attention_backends_agree_with_and_without_padding(name, backend, flex):
    kha, sizes = FAMILY.get(name, (every_projection("mlp"), {}))
    ours = make_model(kha, **sizes | WIDE)
    theirs = make_model(kha, attention=backend, **sizes | WIDE)
    theirs.load_state_dict(ours.state_dict())
    ids = tokens()
    padded = torch.ones_like(ids)
    padded[0, :3] = 0
    for mask in (torch.ones_like(ids), padded):
        with torch.no_grad():
            logits, others = (
                model(ids, attention_mask=mask).logits[mask.bool()] for model in (ours, theirs)
            )
        torch.testing.assert_close(others, logits, rtol=1e-5, atol=2e-5)


ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.4}
GATE = {"kha_gate": {"output": "head", "value": "element"}}
UNEQUAL = {
    "mla, narrower values": (LINEAR, LATENT | {"q_lora_rank": 9, "v_head_dim": 6}),
    "mla, wider values": (LINEAR, LATENT | {"q_lora_rank": 9, "v_head_dim": 14}),
    "gla, narrower values": (LINEAR, LATENT | {"v_head_dim": 6, "kha_attention": "gla"}),
    "collaborative, narrower values": ({}, GATE | {"kha_collaborative": {"dim": 14}}),
    "collaborative, wider values": (
        {},
        GATE | {"kha_collaborative": {"dim": 6}, "rope_parameters": ROPE},
    ),
}


def flash(query, key, value, mask, *, softmax_scale, **ignored):
    """Compute what flash-attn's kernels do on ``[B, S, heads, D]``. They need equal widths."""
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert mask is None
    output = F.scaled_dot_product_attention(
        *(part.transpose(1, 2) for part in (query, key, value)),
        is_causal=True,
        scale=softmax_scale,
        enable_gqa=True,
    )
    return output.transpose(1, 2)


@pytest.mark.parametrize("backend", ["sdpa", "flash_attention_2"])
@pytest.mark.parametrize("name", UNEQUAL)
def test_backends_agree_with_unequal_widths_of_keys_and_values(name, backend, monkeypatch):
    kha, sizes = UNEQUAL[name]
    model = make_model(kha, attention="eager", **sizes)
    ids = tokens()
    calls = []
    monkeypatch.setattr(
        flash_attention,
        "_flash_attention_forward",
        lambda *args, **kwargs: calls.append(1) or flash(*args, **kwargs),
    )
    with torch.no_grad():
        expected = model(ids).logits
        model.config._attn_implementation = backend  # The public setter needs the package.
        found = model(ids, use_cache=False).logits
    assert len(calls) == (3 if "flash" in backend else 0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mlp", *FAMILY, *UNEQUAL])
def test_flash_attention_2_agrees_on_a_gpu(name):
    """Relative to eager attention in float32, it rounds as SDPA does in bf16."""
    pytest.importorskip("flash_attn", reason="NOT TESTED: flash-attn is not installed")
    if not torch.cuda.is_available():
        pytest.skip("NOT TESTED: needs a CUDA device, and none was found")
    kha, sizes = (FAMILY | UNEQUAL).get(name, (every_projection("mlp"), {}))
    models = {
        "sdpa": make_model(kha, attention="sdpa", dtype=torch.bfloat16, **sizes),
        "flash_attention_2": make_model(
            kha,
            attention="flash_attention_2",
            dtype=torch.bfloat16,
            **sizes,
        ),
        "eager": make_model(kha, attention="eager", dtype=torch.float32, **sizes),
    }
    ids = tokens().cuda()
    padded = torch.ones_like(ids)
    padded[0, :3] = 0
    for mask in (torch.ones_like(ids), padded):
        logits = {}
        for attention, model in models.items():
            model.load_state_dict(models["sdpa"].state_dict())
            with torch.no_grad():
                output = model.cuda()(ids, attention_mask=mask)
            logits[attention] = output.logits[mask.bool()].float()
        exact = logits["eager"]
        flash_error = (logits["flash_attention_2"] - exact).norm()
        sdpa_error = (logits["sdpa"] - exact).norm()
        floor = 2**-8 * exact.norm()
        assert flash_error <= 2 * sdpa_error + floor
