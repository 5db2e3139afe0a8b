"""Triton's interpreter, for kernels without a GPU."""

import os


def interpret() -> None:
    """Let Triton interpret in this process, which must not have imported it yet."""
    os.environ["TRITON_INTERPRET"] = "1"  # Triton looks once, when it is imported
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
