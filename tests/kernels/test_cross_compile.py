"""Compile every kernel for every architecture, without a GPU, and check its resources."""

import sys
from pathlib import Path

import pytest
import roofline
import torch
from torch.utils.flop_counter import FlopCounterMode

from kha_megatron.heads.kernels import tilings
from kha_megatron.heads.kernels.tilings import KERNEL_DTYPES, KERNEL_VARIANTS
from kha_megatron.heads.knock import knock
from tests.kernels.cases import weight_of
from tools.cross_compile import Launch, Report, compile_all, compile_launch, complaints, launches

pytestmark = pytest.mark.usefixtures("usable_triton")
compiles = pytest.mark.skipif(sys.platform != "linux", reason="Triton has ptxas on Linux only")


@compiles
@pytest.mark.whole
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", tilings.TILINGS)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_every_launch_stays_within_its_bounds(dtype, arch):
    chosen = launches((dtype,), arch)
    # 3 kernels, 2 variants, 3 head dims; each also through descriptors
    pointers_only = dtype == torch.float32 or arch in ("sm_80", "sm_120")
    assert len(chosen) == (18 if pointers_only else 18 + 18)
    for launch, report in compile_all(chosen).items():
        assert complaints(launch, report) == [], launch
        if launch.head_dim == 128 and launch.tma and dtype == torch.bfloat16:
            # instructions of one warp would leave half of the tensor cores idle
            assert "HMMA" not in report.instructions


@compiles
@pytest.mark.whole
def test_roofline_page_is_up_to_date():
    page = roofline.page()
    written = Path(roofline.__file__).parents[1] / "benchmarks" / "roofline.md"
    assert written.read_text() == page, "run python tools/roofline.py > benchmarks/roofline.md"


@compiles
def test_spilling_tiling_is_detected(monkeypatch):
    launch = Launch("backward_input", "mlp", 128, torch.bfloat16, False)
    assert complaints(launch, compile_launch(launch)) == []
    spilling = tilings.Tiling(128, 128, 8, 1)
    monkeypatch.setitem(tilings.TILINGS["sm_90"], ("backward_input", "mlp", 128), spilling)
    complaint, *_ = complaints(launch, compile_launch(launch))
    assert "bytes spilled" in complaint


def test_too_much_shared_memory_is_detected():
    launch = Launch("forward", "mlp", 128, torch.bfloat16, True)
    report = Report(200, 0, 227 * 1024, 256, {"HGMMA": 24})
    assert complaints(launch, report) == []
    (complaint,) = complaints(launch, report._replace(shared=227 * 1024 + 1))
    assert "shared memory" in complaint


@pytest.mark.parametrize("variant", KERNEL_VARIANTS)
def test_roofline_flops_match_torch(variant):
    heads = roofline.Heads(tokens=7, groups=3, dim=64)
    forward, d_input, d_weight = roofline.knocks(heads, variant)
    x = torch.randn(7, 3, 64, dtype=torch.bfloat16, requires_grad=True)
    weight = weight_of(variant, 64, torch.bfloat16).requires_grad_()
    with FlopCounterMode(display=False) as counted:
        y = knock(x, weight, variant)
    assert forward.products == counted.get_total_flops()
    assert forward.memory == x.nbytes + y.nbytes
    with FlopCounterMode(display=False) as counted:
        torch.autograd.grad(y, (x, weight), torch.ones_like(y))
    # the kernels save nothing: each recomputes the products that both gradients need, and the
    # gradient of mlp's hidden features is one of those that torch counts
    recomputed = {"mlp": 5, "gate": 2}[variant] * 2 * 7 * 3 * 64**2
    assert d_input.products + d_weight.products == counted.get_total_flops() + recomputed
