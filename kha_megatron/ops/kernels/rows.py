"""Where the rows of a tensor lie, as kernels address them. Needs no Triton.

Shape legend: ``...`` any leading dimensions; ``D`` features of a row.
"""

from typing import NamedTuple

from torch import Tensor


class Strides(NamedTuple):
    """In elements: row ``r`` is head ``r % heads`` of token ``r // heads``.

    With one stride between all rows there is one head a token.
    """

    heads: int
    token: int
    head: int


class Rows(NamedTuple):
    """The rows of ``[..., D]`` as a kernel addresses them."""

    tensor: Tensor
    heads: int
    token_stride: int
    head_stride: int

    @property
    def fit_a_descriptor(self) -> bool:
        """Whether the tensor memory accelerator can read them: multiples of 16 bytes."""
        step = self.token_stride * self.tensor.element_size()
        return self.heads == 1 and step > 0 and not (step | self.tensor.data_ptr()) % 16


def strides_of(x: Tensor) -> Strides | None:
    """How the rows of ``x`` ``[..., D]`` lie, or None where two strides do not say it."""
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


def rows_of(x: Tensor) -> Rows:
    """Where the rows of ``x`` ``[..., D]`` lie, copied only if two strides do not say it."""
    strides = strides_of(x)
    return rows_of(x.contiguous()) if strides is None else Rows(x, *strides)
