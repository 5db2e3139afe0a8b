"""Test the routing of mixture-of-head attention: exactness and numerical edge cases."""

import pytest
import torch

from kha_megatron.heads import HeadSizes
from kha_megatron.heads.moh import MixtureOfHeads, route
from kha_megatron.heads.ranks import Ranks
from tests.heads.saving import saved_tensors

HEADS = 8


@pytest.mark.fast
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_zero_router_with_all_heads_is_the_identity(dtype):
    moh = MixtureOfHeads(shared=4, active=4, start="zeros")
    output = torch.randn(3, 7, HEADS, 6).to(dtype)
    scores = {"moh_router": torch.zeros(3, 7, HEADS + 2, dtype=dtype), "output": output}
    assert torch.equal(moh.apply(scores, {}, Ranks())["output"], output)


def test_equal_norms_give_finite_weights_and_gradients():
    moh = MixtureOfHeads(shared=3, active=2, router="query_norm")
    scores = torch.full((7, HEADS), 2.0, requires_grad=True)
    weights, _, _ = route(scores, moh)
    (gradient,) = torch.autograd.grad((weights * torch.randn(7, HEADS)).sum(), scores)
    assert torch.isfinite(weights).all()
    assert torch.isfinite(gradient).all()


def test_half_precision_is_routed_in_float32():
    moh = MixtureOfHeads(shared=3, active=2)
    scores = torch.randn(7, HEADS + 2).bfloat16()
    assert route(scores, moh).weights.dtype == torch.float32
    wide = route(scores.float(), moh).weights
    assert torch.equal(route(scores, moh).weights, wide)
    tensors = {"moh_router": scores, "output": torch.randn(7, HEADS, 6).bfloat16()}
    assert moh.apply(tensors, {}, Ranks())["output"].dtype == torch.bfloat16


@pytest.mark.parametrize("router", ["learned", "query_norm"])
@pytest.mark.parametrize("choice", [{}, {"quantized": True}, {"scale": "paper"}], ids=str)
def test_activations_bound_what_autograd_saves(router, choice):
    """In elements of 16 bits: the bound is at most an eighth above what autograd saves."""
    tokens = 5
    heads = 16
    dim = 64
    moh = MixtureOfHeads(share=0.75, router=router, **choice)
    sizes = HeadSizes(query_heads=heads, kv_heads=4, head_dim=dim, hidden_size=30)
    shape = {
        "output": (heads, dim),
        "moh_router": (heads + 2,),
        "query": (heads, dim),
    }
    given = {
        name: torch.randn(tokens, *size, dtype=torch.bfloat16, requires_grad=True)
        for name, size in shape.items()
    }
    with saved_tensors() as saved:
        query = given.pop("query")
        if router == "query_norm":
            given |= moh.apply({"query": query}, {}, Ranks())
        moh.apply(given, {}, Ranks())
    found = sum(x.untyped_storage().nbytes() for x in saved.values()) / 2
    assert found <= tokens * moh.costs(sizes).activations <= 1.125 * found
