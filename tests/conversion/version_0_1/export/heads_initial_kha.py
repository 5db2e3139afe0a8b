# kha_megatron.heads.initial of kha-megatron 0.1.0 (Apache-2.0)
"""Initialization of mechanism parameters."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .heads_mechanism_kha import InitialValue


@torch.no_grad()
def initial_weight(
    weight: Tensor, values: Sequence[InitialValue], *, std: float = 0.02, seed: int | None = None
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
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        weight.copy_(torch.randn(weight.shape, device="cpu", generator=generator) * std)
    for part, start in zip(weight, values, strict=True):
        if callable(start):
            start(part)
        elif start == "identity":
            torch.nn.init.eye_(part)
        elif start == "blocks":
            rows, columns = part.shape
            owner = torch.arange(columns, device=part.device) * rows // columns
            mine = owner == torch.arange(rows, device=part.device)[:, None]
            part.copy_(mine * (columns / mine.sum(1, keepdim=True)).sqrt())
        elif start != "normal":
            part.fill_(start == "ones")
    return weight
