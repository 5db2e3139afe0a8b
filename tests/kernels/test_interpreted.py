"""The kernels in Triton's interpreter, compared with float64, with unwritten memory full of NaN.

The tilings are those of a GPU. The interpreter runs one program after another, so it shows no
races.
"""

import itertools
import tempfile

import numpy as np
import pytest
import torch

from kha_megatron.heads.kernels.tilings import HEAD_DIMS, KERNEL_DTYPES, KERNEL_VARIANTS
from kha_megatron.heads.knock import MATRICES
from tests.kernels import cases

# Of norms. Rounding to two bytes: several times half a unit of the last place, 2**-9 and 2**-12,
# since hidden features and their gradients are rounded too; the interpreter truncates bfloat16.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 1e-6}

QUICK = [(torch.bfloat16, 64, 129), (torch.float16, 96, 7), (torch.float32, 96, 63)]
"""Whole matrices in descriptors, padded ones, and blocks of padded ones."""


def sizes():
    """Yield all numbers of rows for small head dims, and for others one number.

    This number leaves the last tile half full: tiles have 128 rows of two-byte numbers, and 16 or
    32 of float32.
    """
    for dtype, head_dim, rows in itertools.product(KERNEL_DTYPES, HEAD_DIMS, cases.ROWS):
        half_a_tile = 63 if dtype == torch.float32 else 129
        if head_dim <= 96 or rows == half_a_tile:
            is_quick = (dtype, head_dim, rows) in QUICK
            marks = [] if is_quick else [pytest.mark.whole]
            yield pytest.param(dtype, head_dim, rows, marks=marks)


variants = pytest.mark.parametrize("variant", KERNEL_VARIANTS)
one_variant = pytest.mark.parametrize(
    "variant",
    ["gate", pytest.param("mlp", marks=pytest.mark.whole)],
)


@pytest.mark.fast
@pytest.mark.parametrize(("dtype", "head_dim", "rows"), list(sizes()), ids=str)
@variants
def test_equals_float64_with_every_gradient(interpreter, variant, dtype, head_dim, rows):
    found = interpreter(cases.errors, variant, head_dim, dtype, cases.ROWS[rows])
    assert set(found) == {"y", "dx", *(f"d_{name}" for name in MATRICES[variant])}
    assert all(error < TOLERANCE[dtype] for error in found.values()), found


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@variants
def test_starts_as_the_identity_bit_for_bit(interpreter, variant, dtype):
    assert interpreter(cases.is_identity_at_start, variant, 96, dtype)


@one_variant
def test_rows_may_have_any_strides(interpreter, variant):
    found = interpreter(cases.errors_by_layout, variant)
    assert all(error < TOLERANCE[torch.float16] for error in found.values()), found


@one_variant
def test_gradients_repeat_to_the_bit(interpreter, variant):
    assert interpreter(cases.repeats, variant, torch.float32, tokens=45)


@variants
def test_no_rows_give_zero_gradients(interpreter, variant):
    assert interpreter(cases.empty, variant) == ((0, 3, 64), (0, 3, 64), 0.0)


@variants
def test_saves_only_the_buffer_of_its_input(interpreter, variant):
    assert interpreter(cases.kept_for_backward, variant) == 0
    assert cases.kept_for_backward(variant) > 0  # torch saves more


def test_every_way_of_calling_gives_the_same_bits(interpreter):
    found = interpreter(cases.ways_of_calling, "gate")
    assert set(found.values()) == {0.0}, found


FAR = 2**29
"""Elements from head to head, so that the fifth head lies beyond 2**31."""


def far_apart(tokens, heads, head_dim):
    """Return ``[tokens, 1, heads, D]`` of float16 in a sparse file of 5 GB."""
    size = FAR * (heads - 1) + tokens * head_dim
    with tempfile.TemporaryFile() as file:
        buffer = np.memmap(file, np.float16, "w+", shape=(size,))
    shape = (tokens, 1, heads, head_dim)
    strides = (2 * head_dim, 0, 2 * FAR, 2)
    view = np.lib.stride_tricks.as_strided(buffer, shape, strides)
    tensor = torch.from_numpy(view)
    tensor.copy_(torch.randn(shape))
    return tensor


def errors_of_distant_heads():
    """Return the errors if input and gradient have heads more than 2**31 elements apart."""
    x = far_apart(3, 6, 64)
    dy = far_apart(3, 6, 64)
    x = x.requires_grad_()
    weight = cases.weight_of("gate", 64, torch.float16).requires_grad_()
    y = cases.fused_knock(x, weight, "gate")
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    expected_y, expected_dx, expected_dw = cases.reference(
        x.detach().contiguous(),
        weight,
        "gate",
        dy.contiguous(),
    )
    return [
        cases.relative_error(y, expected_y),
        cases.relative_error(dx, expected_dx),
        cases.relative_error(dw, expected_dw),
    ]


def test_reaches_heads_beyond_32_bit_offsets(interpreter):
    found = interpreter(errors_of_distant_heads)
    assert all(error < TOLERANCE[torch.float16] for error in found), found
