"""Replace functions of Megatron-Core and PyTorch."""

import functools
from collections.abc import Callable
from typing import Any


def patch[F: Callable[..., Any]](owner: Any, *names: str) -> Callable[[F], F]:
    """Replace functions of a module or methods of a class by the decorated function.

    The decorated function is called with the original function, followed by the arguments.
    """

    def replace(function: F) -> F:
        for name in names:
            original = getattr(owner, name)
            setattr(owner, name, _around(original, function))
        return function

    return replace


def _around(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    return patched
