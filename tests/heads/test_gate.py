"""Compare the activation counts of gates with what autograd saves."""

import pytest
import torch

from kha_megatron.heads import Gate, HeadSizes
from kha_megatron.heads.gate import activate, gated
from tests.heads.saving import saved_tensors

SIZES = HeadSizes(
    query_heads=6,
    kv_heads=3,
    head_dim=7,
    value_dim=5,
    hidden_size=22,
)


@pytest.mark.fast
@pytest.mark.parametrize("form", ["multiply", "add"])
@pytest.mark.parametrize("activation", ["sigmoid", "silu", "half_sigmoid"])
@pytest.mark.parametrize(
    ("gate", "shape", "score"),
    [
        ({"output": "element"}, (6, 5), (6, 5)),
        ({"query": "element"}, (6, 7), (6, 7)),
        ({"value": "head"}, (3, 5), (3, 1)),
        ({"key": "shared"}, (3, 7), (1, 7)),
        ({"dense": "element"}, (22,), (22,)),
    ],
    ids=str,
)
def test_activations_count_what_autograd_saves(gate, shape, score, activation, form):
    """In bfloat16, where a score of float32 is two elements."""
    tokens = 4
    x = torch.randn(tokens, *shape, dtype=torch.bfloat16, requires_grad=True)
    scores = torch.randn(tokens, *score, dtype=torch.bfloat16, requires_grad=True)
    with saved_tensors() as saved:
        gated(x, activate(scores, activation), form).sum()
    saved_elements = sum(tensor.nbytes for tensor in saved.values()) / 2
    mechanism = Gate(**gate, activation=activation, form=form)
    costs = mechanism.costs(SIZES)
    assert saved_elements == tokens * (costs.activations + costs.sharded_activations)
    assert bool(costs.sharded_activations) == ("dense" in gate)
