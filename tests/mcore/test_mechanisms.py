"""Any mechanism that says what its tensors are gets its place, its ranks and its gradients.

Two toys stand for those to come: a factor for each key/value head, cut over tensor-parallel ranks
with the heads, and a factor for each feature of the output, which all heads share.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch

from kha_megatron.config import KHAConfig
from kha_megatron.heads import HeadTensor, Mechanism
from tests.mcore.test_attention import BATCH, GROUPS, HEAD_DIM, HEADS, HIDDEN, TOKENS

TP_HEADS, TP_GROUPS = 8, 2


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
        shape, heads = (sizes.dim("value"),), "query"
        return (
            HeadTensor(
                name="shared_output",
                shape=shape,
                gradient="heads",
                heads=heads,
                initial=("ones",),
                hf="o_scale",
            ),
        )

    def apply(self, tensors, weights, ranks):
        """Multiply the output."""
        return {"output": tensors["output"] * weights["shared_output"]}


@dataclass(frozen=True, kw_only=True)
class Scaled(KHAConfig):
    """KHA and the two toys."""

    scale: Scale | None = None
    shared: Shared | None = None


BOTH = Scaled(value="mlp", scale=Scale(), shared=Shared())


def _layer(kha, ranks, heads, groups):
    from tests.distributed import models

    models.initialize(tensor_model_parallel_size=ranks)
    config = models.transformer_config(
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=HEAD_DIM,
        hidden_size=HIDDEN,
        tensor_model_parallel_size=ranks,
        params_dtype=torch.float64,
    )
    layer = models.attention(config, kha).double()
    models.perturb(layer)
    return layer


def _factors(groups):
    return torch.linspace(0.5, 2, groups).double(), torch.linspace(-1, 2, HEAD_DIM).double()


def _run(layer):
    """Output, input gradient and output's upstream of one pass."""
    generator = torch.Generator().manual_seed(3)
    shape = (TOKENS, BATCH, HIDDEN)
    hidden = torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)[None, None]
    output, _ = layer(hidden, mask)
    output.backward(torch.randn(shape, dtype=torch.float64, generator=generator))
    return output.detach().numpy(), hidden.grad.numpy()


def against_scaled_weights():
    """The layer with both toys, and one without whose weights hold the factors."""
    scale, shared = _factors(GROUPS)
    ours = _layer(Scaled(value="linear", scale=Scale(), shared=Shared()), 1, HEADS, GROUPS)
    plain = _layer(KHAConfig(value="linear"), 1, HEADS, GROUPS)
    before = [_run(layer)[0] for layer in (ours, plain)]
    with torch.no_grad():
        ours.scale_value.weight.copy_(scale)
        ours.shared_output.weight.copy_(shared)
        rows = plain.linear_qkv.weight.view(GROUPS, HEADS // GROUPS + 2, HEAD_DIM, HIDDEN)
        rows[:, -1] *= scale[:, None, None]
        plain.linear_proj.weight.view(HIDDEN, HEADS, HEAD_DIM).mul_(shared)
    return before, [_run(layer) for layer in (ours, plain)]


def test_a_mechanism_acts_at_its_stage(ranks):
    (ours, plain), after = ranks(against_scaled_weights, 1)[0]
    assert np.array_equal(ours, plain)
    for one, other in zip(*after, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
    assert not np.allclose(after[0][0], ours, rtol=0.1)


def on_ranks(ranks):
    """Of one rank: output, input gradient, factors' gradients and their places in a checkpoint."""
    from megatron.core import parallel_state

    layer = _layer(BOTH, ranks, TP_HEADS, TP_GROUPS)
    scale, shared = _factors(TP_GROUPS)
    rank = parallel_state.get_tensor_model_parallel_rank()
    mine = scale.chunk(ranks)[rank] if ranks <= TP_GROUPS else scale
    with torch.no_grad():
        layer.scale_value.weight.copy_(mine)
        layer.shared_output.weight.copy_(shared)
    found = _run(layer)
    stored = layer.sharded_state_dict()["scale_value.weight"]
    gradients = [layer.scale_value.weight.grad.numpy(), layer.shared_output.weight.grad.numpy()]
    return *found, *gradients, stored.global_shape, stored.global_offset


@pytest.mark.parametrize("size", [2, 4])
def test_factors_are_cut_with_their_heads_or_whole_where_ranks_share_one(ranks, size):
    (output, hidden, scale, shared, shape, _) = ranks(on_ranks, 1, 1)[0]
    assert shape == (TP_GROUPS,)
    found = ranks(on_ranks, size, size)
    for rank, (out, grad, of_scale, of_shared, shape, offset) in enumerate(found):
        assert shape == (TP_GROUPS,)
        assert offset == (rank * (size == 2),)
        expected = scale[rank : rank + 1] if size == 2 else scale
        for ours, theirs in (
            (out, output),
            (grad, hidden),
            (of_scale, expected),
            (of_shared, shared),
        ):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)
