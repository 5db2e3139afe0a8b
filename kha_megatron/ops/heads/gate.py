"""Gates on plain tensors (arXiv 2505.06708)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kha_megatron.heads.gate import Activation, Form, Gate
from kha_megatron.ops.heads.ranks import Ranks


def apply(
    tensors: dict[str, Tensor], weights: Mapping[str, Tensor], gates: Gate, ranks: Ranks
) -> dict[str, Tensor]:
    """Gate what is at a position of ``gates``; scores are ``gate_{position}``."""
    changed = {}
    for position in gates.positions:
        if position in tensors:
            name = f"gate_{position}"
            score = weights[name] if name in weights else tensors[name]
            changed[position] = gate(tensors[position], score, gates.form, gates.activation)
    return changed


def gate(x: Tensor, score: Tensor, form: Form, activation: Activation) -> Tensor:
    """``x * s`` or ``x + s``, where ``s`` is the activated score.

    Computed in float32 at least, as Megatron's own gate is, and rounded once.

    Args:
        x: ``[..., heads, D]`` or ``[..., hidden]``, any floating dtype.
        score: what can be broadcast to it.
        form: ``multiply`` or ``add``.
        activation: ``sigmoid``, ``silu``, or ``half_sigmoid``, which is ``0.5 + sigmoid / 2``.

    Returns:
        Shape and dtype of ``x``.
    """
    score = score.to(torch.promote_types(score.dtype, torch.float32))
    s = torch.nn.functional.silu(score) if activation == "silu" else torch.sigmoid(score)
    if activation == "half_sigmoid":
        s = 0.5 + s / 2
    return (x * s if form == "multiply" else x + s).to(x.dtype)
