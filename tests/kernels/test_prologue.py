"""The prologue's kernels in Triton's interpreter, against the definition in float64."""

import pytest
import torch

from kha_megatron.heads.knock import MATRICES, PROJECTIONS
from kha_megatron.ops.kernels.tilings import DTYPES, HEAD_DIMS
from tests.kernels import prologue_cases as cases
from tests.kernels.test_interpreted import TOLERANCE
from tools.cross_compile import PrologueLaunch, compile_prologue

# tokens, query heads of each key/value head, head dim
SIZES = [
    *((1, 1, 64), (7, 4, 64), (63, 2, 64), (129, 1, 64)),
    *((1, 2, 96), (7, 1, 96), (63, 4, 96), (129, 2, 96)),
    *((7, 2, 128), (129, 4, 128), (63, 1, 192), (7, 2, 256)),
]
KNOCKED = [(1, 1, 64), (7, 4, 64), (21, 2, 96), (7, 1, 128), (7, 2, 192)]


@pytest.mark.parametrize(("tokens", "r", "head_dim"), SIZES)
def test_equals_float64_with_every_gradient(interpreter, tokens, r, head_dim):
    found = interpreter(cases.errors, tokens, r, head_dim, torch.float32)
    assert len(found) == 6
    assert all(error < TOLERANCE[torch.float32] for error in found.values()), found


@pytest.mark.parametrize(("tokens", "r", "head_dim"), KNOCKED)
def test_with_knocked_values(interpreter, tokens, r, head_dim):
    options = {"variants": {"value": "mlp"}}
    found = interpreter(cases.errors, tokens, r, head_dim, torch.float32, **options)
    assert len(found) == 7
    assert all(error < TOLERANCE[torch.float32] for error in found.values()), found


@pytest.mark.parametrize("dtype", [t for t in DTYPES if t.itemsize == 2], ids=str)
@pytest.mark.parametrize("head_dim", [96, 128])
def test_two_bytes(interpreter, head_dim, dtype):
    found = interpreter(cases.errors, 7, 2, head_dim, dtype, variants={"value": "mlp"})
    assert all(error < TOLERANCE[dtype] for error in found.values()), found


@pytest.mark.parametrize("options", cases.OPTIONS.values(), ids=cases.OPTIONS)
def test_options(interpreter, options):
    found = interpreter(cases.errors, 21, 4, 96, torch.float32, **options)
    assert all(error < TOLERANCE[torch.float32] for error in found.values()), found


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("variant", MATRICES)
def test_every_variant_in_every_place(interpreter, variant, projection):
    options = {"variants": {projection: variant}, "rotary": 32}
    found = interpreter(cases.errors, 7, 2, 64, torch.float32, **options)
    assert len(found) == 7
    assert all(error < TOLERANCE[torch.float32] for error in found.values()), found


def test_gradients_repeat_to_the_bit(interpreter):
    assert interpreter(cases.repeats)


def test_keeps_nothing_beyond_the_buffer(interpreter):
    assert interpreter(cases.kept_for_backward) == 0


def test_no_tokens(interpreter):
    shapes, gradient, size = interpreter(cases.no_tokens)
    assert shapes == [(0, 2, 6, 64), (0, 2, 3, 64), (0, 2, 3, 64)]
    assert gradient == 0.0
    assert size == (0, 2, cases.G, 256)


COMPILED = [
    *((head_dim, torch.bfloat16, head_dim) for head_dim in HEAD_DIMS),
    (128, torch.bfloat16, 64),
    (128, torch.float32, 128),
]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("head_dim", "dtype", "turning"), COMPILED)
def test_fits_hopper_many_times(reports, direction, head_dim, dtype, turning):
    """No register is spilled, and enough programs run at once to keep the memory busy."""
    case = PrologueLaunch(direction, head_dim, dtype, turning)
    report = reports([case], lambda cases: {c: compile_prologue(c) for c in cases})[case]
    assert report.spilled == 0
    # backward may take no more registers than its five or four programs leave; forward takes up to
    # 64, and more for a third piece of a head
    many = {"forward": 8, "backward": 4 + (head_dim <= 128)} if turning == head_dim else {}
    assert report.programs >= many.get(direction, 4)
