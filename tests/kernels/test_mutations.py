"""Check that the tests and the self-check detect mistakes in the kernels.

Each mistake is made in a copy of the package, which runs in Triton's interpreter. The self-check
must choose torch and log a warning, so that the results stay right.
"""

import re
import shutil
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import kha_megatron
from kha_megatron import announcements
from kha_megatron.heads.kernels import verification
from tests.kernels import cases
from tests.kernels.interpreter import interpreter_of
from tests.kernels.test_interpreted import TOLERANCE

PACKAGE = Path(kha_megatron.__file__).parent


class Mistake(NamedTuple):
    """A text of a file in ``heads/kernels`` that is replaced by another."""

    file: str
    right: str
    wrong: str
    detected: set[str]
    """Errors of :func:`tests.kernels.cases.errors_of` that must be too large."""
    warning: str
    """Regular expression of the self-check's warning."""
    variant: str = "gate"


RESULT, INPUT, MATRICES = (
    f"the {name} has a relative error of "
    for name in ("result", "input gradient", "gradient of the matrices")
)
MISTAKES = {
    "the matrices' gradient is scaled": Mistake(
        "knock_launch.py",
        "return gradient\n",
        "return 0.9 * gradient\n",
        {"d_gate"},
        MATRICES,
    ),
    "the gate's slope lacks a factor": Mistake(
        "tiles.py",
        "* x_j.to(tl.float32) * (1.0 - 0.5 * factor)",
        "* x_j.to(tl.float32)",
        {"dx", "d_gate"},
        INPUT,
    ),
    "the mlp's slope lacks a factor": Mistake(
        "tiles.py",
        "d_gate = d_up * hidden * (1.0 - 0.5 * factor)",
        "d_gate = d_up * hidden",
        {"dx", "d_gate"},
        INPUT,
        "mlp",
    ),
    "only the first turn of the loop runs": Mistake(
        "knock_kernels.py",
        "tiles, programs, disable_licm",
        "tl.minimum(tiles, programs), programs, disable_licm",
        set(),
        RESULT + "inf",
    ),
    "the last split is not summed": Mistake(
        "knock_kernels.py",
        "is_inside(splits, elements, num_splits, num_elements)",
        "is_inside(splits, elements, num_splits - 1, num_elements)",
        {"d_gate"},
        MATRICES,
    ),
    "heads are taken for tokens": Mistake(
        "tiles.py",
        "(rows % heads).to(tl.int64) * head",
        "(rows % heads).to(tl.int64) * token",
        {"y", "dx", "d_gate"},
        RESULT,
    ),
    "a kernel does not compile": Mistake(
        "knock_kernels.py",
        "first = tile * TILE_ROWS",
        "first = tile * no_name",
        set(),
        r"the kernels failed \(\w+: .*no_name.*\)",
    ),
}


def compare(variant, choice):
    """Compare one tile of rows at two strides in a process without earlier comparisons.

    Returns:
        The errors (or the message of an exception), the log, and whether the kernels were used.
    """
    x = between_gaps(torch.randn(7, 3, 64))
    dy = between_gaps(torch.randn(7, 3, 64))
    weight = cases.weight_of(variant, 64, torch.float32)
    verification._trusted.clear()
    announcements._logged.clear()
    state = torch.get_rng_state()
    with pytest.MonkeyPatch.context() as environment, redirect_stderr(StringIO()) as log:
        environment.setenv("KHA_KERNELS", choice)
        try:
            found = cases.errors_of(x, weight, dy, variant)
        except Exception as error:
            found = str(error)
        used_kernels = False
        if choice == "auto":
            y = cases.fused_knock(x.requires_grad_(), weight, variant)
            used_kernels = "FusedKnock" in type(y.grad_fn).__name__
    assert torch.equal(state, torch.get_rng_state()), "the global random state was used"
    return found, log.getvalue(), used_kernels


def between_gaps(rows):
    """Return the rows as a view of a tensor whose other elements are NaN."""
    tensor = torch.full((8, 4, 64), torch.nan)
    view = tensor[:7, :3]
    view.copy_(rows)
    return view


@contextmanager
def mutated(folder, mistake):
    """Yield an interpreter of a package in which one text is replaced."""
    shutil.copytree(PACKAGE, folder / "kha_megatron", ignore=shutil.ignore_patterns("*.pyc"))
    path = folder / "kha_megatron" / "heads" / "kernels" / mistake.file
    text = path.read_text()
    assert mistake.right in text, "the kernels have changed: write the mistake anew"
    path.write_text(text.replace(mistake.right, mistake.wrong))
    with interpreter_of(folder) as run:
        yield run


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.whole] * (m.variant == "mlp"))
        for n, m in MISTAKES.items()
    ],
)
def test_mistakes_are_detected(interpreter, name, tmp_path):
    mistake = MISTAKES[name]
    right, _, fused = interpreter(compare, mistake.variant, "auto")
    assert fused
    assert max(right.values()) < TOLERANCE[torch.float32]
    with mutated(tmp_path, mistake) as process:
        checked, log, fused = process(compare, mistake.variant, "auto")
        unchecked, *_ = process(compare, mistake.variant, "triton")
    assert not fused
    assert max(checked.values()) < 1e-6
    start = rf"kha_megatron: WARNING: Falling back to torch for KHA {mistake.variant} .*, because "
    assert re.search(f"{start}on this device {mistake.warning}", log), log
    if isinstance(unchecked, dict):
        wrong = {key for key, error in unchecked.items() if not error < TOLERANCE[torch.float32]}
        assert wrong >= mistake.detected, unchecked
    else:
        assert "no_name" in unchecked


@pytest.mark.parametrize("variant", ["gate", pytest.param("mlp", marks=pytest.mark.whole)])
def test_right_kernels_are_used(interpreter, variant):
    errors, log, fused = interpreter(compare, variant, "auto")
    assert fused
    assert max(errors.values()) < TOLERANCE[torch.float32]
    assert log == "kha_megatron: Computing KHA with Triton's interpreter\n"
