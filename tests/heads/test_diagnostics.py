"""Compare the diagnostics with their formulas in plain Python."""

import math

import pytest
import torch

from kha_megatron.heads.diagnostics import diagnose

D = 7


def test_formulas():
    weight = torch.randn(
        3,
        D,
        D,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(3),
    )
    for matrix, result in zip(weight.tolist(), diagnose(weight, "mlp"), strict=True):
        start = 0 if result.matrix == "gate" else 1
        cells = [(i, j, matrix[i][j]) for i in range(D) for j in range(D)]
        off = sum(x * x for i, j, x in cells if i != j)
        moved = sum((x - (start if i == j else 0)) ** 2 for i, j, x in cells)
        assert result.diagonal_mean == pytest.approx(sum(matrix[i][i] for i in range(D)) / D)
        assert result.off_diagonal_share == pytest.approx(off / sum(x * x for *_, x in cells))
        assert result.distance == pytest.approx(math.sqrt(moved / D))
