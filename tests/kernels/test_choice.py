"""Test whether a call of ``fused_knock`` runs in the kernels or in torch, and what is logged."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from kha_megatron import announcements
from kha_megatron.errors import ConfigError
from kha_megatron.heads import knock as knocking
from kha_megatron.heads.kernels import fused
from kha_megatron.heads.kernels.fused import fused_knock

CUDA = torch.device("cuda", 0)
HOPPER = (CUDA, torch.bfloat16, torch.bfloat16, 128)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv("KHA_KERNELS", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    refusals = fused._cached_unsupported_reason
    announcements._logged.clear()
    refusals.cache_clear()
    yield
    announcements._logged.clear()
    refusals.cache_clear()


def inputs():
    return torch.randn(5, 3, 64), torch.randn(1, 64, 64)


@pytest.mark.parametrize(
    ("choice", "why"),
    [
        ("auto", "the kernels require a CUDA device, but the tensors are on cpu"),
        ("torch", "KHA_KERNELS=torch"),
    ],
)
def test_uses_torch_on_the_cpu_and_logs_it_once(capsys, monkeypatch, choice, why):
    monkeypatch.setenv("KHA_KERNELS", choice)
    x, weight = inputs()
    for _ in range(3):
        assert torch.equal(fused_knock(x, weight, "gate"), knocking.knock(x, weight, "gate"))
    assert capsys.readouterr().err == f"kha_megatron: Computing KHA with torch ({why})\n"
    announcements._logged.clear()
    monkeypatch.setenv("RANK", "1")
    fused_knock(x, weight, "gate")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("triton", "KHA_KERNELS=triton is not supported here, because the kernels require"),
        ("cuda", "KHA_KERNELS must be auto, torch or triton, got 'cuda'"),
    ],
)
def test_invalid_choices_raise_an_error(monkeypatch, choice, message):
    monkeypatch.setenv("KHA_KERNELS", choice)
    with pytest.raises(ConfigError, match=message):
        fused_knock(*inputs(), "gate")


@pytest.mark.parametrize(
    ("change", "capability", "triton", "reason"),
    [
        ({}, (9, 0), "3.5.0", None),
        ({}, (9, 0), "4", None),
        ({2: torch.float32}, (9, 0), "4", "torch.bfloat16 with matrices in torch.float32"),
        ({1: torch.float64, 2: torch.float64}, (9, 0), "4", "activations in torch.float64"),
        ({3: 80}, (9, 0), "4", r"head dims \(64, 96, .*, got 80"),
        ({0: torch.device("meta")}, (9, 0), "4", "the tensors are on meta"),
        ({}, (8, 0), "4", None),
        ({}, (8, 9), "4", "no tile sizes for sm_89, only for sm_80, sm_90, sm_100, sm_120"),
        ({}, (9, 0), "3.4.0+git1a2b", r"require Triton 3.5 .* or newer, got 3.4.0\+git1a2b"),
        ({}, (9, 0), None, r"Triton cannot be imported \(ModuleNotFoundError: "),
    ],
)
def test_unsupported_tensors_and_machines(change, capability, triton, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    module = triton and SimpleNamespace(__version__=triton)
    monkeypatch.setitem(sys.modules, "triton", module)
    arguments = [change.get(index, argument) for index, argument in enumerate(HOPPER)]
    found = fused._cached_unsupported_reason(*arguments)
    assert found == reason if reason is None else re.search(reason, found)


def test_autocast_and_wrapper_tensors_use_torch(monkeypatch):
    monkeypatch.setattr(fused, "_cached_unsupported_reason", lambda *arguments: None)
    x, weight = inputs()
    assert fused.unsupported_reason(x, torch.nn.Parameter(weight)) is None
    assert "type TwoTensor" in fused.unsupported_reason(x, TwoTensor(weight, weight.clone()))
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast" in fused.unsupported_reason(x, weight)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_compiled_knock_equals_the_plain_one(autocast):
    x = torch.randn(5, 16, dtype=torch.bfloat16 if autocast else torch.float32)
    leaves = x.requires_grad_(), (torch.randn(3, 16, 16) / 4).requires_grad_()
    compiled = torch.compile(fused_knock, backend="aot_eager", fullgraph=True)
    results = []
    for function in (compiled, fused_knock):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = function(*leaves, "mlp")
        results.append((y, *torch.autograd.grad(y.float().square().sum(), leaves)))
    torch.testing.assert_close(*results)  # compares dtypes too


def test_needs_no_triton():
    code = """
import sys
sys.modules["triton"] = None  # imports of it fail
import torch
from kha_megatron.heads.kernels.fused import fused_knock
print(fused_knock(torch.ones(2, 64), torch.zeros(1, 64, 64), "gate").sum().item())
"""
    environment = os.environ | {"KHA_KERNELS": "auto", "TRITON_INTERPRET": "1"}
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert result.stdout.strip() == "128.0", result.stderr
    assert "Computing KHA with torch (Triton cannot be imported" in result.stderr
