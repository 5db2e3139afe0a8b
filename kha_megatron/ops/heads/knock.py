"""Knocking-Heads Attention on plain tensors (arXiv 2510.23052, section 3.2).

Shape legend: ``D`` head dim; ``n`` matrices of the variant (``heads.knock.MATRICES``); ``H``
heads of the knocked tensor; ``K`` input features of its projection; ``...`` any leading
dimensions. The matrices of one projected tensor are one stacked weight ``[n, D, D]``, applied from
the right: ``x @ W``, the paper's row-vector convention (``torch.nn.Linear``'s is the transpose).
"""

import torch
from torch import Tensor

from kha_megatron.heads.knock import Variant


def knock(x: Tensor, weight: Tensor, variant: Variant) -> Tensor:
    """Pass every head's row through the matrices that all heads share.

    ==========  ==================================================================  =============
    ``linear``  ``x @ T``                                                           eq. 5-7
    ``mlp``     ``2 * ((x @ W_up) * sigmoid(x @ W_gate)) @ W_down``                 eq. 9
    ``gate``    ``2 * x * sigmoid(x @ W_gate)``                                     Table 2, "Gate"
    ==========  ==================================================================  =============

    Args:
        x: ``[..., D]``, any floating dtype, any strides.
        weight: ``[n, D, D]``, same dtype.
        variant: which row of the table.

    Returns:
        ``[..., D]``, same dtype. At the identity initial value it equals ``x`` bit for bit: each
        product has one non-zero term and ``2 * sigmoid(0) == 1``.
    """
    if variant == "linear":
        return x @ weight[0]
    if variant == "gate":
        return 2 * x * torch.sigmoid(x @ weight[0])
    up, gate, down = weight.unbind(0)
    return (2 * (x @ up) * torch.sigmoid(x @ gate)) @ down


def gradients(x: Tensor, dy: Tensor, weight: Tensor, variant: Variant) -> tuple[Tensor, Tensor]:
    """Those of :func:`knock` for ``x`` and ``weight``, without autograd.

    An operator's body runs where autograd records nothing.

    Args:
        x: as it was given to :func:`knock`.
        dy: the gradient of its result, ``[..., D]``.
        weight: as it was given.
        variant: as it was given.

    Returns:
        ``[..., D]`` and ``[n, D, D]``, dtypes of ``x`` and ``weight``.
    """
    if variant == "linear":
        return dy @ weight[0].mT, _outer(x, dy)[None]
    if variant == "gate":
        opened = torch.sigmoid(x @ weight[0])
        of_gate = 2 * dy * x * opened * (1 - opened)
        return 2 * dy * opened + of_gate @ weight[0].mT, _outer(x, of_gate)[None]
    up, gate, down = weight.unbind(0)
    risen, opened = x @ up, torch.sigmoid(x @ gate)
    of_hidden = dy @ down.mT
    of_up = 2 * of_hidden * opened
    of_gate = 2 * of_hidden * risen * opened * (1 - opened)
    of_weight = _outer(x, of_up), _outer(x, of_gate), _outer(2 * risen * opened, dy)
    return of_up @ up.mT + of_gate @ gate.mT, torch.stack(of_weight)


def _outer(rows: Tensor, others: Tensor) -> Tensor:
    """``[D, D]``: the sum of the outer products of all rows."""
    return rows.flatten(0, -2).mT @ others.flatten(0, -2)


def fold(
    projection: Tensor, weight: Tensor, *, head_rows: int | None = None, start: int = 0
) -> Tensor:
    """Absorb a ``linear`` knock into the projection before it: ``W' = W T`` (eq. 8).

    Computed in float64, a head at a time, and rounded once to the projection's dtype.

    A head of latent attention has more rows than are knocked. With ``n`` no-position features, a
    rotary part of ``r`` and values of ``v``, its matrices fold into the up-projections so::

        query_up = fold(query_up, t_query, head_rows=n + r)
        key_value_up = fold(key_value_up, t_key, head_rows=n + v)
        key_value_up = fold(key_value_up, t_value, head_rows=n + v, start=n)

    Args:
        projection: ``[H * head_rows, K]``, the ``torch.nn.Linear`` weight (or ``[H * head_rows]``
            bias) of the knocked tensor, heads outermost.
        weight: ``[1, D, D]``.
        head_rows: rows of one head; ``D`` if None.
        start: the first of the ``D`` rows of a head that are knocked.

    Returns:
        Same shape and dtype as ``projection``, with ``fold(projection, T) @ h`` equal to knocking
        every head of ``projection @ h``. Rows that are not knocked keep their bits.
    """
    matrix = weight[0].double()
    folded = projection.clone().unflatten(0, (-1, head_rows or len(matrix)))
    for head in range(len(folded)):
        rows = folded[head, start : start + len(matrix)]
        rows.copy_(torch.einsum("d...,de->e...", rows.double(), matrix))
    return folded.flatten(0, 1)
