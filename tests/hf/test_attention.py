"""The knocked attention against the oracle, output and all gradients."""

import itertools

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention as FLEX
from transformers import Qwen3Config, Qwen3ForCausalLM, masking_utils
from transformers.integrations import flex_attention

from kha_megatron.heads.kernels.fused import knock
from kha_megatron.heads.knock import MATRICES, PROJECTIONS, fold, module_name
from kha_megatron.hf import read_kha
from kha_megatron.hf.modeling_kha import KHAKnock
from tests import oracle as reference
from tests.hf.conftest import (
    SIZES,
    TOKENS,
    check_layer_against_oracle,
    every_projection,
    make_config,
    make_model,
    tokens,
)

CASES = [
    *({p: v} for p, v in itertools.product(PROJECTIONS, MATRICES)),
    {"query": "gate", "key": "linear", "value": "mlp"},
    {},
]


def oracle(layer, hidden, kha, **gates):
    matrices = {
        p: [
            getattr(layer, f"{p[0]}_knock").get_submodule(module_name(m)).weight.T
            for m in MATRICES[v]
        ]
        for p, v in kha.items()
    }
    norms = {}
    if layer.use_qk_norm:
        norms = {"q_norm": layer.q_norm.weight, "k_norm": layer.k_norm.weight}
    return reference.attention(
        hidden,
        *(w.weight.T for w in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj)),
        read_kha(layer.config),
        matrices,
        num_query_groups=SIZES["num_key_value_heads"],
        head_dim=SIZES["head_dim"],
        eps=layer.config.rms_norm_eps,
        rotary_base=10000.0,
        **norms,
        **gates,
    )


@pytest.mark.parametrize("use_qk_norm", [False, True], ids=["no_norm", "qk_norm"])
@pytest.mark.parametrize("kha", CASES, ids=lambda kha: "-".join(f"{p}_{kha[p]}" for p in kha))
def test_output_and_gradients_equal_the_oracle(kha, use_qk_norm):
    config = make_config(kha, use_qk_norm=use_qk_norm)
    # transformers' RMSNorm always computes in float32.
    tolerance = 2e-6 if use_qk_norm else 1e-12
    check_layer_against_oracle(config, lambda *given: oracle(*given, kha), tolerance)


@pytest.mark.parametrize("variant", MATRICES)
def test_knock_module_computes_what_the_function_computes(variant):
    module = KHAKnock(variant, 10).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    stack = torch.stack([module.get_submodule(module_name(m)).weight.T for m in MATRICES[variant]])
    x = torch.randn(2, TOKENS, 3, 10, dtype=torch.float64)
    torch.testing.assert_close(module(x), knock(x, stack, variant), rtol=1e-12, atol=1e-12)


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
        expected, actual = ours(ids).logits, stock(ids).logits
    assert expected.abs().max() > 1
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)


def backend(name: str, monkeypatch) -> str:
    """A word for ``attn_implementation``; ``flex`` is transformers' code without the compiler.

    The CPU compiler takes a minute for it, which only ``make test-all`` spends.
    """
    if name != "flex":
        return name
    monkeypatch.setattr(flex_attention.WrappedFlexAttention, "__call__", lambda self: FLEX)
    whole = masking_utils.create_block_mask
    monkeypatch.setattr(
        masking_utils,
        "create_block_mask",
        lambda *args, **settings: whole(*args, **{**settings, "_compile": False}),
    )
    return "flex_attention"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "other", ["eager", "flex", pytest.param("flex_attention", marks=pytest.mark.whole)]
)
def test_attention_backends_agree(other, monkeypatch):
    """With and without padding on the left; the flexible one demands 16 features a head."""
    ours = make_model(every_projection("mlp"), attention="sdpa", head_dim=16)
    theirs = make_model(every_projection("mlp"), attention=backend(other, monkeypatch), head_dim=16)
    theirs.load_state_dict(ours.state_dict())
    ids = tokens()
    full = torch.ones_like(ids)
    padded = full.clone()
    padded[0, :3] = 0
    for mask in (full, padded):
        with torch.no_grad():
            logits, others = (
                model(ids, attention_mask=mask).logits[mask.bool()] for model in (ours, theirs)
            )
        torch.testing.assert_close(others, logits, rtol=1e-5, atol=1e-5)


def test_eager_and_sdpa_agree_on_gradients():
    """torch's flexible attention has no backward pass on the CPU."""
    models = [make_model(every_projection("mlp"), attention=name) for name in ("sdpa", "eager")]
    models[1].load_state_dict(models[0].state_dict())
    ids = tokens()
    for model in models:
        model(ids, labels=ids).loss.backward()
    for (name, ours), theirs in zip(
        models[0].named_parameters(), models[1].parameters(), strict=True
    ):
        error = (theirs.grad - ours.grad).abs().max() / ours.grad.abs().max()
        assert error < 1e-5, f"{name}: {error:.1e}"


def test_partial_rotary_and_biases_reach_the_attention():
    model = make_model(attention_bias=True, rope_parameters={"partial_rotary_factor": 0.4})
    cos, _ = model.model.rotary_emb(torch.zeros(1), torch.arange(TOKENS)[None])
    assert cos.shape[-1] == 4
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.bias is not None
    assert attention.o_proj.bias is None
    ids = tokens()
    before = model(ids).logits
    attention.v_proj.bias.data += 1
    assert not torch.equal(before, model(ids).logits)
