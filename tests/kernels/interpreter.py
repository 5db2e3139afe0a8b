"""A process in which Triton interprets its kernels on the CPU.

Triton reads ``TRITON_INTERPRET`` when it is imported, which may already have happened here.
"""

import multiprocessing
import multiprocessing.forkserver
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.interpreting import mend

INTERPRETING = {
    "TRITON_INTERPRET": "1",
    "KHA_KERNELS": "triton",
    "CUDA_VISIBLE_DEVICES": "",
}


def _context() -> multiprocessing.context.ForkServerContext:
    """Return a context that forks a process with torch and Triton, but without our package."""
    context = multiprocessing.get_context("forkserver")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in INTERPRETING.items():
            patch.setenv(name, value)
        context.set_forkserver_preload(["torch", "triton"])
        multiprocessing.forkserver.ensure_running()
    return context


@contextmanager
def interpreter_of(package: Path | None = None):
    """Yield ``run(case, *args)``, which calls a function in such a process.

    Args:
        package: directory with another ``kha_megatron`` to import instead.
    """
    with ProcessPoolExecutor(1, _context(), initializer=_start, initargs=(package,)) as pool:
        yield lambda case, *args, **kwargs: pool.submit(_seeded, case, *args, **kwargs).result(500)


def _seeded(case, *args, **kwargs):
    import torch

    torch.manual_seed(0)
    return case(*args, **kwargs)


def _start(package: Path | None) -> None:
    os.environ |= INTERPRETING
    if package:
        sys.path.insert(0, str(package))
    import torch

    torch.set_num_threads(1)
    # fill torch.empty with NaN, so that unwritten outputs and reads out of bounds are detected
    torch.use_deterministic_algorithms(True)
    mend()
    if os.environ.get("KHA_TILINGS"):
        from bench_tune import use_chosen_tilings

        use_chosen_tilings()
