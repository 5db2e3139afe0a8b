"""Hooks on a projection of a layer that follow a replacement of the module."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.nn import Module


class PlacedHook:
    """A hook on a layer's submodule that follows when adapters replace the submodule.

    It wraps the module's ``forward``, because Megatron does not capture a module with a pre-forward
    hook in a CUDA graph.

    Args:
        layer: calls :meth:`follow` before each forward pass.
        name: name of the module, such as ``linear_proj``.
        hook: maps the module's result; with ``before``, maps its positional inputs.
    """

    def __init__(
        self, layer: Module, name: str, hook: Callable[[Any], Any], *, before: bool = False
    ) -> None:
        self._name, self._hook, self._before = name, hook, before
        self._module: Module | None = None
        self.follow(layer)

    def follow(self, layer: Module) -> None:
        """Move to the current module, if there is one: MLA deletes an absorbed projection."""
        module: Any = getattr(layer, self._name, None)
        if module is self._module or module is None:
            return
        if self._module is not None:
            del self._module.forward  # uncovers the method
        module.forward = partial(self._around, module.forward)
        self._module = module

    def _around(self, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        if self._before:
            return forward(*self._hook(inputs), **options)
        return self._hook(forward(*inputs, **options))
