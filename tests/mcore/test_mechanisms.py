"""A mechanism that declares its tensors is applied at its stage and sharded with its gradients.

Two examples stand for future mechanisms: a factor for each key/value head, sharded over
tensor-parallel ranks with the heads, and a factor for each feature of the output, which all heads
share.
"""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from kha_megatron.config import KHAConfig
from kha_megatron.heads import HeadTensor, Mechanism
from tests.mcore import twins
from tests.mcore.sharded_layer import differences


@dataclass(frozen=True, kw_only=True)
class Scale(Mechanism):
    """``value * s_g``."""

    name: ClassVar[str] = "scale"

    def tensors(self, sizes):
        """One number a head."""
        return (
            HeadTensor(
                name="scale_value",
                shape=(sizes.kv_heads,),
                gradient="heads",
                heads="value",
                initial=("ones",),
                hf="v_scale",
                per_head=True,
            ),
        )

    def apply(self, tensors, weights, ranks):
        """Multiply the values."""
        return {"value": tensors["value"] * weights["scale_value"][:, None]}


@dataclass(frozen=True, kw_only=True)
class Shared(Mechanism):
    """``output * s``."""

    name: ClassVar[str] = "shared"
    stages: ClassVar = ("output",)

    def tensors(self, sizes):
        """One number a feature."""
        return (
            HeadTensor(
                name="shared_output",
                shape=(sizes.dim("value"),),
                gradient="heads",
                heads="query",
                initial=("ones",),
                hf="o_scale",
            ),
        )

    def apply(self, tensors, weights, ranks):
        """Multiply the output."""
        return {"output": tensors["output"] * weights["shared_output"]}


@dataclass(frozen=True, kw_only=True)
class Scaled(KHAConfig):
    """KHA and the two examples."""

    scale: Scale | None = None
    shared: Shared | None = None


BOTH = Scaled(value="linear", scale=Scale(), shared=Shared())


def scaled_twin(kha, sizes, hidden, weights):
    """The oracle's layer without the two mechanisms, whose factors multiply other weights."""
    heads, groups = sizes["num_attention_heads"], sizes["num_query_groups"]
    scale, shared = weights["scale_value.weight"], weights["shared_output.weight"]
    rows = weights["linear_qkv.weight"].unflatten(0, (groups, -1, sizes["kv_channels"]))
    factors = torch.cat([scale.new_ones(groups, rows.shape[1] - 1), scale[:, None]], 1)
    output = weights["linear_proj.weight"].unflatten(1, (heads, -1)) * shared
    folded = {
        "linear_qkv.weight": (rows * factors[..., None, None]).flatten(0, 2),
        "linear_proj.weight": output.flatten(1),
    }
    return twins.twin(KHAConfig(value=kha.value), sizes, hidden, weights | folded)


@pytest.mark.parametrize(("tp", "sp", "groups"), [(1, False, 3), (2, True, 2), (4, False, 2)])
def test_a_mechanism_equals_scaled_weights_with_every_gradient(ranks, tp, sp, groups):
    """Four ranks share two key/value heads, whose factors are then replicated."""
    assert not differences(ranks, BOTH, tp, sp, twin=scaled_twin, num_query_groups=groups)
