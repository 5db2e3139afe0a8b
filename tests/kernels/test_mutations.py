"""That the comparison with float64 can fail: it does, for each of these mistakes in the kernels."""

import shutil
from pathlib import Path

import pytest
import torch

import kha_megatron
from tests.kernels import cases, prologue_cases
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
        "(s < S)[:, None]",
        "(s < S - 1)[:, None]",
        {"d_gate"},
    ),
    "the sigmoid's slope lacks a factor": (
        "tiles.py",
        "* x_j.to(tl.float32) * (1.0 - 0.5 * factor)",
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

IN_THE_PROLOGUE = {
    "RoPE turns backwards": (
        "prologue_kernels.py",
        "x[0] * cos - x[1] * sin, x[1] * cos + x[0] * sin",
        "x[0] * cos + x[1] * sin, x[1] * cos - x[0] * sin",
        {"query", "key", "d qkv"},
    ),
    "RoPE's gradient turns forwards": (
        "prologue_kernels.py",
        "turned(dy, cos, -sin)",
        "turned(dy, cos, sin)",
        {"d qkv", "d query norm", "d key norm"},
    ),
    "cosines and sines are 0.5": (
        "prologue_kernels.py",
        "    return cos, sin\n",
        "    return cos * 0.0 + 0.5, sin * 0.0 + 0.5\n",
        {"query", "key", "d qkv"},
    ),
    "gradients of the norms' weights are halved": (
        "prologue_kernels.py",
        "d_gains = times(dy, unit)",
        "d_gains = times((dy[0] * 0.5, dy[1] * 0.5, dy[2] * 0.5), unit)",
        {"d query norm", "d key norm"},
    ),
    "a norm does not see that its scale moves": (
        "prologue_kernels.py",
        "along = inner(dy, unit) / D",
        "along = inner(dy, unit) * 0.0",
        {"d qkv"},
    ),
    "a program stops after its first tile": (
        "prologue_kernels.py",
        "tl.cdiv(T, M) * G, tl.num_programs(0)",
        "tl.num_programs(0), tl.num_programs(0)",
        {"d qkv", "d query norm", "d key norm"},
    ),
    "the ragged end is left out": (
        "prologue_kernels.py",
        "tl.cdiv(T, M) * G",
        "(T // M) * G",
        {"d qkv", "d query norm", "d key norm"},
    ),
    "keys are normalised as queries are": (
        "prologue_kernels.py",
        "gains = load_gains(GAIN_K",
        "gains = load_gains(GAIN_Q",
        {"key"},
    ),
}


def errors_of_a_prologue():
    """Of three tiles of each group, the last one ragged."""
    return prologue_cases.errors(129, 2, 64, torch.float32)


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


EXPERIMENTS = {
    **dict.fromkeys(MISTAKES, errors_of_separate_heads),
    **dict.fromkeys(IN_THE_PROLOGUE, errors_of_a_prologue),
}
"""By the name of a mistake, what finds it."""


@pytest.mark.parametrize("experiment", dict.fromkeys(EXPERIMENTS.values()))
def test_nothing_is_wrong_without_a_mistake(interpreter, experiment):
    assert wrong(interpreter(experiment)) == set()


@pytest.mark.parametrize("mistake", EXPERIMENTS)
def test_finds(interpreter, mistake, tmp_path):
    name, right, mistaken, expected = (MISTAKES | IN_THE_PROLOGUE)[mistake]
    shutil.copytree(PACKAGE, tmp_path / "kha_megatron", ignore=shutil.ignore_patterns("*.pyc"))
    path = tmp_path / "kha_megatron" / "ops" / "kernels" / name
    text = path.read_text()
    assert right in text, "the kernels have changed: write the mistake anew"
    path.write_text(text.replace(right, mistaken, 1))
    process = Interpreter(package=tmp_path)
    try:
        found = process(EXPERIMENTS[mistake])
    finally:
        process.close()
    assert wrong(found) >= expected, found
