"""`auto` takes no kernel that was not compared with plain torch on this very machine.

Kernels that are broken on purpose run in Triton's interpreter, which stands for the GPU: each must
be found and replaced, and said. The case is small: three programs run at once there, so that a turn
of a loop is 96 rows of float32.
"""

import errno
import re
import shutil
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path

import pytest
import torch

import kha_megatron
from kha_megatron import announcements
from kha_megatron.heads.knock import MATRICES
from kha_megatron.ops import knock, verdicts
from kha_megatron.ops.kernels.tilings import DTYPES
from kha_megatron.ops.verification import KnockCase
from tests.kernels import cases
from tests.kernels.interpreter import Interpreter

PACKAGE = Path(kha_megatron.__file__).parent
KERNELS, LAUNCH = "knock_kernels.py", "knock_launch.py"


@contextmanager
def started(cache, choice="auto"):
    """As a process that has just started, with this cache folder; gives what it says."""
    verdicts.forget()
    announcements.forget()
    with pytest.MonkeyPatch.context() as environment, redirect_stderr(StringIO()) as said:
        environment.setenv("KHA_KERNELS", choice)
        environment.setenv("XDG_CACHE_HOME", str(cache))
        yield said


def knocked(cache, variant="gate", choice="auto"):
    """Errors of result and gradients, what was said, and whether they came out of the kernels."""
    x = cases.strided((7, 3), 64, torch.float32).requires_grad_()
    weight = cases.weight_of(variant, 64, torch.float32).requires_grad_()
    dy = torch.randn(7, 3, 64)
    state = torch.get_rng_state()
    with started(cache, choice) as said:
        y = knock(x, weight, variant)
        dx, dw = torch.autograd.grad(y, (x, weight), dy)
    assert torch.equal(state, torch.get_rng_state()), "the training's random numbers were drawn"
    want = cases.reference(x, weight, variant, dy)
    errors = [cases.relative_error(*pair) for pair in zip((y, dx, dw), want, strict=True)]
    return errors, said.getvalue(), "FusedKnock" in type(y.grad_fn).__name__


def test_right_kernels_are_compared_once(interpreter, tmp_path):
    for said_first in (True, False):  # a second start finds the verdict in the cache folder
        errors, said, fused = interpreter(knocked, tmp_path)
        assert fused
        assert max(errors) < 1e-6
        assert ("the kernels equal plain torch here (compared in" in said) is said_first
        assert "knocking runs in Triton's interpreter" in said
    (record,) = tmp_path.rglob("*.txt")
    record.write_text(record.read_text().replace("gate", "mlp"))
    assert "compared in" in interpreter(knocked, tmp_path)[1]  # that was no verdict on this


def test_a_cache_folder_that_cannot_be_written_is_no_error(interpreter, tmp_path):
    place = tmp_path / "file"
    place.write_text("in the way")
    errors, said, fused = interpreter(knocked, place)
    assert fused
    assert max(errors) < 1e-6
    assert "cannot be written (Not a directory): each start compares again" in said


def kept_on_a_full_disk(cache):
    """What lies in the cache folder after a verdict could not be written, and what was said."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with started(cache) as said, pytest.MonkeyPatch.context() as patch:
        patch.setattr(verdicts.os, "replace", full)
        verdicts._keep(KnockCase.of(torch.randn(7, 64), "gate"))
    return [str(file) for file in cache.rglob("*") if file.is_file()], said.getvalue()


def test_a_verdict_that_cannot_be_written_leaves_nothing(interpreter, tmp_path):
    files, said = interpreter(kept_on_a_full_disk, tmp_path)
    assert "cannot be written (No space left on device): each start compares again" in said
    assert files == []


def in_other_circumstances(cache):
    """What the first calls do where a comparison would be seen, or could not be made."""
    from kha_megatron.ops.heads import knock as knocking

    found = {}
    with started(cache):  # recomputation and offloading count what is saved
        found["bytes kept under hooks"] = cases.kept_for_backward("gate")
    with started(cache / "other"):  # and torch.compile traces
        found["every way of calling"] = set(cases.ways_of_calling("linear").values()) == {0.0}
    x, weight = torch.randn(7, 64), cases.weight_of("linear", 64, torch.float32)
    want = knocking.knock(x, weight, "linear")
    with started(cache) as said, torch.inference_mode():
        error = cases.relative_error(knock(x, weight, "linear"), want.double())
        found["inference"] = error < 1e-6 and "equal plain torch" in said.getvalue()

    def in_a_backward_pass(gradient):
        found["in a backward pass"] = torch.equal(knock(x, weight[:1], "gate"), right)

    right = knocking.knock(x, weight[:1], "gate")
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(in_a_backward_pass)
    with started(cache / "empty") as said:
        leaf.sum().backward()
        found["and it is said"] = (
            "runs in plain torch: a backward pass runs, and" in said.getvalue()
        )
        knock(x, weight, "gate")  # the answer stayed open
        found["then compared"] = "equal plain torch" in said.getvalue()
    return found


def test_first_calls_anywhere(interpreter, tmp_path):
    found = interpreter(in_other_circumstances, tmp_path)
    assert found.pop("bytes kept under hooks") == 0
    assert len(found) == 5
    assert all(found.values()), found


class Unknown:
    """A case on a GPU that must not be compared."""

    device = torch.device("cuda", 0)

    def complaint(self):
        raise AssertionError("compared while a graph is captured")


def test_no_comparison_is_captured(monkeypatch, capsys):
    case = Unknown()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    announcements.forget()
    assert verdicts.trusts(case) is None
    said = capsys.readouterr().err
    assert "runs in plain torch: a CUDA graph is being captured, and these kernels have not" in said
    monkeypatch.setitem(verdicts._right, case, True)  # from before
    assert verdicts.trusts(case) is True


MISTAKES = {
    "forward": (
        KERNELS,
        "store_rows(Y, y_j,",
        "store_rows(Y, 0.9 * y_j,",
        r"the result is off by 0\.1 of its size",
    ),
    "dx": (
        KERNELS,
        "write_tile(DX, dx,",
        "write_tile(DX, 0.9 * dx,",
        r"the input's gradient is off by 0\.1 of its size",
    ),
    "dW": (
        LAUNCH,
        "    return gradient\n",
        "    return 0.9 * gradient\n",
        r"the matrices' gradient is off by 0\.1 of its size",
    ),
    "beyond the first turn": (
        KERNELS,
        "tl.cdiv(R, M), tl.num_programs(0)",
        "tl.minimum(tl.cdiv(R, M), tl.num_programs(0)), tl.num_programs(0)",
        r"the result is off by inf of its size",  # it is not written at all
    ),
    "dW beyond the first turn": (
        LAUNCH,
        '_launch("backward_weight", variant, weight, [x, dy], [])',
        '_launch("backward_weight", variant, weight, [x[:48], dy[:48]], [])',
        r"the matrices' gradient is off by 0\.\d+ of its size",
    ),
    "dW of the ragged end": (
        LAUNCH,
        '_launch("backward_weight", variant, weight, [x, dy], [])',
        '_launch("backward_weight", variant, weight, [x[:128], dy[:128]], [])',
        r"the matrices' gradient is off by 0\.\d+ of its size",
    ),
    "a row of the ragged end": (
        "tiles.py",
        "inside = (rows < count)[:, None]",
        "inside = (rows < count - 1)[:, None]",
        r"the result is off by inf of its size",
    ),
    "import": (
        LAUNCH,
        "from triton.tools.tensor_descriptor import",
        "from triton.tools.no_descriptor import",
        r"the kernels fail, ModuleNotFoundError: No module named 'triton\.tools\.no_descriptor'",
    ),
    "compile": (
        KERNELS,
        "first = tile * M",
        "first = tile * not_a_name",
        r"the kernels fail, \w+: .*not_a_name",
    ),
    "launch": (
        LAUNCH,
        "    count, head_dim = inputs[0].shape[:-1].numel(), weight.shape[-1]",
        '    raise RuntimeError("out of resource:\\n shared memory")',
        r"the kernels fail, RuntimeError: out of resource: shared memory ",
    ),
}


@contextmanager
def broken(folder, name, right, wrong):
    """An interpreter of a package in which one text is replaced by another."""
    shutil.copytree(PACKAGE, folder / "kha_megatron", ignore=shutil.ignore_patterns("*.pyc"))
    path = folder / "kha_megatron" / "ops" / "kernels" / name
    text = path.read_text()
    assert right in text, "the kernels have changed: write the mistake anew"
    path.write_text(text.replace(right, wrong))
    process = Interpreter(package=folder)
    yield process
    process.close()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_kernels_are_replaced_and_said(usable_triton, mistake, tmp_path):
    *mutation, expected = MISTAKES[mistake]
    with broken(tmp_path, *mutation) as process:
        errors, said, fused = process(knocked, tmp_path / "cache")
        assert not fused
        assert max(errors) < 1e-6
        start = r"kha_megatron: WARNING: knocking \(gate, head dim 64, torch\.float32\) runs in "
        assert re.fullmatch(start + f"plain torch, for here {expected}.*\n", said), said
        assert not list((tmp_path / "cache").rglob("*.txt"))  # the next start looks again
        if mistake in ("import", "compile", "launch"):
            with pytest.raises(Exception, match=r"no_descriptor|not_a_name|out of resource"):
                process(knocked, tmp_path / "cache", choice="triton")
        else:  # which is compared with nothing
            assert process(knocked, tmp_path / "cache", choice="triton")[2]


def trusted_prologue(cache, variants=None, device="cpu"):
    """Whether `auto` takes the prologue's kernels, and what it said."""
    from kha_megatron.ops.fused import trusts_prologue
    from kha_megatron.ops.prologue import PrologueSettings
    from kha_megatron.ops.verification import PrologueCase

    heads = {"query": (0, 2), "key": (2, 3), "value": (3, 4)}
    case = PrologueCase(
        settings=PrologueSettings(head_dim=64, heads=heads, variants=variants or {}),
        dtype=torch.float32,
        batch=2,
        groups=3,
        features=256,
        width=1024,
        norms=(torch.float32, torch.float32),
        turning=32,
        own_angles=False,
        device=torch.device(device),
    )
    with started(cache) as said:
        return trusts_prologue(case), said.getvalue()


@pytest.mark.parametrize("variants", [{}, {"query": "linear", "value": "gate"}], ids=str)
def test_a_right_prologue_is_taken(interpreter, variants, tmp_path):
    trusted, said = interpreter(trusted_prologue, tmp_path, variants)
    assert trusted, said
    assert "the fused prologue (head dim 64, torch.float32): the kernels equal plain" in said
    assert interpreter(trusted_prologue, tmp_path, variants) == (True, "")


IN_THE_PROLOGUE = {
    "angles backwards": (
        "x = turned(x, cos, sin)",
        "x = turned(x, cos, -sin)",
        r"the query is off by",
    ),
    "their gradient": (
        "turned(dy, cos, -sin)",
        "turned(dy, cos, sin)",
        r"the buffer's gradient is off by",
    ),
    "the norm's gradient": (
        "d_gains = times(dy, unit)",
        "d_gains = times(dy, x)",
        r"the query norm's gradient is off by",
    ),
    "beyond the first turn": (
        "tl.cdiv(T, M) * G, tl.num_programs(0)",
        "tl.num_programs(0), tl.num_programs(0)",
        r"the buffer's gradient is off by inf",
    ),
    "import": ("import triton.language as tl", "import triton.speech as tl", r"the kernels fail, "),
}


@pytest.mark.parametrize("mistake", IN_THE_PROLOGUE)
def test_a_wrong_prologue_is_not_taken(usable_triton, mistake, tmp_path):
    *mutation, expected = IN_THE_PROLOGUE[mistake]
    with broken(tmp_path, "prologue_kernels.py", *mutation) as process:
        trusted, said = process(trusted_prologue, tmp_path / "cache")
    assert trusted is False
    start = r"kha_megatron: WARNING: the fused prologue \(head dim 64, torch\.float32\) runs in "
    assert re.fullmatch(start + f"plain torch, for here {expected}.*\n", said), said


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", MATRICES)
def test_auto_takes_the_kernels_on_a_gpu(gpu, variant, dtype, tmp_path):
    """And says how long it took to compare them."""
    x = cases.strided((7, 3), 128, dtype, gpu).requires_grad_()
    weight = cases.weight_of(variant, 128, dtype, gpu)
    with started(tmp_path) as said:
        y = knock(x, weight, variant)
    assert "the kernels equal plain torch here" in said.getvalue(), said.getvalue()
    assert "FusedKnock" in type(y.grad_fn).__name__


@pytest.mark.gpu
@pytest.mark.parametrize("variants", [{}, {"value": "mlp"}], ids=str)
def test_auto_takes_the_prologue_on_a_gpu(gpu, variants, tmp_path):
    trusted, said = trusted_prologue(tmp_path, variants, gpu)
    assert trusted, said
