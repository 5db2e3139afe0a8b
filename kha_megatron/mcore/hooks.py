"""Hook on a projection of a layer that stays when an adapter replaces the projection."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.nn import Module


class ProjectionHook:
    """Wrap the ``forward`` of a layer's submodule, also after an adapter replaces the submodule.

    Megatron does not capture a module with a forward pre-hook in a CUDA graph.

    Args:
        layer: calls :meth:`follow` before each forward pass.
        name: name of the submodule, such as ``linear_proj``.
        hook: maps the module's result; with ``before``, its positional inputs.
    """

    def __init__(
        self, layer: Module, name: str, hook: Callable[[Any], Any], *, before: bool = False
    ) -> None:
        self._name, self._hook, self._before = name, hook, before
        self._module: Module | None = None
        self.follow(layer)

    def follow(self, layer: Module) -> None:
        """Move to the current submodule, if any. MLA deletes an absorbed projection."""
        module: Any = getattr(layer, self._name, None)
        if module is self._module or module is None:
            return
        if self._module is not None:
            del self._module.forward  # restore the method of the class
        module.forward = partial(self._around, module.forward)
        self._module = module

    def _around(self, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        if self._before:
            return forward(*self._hook(inputs), **options)
        return self._hook(forward(*inputs, **options))
