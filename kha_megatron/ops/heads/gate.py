"""Gates on plain tensors (arXiv 2505.06708)."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from kha_megatron.heads.gate import Activation, Form, Gate
from kha_megatron.ops.heads.ranks import Ranks

SHUT = 0.1
"""A score below it lets next to nothing pass."""


def apply(
    tensors: dict[str, Tensor], weights: Mapping[str, Tensor], gates: Gate, ranks: Ranks
) -> dict[str, Tensor]:
    """Gate what is at a position of ``gates``; scores are ``gate_{position}``.

    Observed are the mean of the activated score, ``gate-score/{position}``, and the share of it
    below :data:`SHUT`, ``gate-shut/{position}``: how sparse the gate is.
    """
    changed: dict[str, Tensor] = {}
    for position in gates.positions:
        if position in tensors:
            name = f"gate_{position}"
            score = activated(weights[name] if name in weights else tensors[name], gates.activation)
            observe(position, partial(torch.Tensor.detach, score), ranks)
            changed[position] = gated(tensors[position], score, gates.form)
    return changed


def observe(position: str, score: Callable[[], Tensor], ranks: Ranks) -> None:
    """Offer what :func:`apply` says of an activated score, asked for where it is wanted."""
    ranks.observe(f"gate-score/{position}", lambda: score().mean())
    ranks.observe(f"gate-shut/{position}", lambda: (score() < SHUT).float().mean())


def activated(score: Tensor, activation: Activation) -> Tensor:
    """The activated score, in float32 at least, as Megatron's own gate is.

    Args:
        score: any shape and floating dtype.
        activation: ``sigmoid``, ``silu``, or ``half_sigmoid``, which is ``0.5 + sigmoid / 2``.
    """
    score = score.to(torch.promote_types(score.dtype, torch.float32))
    if activation == "silu":
        return torch.nn.functional.silu(score)
    return 0.5 + score.sigmoid() / 2 if activation == "half_sigmoid" else score.sigmoid()


def gated(x: Tensor, score: Tensor, form: Form) -> Tensor:
    """``x * s`` or ``x + s``, rounded once.

    Args:
        x: ``[..., heads, D]`` or ``[..., hidden]``, any floating dtype.
        score: activated; what can be broadcast to ``x``.
        form: ``multiply`` or ``add``.

    Returns:
        Shape and dtype of ``x``.
    """
    return (x * score if form == "multiply" else x + score).to(x.dtype)
