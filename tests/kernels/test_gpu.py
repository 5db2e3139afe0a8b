"""The kernels on a GPU, compared with the same float64 as in the interpreter."""

from typing import get_args

import pytest
import torch

from kha_megatron.heads.kernels.tilings import (
    HEAD_DIMS,
    KERNEL_DTYPES,
    KERNEL_VARIANTS,
    Kernel,
    tiling,
)
from tests.kernels import cases

# Of norms: roundings to two bytes, several times half a unit of the last place; float32 sums in
# another order than float64.
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}

PROCESSORS = 132
"""Multiprocessors of an H100 or H200 (SXM), the largest GPU that has tilings."""

USUAL = torch.bfloat16, 128
"""Dtype and head dim of the paper's models, in the first minute of ``make gpu-check``."""
SIZES = [
    pytest.param(dtype, head_dim, marks=[pytest.mark.first] * ((dtype, head_dim) == USUAL))
    for dtype in KERNEL_DTYPES
    for head_dim in HEAD_DIMS
]
variants = pytest.mark.parametrize("variant", KERNEL_VARIANTS)
sizes = pytest.mark.parametrize(("dtype", "head_dim"), SIZES, ids=str)


@pytest.fixture
def device(gpu, monkeypatch):
    """Return the GPU. The kernels must run on it, and unwritten memory is full of NaN."""
    monkeypatch.setenv("KHA_KERNELS", "triton")
    # cuBLAS, in the reference, refuses deterministic algorithms otherwise
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield gpu
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@sizes
@variants
def test_equals_float64_with_every_gradient(device, variant, dtype, head_dim):
    for lead in (cases.MANY, *cases.ROWS.values()):
        found = cases.errors(variant, head_dim, dtype, lead, device)
        assert all(error < TOLERANCE[dtype] for error in found.values()), (lead, found)
    assert cases.is_identity_at_start(variant, head_dim, dtype, device)


@pytest.mark.gpu
@variants
def test_rows_may_have_any_strides(device, variant):
    found = cases.errors_by_layout(variant, device)
    assert all(error < TOLERANCE[torch.float16] for error in found.values()), found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@variants
def test_gradients_repeat_to_the_bit(device, variant, dtype):
    assert all(cases.repeats(variant, dtype, device, tokens=20011) for _ in range(5))


@pytest.mark.gpu
@variants
def test_empty_rows_saved_memory_and_every_way_of_calling(device, variant):
    assert cases.empty(variant, device) == ((0, 3, 64), (0, 3, 64), 0.0)
    assert cases.kept_for_backward(variant, device) == 0
    assert set(cases.ways_of_calling(variant, device).values()) == {0.0}


@variants
def test_many_rows_fill_the_largest_gpu_more_than_twice(variant):
    count = cases.MANY[0] * cases.MANY[1]
    for kernel in get_args(Kernel):
        for dtype in KERNEL_DTYPES:
            for head_dim in HEAD_DIMS:
                cut = tiling(kernel, variant, head_dim, dtype, "sm_90")
                assert count > 2 * PROCESSORS * cut.per_processor * cut.rows
                assert count % cut.rows
