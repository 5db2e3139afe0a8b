"""Compare the diagnostics with their formulas in plain Python."""

import math

import pytest
import torch

from kha_megatron.heads.diagnostics import diagnose

D = 7


def test_formulas():
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(3, D, D, dtype=torch.float64, generator=generator)
    for matrix, result in zip(weight.tolist(), diagnose(weight, "mlp"), strict=True):
        diagonal = 0
        squares = 0
        off_diagonal_squares = 0
        squared_distance = 0
        for i in range(D):
            for j in range(D):
                value = matrix[i][j]
                squares += value**2
                if i != j:
                    off_diagonal_squares += value**2
                    squared_distance += value**2
                else:
                    diagonal += value
                    initial = 0 if result.matrix == "gate" else 1
                    squared_distance += (value - initial) ** 2
        assert result.diagonal_mean == pytest.approx(diagonal / D)
        assert result.off_diagonal_share == pytest.approx(off_diagonal_squares / squares)
        assert result.distance == pytest.approx(math.sqrt(squared_distance / D))
