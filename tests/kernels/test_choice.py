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
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert re.search(reason, fused._refusal(*arguments))


def test_architectures_without_tilings_fall_back(monkeypatch):
    arguments = (CUDA, torch.bfloat16, CUDA, torch.bfloat16, 128)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert fused._refusal(*arguments) is None
    fused._refusal.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert fused._refusal(*arguments) == "there are tilings for sm_90 only, and this is sm_80"


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
