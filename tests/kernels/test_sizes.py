"""What ``test_gpu.py`` computes on a GPU fills it more than twice, with a ragged end."""

import itertools

import pytest

from kha_megatron.heads.knock import MATRICES
from kha_megatron.ops.kernels.tilings import DTYPES, HEAD_DIMS, tiling
from tests.kernels import cases, prologue_cases

PROCESSORS = 132
"""Of an H100 or H200 (SXM), which have the most of all GPUs that have tilings."""


@pytest.mark.parametrize("kernel", ["forward", "backward_input", "backward_weight"])
@pytest.mark.parametrize("variant", MATRICES)
def test_rows(variant, kernel):
    count = cases.MANY[0] * cases.MANY[1]
    for head_dim, dtype in itertools.product(HEAD_DIMS, DTYPES):
        cut = tiling(kernel, variant, head_dim, dtype)
        assert count > 2 * PROCESSORS * cut.per_processor * cut.rows
        assert count % cut.rows


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_tokens_of_the_prologue(usable_triton, direction):
    from kha_megatron.ops.kernels import prologue_launch

    length, batch = prologue_cases.LENGTHS[prologue_cases.MANY]
    assert length * batch == prologue_cases.MANY
    for head_dim in HEAD_DIMS:
        cut = prologue_launch.tiling(direction, head_dim, head_dim // 2)
        tiles = prologue_cases.MANY / cut.tokens * prologue_cases.G
        assert tiles > 2 * PROCESSORS * max(1, cut.per_processor)
        assert prologue_cases.MANY % cut.tokens
