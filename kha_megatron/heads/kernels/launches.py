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
        self._constexpr_values = [options[name] for name in function.arg_names if name in options]
        self._launch_compiled: Callable[..., None] | None = None
        self._arguments = list(arguments)
        self._tensor_slots: list[_TensorSlot] = []
        for position, argument in enumerate(arguments):
            if isinstance(argument, Tensor):
                descriptor = None
            elif isinstance(argument, TensorDescriptor):
                descriptor = _copy_descriptor(argument, None)
            else:
                continue
            self._tensor_slots.append(_TensorSlot(position, descriptor))
            self._arguments[position] = None  # a stored tensor would be kept alive

    def __call__(self, *tensors: Tensor) -> None:
        """Launch the kernel on the current stream, with tensors in the order of ``arguments``."""
        arguments = self._arguments.copy()
        for slot, tensor in zip(self._tensor_slots, tensors, strict=True):
            arguments[slot.position] = slot.argument_for(tensor)
        if self._launch_compiled is not None:
            self._launch_compiled(*arguments, *self._constexpr_values)
            return
        compile_and_launch = self._function[self._grid]
        compiled = compile_and_launch(*arguments, **self._options)
        if compiled is not None:  # None in Triton's interpreter
            grid = (*self._grid, 1, 1)[:3]  # compiled kernels need three dimensions
            self._launch_compiled = compiled[grid]


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
    """Launch a kernel, and prepare it first if the layouts are new.

    Only launches for layouts that need no copy are remembered. If an input has too many strides,
    the first lookup finds nothing, and the second one finds the launch for the layout of its copy.
    """
    prepared = _launches.get(_layout_key(prepare, settings, inputs, output))
    if prepared is not None:
        prepared(*inputs, output)
        return
    input_rows = [rows_of(tensor) for tensor in inputs]
    inputs = [rows.tensor for rows in input_rows]
    key = _layout_key(prepare, settings, inputs, output)
    prepared = _launches.get(key)
    if prepared is None:
        prepared = prepare(*settings, *input_rows, rows_of(output))
        if len(_launches) >= MAX_LAUNCHES:
            _launches.clear()
        _launches[key] = prepared
    prepared(*inputs, output)


def _layout_key(
    prepare: Callable[..., Launch],
    settings: tuple[str, ...],
    inputs: Sequence[Tensor],
    output: Tensor,
) -> tuple[Any, ...]:
    """Return a key of everything that a :class:`Launch` depends on.

    Its arguments include sizes and strides of the inputs, and Triton compiles a kernel for a
    device, dtypes and alignments. The shape and strides of the output follow from the rest.
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
