"""The rows of ``linear_qkv`` as data, and the one split of them, against Megatron's own."""

from dataclasses import replace

import pytest
import torch

from kha_megatron.heads import Gate, HeadSizes
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.model.qkv import QKVLayout
from tests.mcore.test_attention import HEAD_DIM, HEADS, HIDDEN, attention_layer

STOCK = Gate(output="element")


def laid_out(gate, **sizes):
    heads = HeadSizes(query_heads=1, kv_heads=1, head_dim=sizes["head_dim"])
    return QKVLayout(mechanism_rows=gate.rows(heads), **sizes)


def rows_of(layout):
    """Return the first row of each part of a group, and the row after the last one."""
    return {name: (part.rows.start, part.rows.stop) for name, part in layout.parts.items()}


@pytest.mark.fast
def test_heads_stand_group_by_group():
    layout = laid_out(STOCK, groups=2, queries=2, head_dim=5)
    assert rows_of(layout) == {
        "query": (0, 10),
        "gate_output": (10, 20),
        "key": (20, 25),
        "value": (25, 30),
    }
    assert layout.rows == 60
    assert layout.stock_gate == "gate_output"
    tied = QKVLayout(groups=2, queries=2, head_dim=5, tied=True)
    assert [*tied.parts] == ["query", "value"]
    assert tied.parts["value"].rows == slice(10, 15)
    assert tied.rows == 30
    assert "key" not in tied.head_slices(0, 1)


def test_other_rows_of_a_group_are_filled_up_to_a_multiple_of_16():
    """Megatron's own stay where they are: 2 queries, 2 gates of 5; then 1 + 2 + 5 = 8 of ours."""
    gate = replace(STOCK, value="head", query="head", key="element")
    layout = laid_out(gate, groups=2, queries=2, head_dim=5)
    assert rows_of(layout) == {
        "query": (0, 10),
        "gate_output": (10, 20),
        "gate_query": (20, 22),
        "gate_key": (22, 27),
        "gate_value": (27, 28),
        "key": (36, 41),
        "value": (41, 46),
    }
    assert layout.padding == slice(28, 36)
    assert layout.rows == 92


def split_both_ways(tp, overrides):
    """Compare the split of the baseline's attention with Megatron's own on this rank.

    Returns:
        The number of parts, whether parts and gradients are equal, and whether strides are equal.
    """
    import torch.distributed as dist
    from megatron.core.transformer.attention import SelfAttention

    from tests.distributed import models

    models.initialize(tensor_model_parallel_size=tp)
    layer = attention_layer(models, HeadsConfig(), tensor_model_parallel_size=tp, **overrides)
    hidden = torch.randn(3, 2, HIDDEN, generator=torch.Generator().manual_seed(1))
    gated = layer.config.attention_output_gate
    ours = layer.get_query_key_value_tensors(hidden, output_gate=gated)
    theirs = SelfAttention.get_query_key_value_tensors(layer, hidden, output_gate=gated)
    assert len(ours) == len(theirs)

    def gradient(parts):
        factors = range(1 + dist.get_rank(), 1 + dist.get_rank() + len(parts))
        sum(factor * part.sum() for factor, part in zip(factors, parts, strict=True)).backward()
        weight_gradient = layer.linear_qkv.weight.grad.clone()
        layer.zero_grad()
        return weight_gradient

    same_bits = torch.equal(gradient(ours), gradient(theirs))
    same_strides = True
    for our_part, their_part in zip(ours, theirs, strict=True):
        same_bits &= torch.equal(our_part, their_part)
        same_strides &= our_part.stride() == their_part.stride()
    return len(ours), same_bits, same_strides


@pytest.mark.fast
@pytest.mark.parametrize(
    ("groups", "gated", "tp"),
    [(6, True, 1), (2, False, 2), (1, True, 2), (1, False, 2)],
)
def test_splits_as_megatron_does(ranks, groups, gated, tp):
    overrides = {"num_query_groups": groups, "attention_output_gate": gated}
    for found in ranks(split_both_ways, tp, tp, overrides):
        assert found == (3 + gated, True, True)


def split_over_a_group_of_its_own(groups):
    """Split on a tensor-parallel group that is not one of Megatron's global groups.

    Returns:
        The parts of this rank, and those of all ranks computed from the whole weight.
    """
    import torch.distributed as dist
    from megatron.core.process_groups_config import ProcessGroupCollection

    from tests.distributed import models

    models.initialize()
    own = ProcessGroupCollection.use_mpu_process_groups()
    own.tp = dist.new_group([0, 1])
    layer = attention_layer(
        models,
        HeadsConfig(),
        built_with={"pg_collection": own},
        tensor_model_parallel_size=2,
        num_query_groups=groups,
        attention_output_gate=True,
        qk_layernorm=False,
    )
    whole_weight = torch.randn(2 * (HEADS + groups) * HEAD_DIM, HIDDEN)
    weight = layer.linear_qkv.weight
    weight.data.copy_(whole_weight.chunk(2)[dist.get_rank()])
    hidden = torch.randn(3, 2, HIDDEN)
    parts = layer.get_query_key_value_tensors(hidden, output_gate=True)
    heads = whole_weight.view(groups, -1, HEAD_DIM, HIDDEN)
    queries = HEADS // groups
    expected = []
    for weight_of_part in (
        heads[:, :queries],
        heads[:, -2:-1],
        heads[:, -1:],
        heads[:, queries : 2 * queries],
    ):
        part = torch.einsum("sbh,gndh->sbgnd", hidden, weight_of_part)
        expected.append(part.flatten(2, 3))
    return [part.detach() for part in parts], expected


@pytest.mark.parametrize("groups", [2, 1])
def test_follows_the_process_group_that_it_is_given(ranks, groups):
    """Megatron 0.19 cuts the gate of shared groups by the rank of its global group."""
    (first, expected), (second, _) = ranks(split_over_a_group_of_its_own, 2, groups)
    for i, expected_part in enumerate(expected):
        if expected_part.shape[2] == 1:  # both ranks have the one key/value head
            torch.testing.assert_close(first[i], second[i], rtol=0, atol=0)
            part = first[i]
        else:
            part = torch.cat([first[i], second[i]], 2)
        torch.testing.assert_close(part, expected_part)
