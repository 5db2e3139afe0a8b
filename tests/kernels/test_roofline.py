"""``benchmarks/roofline.md`` is what its program says today, and its counts are torch's."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kha_megatron.heads.knock import MATRICES
from kha_megatron.ops.heads.knock import knock
from tests.kernels.cases import weight_of
from tools.cross_compile import Report

ROOT = Path(__file__).parents[2]


@pytest.fixture
def roofline():
    """The tool, a script beside others."""
    import importlib

    return importlib.import_module("roofline")


def test_the_page_is_what_the_program_says(roofline, reports):
    found = reports(roofline.all_launches(), roofline.compiled)
    page = roofline.page(found)
    again = "run python tools/roofline.py > benchmarks/roofline.md"
    assert (ROOT / "benchmarks" / "roofline.md").read_text() == page, again


@pytest.mark.parametrize("variant", MATRICES)
def test_counts_what_torch_counts(roofline, variant):
    heads = roofline.Heads(tokens=7, groups=3, queries=6, dim=64)
    forward, d_input, d_weight = roofline.knocks(heads, variant)
    x = torch.randn(7, 3, 64, dtype=torch.bfloat16, requires_grad=True)
    weight = weight_of(variant, 64, torch.bfloat16).requires_grad_()
    with FlopCounterMode(display=False) as counted:
        y = knock(x, weight, variant)
    assert forward.products == counted.get_total_flops()
    assert forward.memory == x.nbytes + y.nbytes
    with FlopCounterMode(display=False) as counted:
        torch.autograd.grad(y, (x, weight), torch.ones_like(y))
    # the kernels keep nothing: each recomputes the products that both gradients need, and the
    # gradient of mlp's hidden features is one of those that torch counts
    inner = {"mlp": 2, "gate": 1, "linear": 0}[variant]
    both = {"mlp": 1, "gate": 0, "linear": 0}[variant]
    recomputed = (2 * inner + both) * 2 * 7 * 3 * 64**2
    assert d_input.products + d_weight.products == counted.get_total_flops() + recomputed


def test_a_program_alone_waits_for_its_first_and_last_rows(roofline):
    gpu = roofline.Gpu(memory=132.0, products=132.0)  # a byte and a FLOP a second, each processor
    chain = roofline.Chain(programs=132, edges=5, turns=3, products=7, moved=2)
    assert chain.seconds(gpu) == 5 + 3 * 7
    assert chain._replace(moved=11).seconds(gpu) == 5 + 3 * 11
    work = roofline.Work("x", memory=132 * 40, chain=chain)
    assert work.chained(gpu) == work.floor(gpu) == 40


def test_programs_that_fit_on_a_multiprocessor():
    report = Report(registers=96, spilled=0, shared=8 * 1024, threads=128, instructions={})
    assert report.programs == 5
    assert report._replace(registers=97).programs == 4  # they come in eights
    assert report._replace(registers=255, threads=256).programs == 1
    assert report._replace(shared=113 * 1024).programs == 2
    assert report._replace(registers=16).programs == 16  # threads
