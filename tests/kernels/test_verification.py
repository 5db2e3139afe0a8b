"""Test when the kernels are compared with torch. ``test_mutations.py`` tests what is detected."""

from contextlib import contextmanager

import pytest
import torch

from kha_megatron import announcements
from kha_megatron.heads import knock as knocking
from kha_megatron.heads.kernels import verification
from kha_megatron.heads.kernels.fused import fused_knock
from kha_megatron.heads.kernels.tilings import KERNEL_DTYPES, KERNEL_VARIANTS
from kha_megatron.heads.kernels.verification import KnockCase, is_trusted
from kha_megatron.heads.knock import MATRICES
from tests.kernels import cases


@contextmanager
def started(comparisons):
    """Start as in a new process with ``KHA_KERNELS=auto``, and append each comparison to a list."""
    verification._trusted.clear()
    announcements._logged.clear()
    find_error = KnockCase.find_error

    def watched(case):
        comparisons.append(case)
        return find_error(case)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KHA_KERNELS", "auto")
        patch.setattr(KnockCase, "find_error", watched)
        yield


def compared_under_modes():
    """Return what the first calls compute while something watches or traces them."""
    found = {}
    compared = []
    with started(compared):
        found["saved under hooks"] = cases.kept_for_backward("gate") == 0
    with started(compared):
        found["every way of calling"] = set(cases.ways_of_calling("mlp").values()) == {0.0}
    x = torch.randn(7, 64)
    weight = cases.weight_of("gate", 64, torch.float32)
    want = knocking.knock(x, weight, "gate")

    def is_right():
        y = fused_knock(x, weight, "gate")
        return cases.relative_error(y, want.double()) < 1e-6

    with started(compared), torch.inference_mode():
        found["inference"] = is_right()

    def in_backward(gradient):
        found["backward"] = is_right()

    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(in_backward)
    with started(compared):
        leaf.sum().backward()
    with started([]):
        fused_knock(x, weight, "gate")
        fused_knock(2 * x, weight, "gate")
        found["same layout once"] = len(verification._trusted) == 1
        fused_knock(x.repeat(1, 2)[:, 64:], weight, "gate")
        found["other strides again"] = len(verification._trusted) == 2
    return found, len(compared)


def test_the_first_call_compares_under_every_mode(interpreter):
    found, comparisons = interpreter(compared_under_modes)
    assert len(found) == 6
    assert all(found.values()), found
    assert comparisons >= 4


def test_no_comparison_during_cuda_graph_capture(monkeypatch, capsys):
    case = KnockCase.of(torch.randn(7, 64, device="meta"), "gate")
    object.__setattr__(case, "device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(KnockCase, "find_error", lambda case: pytest.fail("compared"))
    announcements._logged.clear()
    assert not is_trusted(case)
    assert "because a CUDA graph is being captured" in capsys.readouterr().err
    monkeypatch.setitem(verification._trusted, case, True)
    assert is_trusted(case)


def found_in(wrong, factor, variant, dtype):
    """Return what the comparison finds if torch computes in place of the kernels."""
    from kha_megatron.heads.kernels import knock_launch

    results = {
        "forward": knocking.knock,
        "backward_input": lambda *arguments: knocking.gradients(*arguments)[0],
        "backward_weight": lambda *arguments: knocking.gradients(*arguments)[1],
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, compute in results.items():
            scale = factor if name == wrong else 1

            def scaled(*arguments, compute=compute, scale=scale):
                return (scale * compute(*(t.float() for t in arguments[:-1]), variant)).to(dtype)

            patch.setattr(knock_launch, f"knock_{name}", scaled)
        return KnockCase.of(torch.empty(7, 3, 64, dtype=dtype), variant).find_error()


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("variant", KERNEL_VARIANTS)
def test_a_result_scaled_by_a_fifth_of_a_percent_is_detected(interpreter, variant, dtype):
    assert interpreter(found_in, None, 1, variant, dtype) is None
    for wrong in ("forward", "backward_input", "backward_weight"):
        assert interpreter(found_in, wrong, 1.002, variant, dtype)


@pytest.mark.parametrize("variant", MATRICES)
def test_gradients_without_autograd_equal_autograd(variant):
    x = torch.randn(7, 3, 10, dtype=torch.float64)
    dy = torch.randn(7, 3, 10, dtype=torch.float64)
    weight = cases.weight_of(variant, 10, torch.float64)
    _, *want = cases.reference(x, weight, variant, dy)
    torch.testing.assert_close(knocking.gradients(x, dy, weight, variant), tuple(want))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("variant", KERNEL_VARIANTS)
def test_auto_uses_the_kernels_on_a_gpu(gpu, variant, dtype):
    compared = []
    with started(compared):
        x = cases.strided((7, 3), 128, dtype, gpu).requires_grad_()
        y = fused_knock(x, cases.weight_of(variant, 128, dtype, gpu), variant)
    assert len(compared) == 1
    assert "FusedKnock" in type(y.grad_fn).__name__
