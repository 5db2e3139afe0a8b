"""That the comparison with float64 can fail: it does, for each of these mistakes in the kernels."""

import shutil
from pathlib import Path

import pytest
import torch

import kha_megatron
from tests.kernels import cases
from tests.kernels.interpreter import Interpreter
from tests.kernels.test_interpreted import TOLERANCE

PACKAGE = Path(kha_megatron.__file__).parent

MISTAKES = {
    "a row beyond the last is read": (
        "tiles.py",
        "inside = (rows < count)[:, None]",
        "inside = (rows < count + 1)[:, None]",
        {"d_gate"},
    ),
    "the last tile is left out": (
        "knock_kernels.py",
        "tl.cdiv(R, M)",
        "R // M",
        {"y"},
    ),
    "the last split is not summed": (
        "knock_kernels.py",
        "for s in range(S)",
        "for s in range(S - 1)",
        {"d_gate"},
    ),
    "the sigmoid's slope lacks a factor": (
        "tiles.py",
        "* x_j.to(tl.float32) * (1.0 - s)",
        "* x_j.to(tl.float32)",
        {"dx", "d_gate"},
    ),
    "heads are taken for tokens": (
        "tiles.py",
        "(rows % heads).to(tl.int64) * head_stride",
        "(rows % heads).to(tl.int64) * token_stride",
        {"y", "dx", "d_gate"},
    ),
}


def errors_of_separate_heads():
    """Of rows at two strides, with NaN after the last one."""
    x, dy = (torch.full((22, 4, 64), torch.nan)[:21, :3] for _ in range(2))
    for tensor in (x, dy):
        tensor.copy_(torch.randn(21, 3, 64))
    x.requires_grad_()
    weight = cases.weight_of("gate", 64, torch.float32).requires_grad_()
    y = cases.knock(x, weight, "gate")
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    want = cases.reference(x, weight, "gate", dy)
    names = ("y", "dx", "d_gate")
    return dict(zip(names, map(cases.relative_error, (y, dx, dw), want), strict=True))


def wrong(found):
    """Which are: NaN is."""
    return {name for name, error in found.items() if not error < TOLERANCE[torch.float32]}


def test_nothing_is_wrong_without_a_mistake(interpreter):
    assert wrong(interpreter(errors_of_separate_heads)) == set()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_finds(interpreter, mistake, tmp_path):
    name, right, mistaken, expected = MISTAKES[mistake]
    shutil.copytree(PACKAGE, tmp_path / "kha_megatron", ignore=shutil.ignore_patterns("*.pyc"))
    path = tmp_path / "kha_megatron" / "ops" / "kernels" / name
    text = path.read_text()
    assert right in text, "the kernels have changed: write the mistake anew"
    path.write_text(text.replace(right, mistaken, 1))
    process = Interpreter(package=tmp_path)
    try:
        found = process(errors_of_separate_heads)
    finally:
        process.close()
    assert wrong(found) >= expected, found
