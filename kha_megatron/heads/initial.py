"""Initialization of mechanism parameters."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kha_megatron.heads.mechanism import InitialValue


@torch.no_grad()
def initial_weight(
    weight: Tensor, values: Sequence[InitialValue], *, std: float = 0.02, seed: int | None = None
) -> Tensor:
    """Initialize a parameter in place (see ``HeadTensor.initial``) and return it.

    Args:
        weight: Tensor of shape ``[n, ...]``.
        values: Initialization of each of the ``n`` slices. ``blocks`` assigns an equal number of
            columns to each row of a matrix, scaled to a mean square of 1.
        std: Standard deviation for ``normal``.
        seed: Seed for ``normal``. Samples are drawn in float32 on the CPU, so that they are the
            same on all ranks and devices. By default, torch's global generator is used.
    """
    if "normal" in values:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        weight.copy_(torch.randn(weight.shape, device="cpu", generator=generator) * std)
    for part, start in zip(weight, values, strict=True):
        if start == "identity":
            torch.nn.init.eye_(part)
        elif start == "blocks":
            rows, columns = part.shape
            owner = torch.arange(columns, device=part.device) * rows // columns
            mine = owner == torch.arange(rows, device=part.device)[:, None]
            part.copy_(mine * (columns / mine.sum(1, keepdim=True)).sqrt())
        elif start != "normal":
            part.fill_(start == "ones")
    return weight
