"""Launch Triton kernels repeatedly with little overhead.

Whenever a kernel is launched, Triton binds and specializes its arguments in Python. For small
inputs, this takes longer than the kernel. We do it once for each memory layout, and then call the
compiled kernel that Triton returned.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kha_megatron.heads.kernels.rows import rows_of

MAX_LAUNCHES = 1024
"""How many layouts to remember. Only varying sequence lengths can need more."""


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
        self._constants: list[Any] = []
        for name in function.arg_names:
            if name in options:
                self._constants.append(options[name])
        self._run_compiled: Callable[..., None] | None = None
        self._arguments: list[Any] = []
        self._tensor_positions: list[int] = []
        self._descriptors: list[dict[str, Any] | None] = []
        """Attributes of each tensor's descriptor, or None if the kernel gets a pointer."""
        for position, argument in enumerate(arguments):
            if not isinstance(argument, Tensor | TensorDescriptor):
                self._arguments.append(argument)
                continue
            self._arguments.append(None)  # do not keep the tensor alive
            self._tensor_positions.append(position)
            attributes = None
            if isinstance(argument, TensorDescriptor):
                attributes = vars(argument) | {"base": None}
            self._descriptors.append(attributes)

    def __call__(self, *tensors: Tensor) -> None:
        """Launch the kernel on the current stream, with tensors in the order of ``arguments``."""
        arguments = self._arguments.copy()
        slots = zip(
            self._tensor_positions,
            self._descriptors,
            tensors,
            strict=True,
        )
        for position, attributes, tensor in slots:
            if attributes is None:
                arguments[position] = tensor
            else:
                arguments[position] = _copy_descriptor(attributes, tensor)
        if self._run_compiled is not None:
            self._run_compiled(*arguments, *self._constants)
            return
        compiled = self._function[self._grid](*arguments, **self._options)
        if compiled is not None:  # None in Triton's interpreter
            grid = (*self._grid, 1, 1)[:3]
            self._run_compiled = compiled[grid]


def _copy_descriptor(attributes: dict[str, Any], base: Tensor) -> TensorDescriptor:
    """Skip the checks of the constructor, because a tensor of the same layout passed them."""
    descriptor = object.__new__(TensorDescriptor)
    vars(descriptor).update(attributes, base=base)
    return descriptor


_launches: dict[tuple[Any, ...], Launch] = {}


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
            launch(prepare, settings, inputs, output)
        return
    # Triton compiles again for another device, dtype, alignment, or kind of stride or size (those
    # that are 1, divisible by 16, or need 64 bits)
    output_alignment = output.data_ptr() % 16
    key: list[Any] = [
        prepare,
        settings,
        device,
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
    prepared = _launches.get(tuple(key))
    if prepared is not None:
        prepared(*inputs, output)
        return
    rows = [rows_of(tensor) for tensor in inputs]
    is_copied = False
    for tensor, tensor_rows in zip(inputs, rows, strict=True):
        if tensor_rows.tensor is not tensor:
            is_copied = True
    if is_copied:
        copies = [tensor_rows.tensor for tensor_rows in rows]
        launch(prepare, settings, copies, output)
        return
    prepared = prepare(*settings, *rows, rows_of(output))
    if len(_launches) >= MAX_LAUNCHES:
        _launches.clear()
    _launches[tuple(key)] = prepared
    prepared(*inputs, output)
