"""Initialization of mechanism parameters."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kha_megatron.heads.mechanism import InitialValue


@torch.no_grad()
def initial_weight(
    weight: Tensor,
    values: Sequence[InitialValue],
    *,
    std: float = 0.02,
    seed: int | None = None,
) -> Tensor:
    """Initialize a mechanism's parameter in place and return it.

    Args:
        weight (Tensor): Parameter of shape [len(values), ...].
        values (Sequence[InitialValue]): How to initialize each slice, e.g.
            ``("identity", "zeros")``. With ``blocks``, row ``i`` of a matrix is non-zero only in
            the i-th block of columns (scaled to a mean square of 1).
        std (float): Standard deviation for ``normal``.
        seed (int, optional): Seed for ``normal``. Samples are always drawn on the CPU in float32,
            so all ranks and devices get the same ones. Defaults to the global torch generator.
    """
    if "normal" in values:
        generator = None
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(weight.shape, device="cpu", generator=generator)
        weight.copy_(noise * std)
    for matrix, value in zip(weight, values, strict=True):
        if callable(value):
            value(matrix)
        elif value == "identity":
            torch.nn.init.eye_(matrix)
        elif value == "blocks":
            _fill_blocks(matrix)
        elif value == "ones":
            matrix.fill_(1)
        elif value != "normal":
            matrix.zero_()
    return weight


def _fill_blocks(matrix: Tensor) -> None:
    rows, columns = matrix.shape
    row_numbers = torch.arange(rows, device=matrix.device)
    column_numbers = torch.arange(columns, device=matrix.device)
    row_of_column = column_numbers * rows // columns
    is_in_block = row_of_column == row_numbers[:, None]
    block_sizes = is_in_block.sum(1, keepdim=True)
    scale = (columns / block_sizes).sqrt()
    matrix.copy_(is_in_block * scale)
