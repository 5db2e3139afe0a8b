"""A hook on a projection follows an adapter that replaces the projection, and runs once."""

import pytest
import torch

from kha_megatron.mcore.hooks import ProjectionHook


def double_inputs(inputs):
    return (2 * inputs[0],)


def cube(result):
    return result**3


class Layer(torch.nn.Module):
    def __init__(self, *, before):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3, bias=False)
        change = double_inputs if before else cube
        self.hook = ProjectionHook(self, "linear", change, before=before)

    def forward(self, x):
        self.hook.follow(self)
        return self.linear(x)


class Adapter(torch.nn.Module):
    """Wraps the projection that it replaces, as in Megatron-Bridge."""

    def __init__(self, linear):
        super().__init__()
        self.to_wrap = linear

    def forward(self, x):
        return self.to_wrap(x) + x


@pytest.mark.parametrize("before", [True, False])
def test_an_adapter_is_hooked_in_place_of_its_projection(before):
    layer = Layer(before=before)
    x = torch.randn(2, 3)
    weight = layer.linear.weight.T

    def expected(matrix):
        return 2 * x @ matrix if before else (x @ matrix) ** 3

    torch.testing.assert_close(layer(x), expected(weight))
    layer.linear = Adapter(layer.linear)
    for _ in range(2):
        torch.testing.assert_close(layer(x), expected(weight + torch.eye(3)))
    layer.linear = layer.linear.to_wrap
    torch.testing.assert_close(layer(x), expected(weight))
