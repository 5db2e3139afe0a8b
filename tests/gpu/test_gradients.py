"""Gradients of shared matrices where Transformer Engine adds its weight gradients to the buffer.

With fused weight-gradient accumulation Transformer Engine writes ``main_grad`` itself, while KHA's
matrices go through Megatron's hooks. The buffers are compared after three microbatches.
"""

import pytest
import torch

from tests.gpu.test_layers import FLOOR, KHAS


def errors(kha, impl, moe, fused, spoil=None):
    """Return ``models.errors`` of accumulated gradients of models without an output layer."""
    from tests.gpu import models

    options = {"moe": moe, "head": False, "gradient_accumulation_fusion": fused}
    return models.errors(
        KHAS[kha], impl, torch.bfloat16, models.accumulated, spoil=spoil, **options
    )


@pytest.mark.gpu
@pytest.mark.te
@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("kha", KHAS)
def test_shared_matrices_with_fused_weight_gradients(gpu_rank, gpu_engine, kha, moe, fused):
    found = gpu_rank(errors, kha, "transformer_engine", moe, fused)
    assert any("knock_value" in name for name in found.ours)
    assert not found.beyond(FLOOR["bf16"])


def lose_a_microbatch(model):
    """Scale all gradients as if one of three microbatches were missing."""
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 2 / 3)


@pytest.mark.whole
def test_the_comparison_notices_a_lost_microbatch(ranks):
    found = ranks(errors, 1, "mixed", "local", False, False)[0]
    assert found.ours == found.plain
    short = ranks(errors, 1, "mixed", "local", False, False, lose_a_microbatch)[0]
    assert short.beyond(FLOOR["bf16"]).keys() == short.plain.keys()
