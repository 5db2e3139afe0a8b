"""Transformer Engine's layers with KHA against Megatron's own: outputs and all gradients.

Both forms compute in two bytes and round in other places, so neither is the truth: that is the
local form in float32 with the very same weights, and Transformer Engine may be at most twice as far
from it as local layers of its own dtype are. The same cases run on the CPU with local layers in the
place of Transformer Engine's, so that what compares is itself tested.
"""

import itertools

import pytest
import torch

from kha_megatron.config import KHAConfig
from kha_megatron.heads import CollaborativeHeads, TalkingHeads

KHAS = {
    "linear": KHAConfig(query="linear", key="linear", value="linear"),
    "mlp": KHAConfig(value="mlp"),
    "gate": KHAConfig(value="gate"),
    "mixed": KHAConfig(query="linear", key="gate", value="mlp"),
    "talking": KHAConfig(value="mlp", talking=TalkingHeads()),
    "collaborative": KHAConfig(value="mlp", collaborative=CollaborativeHeads(dim=64)),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FLOOR = {"bf16": 2**-8, "fp16": 2**-11}
"""Of norms: one rounding. What local layers happen to get right is not asked for."""


def errors(kha, impl, dtype, moe, spoiled=False):
    """Relative errors of ``impl`` and of the local form in one dtype, against local float32."""
    from tests.distributed.models import initialize
    from tests.gpu import models

    initialize()
    ours = models.build(kha, impl, dtype, moe=moe)
    plain = models.build(kha, "local", dtype, moe=moe)
    exact = models.build(kha, "local", torch.float32, moe=moe)
    models.copy_weights(ours, plain)
    models.copy_weights(ours, exact)
    if spoiled:
        ours.decoder.layers[1].self_attention.knock_value.weight.data.mul_(1.1)
    want = models.outcome(exact)
    return tuple(models.relative_errors(models.outcome(m), want) for m in (ours, plain))


def beyond(ours, plain, floor):
    """What is too far from the truth, by name."""
    return {n: (e, plain[n]) for n, e in ours.items() if not e <= max(2 * plain[n], floor)}


CASES = [
    pytest.param(kha, dtype, moe, id=f"{kha}-{dtype}-{'moe' if moe else 'dense'}")
    for kha, dtype, moe in itertools.product(KHAS, DTYPES, [False, True])
]


@pytest.mark.gpu
@pytest.mark.te
@pytest.mark.parametrize(("kha", "dtype", "moe"), CASES)
def test_transformer_engine_equals_local_layers(gpu_rank, engine, kha, dtype, moe):
    ours, plain = gpu_rank(errors, KHAS[kha], "transformer_engine", DTYPES[dtype], moe)
    assert any("knock_value" in name for name in ours)
    assert not beyond(ours, plain, FLOOR[dtype])


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_the_comparison_runs_and_can_fail(ranks, moe):
    ours, plain = ranks(errors, 1, KHAS["mixed"], "local", torch.bfloat16, moe)[0]
    assert ours == plain
    assert {"logits", "d decoder.layers.1.self_attention.knock_value.weight"} <= ours.keys()
    assert 1e-4 < ours["logits"] < 2**-5
    spoiled, plain = ranks(errors, 1, KHAS["mixed"], "local", torch.bfloat16, moe, True)[0]
    assert "logits" in beyond(spoiled, plain, FLOOR["bf16"])


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
