"""A process in which Triton interprets its kernels on the CPU.

Triton looks at ``TRITON_INTERPRET`` once, when it is imported, and in the test process something
else may have imported it already.
"""

import multiprocessing
import multiprocessing.forkserver
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.interpreting import mend

INTERPRETING = {"TRITON_INTERPRET": "1", "KHA_KERNELS": "triton", "CUDA_VISIBLE_DEVICES": ""}


def _context() -> multiprocessing.context.ForkServerContext:
    """Forks of one process that has imported torch and Triton, and nothing of ours."""
    context = multiprocessing.get_context("forkserver")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in INTERPRETING.items():
            patch.setenv(name, value)
        context.set_forkserver_preload(["torch", "triton"])
        multiprocessing.forkserver.ensure_running()
    return context


class Interpreter:
    """Runs functions in one such process: ``interpreter(case, *args) -> its result``.

    Args:
        package: a folder with another ``kha_megatron`` to import instead.
    """

    def __init__(self, package: Path | None = None) -> None:
        self.pool = ProcessPoolExecutor(1, _context(), initializer=_start, initargs=(package,))

    def __call__(self, case, *args, **kwargs):
        """Errors are raised here, with the process's own traceback as their cause."""
        return self.pool.submit(_seeded, case, *args, **kwargs).result(timeout=500)

    def close(self) -> None:
        """End the process."""
        self.pool.shutdown(cancel_futures=True)


def _seeded(case, *args, **kwargs):
    import torch

    torch.manual_seed(0)  # whatever ran before it
    return case(*args, **kwargs)


def _start(package: Path | None) -> None:
    os.environ |= INTERPRETING
    if package:
        sys.path.insert(0, str(package))
    import torch

    torch.set_num_threads(1)
    # torch.empty gives NaN: whatever a kernel forgets to write, or reads too much of, is seen
    torch.use_deterministic_algorithms(True)
    mend()
