"""Initial values of the parameters of head mechanisms."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kha_megatron.heads.mechanism import Start


@torch.no_grad()
def initial_weight(
    weight: Tensor, starts: Sequence[Start], *, std: float = 0.02, seed: int | None = None
) -> Tensor:
    """Fill a parameter in place with its initial value (``HeadTensor.starts``).

    Args:
        weight: ``[n, ...]``, any device and dtype: one entry for each start.
        starts: ``identity`` for a square matrix, ``zeros``, ``ones``, ``normal``, or ``blocks`` for
            a matrix each of whose rows has as many columns of its own, with a mean square of 1.
        std: standard deviation of ``normal``.
        seed: seed of ``normal``, drawn on the CPU in float32 from a generator of its own, so that
            every rank and device gets the same numbers; None uses torch's current state.

    Returns:
        ``weight``.
    """
    if "normal" in starts:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        weight.copy_(torch.randn(weight.shape, device="cpu", generator=generator) * std)
    for part, start in zip(weight, starts, strict=True):
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
