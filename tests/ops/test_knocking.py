"""The production path against the oracle, the initial values and folding."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kha_megatron.config import MATRICES, KHAConfig
from kha_megatron.ops import fold, initial_weight, knock, reference

TOKENS, BATCH, HEADS, HEAD_DIM = 7, 2, 3, 10


def weight_of(variant, dtype=torch.float64, scale=0.3):
    torch.manual_seed(len(variant))
    weight = initial_weight(torch.empty(len(MATRICES[variant]), HEAD_DIM, HEAD_DIM), variant)
    return (weight + scale * torch.randn_like(weight)).to(dtype)


@pytest.mark.parametrize("variant", MATRICES)
def test_equals_the_oracle_with_every_gradient(variant):
    weight = weight_of(variant).requires_grad_()
    # a strided view with gaps, as the split of Megatron's QKV buffer gives
    buffer = torch.randn(BATCH, TOKENS, HEADS, 3 * HEAD_DIM, dtype=torch.float64)
    x = buffer[..., HEAD_DIM : 2 * HEAD_DIM].requires_grad_()
    upstream = torch.randn(BATCH, TOKENS, HEADS, HEAD_DIM, dtype=torch.float64)
    got = torch.autograd.grad(knock(x, weight, variant), (x, weight), upstream)
    heads = [reference.knock_head(x[:, :, h], list(weight), variant) for h in range(HEADS)]
    want = torch.autograd.grad(torch.stack(heads, 2), (x, weight), upstream)
    torch.testing.assert_close(knock(x, weight, variant), torch.stack(heads, 2))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("variant", MATRICES)
def test_starts_as_the_identity_bit_for_bit(variant, dtype):
    weight = initial_weight(
        torch.empty(len(MATRICES[variant]), HEAD_DIM, HEAD_DIM, dtype=dtype), variant
    )
    x = (100 * torch.randn(TOKENS, BATCH, HEADS, HEAD_DIM)).to(dtype)
    assert torch.equal(knock(x, weight, variant), x)


def test_random_start_is_reproducible_and_independent_of_the_global_state():
    first = initial_weight(torch.empty(3, 5, 5), "mlp", "random", std=0.5, seed=3)
    torch.manual_seed(99)
    again = initial_weight(
        torch.empty(3, 5, 5, dtype=torch.float64), "mlp", "random", std=0.5, seed=3
    )
    assert torch.equal(first.double(), again)
    assert not torch.equal(first, initial_weight(torch.empty(3, 5, 5), "mlp", "random", seed=4))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_folding_equals_knocking(dtype):
    t = weight_of("linear", dtype)
    projection = torch.randn(HEADS * HEAD_DIM, 13, dtype=dtype)
    bias = torch.randn(HEADS * HEAD_DIM, dtype=dtype)
    hidden = torch.randn(TOKENS, 13, dtype=dtype)
    projected = (hidden @ projection.T + bias).unflatten(-1, (HEADS, HEAD_DIM))
    folded = hidden @ fold(projection, t).T + fold(bias, t)
    torch.testing.assert_close(folded, knock(projected, t, "linear").flatten(-2))


@pytest.mark.parametrize("variant", MATRICES)
def test_flops_and_saved_elements_are_those_of_the_op(variant):
    """What ``KHAConfig`` says of one knocked tensor, counted on the op itself."""
    tokens, heads, head_dim = 5, 3, 7
    kha = KHAConfig(query=variant)
    x = torch.randn(tokens, heads, head_dim, requires_grad=True)
    weight = torch.randn(len(MATRICES[variant]), head_dim, head_dim, requires_grad=True)
    saved = {}

    def keep(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    keeping = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with FlopCounterMode(display=False) as forward, keeping:
        y = knock(x, weight, variant)
    saved.pop(weight.untyped_storage().data_ptr())
    expected = tokens * kha.forward_flops_per_token(head_dim, heads, 1)
    assert forward.get_total_flops() == expected
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    assert backward.get_total_flops() == 2 * expected
    assert sum(saved.values()) == tokens * kha.saved_elements_per_token(head_dim, heads, 1)
