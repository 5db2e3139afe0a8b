"""Models of Transformer Engine's layers with KHA, in bf16 and in every scaling of FP8, on the CPU.

Transformer Engine runs on the test double ``tests/transformer_engine``. The reference is the model
of Megatron's local layers in float32 with the same weights (``models.errors``). The error of local
layers in bf16 gives the scale: bf16 rounds to 2^-8 of a number, E4M3 to 2^-4, and E5M2, which
``hybrid`` uses for gradients, to 2^-3. FP8 may therefore be 16 to 32 times as far from the
reference as bf16. The bound is 24; 8 to 20 are observed (``benchmarks/fp8.md``).
"""

import functools

import pytest
import torch

from kha_megatron.heads.config import HeadsConfig
from tests import transformer_engine
from tests.distributed.launcher import RankPool
from tests.gpu.test_layers import FLOOR, KHAS

pytestmark = pytest.mark.te

COARSER = 24
"""Largest ratio of errors in FP8 to errors in bf16."""

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
    "stock": (HeadsConfig(), {}),
    "latent": (KHAS["linear"], LATENT),
}


def second_outcome(model):
    """Return the outcome of the second step. Delayed scaling has no scale in the first one."""
    from tests.gpu import models

    models.outcome(model)
    model.set_is_first_microbatch()
    return models.outcome(model)


def errors(kind, *scalings, look=None, **given):
    """Return ``models.errors`` of logits and gradients, or of what ``look`` returns, by scaling."""
    from kha_megatron.mcore import patches
    from tests.gpu import models

    patches.build_output_layer_without_apex()
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
    """Return the errors that are too large."""
    return found.beyond(FLOOR["bf16"], times=COARSER if scaling in SCALINGS else 2)


def judge(answers, kind, note=""):
    """Check the result of a comparison. ``pytest -rP`` prints it as rows of benchmarks/fp8.md."""
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


def compare(kind, *scalings, note="", whole=True, **given):
    """Return a case of the comparison with local layers, marked ``whole`` if ``whole``."""
    marks = [pytest.mark.whole] if whole else []
    return pytest.param(
        kind,
        scalings,
        note,
        given,
        marks=marks,
        id=f"{kind} {scalings}{note}",
    )


@pytest.mark.parametrize(
    ("kind", "scalings", "note", "given"),
    [
        compare("mlp", "bf16", "tensorwise", "delayed", "blockwise", whole=False),
        compare("latent", "bf16", "tensorwise", whole=False),
        *(compare(kind, "bf16", "tensorwise") for kind in KINDS if kind not in ("mlp", "latent")),
        compare("linear", "delayed", "blockwise"),
        compare("output gate", "tensorwise", note=", experts", whole=False, moe=True),
        compare("mixed", "bf16", "tensorwise", "blockwise", note=", experts", moe=True),
        compare("output gate", "bf16", "blockwise", note=", experts", moe=True),
        compare("mlp", "tensorwise", note=", FP8 parameters", whole=False, fp8_param=True),
        compare("mlp", "delayed", "blockwise", note=", FP8 parameters", fp8_param=True),
    ],
)
def test_equals_local_layers(ranks_with_engine, kind, scalings, note, given):
    judge(ranks_with_engine(errors, 1, kind, *scalings, **given)[0], kind, note)


@pytest.mark.whole
def test_equals_local_layers_as_on_blackwell(engine):
    pool = RankPool(
        install=functools.partial(transformer_engine.install, transformer_engine.BLACKWELL)
    )
    try:
        judge(pool(errors, 1, "mlp", "mxfp8")[0], "mlp")
    finally:
        pool.close()


def turn_a_matrix(model):
    """Make a mistake that rounding must not hide."""
    knock = model.decoder.layers[1].self_attention.knock_value.weight
    knock.data.copy_(knock.data.mT.clone())


def test_the_comparison_can_fail(ranks_with_engine):
    answers = ranks_with_engine(errors, 1, "mlp", *("bf16", "tensorwise"), spoil=turn_a_matrix)[0]
    for scaling, found in answers.items():
        assert "logits" in beyond(found, scaling)


def accumulated(model):
    """Return the gradient buffers after three microbatches. The first one makes the FP8 weights."""
    from tests.gpu import models

    fused = model.config.gradient_accumulation_fusion
    if model.config.transformer_impl == "transformer_engine":
        for layer in model.decoder.layers:
            assert layer.self_attention.linear_qkv.fuse_wgrad_accumulation == fused
    for module in model.modules():
        assert getattr(module, "fuse_wgrad_accumulation", fused) == fused
    assert not model.output_layer.gradient_accumulation_fusion  # needs apex
    return models.accumulated(model)


def accumulated_in_folded_weight(model):
    """Fold Transformer Engine's layers, but not the local layers of the reference."""
    from kha_megatron.mcore.step_folding import fold_once_per_step

    if model.config.transformer_impl == "transformer_engine":
        fold_once_per_step([model], KHAS["linear"])
    return accumulated(model)


@pytest.mark.parametrize(
    ("kind", "fused", "moe", "look"),
    [
        ("mlp", True, True, accumulated),
        ("linear", True, False, accumulated),
        ("linear", True, False, accumulated_in_folded_weight),
        pytest.param("mlp", False, False, accumulated, marks=pytest.mark.whole),
    ],
)
def test_gradients_accumulate_beside_fused_weight_gradients(
    ranks_with_engine, kind, fused, moe, look
):
    given = {
        "look": look,
        "gradient_accumulation_fusion": fused,
        "moe": moe,
    }
    answers = ranks_with_engine(errors, 1, kind, "bf16", "tensorwise", **given)[0]
    for scaling, found in answers.items():
        assert any("knock_" in name for name in found.ours)
        assert not beyond(found, scaling)


def train_in_fp8(caches, announces=True):
    """Train three steps of two microbatches with Megatron's schedule. Return the weights.

    With ``caches``, Transformer Engine only quantizes the weights in the first microbatch of a
    step, which the schedule announces. Otherwise it quantizes them in every microbatch.
    """
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

    from tests.distributed.models import initialize
    from tests.gpu import models

    initialize()
    kha, _ = KINDS["mixed"]
    model = models.build(
        kha,
        "transformer_engine",
        torch.bfloat16,
        moe=False,
        **SCALINGS["tensorwise"],
    )
    for module in model.modules():
        if hasattr(module, "disable_parameter_transpose_cache"):
            module.disable_parameter_transpose_cache = not caches
    if not announces:
        model.set_is_first_microbatch = lambda: None

    def forward_step(batches, model):
        tokens, positions, mask = next(batches)
        losses = model(tokens, positions, mask, labels=tokens.roll(-1, 1))
        return losses, lambda losses: (losses.float().mean(), {})

    for step in range(3):
        batches = [models.batch(seed) for seed in (2 * step, 2 * step + 1)]
        forward_backward_no_pipelining(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=model,
            num_microbatches=len(batches),
            seq_length=models.SEQUENCE,
            micro_batch_size=models.BATCH,
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.5 * parameter.grad / parameter.grad.norm()
                parameter.grad = None
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_no_step_uses_fp8_weights_of_an_earlier_step(ranks_with_engine):
    """Since pull request 6965, Megatron disables the cache where no schedule announces steps."""
    (expected,) = ranks_with_engine(train_in_fp8, 1, caches=False)
    (trained,) = ranks_with_engine(train_in_fp8, 1, caches=True)
    (stale,) = ranks_with_engine(train_in_fp8, 1, caches=True, announces=False)
    assert any("knock_" in name for name in expected)
    for name, weight in expected.items():
        assert torch.equal(trained[name], weight), name
    assert any(not torch.equal(stale[name], weight) for name, weight in expected.items())
