"""The kernels in Triton's interpreter, against float64, with unwritten memory full of NaN.

The tilings are those that a GPU launches. The interpreter runs one program after another, so that
it shows no races.
"""

import pytest
import torch

from kha_megatron.heads.knock import MATRICES
from kha_megatron.ops.kernels.tilings import DTYPES, HEAD_DIMS
from tests.kernels import cases

# Of norms. Rounding to two bytes: several times half a unit of the last place, 2**-9 and 2**-12,
# since hidden features and their gradients are rounded too; the interpreter cuts bfloat16 off.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 1e-6}

SIZES = [
    (dtype, head_dim, rows)
    for dtype in DTYPES
    for head_dim in HEAD_DIMS
    for rows in cases.ROWS
    if head_dim <= 96 or rows == (63 if dtype == torch.float32 else 129)
]
"""Every number of rows where interpreting is quick; elsewhere one that leaves a tile half full,
after others: 128 rows are in a tile of two-byte numbers, 16 or 32 in one of float32."""

variants = pytest.mark.parametrize("variant", MATRICES)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.mark.parametrize(("dtype", "head_dim", "rows"), SIZES, ids=str)
@variants
def test_equals_float64_with_every_gradient(interpreter, variant, dtype, head_dim, rows):
    found = interpreter(cases.errors, variant, head_dim, dtype, cases.ROWS[rows])
    assert set(found) == {"y", "dx", *(f"d_{name}" for name in MATRICES[variant])}
    assert all(error < TOLERANCE[dtype] for error in found.values()), found


@dtypes
@variants
def test_starts_as_the_identity_bit_for_bit(interpreter, variant, dtype):
    assert interpreter(cases.is_identity_at_start, variant, 128, dtype)


@variants
def test_takes_rows_wherever_they_lie(interpreter, variant):
    found = interpreter(cases.layouts_agree, variant)
    assert all(error < TOLERANCE[torch.float16] for error in found.values()), found


@pytest.mark.parametrize("head_dim", [96, 256])
@variants
def test_writes_input_gradients_into_a_view(interpreter, variant, head_dim):
    error, rest_untouched = interpreter(cases.writes_into, variant, head_dim, torch.float16)
    assert error < TOLERANCE[torch.float16]
    assert rest_untouched


@variants
def test_gradients_repeat_to_the_bit(interpreter, variant):
    assert interpreter(cases.repeats, variant, torch.bfloat16)


@variants
def test_no_rows(interpreter, variant):
    assert interpreter(cases.empty, variant) == ((0, 3, 64), (0, 3, 64), 0.0)


@variants
def test_keeps_nothing_beyond_the_buffer_that_holds_its_input(interpreter, variant):
    assert interpreter(cases.kept_for_backward, variant) == 0


def test_plain_torch_keeps_more(monkeypatch):
    monkeypatch.setenv("KHA_KERNELS", "torch")
    assert cases.kept_for_backward("mlp") > 0


@variants
def test_every_way_of_calling_it_gives_the_same_bits(interpreter, variant):
    found = interpreter(cases.ways_of_calling, variant)
    assert len(found) == 6
    assert set(found.values()) == {0.0}, found


@variants
def test_computes_no_gradient_that_nobody_asked_for(interpreter, variant):
    assert interpreter(cases.only_what_is_asked_for, variant) == [(True, False), (False, True)]
