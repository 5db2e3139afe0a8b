"""The maths of the head mechanisms on plain tensors: one file, one pure function for each.

:data:`FUNCTIONS` is asked by Megatron's attention and by that of our transformers class, wherever a
:data:`~kha_megatron.heads.mechanism.Stage` is reached.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kha_megatron.heads.mechanism import Start

Tensors = dict[str, Tensor]

FUNCTIONS: Mapping[str, Callable[[Tensors, Tensors, Any], Tensors]] = {}
"""By the name of a mechanism, without the knock, ``(tensors, weights, mechanism) -> tensors``.

``tensors`` are ``query``, ``key`` and ``value`` at the stage ``qkv``, ``output`` at ``output``, as
``[..., heads, D]`` with the heads of this rank; it answers with those that it changes. ``weights``
are the mechanism's parameters by their names, as far as they meet those heads.
"""


@torch.no_grad()
def initial_weight(
    weight: Tensor, starts: Sequence[Start], *, std: float = 0.02, seed: int | None = None
) -> Tensor:
    """Fill a parameter in place with its initial value (``HeadTensor.starts``).

    Args:
        weight: ``[n, ...]``, any device and dtype: one entry for each start.
        starts: ``identity`` for a square matrix, ``zeros``, ``ones``, or ``normal``.
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
        elif start != "normal":
            part.fill_(start == "ones")
    return weight
