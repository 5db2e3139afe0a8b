"""Hooks on projections that adapters, e.g. LoRA, may replace."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.nn import Module


class ProjectionHook:
    """Hook around the ``forward`` of a layer's submodule ``name``, e.g. ``linear_proj``.

    ``hook`` maps the submodule's outputs, or its positional inputs if ``before`` is True. The layer
    calls :meth:`follow` before each forward pass, in case the submodule has been replaced. Note
    that Megatron does not capture modules with a forward pre-hook in CUDA graphs.
    """

    def __init__(
        self, layer: Module, name: str, hook: Callable[[Any], Any], *, before: bool = False
    ) -> None:
        self._name, self._hook, self._before = name, hook, before
        self._module: Module | None = None
        self.follow(layer)

    def follow(self, layer: Module) -> None:
        """Move the hook to the layer's current submodule."""
        module: Any = getattr(layer, self._name, None)  # absorbed projections of MLA are deleted
        if module is self._module or module is None:
            return
        if self._module is not None:
            del self._module.forward  # restores the class's method
        module.forward = partial(self._around, module.forward)
        self._module = module

    def _around(self, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        if self._before:
            return forward(*self._hook(inputs), **options)
        return self._hook(forward(*inputs, **options))
