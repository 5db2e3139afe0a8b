"""Memory layout of head rows. Can be imported without Triton."""

from typing import NamedTuple

from torch import Tensor


class Strides(NamedTuple):
    """Memory layout of a tensor of heads that a kernel processes row by row.

    A row holds the features of one head of one token. The kernel computes the address of row ``r``
    as ``(r // heads) * token + (r % heads) * head``, in elements. If the rows are evenly spaced,
    e.g. in a contiguous tensor, ``heads`` is 1.
    """

    heads: int
    token: int
    head: int


def strides_of(x: Tensor) -> Strides | None:
    """Return the strides of the rows of ``x``, or None if this needs more than two strides."""
    steps: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if steps and steps[-1][1] == size * stride:
            steps[-1] = (steps[-1][0] * size, stride)
        else:
            steps.append((size, stride))
    if len(steps) > 2 or x.stride(-1) != 1:
        return None
    if len(steps) == 2:
        return Strides(steps[1][0], steps[0][1], steps[1][1])
    return Strides(1, steps[0][1] if steps else x.shape[-1], 0)


def rows_of(x: Tensor) -> tuple[Tensor, Strides]:
    """Return ``x`` and its strides. Makes ``x`` contiguous first if that is necessary."""
    strides = strides_of(x)
    return rows_of(x.contiguous()) if strides is None else (x, strides)
