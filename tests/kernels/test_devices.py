"""Every kernel is launched on the device of its tensors, whichever is the current one."""

from contextlib import contextmanager

import pytest
import torch

from tests.kernels import cases
from tests.kernels.prologue_cases import NORMS, both


def launches():
    """By name of kernel: whether it was launched under the guard of its tensors' device."""
    from kha_megatron.ops.kernels import knock_kernels

    guards, found = [], {}

    @contextmanager
    def guard(tensor):
        guards.append(tensor)
        yield
        guards.pop()

    kind = type(knock_kernels.sum_partials)
    launch = kind.__getitem__

    def watched(kernel, grid):
        found[kernel.fn.__name__] = bool(guards)
        return launch(kernel, grid)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_of", guard)
        patch.setattr(kind, "__getitem__", watched)
        cases.errors("mlp", 64, torch.float32, (7,))
        options = {"variants": {}, "rotary": 64, "norms": NORMS, "own_angles": False}
        both(7, 1, 64, torch.float32, device="cpu", **options)
    return found


def test_no_launch_is_left_to_the_current_device(interpreter):
    found = interpreter(launches)
    assert {name for name in found if "knock" in name or "sum" in name} == {
        "knock_forward",
        "knock_backward_input",
        "knock_backward_weight",
        "sum_partials",
    }
    assert all(found.values()), found
