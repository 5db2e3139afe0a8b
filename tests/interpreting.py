"""Run kernels in Triton's interpreter, without a GPU.

``python -m tests.interpreting SCRIPT ARGUMENTS`` runs a script with it.
"""

import os
import runpy
import sys
from pathlib import Path


def interpret() -> None:
    """Enable the interpreter in this process, which must not have imported Triton yet."""
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    mend()


def mend() -> None:
    """Patch Triton's interpreter for numpy 2.4, and speed up its own patching."""
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    # Triton 3.6 converts a scalar of shape (1,) to an index, which numpy 2.4 refuses
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched

    # each function that a kernel calls would patch the language again
    patch_language = interpreter._patch_lang

    def patched_once(function):
        modules = [m for m in function.__globals__.values() if m is tl or m is tl.core]
        if any(tl.core.is_builtin(module.load) for module in modules):
            return patch_language(function)
        return None

    interpreter._patch_lang = patched_once


if __name__ == "__main__":
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    interpret()
    runpy.run_path(sys.argv[0], run_name="__main__")
