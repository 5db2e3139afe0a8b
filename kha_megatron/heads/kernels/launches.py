"""Launch Triton kernels repeatedly with little overhead.

Whenever a kernel is launched, Triton binds and specializes its arguments in Python. For small
inputs, this takes longer than the kernel. We do it once for each memory layout, and then call the
compiled kernel that Triton returned.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kha_megatron.heads.kernels.rows import rows_of

MAX_LAUNCHES = 1024
"""How many layouts to remember. Only varying sequence lengths can need more."""


class _TensorSlot(NamedTuple):
    """A kernel argument that changes with each launch."""

    position: int
    descriptor: TensorDescriptor | None
    """Descriptor without a tensor, or None if the kernel gets a pointer."""

    def argument_for(self, tensor: Tensor) -> Tensor | TensorDescriptor:
        if self.descriptor is None:
            return tensor
        return _copy_descriptor(self.descriptor, tensor)


class Launch:
    """A kernel with its grid and arguments, for all tensors of the same layouts.

    Args:
        function: Triton kernel. The parameters in ``options`` must be its last ones.
        grid (tuple[int, ...]): Number of programs.
        arguments (Sequence): All other arguments. Only the layout of tensors is used.
        options (dict): Block sizes and launch options.
    """

    def __init__(
        self,
        function: Any,
        grid: tuple[int, ...],
        arguments: Sequence[Any],
        options: dict[str, Any],
    ) -> None:
        self._function = function
        self._grid = grid
        self._options = options
        # compiled kernels still take constexpr parameters, but no options such as num_warps
        self._constexpr_values: list[Any] = []
        for name in function.arg_names:
            if name in options:
                self._constexpr_values.append(options[name])
        self._run_compiled: Callable[..., None] | None = None
        self._arguments: list[Any] = []
        self._tensor_slots: list[_TensorSlot] = []
        for position, argument in enumerate(arguments):
            # store no tensors, because this would keep them alive
            if isinstance(argument, Tensor):
                self._tensor_slots.append(_TensorSlot(position, None))
                self._arguments.append(None)
            elif isinstance(argument, TensorDescriptor):
                descriptor = _copy_descriptor(argument, None)
                self._tensor_slots.append(_TensorSlot(position, descriptor))
                self._arguments.append(None)
            else:
                self._arguments.append(argument)

    def __call__(self, *tensors: Tensor) -> None:
        """Launch the kernel on the current stream, with tensors in the order of ``arguments``."""
        arguments = self._arguments.copy()
        for slot, tensor in zip(self._tensor_slots, tensors, strict=True):
            arguments[slot.position] = slot.argument_for(tensor)
        if self._run_compiled is not None:
            self._run_compiled(*arguments, *self._constexpr_values)
            return
        compiled = self._function[self._grid](*arguments, **self._options)
        if compiled is not None:  # None in Triton's interpreter
            grid = (*self._grid, 1, 1)[:3]  # compiled kernels need three dimensions
            self._run_compiled = compiled[grid]


def _copy_descriptor(descriptor: TensorDescriptor, base: Tensor | None) -> TensorDescriptor:
    """Copy a descriptor, but with another tensor (``base``) of the same layout.

    Skips the checks of the constructor, because the original descriptor has passed them.
    """
    copied = object.__new__(TensorDescriptor)
    vars(copied).update(vars(descriptor), base=base)
    return copied


_launches: dict[tuple[Any, ...], Launch] = {}
"""Prepared launches by :func:`_layout_key`."""


def launch(
    prepare: Callable[..., Launch],
    settings: tuple[str, ...],
    inputs: Sequence[Tensor],
    output: Tensor,
) -> None:
    """Launch a kernel. ``prepare(*settings, *rows)`` is called when the layouts are new.

    Args:
        prepare (callable): Takes the :class:`Rows` of the inputs and of the output. Its result may
            only depend on the settings, the layouts and the device.
        settings (tuple[str, ...]): Further arguments of ``prepare``.
        inputs (Sequence[Tensor]): On the same device as the output. Those whose layout has too many
            strides are copied.
        output (Tensor): Contiguous, with a shape that follows from the settings and inputs.
    """
    device = output.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _launch_on_current_device(prepare, settings, inputs, output)
    else:
        _launch_on_current_device(prepare, settings, inputs, output)


def _launch_on_current_device(
    prepare: Callable[..., Launch],
    settings: tuple[str, ...],
    inputs: Sequence[Tensor],
    output: Tensor,
) -> None:
    key = _layout_key(prepare, settings, inputs, output)
    prepared = _launches.get(key)
    if prepared is None:
        # the layout is new, or must be copied
        inputs = [rows_of(tensor).tensor for tensor in inputs]
        prepared = _prepare_once(prepare, settings, inputs, output)
    prepared(*inputs, output)


def _prepare_once(
    prepare: Callable[..., Launch],
    settings: tuple[str, ...],
    inputs: Sequence[Tensor],
    output: Tensor,
) -> Launch:
    """Return the launch for inputs that need no copy. Prepare it if their layouts are new."""
    key = _layout_key(prepare, settings, inputs, output)
    if key in _launches:
        return _launches[key]
    rows = [rows_of(tensor) for tensor in (*inputs, output)]
    prepared = prepare(*settings, *rows)
    if len(_launches) >= MAX_LAUNCHES:
        _launches.clear()
    _launches[key] = prepared
    return prepared


def _layout_key(
    prepare: Callable[..., Launch],
    settings: tuple[str, ...],
    inputs: Sequence[Tensor],
    output: Tensor,
) -> tuple[Any, ...]:
    """Return a key that is equal for launches which can use the same compiled kernel.

    Triton compiles again for another device, dtype, alignment, or kind of stride or size (those
    that are 1, divisible by 16, or need 64 bits).
    """
    output_alignment = output.data_ptr() % 16
    key: list[Any] = [
        prepare,
        settings,
        output.device,
        output.dtype,
        output_alignment,
    ]
    for tensor in inputs:
        alignment = tensor.data_ptr() % 16
        key += (
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            alignment,
        )
    return tuple(key)
