"""Models of Transformer Engine's layers with KHA, in bf16 and in every scaling of FP8, on the CPU.

The specs are Megatron's and the Python Transformer Engine's own, above the stand-in for its kernels
(``kha_megatron.cpu.engine``). The truth is Megatron's local form in float32 with the very same
weights (``models.errors``), and the errors of local layers in bf16 measure how far rounding leads:
bf16 rounds to 2^-8 of a number, E4M3 to 2^-4 and E5M2, in which ``hybrid`` keeps gradients, to
2^-3. So FP8 may be 16 to 32 times as far from the truth as bf16 is; 24 is asked for, and 8 to 20
are seen (``benchmarks/fp8.md``).
"""

import dataclasses
from functools import partial

import pytest
import torch

from kha_megatron.config import KHAConfig
from tests.distributed.launcher import RankPool
from tests.gpu.test_layers import FLOOR, KHAS

pytestmark = pytest.mark.te

COARSER = 24
"""How many times as far from the truth as bf16 FP8 may be."""

SCALINGS = {
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "delayed": {"fp8": "hybrid", "fp8_recipe": "delayed"},
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
}

LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_head_dim": 32,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 32,
}

KINDS = {kha: (config, {}) for kha, config in KHAS.items()} | {
    "stock": (KHAConfig(), {}),
    "folded": (dataclasses.replace(KHAS["linear"], fold="always"), {}),
    "direct": (dataclasses.replace(KHAS["linear"], fold="never"), {}),
    "latent": (KHAS["linear"], LATENT),
}
del KINDS["linear"]  # which is one of the two before


def second_outcome(model):
    """Of the second step: delayed scaling has no scale in the first one."""
    from tests.gpu import models

    models.outcome(model)
    model.set_is_first_microbatch()
    return models.outcome(model)


def errors(kind, *scalings, look=None, **given):
    """By scaling, ``models.errors`` of logits and of all gradients, or of what ``look`` finds."""
    from tests.gpu import models

    kha, sizes = KINDS[kind]
    every = {"delayed": second_outcome} if look is None else {}
    return {
        scaling: models.errors(
            kha,
            "transformer_engine",
            torch.bfloat16,
            every.get(scaling, look or models.outcome),
            sizes=sizes,
            **SCALINGS.get(scaling, {}),
            **given,
        )
        for scaling in scalings
    }


def beyond(found, scaling):
    """What is too far from the truth."""
    return found.beyond(FLOOR["bf16"], times=COARSER if scaling in SCALINGS else 2)


def judge(answers, kind, note=""):
    """What a comparison must have found; ``pytest -rP`` shows it as rows of benchmarks/fp8.md."""
    for scaling, found in answers.items():
        knocks = [error for name, error in found.ours.items() if "knock_" in name]
        assert (kind == "stock") == (not knocks)
        times = max(error / found.plain[name] for name, error in found.ours.items())
        errors = found.ours["logits"], max(knocks, default=0), max(found.ours.values())
        figures = " | ".join(f"{error:.4f}" for error in errors)
        print(f"| {kind}{note} | {scaling} | {figures} | {times:.1f} |")
        assert not beyond(found, scaling), scaling
        if scaling in SCALINGS:  # it is FP8, and not bf16 under another name
            assert found.ours["logits"] > 4 * found.plain["logits"]


@pytest.mark.parametrize("kind", KINDS)
def test_equals_local_layers(ranks_with_engine, kind):
    judge(ranks_with_engine(errors, 1, kind, "bf16", "tensorwise")[0], kind)


@pytest.mark.parametrize("kind", ["mlp", "folded"])
def test_equals_local_layers_in_other_scalings(ranks_with_engine, kind):
    judge(ranks_with_engine(errors, 1, kind, "delayed", "blockwise")[0], kind)


@pytest.mark.parametrize("kind", ["mixed", "output gate"])
def test_equals_local_layers_with_grouped_experts(ranks_with_engine, kind):
    scalings = ("bf16", "tensorwise", "blockwise")
    judge(ranks_with_engine(errors, 1, kind, *scalings, moe=True)[0], kind, ", experts")


def test_equals_local_layers_as_on_blackwell(engine):
    pool = RankPool(transformer_engine=True, capability="10.0")
    try:
        judge(pool(errors, 1, "mlp", "mxfp8")[0], "mlp")
    finally:
        pool.close()


def turn_a_matrix(model):
    """A mistake that rounding must not hide."""
    knock = model.decoder.layers[1].self_attention.knock_value.weight
    knock.data.copy_(knock.data.mT.clone())


def test_the_comparison_can_fail(ranks_with_engine):
    answers = ranks_with_engine(errors, 1, "mlp", *("bf16", "tensorwise"), spoil=turn_a_matrix)[0]
    for scaling, found in answers.items():
        assert "logits" in beyond(found, scaling)


@pytest.mark.parametrize("scaling", ["tensorwise", "delayed", "blockwise"])
def test_equals_local_layers_with_parameters_in_fp8(ranks_with_engine, scaling):
    answers = ranks_with_engine(errors, 1, "mlp", scaling, fp8_param=True)[0]
    judge(answers, "mlp", ", FP8 parameters")


def accumulated(model):
    """What the buffers hold after three microbatches, the first of which makes the FP8 weights."""
    from tests.gpu import models

    return models.accumulated(model)


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("kind", ["mlp", "direct", "folded"])
def test_gradients_accumulate_beside_fused_weight_gradients(ranks_with_engine, kind, fused):
    given = {"look": accumulated, "head": False, "gradient_accumulation_fusion": fused}
    answers = ranks_with_engine(errors, 1, kind, "bf16", "tensorwise", **given)[0]
    for scaling, found in answers.items():
        assert any("knock_" in name for name in found.ours)
        assert not beyond(found, scaling)


RECOMPUTING = {
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "selective": {"recompute_granularity": "selective"},
}


def differences():
    """What is not bit for bit as in a model of the same weights that recomputes nothing."""
    from tests.distributed.models import initialize
    from tests.gpu import models

    initialize()
    build = partial(models.build, KHAS["mlp"], "transformer_engine", torch.bfloat16, moe=False)
    plain = build(**SCALINGS["tensorwise"])
    want = models.outcome(plain)
    found = {}
    for name, options in RECOMPUTING.items():
        model = build(**SCALINGS["tensorwise"], **options)
        models.copy_weights(plain, model)
        got = models.outcome(model)
        found[name] = [key for key, value in want.items() if not torch.equal(value, got[key])]
    return found


def test_recomputing_changes_no_bit(ranks_with_engine):
    assert ranks_with_engine(differences, 1)[0] == {"full": [], "selective": []}


def layers_in_fp8():
    """Whether each layer's projection ran in FP8, where the first one is kept in bf16."""
    from tests.distributed.models import initialize
    from tests.gpu import models

    initialize()
    model = models.build(
        KHAS["mlp"],
        "transformer_engine",
        torch.bfloat16,
        moe=False,
        first_last_layers_bf16=True,
        num_layers_at_start_in_bf16=1,
        num_layers_at_end_in_bf16=0,
        **SCALINGS["tensorwise"],
    )
    models.outcome(model)
    return [layer.self_attention.linear_qkv.fp8 for layer in model.decoder.layers]


def test_first_layers_stay_in_bf16(ranks_with_engine):
    assert ranks_with_engine(layers_in_fp8, 1)[0] == [False, True]
