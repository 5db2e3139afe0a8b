"""Which way knocking goes, that it says so once, and what it may import."""

import os
import re
import subprocess
import sys

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from kha_megatron import announcements
from kha_megatron.errors import ConfigError
from kha_megatron.heads.knock import MATRICES
from kha_megatron.ops import fused, knock
from kha_megatron.ops.heads import knock as knocking

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv("KHA_KERNELS", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    refusals = fused._refusal  # a test puts something else there
    announcements.forget()
    refusals.cache_clear()
    yield
    announcements.forget()
    refusals.cache_clear()


def inputs(head_dim=64, dtype=torch.float32):
    return torch.randn(5, 3, head_dim, dtype=dtype), torch.randn(1, head_dim, head_dim, dtype=dtype)


def test_falls_back_on_the_cpu_and_says_so_once(capsys):
    x, weight = inputs()
    for _ in range(3):
        assert torch.equal(knock(x, weight, "gate"), knocking.knock(x, weight, "gate"))
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "kha_megatron: knocking runs in plain torch: tensors are on cpu, and the kernels need a "
        "CUDA device\n"
    )


def test_other_ranks_say_nothing(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    knock(*inputs(), "gate")
    assert capsys.readouterr().err == ""


def test_plain_torch_can_be_forced(capsys, monkeypatch):
    monkeypatch.setenv("KHA_KERNELS", "torch")
    knock(*inputs(), "gate")
    assert (
        capsys.readouterr().err
        == "kha_megatron: knocking runs in plain torch (KHA_KERNELS=torch)\n"
    )


def test_forced_kernels_refuse_to_fall_back(monkeypatch):
    monkeypatch.setenv("KHA_KERNELS", "triton")
    with pytest.raises(ConfigError, match="KHA_KERNELS=triton, but tensors are on cpu"):
        knock(*inputs(), "gate")


def test_another_word_is_refused(monkeypatch):
    monkeypatch.setenv("KHA_KERNELS", "cuda")
    with pytest.raises(ConfigError, match="'cuda': choose one of auto, torch, triton"):
        knock(*inputs(), "gate")
    with pytest.raises(ConfigError, match="'cuda': choose one of auto, torch, triton"):
        fused.prologue_kernel(inputs()[0], 16)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((CUDA, torch.float32, CUDA, torch.bfloat16, 128), "float32 and matrices torch.bfloat16"),
        ((CUDA, torch.float64, CUDA, torch.float64, 128), "only, and this is torch.float64"),
        ((CUDA, torch.float32, CUDA, torch.float32, 80), "head dims 64, 96, .* this is 80"),
        (
            (CUDA, torch.float32, torch.device("cpu"), torch.float32, 64),
            "on cuda:0 and matrices on",
        ),
        ((torch.device("meta"), torch.float32, CUDA, torch.float32, 64), "tensors are on meta"),
    ],
)
def test_reasons(arguments, reason, monkeypatch):
    monkeypatch.setattr(fused, "triton_refusal", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert re.search(reason, fused._refusal(*arguments))


def test_architectures_without_tilings_fall_back(monkeypatch):
    arguments = (CUDA, torch.bfloat16, CUDA, torch.bfloat16, 128)
    monkeypatch.setattr(fused, "triton_refusal", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert fused._refusal(*arguments) is None
    fused._refusal.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert fused._refusal(*arguments) == "there are tilings for sm_90 only, and this is sm_80"


@pytest.mark.parametrize("release", ["3.3.1", "3.4.0+git1a2b"])
def test_a_triton_that_is_too_old_falls_back(monkeypatch, capsys, release):
    """3.3, which torch 2.7 brings, has no tensor descriptors."""
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(triton, "__version__", release)
    monkeypatch.setitem(sys.modules, "triton.tools.tensor_descriptor", None)
    x, weight = inputs()
    assert torch.equal(knock(x, weight, "gate"), knocking.knock(x, weight, "gate"))
    why = f"the kernels need Triton 3.5, which torch 2.9 brings, and this is {release}"
    assert capsys.readouterr().err == f"kha_megatron: knocking runs in plain torch: {why}\n"
    monkeypatch.setenv("KHA_KERNELS", "triton")
    with pytest.raises(ConfigError, match=re.escape(f"KHA_KERNELS=triton, but {why}")):
        knock(x, weight, "gate")


@pytest.mark.parametrize("release", ["3.5.0", "3.10.1", "4.0"])
def test_newer_tritons_are_taken(monkeypatch, release):
    monkeypatch.setattr(pytest.importorskip("triton"), "__version__", release)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert fused._refusal(CUDA, torch.bfloat16, CUDA, torch.bfloat16, 128) is None


def test_a_triton_that_cannot_be_imported_falls_back(monkeypatch):
    monkeypatch.setattr(fused.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "triton", None)
    found = fused._refusal(CUDA, torch.bfloat16, CUDA, torch.bfloat16, 128)
    assert found.startswith("Triton cannot be imported (ModuleNotFoundError: ")


def test_autocast_falls_back(monkeypatch):
    monkeypatch.setattr(fused, "_refusal", lambda *arguments: None)
    assert fused.refusal(*inputs()) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast" in fused.refusal(*inputs())


def test_tensors_that_hold_others_fall_back(monkeypatch):
    """Such as DTensor: a kernel would read the memory behind them."""
    monkeypatch.setattr(fused, "_refusal", lambda *arguments: None)
    x, weight = inputs()
    assert "TwoTensor keeps its numbers" in fused.refusal(x, TwoTensor(weight, weight.clone()))
    assert fused.refusal(x, torch.nn.Parameter(weight)) is None


def test_plain_torch_compiles_with_gradients():
    x, weight = (t.requires_grad_() for t in inputs())
    compiled = torch.compile(knock, backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(compiled(x, weight, "gate").square().sum(), (x, weight))
    want = torch.autograd.grad(knock(x, weight, "gate").square().sum(), (x, weight))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("variant", MATRICES)
def test_a_compiled_knock_falls_back_in_its_backward_pass(monkeypatch, variant):
    """Whose kernels are found wrong when it runs: an operator's body cannot ask autograd."""
    monkeypatch.setattr(fused, "_may_take_kernels", lambda x, weight: True)
    monkeypatch.setattr(fused, "_takes_kernels", lambda x, weight, variant: False)
    x = torch.randn(3, 7, 2, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(len(MATRICES[variant]), 16, 16, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(knock, backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(compiled(x, weight, variant).square().sum(), (x, weight))
    plain = knocking.knock(x, weight, variant)
    torch.testing.assert_close(got, torch.autograd.grad(plain.square().sum(), (x, weight)))


def test_autocast_casts_in_a_compiled_knock_too():
    x, weight = torch.randn(5, 16, dtype=torch.bfloat16), torch.randn(3, 16, 16, requires_grad=True)
    compiled = torch.compile(knock, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = (function(x, weight, "mlp") for function in (compiled, knock))
    torch.testing.assert_close(got, want)
    (gradient,) = torch.autograd.grad(got.float().sum(), weight)
    assert gradient.dtype == torch.float32


def test_needs_no_triton():
    code = """
import sys
sys.modules["triton"] = None  # imports of it fail
import torch
from kha_megatron.ops import knock
print(knock(torch.ones(2, 64), torch.eye(64)[None], "linear").sum().item())
"""
    environment = {k: v for k, v in os.environ.items() if k != "KHA_KERNELS"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "128.0"
    assert "Triton is not installed" in result.stderr
