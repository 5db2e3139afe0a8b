"""KHA's matrices stay in bf16 where Transformer Engine keeps its weights in FP8.

Megatron's buffers and its distributed optimizer treat a parameter as FP8 if ``is_float8tensor``
says so. Only Transformer Engine's modules make such parameters.
"""

import pytest
import torch

from tests.gpu.test_layers import KHAS


def places(recipe):
    """Return by parameter: class, dtype, whether Megatron treats it as FP8, dtype of its buffer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.fp8_utils import is_float8tensor

    from tests.distributed.models import initialize
    from tests.gpu import models

    initialize()
    fp8 = {
        "ffn_hidden_size": 256,
        "fp8": "hybrid",
        "fp8_param": True,
        "fp8_recipe": recipe,
    }
    engine = "transformer_engine"
    model = models.build(KHAS["mixed"], engine, torch.bfloat16, moe=False, **fp8)
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True, fp8_param_gather=True)
    wrapped = DistributedDataParallel(model.config, settings, model)
    buffer_dtypes = {}
    for buffer in wrapped.buffers:
        for parameter in buffer.params:
            buffer_dtypes[parameter] = str(buffer.param_dtype)
    places = {}
    for name, parameter in model.named_parameters():
        places[name] = (
            type(parameter.data).__name__,
            str(parameter.dtype),
            is_float8tensor(parameter),
            buffer_dtypes[parameter],
        )
    return places


def check(found):
    knocks = [place for name, place in found.items() if ".knock_" in name]
    assert knocks == [("Tensor", "torch.bfloat16", False, "torch.bfloat16")] * 6
    linears = [p for n, p in found.items() if ".linear_" in n and n.endswith(".weight")]
    assert [place[2:] for place in linears] == [(True, "torch.uint8")] * 8


recipes = pytest.mark.parametrize(
    "recipe",
    ["tensorwise", *(pytest.param(r, marks=pytest.mark.whole) for r in ("delayed", "blockwise"))],
)


@pytest.mark.te
@recipes
def test_shared_matrices_are_not_quantised(ranks_with_engine, recipe):
    check(ranks_with_engine(places, 1, recipe)[0])


@pytest.mark.gpu
@pytest.mark.te
@recipes
def test_shared_matrices_are_not_quantised_on_a_gpu(gpu_rank, gpu_engine, recipe):
    check(gpu_rank(places, recipe))
