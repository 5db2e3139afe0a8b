"""Whole layers with KHA: Transformer Engine's, and the kernels, against Megatron's own in torch.

Both forms compute in two bytes and round in other places, so neither is the truth: that is the
local form in float32 with the very same weights and no kernel of ours (``models.errors``), and what
is tested may be at most twice as far from it as local layers of its own dtype are. The same cases
run on the CPU with local layers in the place of Transformer Engine's, so that what compares is
itself tested; ``test_mistakes.py`` breaks the kernels for it.
"""

import itertools

import pytest
import torch

from kha_megatron.config import KHAConfig
from kha_megatron.heads import CollaborativeHeads, Gate, MixtureOfHeads, TalkingHeads

KHAS = {
    "linear": KHAConfig(query="linear", key="linear", value="linear"),
    "mlp": KHAConfig(value="mlp"),
    "gate": KHAConfig(value="gate"),
    "mixed": KHAConfig(query="linear", key="gate", value="mlp"),
    "output gate": KHAConfig(value="mlp", gate=Gate(output="element", dense="element")),
    "gates": KHAConfig(value="mlp", gate=Gate(query="element", key="shared", value="head")),
    # all heads for every token, as of experts
    "moh": KHAConfig(value="mlp", moh=MixtureOfHeads(shared=1, active=3, balance=0.0)),
    "talking": KHAConfig(value="mlp", talking=TalkingHeads()),
    "collaborative": KHAConfig(value="mlp", collaborative=CollaborativeHeads(dim=64)),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FLOOR = {"bf16": 2**-8, "fp16": 2**-11}
"""Of norms: one rounding. What local layers happen to get right is not asked for."""


IN_THE_PROLOGUE = ("linear", "mlp", "gate", "mixed", "moh", "talking")
"""Of :data:`KHAS` those with which query, key and value come out of the fused prologue."""


def errors(kha, impl, dtype, moe, spoil=None):
    """``models.errors`` of logits and of all gradients."""
    from tests.gpu import models

    return models.errors(KHAS[kha], impl, dtype, models.outcome, moe=moe, spoil=spoil)


CASES = [
    pytest.param(kha, dtype, moe, id=f"{kha}-{dtype}-{'moe' if moe else 'dense'}")
    for kha, dtype, moe in itertools.product(KHAS, DTYPES, [False, True])
]


@pytest.mark.gpu
@pytest.mark.te
@pytest.mark.parametrize(("kha", "dtype", "moe"), CASES)
def test_transformer_engine_equals_local_layers(gpu_rank, gpu_engine, kha, dtype, moe):
    judge(gpu_rank(errors, kha, "transformer_engine", DTYPES[dtype], moe), kha, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kha", [pytest.param(kha, marks=[pytest.mark.first] * (kha == "mlp")) for kha in KHAS]
)
def test_local_layers_with_kernels_equal_those_without(gpu_rank, kha):
    judge(gpu_rank(errors, kha, "local", torch.bfloat16, False), kha, "bf16")


def judge(found, kha, dtype):
    """What a comparison on a GPU must have found."""
    assert any("knock_value" in name for name in found.ours)
    if found.fused is not None:
        assert (found.fused > 0) == (kha in IN_THE_PROLOGUE)
    assert not found.beyond(FLOOR[dtype])


def spoil_a_matrix(model):
    """What a comparison must notice."""
    model.decoder.layers[1].self_attention.knock_value.weight.data.mul_(1.1)


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_the_comparison_runs_and_can_fail(ranks, moe):
    found = ranks(errors, 1, "mixed", "local", torch.bfloat16, moe)[0]
    assert found.ours == found.plain
    assert {"logits", "d decoder.layers.1.self_attention.knock_value.weight"} <= found.ours.keys()
    assert 1e-4 < found.ours["logits"] < 2**-5
    spoiled = ranks(errors, 1, "mixed", "local", torch.bfloat16, moe, spoil_a_matrix)[0]
    assert "logits" in spoiled.beyond(FLOOR["bf16"])


@pytest.mark.parametrize("kha", sorted(KHAS.keys() - {"mixed"}))
def test_every_comparison_is_with_itself_sound(ranks, kha):
    found = ranks(errors, 1, kha, "local", torch.bfloat16, False)[0]
    assert found.ours == found.plain
    assert max(found.ours.values()) < 2**-3


def names(moe):
    """Of all parameters, by the local names: Transformer Engine's and Megatron's form."""
    from tests.distributed.models import initialize
    from tests.gpu import models

    initialize()
    forms = [
        models.build(KHAS["mixed"], impl, torch.bfloat16, moe=moe)
        for impl in ("transformer_engine", "local")
    ]
    models.copy_weights(*forms)
    return [
        {models.local_name(n): tuple(p.shape) for n, p in form.named_parameters()} for form in forms
    ]


@pytest.mark.te
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_both_forms_have_the_same_weights(ranks_with_engine, moe):
    engine_form, local = ranks_with_engine(names, 1, moe)[0]
    assert engine_form == local
