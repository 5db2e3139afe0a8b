"""Compare knocking and folding with the oracle; check initial values, FLOPs and saved tensors."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from kha_megatron.heads import HeadSizes, Knock
from kha_megatron.heads.collaborative import fold_mixing
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.heads.initial import initial_weight
from kha_megatron.heads.kernels.fused import fused_knock
from kha_megatron.heads.knock import MATRICES, fold, initial_values, knock
from tests import oracle
from tests.heads.saving import saved_tensors

TOKENS = 7
BATCH = 2
HEADS = 3
HEAD_DIM = 10


def empty_weight(variant, dtype=torch.float32):
    return torch.empty(len(MATRICES[variant]), HEAD_DIM, HEAD_DIM, dtype=dtype)


def weight_of(variant, dtype=torch.float64, scale=0.3):
    torch.manual_seed(len(variant))
    weight = initial_weight(empty_weight(variant), initial_values(variant))
    noise = torch.randn_like(weight)
    return (weight + scale * noise).to(dtype)


@pytest.mark.fast
@pytest.mark.parametrize("variant", MATRICES)
def test_equals_the_oracle_with_every_gradient(variant):
    weight = weight_of(variant).requires_grad_()
    # a strided view with gaps, as the split of Megatron's QKV buffer gives
    buffer = torch.randn(BATCH, TOKENS, HEADS, 3 * HEAD_DIM, dtype=torch.float64)
    x = buffer[..., HEAD_DIM : 2 * HEAD_DIM].requires_grad_()
    upstream = torch.randn(BATCH, TOKENS, HEADS, HEAD_DIM, dtype=torch.float64)
    knocked = fused_knock(x, weight, variant)
    heads = [oracle.knock_head(x[:, :, h], list(weight), variant) for h in range(HEADS)]
    expected = torch.stack(heads, 2)
    torch.testing.assert_close(knocked, expected)
    gradients = torch.autograd.grad(knocked, (x, weight), upstream)
    expected_gradients = torch.autograd.grad(expected, (x, weight), upstream)
    torch.testing.assert_close(
        gradients,
        expected_gradients,
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.fast
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("variant", MATRICES)
def test_starts_as_the_identity_bit_for_bit(variant, dtype):
    weight = initial_weight(empty_weight(variant, dtype), initial_values(variant))
    x = 100 * torch.randn(TOKENS, BATCH, HEADS, HEAD_DIM)
    x = x.to(dtype)
    assert torch.equal(fused_knock(x, weight, variant), x)


def test_random_start_is_reproducible_and_ignores_the_global_state():
    initial = initial_values("mlp", "random")
    first = initial_weight(torch.empty(3, 5, 5), initial, std=0.5, seed=3)
    torch.manual_seed(99)
    again = initial_weight(
        torch.empty(3, 5, 5, dtype=torch.float64),
        initial,
        std=0.5,
        seed=3,
    )
    other_seed = initial_weight(torch.empty(3, 5, 5), initial, seed=4)
    assert torch.equal(first.double(), again)
    assert not torch.equal(first, other_seed)


@pytest.mark.fast
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_folding_equals_knocking(dtype):
    t = weight_of("linear", dtype)
    projection = torch.randn(HEADS * HEAD_DIM, 13, dtype=dtype)
    bias = torch.randn(HEADS * HEAD_DIM, dtype=dtype)
    hidden = torch.randn(TOKENS, 13, dtype=dtype)
    projected = hidden @ projection.T + bias
    heads = projected.unflatten(-1, (HEADS, HEAD_DIM))
    knocked = fused_knock(heads, t, "linear").flatten(-2)
    folded = hidden @ fold(projection, t).T + fold(bias, t)
    torch.testing.assert_close(folded, knocked)


class Largest(TorchDispatchMode):
    """Record the bytes of the largest tensor that is allocated."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensor = func(*args, **(kwargs or {}))
        self.bytes = max(self.bytes, tensor.nbytes)
        return tensor


class Operators(TorchDispatchMode):
    """Record the names of operators, without views."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_linear_backward_only_multiplies():
    x = torch.randn(TOKENS, HEADS, HEAD_DIM, requires_grad=True)
    weight = weight_of("linear", torch.float32).requires_grad_()
    dy = torch.randn(TOKENS, HEADS, HEAD_DIM)
    y = knock(x, weight, "linear")
    with Operators() as operators:
        dx, d_weight = torch.autograd.grad(y, (x, weight), dy)
    assert operators.names == ["aten::mm", "aten::mm"]
    indexed = x @ weight[0]
    with Operators() as operators:
        expected_dx, expected_d_weight = torch.autograd.grad(indexed, (x, weight), dy)
    # which fills a tensor with zeros and copies the gradient into it
    assert operators.names == ["aten::mm", "aten::mm", "aten::select_backward"]
    assert torch.equal(y, indexed)
    assert torch.equal(dx, expected_dx)
    assert torch.equal(d_weight, expected_d_weight)


def test_folding_allocates_no_tensor_larger_than_its_result():
    projection = torch.randn(16 * HEAD_DIM, 130).bfloat16()
    weight = weight_of("linear", torch.bfloat16)
    mixing = torch.randn(16, HEAD_DIM).bfloat16()
    with Largest() as largest:
        fold(projection, weight)
    assert largest.bytes == projection.nbytes
    with Largest() as largest:
        folded = fold_mixing(projection[:HEAD_DIM], mixing)
    assert largest.bytes == folded.nbytes


@pytest.mark.fast
@pytest.mark.parametrize("variant", MATRICES)
def test_flops_and_activations_match_torch(variant):
    tokens = 5
    heads = 3
    head_dim = 7
    kha = HeadsConfig(Knock(query=variant))
    sizes = HeadSizes(query_heads=heads, kv_heads=1, head_dim=head_dim)
    costs = kha.costs(sizes)
    x = torch.randn(tokens, heads, head_dim, requires_grad=True)
    matrices = len(MATRICES[variant])
    weight = torch.randn(matrices, head_dim, head_dim, requires_grad=True)
    with FlopCounterMode(display=False) as forward, saved_tensors() as saved:
        y = fused_knock(x, weight, variant)
    saved.pop(weight.untyped_storage().data_ptr())
    assert forward.get_total_flops() == tokens * costs.flops
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    assert backward.get_total_flops() == 2 * tokens * costs.flops
    saved_elements = sum(tensor.numel() for tensor in saved.values())
    assert saved_elements == tokens * costs.activations
