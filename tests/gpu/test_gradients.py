"""Gradients of shared matrices where Transformer Engine adds its weight gradients to the buffer.

With fused weight-gradient accumulation Transformer Engine writes ``main_grad`` itself and hands
autograd a dummy; KHA's matrices go the ordinary way through Megatron's hooks, beside it. Compared
is what the buffers hold after three microbatches.
"""

import importlib.util

import pytest
import torch

from tests.gpu.test_layers import FLOOR, KHAS, beyond


def errors(kha, impl, moe, fused, head, spoiled=False):
    """Relative errors of accumulated gradients, as in ``test_layers``."""
    from tests.distributed.models import initialize
    from tests.gpu import models

    initialize()
    ours = models.build(
        kha, impl, torch.bfloat16, moe=moe, head=head, gradient_accumulation_fusion=fused
    )
    plain = models.build(kha, "local", torch.bfloat16, moe=moe, head=head)
    exact = models.build(kha, "local", torch.float32, moe=moe, head=head)
    models.copy_weights(ours, plain)
    models.copy_weights(ours, exact)
    found = models.accumulated(ours, microbatches=2 if spoiled else 3)
    want, rival = models.accumulated(exact), models.accumulated(plain)
    return tuple(models.relative_errors(grads, want) for grads in (found, rival))


@pytest.mark.gpu
@pytest.mark.te
@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("kha", KHAS)
def test_shared_matrices_with_fused_weight_gradients(gpu_rank, engine, kha, moe, fused):
    ours, plain = gpu_rank(errors, KHAS[kha], "transformer_engine", moe, fused, False)
    assert any("knock_value" in name for name in ours)
    assert not beyond(ours, plain, FLOOR["bf16"])


@pytest.mark.gpu
@pytest.mark.te
@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_the_same_to_the_loss_with_apex(gpu_rank, engine, impl):
    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
        pytest.skip("NOT TESTED: NVIDIA's apex with fused_weight_gradient_mlp_cuda is not here")
    ours, plain = gpu_rank(errors, KHAS["mixed"], impl, False, True, True)
    assert not beyond(ours, plain, FLOOR["bf16"])


def test_the_comparison_runs_and_can_fail(ranks):
    ours, plain = ranks(errors, 1, KHAS["mixed"], "local", False, False, False)[0]
    assert ours == plain
    assert "decoder.layers.0.self_attention.knock_query.weight" in ours
    short, plain = ranks(errors, 1, KHAS["mixed"], "local", False, False, False, True)[0]
    assert beyond(short, plain, FLOOR["bf16"]).keys() == plain.keys()
