"""Compare the diagnostics with their formulas in plain Python."""

import math

import pytest
import torch

from kha_megatron.heads.diagnostics import diagnose
from kha_megatron.heads.initial import initial_weight
from kha_megatron.heads.knock import MATRICES, initial_values

D = 7


@pytest.mark.parametrize("variant", MATRICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_distances_are_zero_at_the_start(variant, dtype):
    weight = initial_weight(
        torch.empty(len(MATRICES[variant]), D, D, dtype=dtype), initial_values(variant)
    )
    before = weight.clone()
    results = list(diagnose(weight, variant))
    assert [result.matrix for result in results] == list(MATRICES[variant])
    for result in results:
        assert result.diagonal_mean == (0 if result.matrix == "gate" else 1)
        assert result.off_diagonal_share == 0
        assert result.distance == 0
    assert torch.equal(weight, before), "the weight was changed"


def test_formulas():
    weight = torch.randn(3, D, D, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for matrix, result in zip(weight.tolist(), diagnose(weight, "mlp"), strict=True):
        start = 0 if result.matrix == "gate" else 1
        cells = [(i, j, matrix[i][j]) for i in range(D) for j in range(D)]
        off = sum(x * x for i, j, x in cells if i != j)
        moved = sum((x - (start if i == j else 0)) ** 2 for i, j, x in cells)
        assert result.diagonal_mean == pytest.approx(sum(matrix[i][i] for i in range(D)) / D)
        assert result.off_diagonal_share == pytest.approx(off / sum(x * x for *_, x in cells))
        assert result.distance == pytest.approx(math.sqrt(moved / D))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_inf_propagate(bad):
    weight = torch.eye(D)[None].clone()
    weight[0, 2, 2] = bad
    (result,) = diagnose(weight, "linear")
    values = (result.diagonal_mean, result.off_diagonal_share, result.distance)
    assert not any(map(math.isfinite, values))
