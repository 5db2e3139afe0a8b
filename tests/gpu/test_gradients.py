"""Gradients of shared matrices where Transformer Engine adds its weight gradients to the buffer.

With fused weight-gradient accumulation Transformer Engine writes ``main_grad`` itself and hands
autograd a dummy; KHA's matrices go the ordinary way through Megatron's hooks, beside it. Compared
is what the buffers hold after three microbatches.
"""

import importlib.util

import pytest
import torch

from tests.gpu.test_layers import FLOOR, KHAS


def errors(kha, impl, moe, fused, head, spoil=None):
    """``models.errors`` of accumulated gradients."""
    from tests.gpu import models

    return models.errors(
        KHAS[kha],
        impl,
        torch.bfloat16,
        models.accumulated,
        moe=moe,
        head=head,
        spoil=spoil,
        gradient_accumulation_fusion=fused,
    )


@pytest.mark.gpu
@pytest.mark.te
@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("kha", KHAS)
def test_shared_matrices_with_fused_weight_gradients(gpu_rank, gpu_engine, kha, moe, fused):
    found = gpu_rank(errors, kha, "transformer_engine", moe, fused, False)
    assert any("knock_value" in name for name in found.ours)
    assert not found.beyond(FLOOR["bf16"])


@pytest.mark.gpu
@pytest.mark.te
@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_the_same_to_the_loss_with_apex(gpu_rank, gpu_engine, impl):
    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
        pytest.skip("NOT TESTED: NVIDIA's apex with fused_weight_gradient_mlp_cuda is not here")
    assert not gpu_rank(errors, "mixed", impl, False, True, True).beyond(FLOOR["bf16"])


def lose_a_microbatch(model):
    """One of three."""
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 2 / 3)


@pytest.mark.whole
def test_the_comparison_notices_a_lost_microbatch(ranks):
    found = ranks(errors, 1, "mixed", "local", False, False, False)[0]
    assert found.ours == found.plain
    assert "decoder.layers.0.self_attention.knock_query.weight" in found.ours
    short = ranks(errors, 1, "mixed", "local", False, False, False, lose_a_microbatch)[0]
    assert short.beyond(FLOOR["bf16"]).keys() == short.plain.keys()
