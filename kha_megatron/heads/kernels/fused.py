"""Choose between Triton and PyTorch for KHA.

You can set the ``KHA_KERNELS`` environment variable to one of the following:

- ``auto`` (default): use the Triton kernels if they support the tensors and pass a self-check (see
  :mod:`kha_megatron.heads.kernels.verification`), otherwise PyTorch.
- ``torch``: always use PyTorch.
- ``triton``: use the Triton kernels without a self-check, or raise an error if that is not
  possible. You can combine this with ``TRITON_INTERPRET=1`` to run them on the CPU (slow).

KHA-Linear always uses PyTorch.
The choice is logged on rank 0. Triton also needs less memory: it only saves the input for backward,
while PyTorch saves several tensors of that size (see ``kha_megatron.heads.knock.SAVED``).
"""

import functools
import os
import re
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kha_megatron.announcements import announce
from kha_megatron.errors import ConfigError
from kha_megatron.heads import knock as knocking
from kha_megatron.heads.kernels.tilings import (
    HEAD_DIMS,
    KERNEL_DTYPES,
    KERNEL_VARIANTS,
    OLDEST_TRITON,
    TILINGS,
    architecture,
)
from kha_megatron.heads.kernels.verification import KnockCase, is_trusted
from kha_megatron.heads.knock import Variant

KERNELS_VARIABLE = "KHA_KERNELS"


def fused_knock(
    x: Tensor,
    weight: Tensor,
    variant: Variant,
) -> Tensor:
    """Apply KHA to every head, using Triton if possible. See ``kha_megatron.heads.knock.knock``.

    Note that the Triton kernels do not support double backward.

    Raises:
        ConfigError: If ``KHA_KERNELS`` is invalid, or is ``triton`` but the kernels cannot be used.
    """
    if variant not in KERNEL_VARIANTS:
        return knocking.knock(x, weight, variant)
    if torch.compiler.is_compiling():
        if torch.is_autocast_enabled(x.device.type):  # autocast does not apply to custom operators
            return knocking.knock(x, weight, variant)
        # the operator chooses between Triton and PyTorch when the compiled code runs
        return torch.ops.kha_megatron.knock(x, weight, variant)
    if _choose_kernels(x, weight, variant):
        from kha_megatron.heads.kernels import knock_launch  # requires Triton

        return knock_launch.FusedKnock.apply(x, weight, variant)
    return knocking.knock(x, weight, variant)


def unsupported_reason(x: Tensor, weight: Tensor) -> str | None:
    """Explain why the kernels cannot be used for these tensors (None if they can)."""
    if torch.is_autocast_enabled(x.device.type):
        return "autocast is enabled"
    for tensor in (x, weight):
        if is_traceable_wrapper_subclass(tensor):
            return f"the kernels do not support tensors of type {type(tensor).__name__}"
    head_dim = weight.shape[-1]
    return _cached_unsupported_reason(x.device, x.dtype, weight.dtype, head_dim)


@functools.cache
def _cached_unsupported_reason(
    device: torch.device,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    head_dim: int,
) -> str | None:
    """Check the device, Triton, the dtypes and the head dim.

    ``TRITON_INTERPRET`` and the installed Triton are fixed for a process, so they are not part of
    the cache key.
    """
    if device.type != "cuda" and not _is_interpreting():
        return f"the kernels require a CUDA device, but the tensors are on {device}"
    reason = triton_reason()
    if reason is not None:
        return reason
    if dtype != weight_dtype or dtype not in KERNEL_DTYPES:
        return f"the kernels do not support activations in {dtype} with matrices in {weight_dtype}"
    if head_dim not in HEAD_DIMS:
        return f"the kernels support head dims {HEAD_DIMS}, got {head_dim}"
    arch = architecture(device)
    if arch not in TILINGS:
        return f"the kernels have no tile sizes for {arch}, only for {', '.join(TILINGS)}"
    return None


def triton_reason() -> str | None:
    """Explain why the installed Triton cannot be used (None if it can)."""
    try:
        import triton
    except Exception as error:  # an incompatible Triton can raise anything
        return f"Triton cannot be imported ({type(error).__name__}: {error})"
    version = triton.__version__
    numbers = re.findall(r"\d+", version)
    major_and_minor = tuple(map(int, numbers[:2]))
    if major_and_minor < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        return f"the kernels require Triton {oldest} (torch 2.9) or newer, got {version}"
    return None


def _is_interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def _choose_kernels(
    x: Tensor,
    weight: Tensor,
    variant: Variant,
) -> bool:
    """Decide between Triton (True) and PyTorch (False), and log the decision.

    Raises:
        ConfigError: If ``KHA_KERNELS`` is invalid, or is ``triton`` but the kernels cannot be used.
    """
    choice = os.environ.get(KERNELS_VARIABLE, "auto")
    if choice not in ("auto", "torch", "triton"):
        raise ConfigError(f"{KERNELS_VARIABLE} must be auto, torch or triton, got {choice!r}.")
    if choice == "torch":
        _announce_implementation(f"torch ({KERNELS_VARIABLE}=torch)")
        return False
    reason = unsupported_reason(x, weight)
    if reason is not None:
        if choice == "triton":
            raise ConfigError(
                f"{KERNELS_VARIABLE}=triton is not supported here, because {reason}. Unset "
                f"{KERNELS_VARIABLE} to fall back to torch."
            )
        _announce_implementation(f"torch ({reason})")
        return False
    if choice == "auto" and not is_trusted(KnockCase.of(x, variant)):
        return False  # is_trusted has logged a warning
    if _is_interpreting():
        _announce_implementation("Triton's interpreter")
    else:
        _announce_implementation("Triton kernels")
    return True


def _announce_implementation(implementation: str) -> None:
    announce(f"Computing KHA with {implementation}", once=("knocking", implementation))


# torch.compile cannot trace kernel launches, so forward and backward are custom operators. Their
# schemas do not support literal types, so the variant is a string.


@torch.library.custom_op("kha_megatron::knock", mutates_args=())
def _knock_operator(
    x: Tensor,
    weight: Tensor,
    variant: str,
) -> Tensor:
    kha_variant = cast(Variant, variant)
    if _choose_kernels(x, weight, kha_variant):
        from kha_megatron.heads.kernels import knock_launch  # requires Triton

        return knock_launch.knock_forward(x, weight.contiguous(), kha_variant)
    return knocking.knock(x, weight, kha_variant).contiguous()


@_knock_operator.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    variant: str,
) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("kha_megatron::knock_backward", mutates_args=())
def _knock_backward_operator(
    x: Tensor,
    dy: Tensor,
    weight: Tensor,
    variant: str,
) -> tuple[Tensor, Tensor]:
    kha_variant = cast(Variant, variant)
    if not _choose_kernels(x, weight, kha_variant):
        dx, dw = knocking.gradients(x, dy, weight, kha_variant)
        return dx.contiguous(), dw.contiguous()
    from kha_megatron.heads.kernels import knock_launch  # requires Triton

    dy = dy.contiguous()
    weight = weight.contiguous()
    dx = knock_launch.knock_backward_input(x, dy, weight, kha_variant)
    dw = knock_launch.knock_backward_weight(x, dy, weight, kha_variant)
    return dx, dw


@_knock_backward_operator.register_fake
def _(
    x: Tensor,
    dy: Tensor,
    weight: Tensor,
    variant: str,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _save_inputs(
    ctx: Any,
    inputs: tuple[Tensor, Tensor, str],
    output: Tensor,
) -> None:
    x, weight, ctx.variant = inputs
    ctx.save_for_backward(x, weight)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    dx, dw = _knock_backward_operator(x, dy, weight, ctx.variant)
    return dx, dw, None


_knock_operator.register_autograd(_gradients, setup_context=_save_inputs)
