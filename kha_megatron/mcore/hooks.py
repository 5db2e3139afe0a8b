"""Forward hooks that still work after a projection is replaced (e.g. by LoRA)."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.nn import Module


class ProjectionHook:
    """Wraps the ``forward`` of a submodule such as ``linear_proj``.

    ``hook`` maps the outputs, or the tuple of positional inputs with ``before=True``. Call
    :meth:`follow` before each forward pass, in case an adapter has replaced the submodule.

    Note: We do not use PyTorch's own hooks, because Megatron does not capture modules that have a
    forward pre-hook in CUDA graphs.
    """

    def __init__(
        self,
        layer: Module,
        name: str,
        hook: Callable[[Any], Any],
        *,
        before: bool = False,
    ) -> None:
        self._name = name
        self._hook = hook
        self._before = before
        self._module: Module | None = None
        self.follow(layer)

    def follow(self, layer: Module) -> None:
        """Move the hook if the submodule has been replaced."""
        module: Any = getattr(layer, self._name, None)  # absorbed projections of MLA are deleted
        if module is self._module or module is None:
            return
        if self._module is not None:
            del self._module.forward  # restores the class's method
        module.forward = partial(self._around, module.forward)
        self._module = module

    def _around(self, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        if self._before:
            changed_inputs = self._hook(inputs)
            return forward(*changed_inputs, **options)
        outputs = forward(*inputs, **options)
        return self._hook(outputs)
