"""Memory layout of head rows. Can be imported without Triton."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Strides(NamedTuple):
    """Memory layout of a tensor of heads that a kernel processes row by row.

    A row holds the features of one head of one token. The kernel computes the address of row ``r``
    as ``(r // heads) * token + (r % heads) * head``, in elements. If the rows are evenly spaced,
    e.g. in a contiguous tensor, ``heads`` is 1 and ``token`` is the distance between rows.
    """

    heads: int  # number of rows per token
    token: int
    head: int

    @property
    def is_uniform(self) -> bool:
        """Whether all rows have the same distance, so that a single stride is enough."""
        return self.heads == 1


def strides_of(shape: Sequence[int], dim_strides: Sequence[int]) -> Strides | None:
    """Return the strides of a tensor's rows, or None if this needs more than two strides."""
    *row_sizes, width = shape
    *row_strides, feature_stride = dim_strides
    sizes: list[int] = []
    strides: list[int] = []
    for size, stride in zip(row_sizes, row_strides, strict=True):
        if size == 1:
            continue
        is_contiguous = bool(strides) and strides[-1] == size * stride
        if is_contiguous:  # merge the dimensions
            sizes[-1] *= size
            strides[-1] = stride
        else:
            sizes.append(size)
            strides.append(stride)
    if len(strides) > 2 or feature_stride != 1:
        return None
    if len(strides) == 2:
        return Strides(
            heads=sizes[1],
            token=strides[0],
            head=strides[1],
        )
    row_stride = width
    if strides:
        row_stride = strides[0]
    return Strides(heads=1, token=row_stride, head=0)


class Rows(NamedTuple):
    tensor: Tensor
    strides: Strides


def rows_of(x: Tensor) -> Rows:
    """Return the rows of ``x``. Makes ``x`` contiguous first if that is necessary."""
    strides = strides_of(x.shape, x.stride())
    if strides is None:
        return rows_of(x.contiguous())
    return Rows(x, strides)
