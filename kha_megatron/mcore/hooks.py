"""What is done before or behind a projection of a layer, whatever stands in its place."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.nn import Module


class PlacedHook:
    """A hook on whatever stands at a name of a layer.

    An adapter of Megatron-Bridge takes the place of a projection after the layer was built, and
    adds what it makes of its own input: what a mechanism does to the projection's input or output
    has to be done to both. And Megatron captures no module in a CUDA graph that has a pre-forward
    hook of torch's, so this is none: it stands around the module's ``forward``.

    Args:
        layer: has a module of that name, and calls :meth:`follow` before each forward pass.
        name: such as ``linear_proj``.
        hook: with ``before``, from the positional inputs to those that the module gets; else from
            its result to the one that is seen.
    """

    def __init__(
        self, layer: Module, name: str, hook: Callable[[Any], Any], *, before: bool = False
    ) -> None:
        self._name, self._hook, self._before = name, hook, before
        self._module: Module | None = None
        self.follow(layer)

    def follow(self, layer: Module) -> None:
        """Move to what stands there now, if anything does: MLA deletes what it has absorbed."""
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
