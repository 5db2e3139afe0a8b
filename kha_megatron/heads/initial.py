"""Initial values of the parameters of head mechanisms."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kha_megatron.heads.mechanism import InitialValue


@torch.no_grad()
def initial_weight(
    weight: Tensor, values: Sequence[InitialValue], *, std: float = 0.02, seed: int | None = None
) -> Tensor:
    """Fill a parameter in place with its initial value (``HeadTensor.initial``) and return it.

    Args:
        weight: ``[n, ...]``, any device and dtype.
        values: one word for each of the ``n`` entries. ``blocks`` gives each row of a matrix an
            equal number of columns of its own, scaled to a mean square of 1.
        std: standard deviation of ``normal``.
        seed: seed of ``normal``, which is drawn in float32 on the CPU, so that all ranks and
            devices get equal numbers. None uses torch's global state.
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
