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
    scores = torch.zeros(3, 7, HEADS + 2, dtype=dtype)
    result = moh.apply({"moh_router": scores, "output": output}, {}, Ranks())
    assert torch.equal(result["output"], output)


def test_equal_norms_give_finite_weights_and_gradients():
    moh = MixtureOfHeads(shared=3, active=2, router="query_norm")
    scores = torch.full((7, HEADS), 2.0, requires_grad=True)
    weights = route(scores, moh).weights
    (gradient,) = torch.autograd.grad(weights, scores, torch.randn(7, HEADS))
    assert torch.isfinite(weights).all()
    assert torch.isfinite(gradient).all()


def test_half_precision_is_routed_in_float32():
    moh = MixtureOfHeads(shared=3, active=2)
    scores = torch.randn(7, HEADS + 2).bfloat16()
    weights = route(scores, moh).weights
    assert weights.dtype == torch.float32
    assert torch.equal(weights, route(scores.float(), moh).weights)
    output = torch.randn(7, HEADS, 6).bfloat16()
    result = moh.apply({"moh_router": scores, "output": output}, {}, Ranks())
    assert result["output"].dtype == torch.bfloat16


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
    tensors = {}
    for name, size in shape.items():
        tensors[name] = torch.randn(
            tokens,
            *size,
            dtype=torch.bfloat16,
            requires_grad=True,
        )
    with saved_tensors() as saved:
        query = tensors.pop("query")
        if router == "query_norm":
            tensors |= moh.apply({"query": query}, {}, Ranks())
        moh.apply(tensors, {}, Ranks())
    saved_elements = sum(x.untyped_storage().nbytes() for x in saved.values()) / 2
    bound = tokens * moh.costs(sizes).activations
    assert saved_elements <= bound <= 1.125 * saved_elements
