"""Sparse layers: the router against Megatron's, experts and the shared expert."""

import pytest
import torch
from megatron.core.transformer.moe import moe_utils
from torch.nn.functional import silu

from kha_megatron.hf.modeling_kha import KHARouter, KHASparseMLP
from tests.hf.conftest import MOE, SIZES, TOKENS, make_config, make_model, tokens

EXPERTS = 5


def build_router(**settings) -> KHARouter:
    router = KHARouter(make_config(**{**MOE, **settings}))
    with torch.no_grad():
        router.weight.normal_()
        if router.score_function == "sigmoid":
            router.e_score_correction_bias.normal_(std=0.3)
    return router


@pytest.mark.fast
@pytest.mark.parametrize(
    ("dtype", "router_dtype"),
    [(torch.float32, "float32"), (torch.bfloat16, "float32"), (torch.bfloat16, "auto")],
)
@pytest.mark.parametrize(
    ("score", "top_k", "pre_softmax"),
    [
        ("sigmoid", 1, False),
        ("sigmoid", 3, False),
        ("softmax", 3, False),
        ("softmax", 3, True),
        ("softmax", 1, True),
    ],
)
def test_router_equals_megatrons(score, top_k, pre_softmax, dtype, router_dtype, monkeypatch):
    monkeypatch.setattr(moe_utils, "te_general_gemm", None)  # Transformer Engine needs a GPU
    normalised = top_k > 1 if score == "sigmoid" else not pre_softmax
    router = build_router(
        scoring_func=score,
        num_experts_per_tok=top_k,
        norm_topk_prob=normalised,
        routed_scaling_factor=2.5,
        router_dtype=router_dtype,
    )
    router.weight.data = router.weight.data.to(dtype)
    hidden = torch.randn(2, TOKENS, SIZES["hidden_size"], dtype=dtype)

    logits, weights, experts = router(hidden)
    rounded = torch.float32 if router_dtype == "float32" else dtype
    expected_logits = moe_utils.router_gating_linear(hidden, router.weight, None, rounded)
    expected_weights, expected_experts = moe_utils.topk_routing_with_score_function(
        expected_logits.flatten(0, 1),
        top_k,
        use_pre_softmax=pre_softmax,
        scaling_factor=2.5,
        score_function=score,
        expert_bias=router.e_score_correction_bias if score == "sigmoid" else None,
        dense_output=True,
    )
    assert torch.equal(logits, expected_logits.flatten(0, 1))
    assert torch.equal(experts, expected_experts)
    assert weights.dtype == rounded
    # the stock router divides after the softmax: in bfloat16 the last bit may differ
    last_bit = 2**-8 if router_dtype == "auto" and score == "softmax" and normalised else 0.0
    torch.testing.assert_close(weights, expected_weights, rtol=last_bit, atol=0)


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_autocast_does_not_change_the_routing(score):
    router = build_router(scoring_func=score)
    hidden = torch.randn(64, SIZES["hidden_size"])
    expected = router(hidden)
    with torch.autocast("cpu", torch.bfloat16):
        found = router(hidden)
    for tensor, expected_tensor in zip(found, expected, strict=True):
        assert tensor.dtype == expected_tensor.dtype
        assert torch.equal(tensor, expected_tensor)


@pytest.mark.parametrize(("shared", "gate"), [(0, False), (9, False), (9, True)])
def test_layer_equals_a_loop_over_tokens(shared, gate):
    config = make_config(
        **MOE | {"shared_expert_intermediate_size": shared, "shared_expert_gate": gate}
    )
    config._experts_implementation = "eager"
    layer = KHASparseMLP(config)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    hidden = torch.randn(2, TOKENS, SIZES["hidden_size"])
    _, weights, experts = layer.gate(hidden)

    def swiglu(x, gate_w, up_w, down_w):
        return down_w @ (silu(gate_w @ x) * (up_w @ x))

    def routed(x, expert):
        gate_w, up_w = layer.experts.gate_up_proj[expert].chunk(2)
        return swiglu(x, gate_w, up_w, layer.experts.down_proj[expert])

    def of_shared_expert(x):
        mlp = layer.shared_experts
        y = swiglu(x, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
        if gate:
            y = y * torch.sigmoid(layer.shared_expert_gate.weight @ x)
        return y

    expected = []
    for x, chosen, weight in zip(hidden.flatten(0, 1), experts, weights, strict=True):
        y = sum(w * routed(x, expert) for expert, w in zip(chosen, weight, strict=True))
        if shared:
            y = y + of_shared_expert(x)
        expected.append(y)
    expected = torch.stack(expected).view_as(hidden)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(layer(hidden), expected, rtol=1e-5, atol=1e-5)


def test_layers_follow_the_pattern_and_return_router_logits():
    model = make_model(**MOE)
    kinds = [isinstance(layer.mlp, KHASparseMLP) for layer in model.model.layers]
    assert kinds == [False, True, True]
    logits = model.model(tokens(), output_router_logits=True).router_logits
    assert [tensor.shape for tensor in logits] == [(2 * TOKENS, EXPERTS)] * 2


def test_implementations_of_the_experts_agree():
    model = make_model(**{**MOE, "hidden_size": 24, "moe_intermediate_size": 16})
    ids = tokens()
    assert model.config._experts_implementation == "grouped_mm"
    logits = []
    for name in ("eager", "batched_mm", "grouped_mm"):
        model.set_experts_implementation(name)
        with torch.no_grad():
            logits.append(model(ids).logits)
    assert not torch.equal(*logits[:2])
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0], rtol=1e-5, atol=1e-5)


def test_experts_of_unaligned_sizes_use_the_loop():
    model = make_model(**MOE)  # Rows of 22 and 14 features are not multiples of 16 bytes.
    assert model.config._experts_implementation == "eager"
    with pytest.raises(ValueError, match="multiples of 8, got 22 and 14"):
        model.set_experts_implementation("grouped_mm")
    dense = make_model(hidden_size=24)
    assert dense(tokens()).logits.isfinite().all()
