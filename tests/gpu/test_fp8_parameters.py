"""KHA's matrices stay in bf16 where Transformer Engine keeps its weights in FP8.

Megatron's buffers and its distributed optimizer treat a parameter as FP8 if ``is_float8tensor``
says so. Transformer Engine's modules quantise their own weights when they are built; a plain
parameter of another module is left alone, and so lies in the bf16 buffer with the norms.
"""

import pytest
import torch

from tests.gpu.test_layers import KHAS

RECIPES = ("delayed", "tensorwise", "blockwise")

FP8 = {"ffn_hidden_size": 256, "fp8": "hybrid", "fp8_param": True}


def places(recipe):
    """By the name of a parameter: its class, dtype, whether Megatron takes it for FP8, its buffer.

    The buffer is the dtype of the one that Megatron's data parallelism put it in.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.fp8_utils import is_float8tensor

    from tests.distributed.models import initialize
    from tests.gpu import models

    initialize()
    model = models.build(
        KHAS["mixed"], "transformer_engine", torch.bfloat16, moe=False, fp8_recipe=recipe, **FP8
    )
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True, fp8_param_gather=True)
    wrapped = DistributedDataParallel(model.config, settings, model)
    buffers = {p: b.param_dtype for b in wrapped.buffers for p in b.params}
    return {
        name: (
            type(p.data).__name__,
            str(p.dtype),
            is_float8tensor(p),
            str(buffers[p]),
        )
        for name, p in model.named_parameters()
    }


def check(found):
    """KHA's matrices are plain and in the bf16 buffer; Transformer Engine's weights are not."""
    knocks = {name: place for name, place in found.items() if ".knock_" in name}
    assert len(knocks) == 6
    assert set(knocks.values()) == {("Tensor", "torch.bfloat16", False, "torch.bfloat16")}
    linears = {n: p for n, p in found.items() if ".linear_" in n and n.endswith(".weight")}
    assert len(linears) == 8
    assert all(quantised for _, _, quantised, _ in linears.values())
    assert {buffer for *_, buffer in linears.values()} == {"torch.uint8"}


@pytest.mark.te
@pytest.mark.parametrize("recipe", RECIPES)
def test_shared_matrices_are_not_quantised(ranks_with_engine, recipe):
    check(ranks_with_engine(places, 1, recipe)[0])


@pytest.mark.gpu
@pytest.mark.te
@pytest.mark.parametrize("recipe", RECIPES)
def test_shared_matrices_are_not_quantised_on_a_gpu(gpu_rank, gpu_engine, recipe):
    check(gpu_rank(places, recipe))


def without_engine():
    """The same question where nothing can be quantised: class, dtype and owner."""
    from kha_megatron.mcore.knocking import KnockingHeads
    from tests.distributed.models import initialize
    from tests.gpu import models

    initialize()
    model = models.build(KHAS["mixed"], "local", torch.bfloat16, moe=False)
    return [
        (type(p), type(p.data), p.dtype, type(owner).__mro__[2].__name__)
        for owner in model.modules()
        if isinstance(owner, KnockingHeads)
        for p in owner.parameters(recurse=False)
    ]


def test_shared_matrices_are_plain_parameters(ranks):
    found = ranks(without_engine, 1)[0]
    assert len(found) == 6
    plain = (torch.nn.Parameter, torch.Tensor, torch.bfloat16, "MegatronModule")
    assert set(found) == {plain}
