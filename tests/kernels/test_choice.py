"""Whether a call of ``knock`` runs in the kernels or in torch, and what is logged."""

import os
import re
import subprocess
import sys

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from kha_megatron import announcements
from kha_megatron.errors import ConfigError
from kha_megatron.heads import knock as knocking
from kha_megatron.heads.kernels import fused
from kha_megatron.heads.kernels.fused import knock

CUDA = torch.device("cuda", 0)
HOPPER = (CUDA, torch.bfloat16, torch.bfloat16, 128)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv("KHA_KERNELS", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    refusals = fused._reason
    announcements.forget()
    refusals.cache_clear()
    yield
    announcements.forget()
    refusals.cache_clear()


def inputs():
    return torch.randn(5, 3, 64), torch.randn(1, 64, 64)


@pytest.mark.parametrize(
    ("choice", "why"),
    [
        ("auto", "torch: the kernels need a CUDA device and the tensors are on cpu"),
        ("torch", "torch: KHA_KERNELS=torch"),
    ],
)
def test_uses_torch_on_the_cpu_and_logs_it_once(capsys, monkeypatch, choice, why):
    monkeypatch.setenv("KHA_KERNELS", choice)
    x, weight = inputs()
    for _ in range(3):
        assert torch.equal(knock(x, weight, "gate"), knocking.knock(x, weight, "gate"))
    assert capsys.readouterr().err == f"kha_megatron: Knocking in {why}\n"
    announcements.forget()
    monkeypatch.setenv("RANK", "1")
    knock(x, weight, "gate")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("triton", "KHA_KERNELS=triton, but the kernels need a CUDA device"),
        ("cuda", "Expected KHA_KERNELS to be auto, torch or triton, got cuda"),
    ],
)
def test_refuses_what_it_cannot_do(monkeypatch, choice, message):
    monkeypatch.setenv("KHA_KERNELS", choice)
    with pytest.raises(ConfigError, match=message):
        knock(*inputs(), "gate")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({2: torch.float32}, "activations in torch.bfloat16 with matrices in torch.float32"),
        ({1: torch.float64, 2: torch.float64}, "activations in torch.float64"),
        ({3: 80}, r"head dims \(64, 96, .*, got 80"),
        ({0: torch.device("meta")}, "the tensors are on meta"),
    ],
)
def test_reasons_against_the_kernels(change, reason, monkeypatch):
    monkeypatch.setattr(fused, "triton_reason", lambda: None)
    found = fused._reason(*(change.get(i, word) for i, word in enumerate(HOPPER)))
    assert found == reason if reason is None else re.search(reason, found)


def test_architectures_without_tilings_use_torch(monkeypatch):
    monkeypatch.setattr(fused, "triton_reason", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert fused._reason(*HOPPER) == "the kernels support GPUs of sm_90, got sm_80"


@pytest.mark.parametrize(
    ("release", "is_old"),
    [("3.3.1", True), ("3.4.0+git1a2b", True), ("3.5.0", False), ("4", False)],
)
def test_an_old_triton_is_not_used(monkeypatch, release, is_old):
    monkeypatch.setattr(pytest.importorskip("triton"), "__version__", release)
    why = f"the kernels need Triton 3.5 (torch 2.9) or newer, got {release}"
    assert fused._reason(*HOPPER) == (why if is_old else None)


def test_a_triton_that_cannot_be_imported_is_not_used(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert fused._reason(*HOPPER).startswith("Triton cannot be imported (ModuleNotFoundError: ")


def test_autocast_and_wrapper_tensors_use_torch(monkeypatch):
    monkeypatch.setattr(fused, "_reason", lambda *arguments: None)
    x, weight = inputs()
    assert fused.unsupported_reason(x, torch.nn.Parameter(weight)) is None
    assert "type TwoTensor" in fused.unsupported_reason(x, TwoTensor(weight, weight.clone()))
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast" in fused.unsupported_reason(x, weight)


def test_compiles_with_gradients_in_torch():
    x, weight = (t.requires_grad_() for t in inputs())
    compiled = torch.compile(knock, backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(compiled(x, weight, "gate").square().sum(), (x, weight))
    want = torch.autograd.grad(knock(x, weight, "gate").square().sum(), (x, weight))
    torch.testing.assert_close(got, want)


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
from kha_megatron.heads.kernels.fused import knock
print(knock(torch.ones(2, 64), torch.eye(64)[None], "linear").sum().item())
"""
    environment = os.environ | {"KHA_KERNELS": "auto", "TRITON_INTERPRET": "1"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert result.stdout.strip() == "128.0", result.stderr
    assert "Knocking in torch: Triton cannot be imported" in result.stderr
