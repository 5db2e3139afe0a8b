"""The kernels on a GPU: what the interpreter cannot show, against the same float64."""

import pytest
import torch

from kha_megatron.heads.knock import MATRICES, PROJECTIONS
from kha_megatron.ops.kernels.tilings import DTYPES, HEAD_DIMS
from tests.kernels import cases, prologue_cases

pytestmark = pytest.mark.gpu

# Of norms: roundings to two bytes, several times half a unit of the last place; float32 sums in
# another order than float64.
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}

variants = pytest.mark.parametrize("variant", MATRICES)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def device(gpu, monkeypatch):
    """Where the kernels must run, with unwritten memory full of NaN."""
    monkeypatch.setenv("KHA_KERNELS", "triton")
    # cuBLAS, in the reference, refuses deterministic algorithms otherwise
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield gpu
    torch.use_deterministic_algorithms(False)


def first_if(condition):
    """The marks of what the first minute of ``make gpu-check`` runs."""
    return [pytest.mark.first] if condition else []


USUAL = torch.bfloat16, 128
"""Dtype and head dim of the paper's models."""
SIZES = [
    pytest.param(dtype, head_dim, marks=first_if((dtype, head_dim) == USUAL))
    for dtype in DTYPES
    for head_dim in HEAD_DIMS
]


@pytest.mark.parametrize(("dtype", "head_dim"), SIZES, ids=str)
@pytest.mark.parametrize("knocked", [{"value": "mlp"}, {}], ids=["mlp", "plain"])
def test_the_prologue_equals_float64_with_every_gradient(device, dtype, head_dim, knocked):
    for tokens in (prologue_cases.MANY, 7):
        found = prologue_cases.errors(tokens, 4, head_dim, dtype, device, variants=knocked)
        assert all(error < TOLERANCE[dtype] for error in found.values()), (tokens, found)


@pytest.mark.parametrize(("dtype", "head_dim"), SIZES, ids=str)
@variants
def test_equals_float64_with_every_gradient(device, variant, dtype, head_dim):
    for lead in (cases.MANY, *cases.ROWS.values()):
        found = cases.errors(variant, head_dim, dtype, lead, device)
        assert all(error < TOLERANCE[dtype] for error in found.values()), (lead, found)


@pytest.mark.parametrize("options", prologue_cases.OPTIONS.values(), ids=prologue_cases.OPTIONS)
def test_options_of_the_prologue(device, options):
    found = prologue_cases.errors(prologue_cases.MANY, 4, 96, torch.bfloat16, device, **options)
    assert all(error < TOLERANCE[torch.bfloat16] for error in found.values()), found


@pytest.mark.parametrize("projection", PROJECTIONS)
@variants
def test_the_prologue_knocks_in_every_place(device, variant, projection):
    options = {"variants": {projection: variant}, "rotary": 64}
    found = prologue_cases.errors(prologue_cases.MANY, 2, 128, torch.bfloat16, device, **options)
    assert all(error < TOLERANCE[torch.bfloat16] for error in found.values()), found


def test_gradients_of_the_prologue_repeat_to_the_bit(device):
    assert all(prologue_cases.repeats(prologue_cases.MANY, device) for _ in range(5))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@dtypes
@variants
def test_starts_as_the_identity_bit_for_bit(device, variant, dtype, head_dim):
    assert cases.is_identity_at_start(variant, head_dim, dtype, device)


@variants
def test_takes_rows_wherever_they_lie(device, variant):
    found = cases.layouts_agree(variant, device)
    assert all(error < TOLERANCE[torch.float16] for error in found.values()), found


@pytest.mark.parametrize("head_dim", [96, 256])
@variants
def test_writes_input_gradients_into_a_view(device, variant, head_dim):
    error, rest_untouched = cases.writes_into(variant, head_dim, torch.float16, device)
    assert error < TOLERANCE[torch.float16]
    assert rest_untouched


@dtypes
@variants
def test_gradients_repeat_to_the_bit(device, variant, dtype):
    assert all(cases.repeats(variant, dtype, device, tokens=20011) for _ in range(5))


@variants
def test_small_behaviour(device, variant):
    assert cases.empty(variant, device) == ((0, 3, 64), (0, 3, 64), 0.0)
    assert cases.kept_for_backward(variant, device) == 0
    assert set(cases.ways_of_calling(variant, device).values()) == {0.0}
    assert cases.only_what_is_asked_for(variant, device) == [(True, False), (False, True)]


def test_keeps_no_memory_but_its_result(device):
    torch.cuda.synchronize()
    x = torch.randn(4096, 4, 1280, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = cases.weight_of("mlp", 128, torch.bfloat16, device).requires_grad_()
    before = torch.cuda.memory_allocated(device)
    y = cases.knock(x[..., -128:], weight, "mlp")
    assert torch.cuda.memory_allocated(device) - before == y.numel() * y.element_size()
