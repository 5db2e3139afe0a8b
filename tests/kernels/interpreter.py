"""A process in which Triton interprets its kernels on the CPU.

Triton looks at ``TRITON_INTERPRET`` once, when it is imported, and in the test process something
else may have imported it already.
"""

import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path


class Interpreter:
    """Runs functions in one such process: ``interpreter(case, *args) -> its result``.

    Args:
        package: a folder with another ``kha_megatron`` to import instead.
    """

    def __init__(self, package: Path | None = None) -> None:
        self.pool = ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), initializer=_start, initargs=(package,)
        )

    def __call__(self, case, *args, **kwargs):
        """Errors are raised here, with the process's own traceback as their cause."""
        return self.pool.submit(case, *args, **kwargs).result(timeout=300)

    def close(self) -> None:
        """End the process."""
        self.pool.shutdown(cancel_futures=True)


def _start(package: Path | None) -> None:
    os.environ |= {"TRITON_INTERPRET": "1", "KHA_KERNELS": "triton", "CUDA_VISIBLE_DEVICES": ""}
    if package:
        sys.path.insert(0, str(package))
    import torch

    torch.set_num_threads(1)
    # torch.empty gives NaN: whatever a kernel forgets to write, or reads too much of, is seen
    torch.use_deterministic_algorithms(True)
    mend()


def mend() -> None:
    """Make Triton's interpreter, in this process, run with today's numpy and not too slowly."""
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    # Triton 3.6 turns a scalar of shape (1,) into an index in a way that numpy 2.4 refuses
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched

    # within a kernel the language is patched already, and each function that it calls does it again
    patch_language = interpreter._patch_lang

    def patched_once(function):
        modules = [m for m in function.__globals__.values() if m is tl or m is tl.core]
        if any(tl.core.is_builtin(module.load) for module in modules):
            return patch_language(function)
        return None

    interpreter._patch_lang = patched_once
