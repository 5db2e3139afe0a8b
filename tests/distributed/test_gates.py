"""Every parallelism equals the unsharded run, with gates in every layer.

Tolerance and quantities are those of ``test_parallelism.py``.
"""

import re
from dataclasses import replace
from unittest import mock

import pytest
import torch

from kha_megatron.config import KHAConfig
from kha_megatron.heads import Gate
from tests.distributed.test_parallelism import (
    FOLDABLE,
    FULL,
    LATENT,
    OVERLAP_ALL,
    SELECTIVE,
    ZERO,
    case,
    check_case,
    mutated,
    unsharded,  # noqa: F401  # a fixture
)

OUTPUT = KHAConfig(value="mlp", gate=Gate(output="element"))
"""Beside Megatron's own gate, which its flag makes it apply itself."""
OTHERS = KHAConfig(
    query="linear",
    gate=Gate(output="head", value="element", key="shared", query="element", dense="element"),
)
"""Rows of every kind, and both rules for what reads the input."""
BOTH = (OUTPUT, OTHERS)
IN_LATENT = replace(FOLDABLE, gate=Gate(output="element"))
STOCK = {"attention_output_gate": True}


def cases():
    yield case(khas=BOTH, tp=2, sp=True, groups=1)
    yield case(khas=(OTHERS,), pp=2, vpp=2, layers=4, cp=2)


def whole_cases():
    for fields in (
        {"tp": 2, "groups": 1, "savings": FULL},
        {"tp": 4, "sp": True, "groups": 2},
        {"pp": 4, "layers": 4},
        {"tp": 2, "sp": True, "dp": 2, "ddp": OVERLAP_ALL, "per_token_loss": True},
        {"tp": 2, "sp": True, "cp": 2, "groups": 1},
        {"dp": 2, "ddp": ZERO},
        {"dp": 2, "fsdp": "torch"},
        {"dp": 2, "per_token_loss": True},
        {"dp": 2, "ep": 2, "model": "moe"},
        {"tp": 2, "sp": True, "ep": 2, "model": "moe"},
        {"tp": 2, "sp": True, "savings": SELECTIVE},
        {"tp": 2, "config": {"qk_layernorm": False}},
    ):
        yield case(khas=BOTH, steps=10, **fields)
    for fields in ({"tp": 2}, {"tp": 4, "groups": 2}, {"pp": 2}, {"savings": SELECTIVE}):
        yield case(khas=(OUTPUT,), config=STOCK, **fields)
    for fields in ({"tp": 2, "sp": True}, {"tp": 2, "dp": 2, "ddp": OVERLAP_ALL}):
        yield case(khas=(IN_LATENT,), config=LATENT, **fields)


@pytest.mark.parametrize(
    "case",
    [*cases(), *(pytest.param(c, marks=pytest.mark.whole) for c in whole_cases())],
    ids=str,
)
def test_equals_the_unsharded_run(ranks, unsharded, parallelism_table, case):  # noqa: F811
    check_case(ranks, unsharded, parallelism_table, case)


def with_the_rule_of_knocking_heads():
    """A copy on the weight though ranks see the same tokens: the sum of equal gradients."""
    from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region as copy

    from kha_megatron.mcore.head_inputs import InputProjection

    project = InputProjection.forward

    def summed_again(self, hidden=None):
        weight = self.weight
        with mock.patch.dict(self._parameters, weight=copy(weight, group=self.tp_group)):
            return project(self, hidden)

    return mock.patch.object(InputProjection, "forward", summed_again)


def without_the_sum_over_parts_of_the_sequence():
    """Under sequence parallelism a rank sees its own tokens."""
    from kha_megatron.mcore import head_inputs

    copy = head_inputs.copy_to_tensor_model_parallel_region

    def left_alone(x, group=None):
        return x if isinstance(x, torch.nn.Parameter) else copy(x, group=group)

    return mock.patch.object(head_inputs, "copy_to_tensor_model_parallel_region", left_alone)


def without_the_sum_over_heads():
    """The score of a gate that all heads share is met by each rank's heads."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region as gather

    from kha_megatron.mcore.head_inputs import InputProjection

    def met_by_all(self, x):
        if not self.config.sequence_parallel:
            return x
        return gather(x, tensor_parallel_output_grad=False, group=self.tp_group)

    return mock.patch.object(InputProjection, "_sum_over_heads", met_by_all)


@pytest.mark.parametrize(
    ("mutate", "sp", "names"),
    [
        (with_the_rule_of_knocking_heads, False, ["gate_dense", "gate_key"]),
        (without_the_sum_over_parts_of_the_sequence, True, ["gate_dense", "gate_key"]),
        (without_the_sum_over_heads, False, ["gate_key"]),
        (without_the_sum_over_heads, True, ["gate_key"]),
    ],
)
def test_another_rule_is_seen(ranks, unsharded, mutate, sp, names):  # noqa: F811
    """In gradients, or in weights of two ranks that are no longer the same."""
    wrong = mutated(ranks, unsharded, case(khas=(OTHERS,), tp=2, sp=sp), mutate)
    if isinstance(wrong, str):  # of a partial score the layer's input has a partial gradient too
        whats = ["input gradient", *(f"{name}.weight" for name in names)]
        assert any(re.match(f"replicas of .*{what}.* differ", wrong) for what in whats), wrong
        return
    for name in names:
        assert f"gradients decoder.layers.self_attention.{name}.weight" in wrong, wrong
    assert not any(name.startswith("loss") for name in wrong)
