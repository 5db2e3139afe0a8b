"""Which way it goes: through the fused kernels where they run, in plain torch everywhere else.

``knock`` decides from what it is given (device, dtypes, head dim) and says once on rank 0, for each
reason, which way it went. The environment variable ``KHA_KERNELS`` overrides that:

==========  ======================================================================================
``auto``    the kernels where they run and equal plain torch, plain torch elsewhere (the default)
``torch``   plain torch always
``triton``  the kernels, compared with nothing, or an error that says why not. With
            ``TRITON_INTERPRET=1``, CPU tensors go through Triton's interpreter: slow, for tests
==========  ======================================================================================

``auto`` compares the kernels with plain torch the first time that they are called in some way
(:mod:`kha_megatron.ops.verdicts`), and says so where they are wrong or fail.

Both ways compute the same function. The kernels keep only their input for the backward pass, where
plain torch keeps ``kha_megatron.heads.knock.SAVED`` tensors of its size, and round fewer times
between.
"""

import functools
import importlib.util
import os
import re
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kha_megatron.announcements import announce
from kha_megatron.errors import ConfigError
from kha_megatron.heads.knock import Variant
from kha_megatron.ops.heads import knock as knocking
from kha_megatron.ops.kernels.tilings import DTYPES, HEAD_DIMS, OLDEST_TRITON, SHARED_MEMORY
from kha_megatron.ops.verdicts import trusts
from kha_megatron.ops.verification import KnockCase, PrologueCase

KERNELS_VARIABLE = "KHA_KERNELS"
"""Environment variable that chooses the way; the module's docstring says how."""


def knock(x: Tensor, weight: Tensor, variant: Variant) -> Tensor:
    """Pass every head's row through the matrices that all heads share.

    Arguments, result and equations are those of ``kha_megatron.ops.heads.knock.knock``. Not
    differentiable twice where it goes through the kernels.

    Raises:
        ConfigError: ``KHA_KERNELS`` is no word of the table, or is ``triton`` and the kernels
            cannot do this.
    """
    if torch.compiler.is_compiling():
        if torch.is_autocast_enabled(x.device.type):  # it casts for torch's operators, not for ours
            return knocking.knock(x, weight, variant)
        return torch.ops.kha_megatron.knock(x, weight, variant)
    if _takes_kernels(x, weight, variant):
        from kha_megatron.ops.kernels.knock_launch import FusedKnock

        return FusedKnock.apply(x, weight, variant)
    return knocking.knock(x, weight, variant)


def refusal(x: Tensor, weight: Tensor) -> str | None:
    """Why the kernels cannot knock ``x`` with ``weight``, or None."""
    why = _refusal(x.device, x.dtype, weight.device, weight.dtype, weight.shape[-1])
    if why is None and torch.is_autocast_enabled(x.device.type):
        return "autocast chooses the dtypes of products"
    for tensor in (x, weight):
        if why is None and is_traceable_wrapper_subclass(tensor):
            return f"{type(tensor).__name__} keeps its numbers elsewhere than a plain tensor"
    return why


def prologue_kernel(x: Tensor, head_dim: int) -> tuple[Callable | None, str]:
    """What takes the place of ``kha_megatron.ops.prologue.prologue`` for a buffer like ``x``.

    Decided by ``KHA_KERNELS`` and by what the kernels can do, as for knocking; but ``triton`` is no
    error here, because a layer may have reasons of its own to be left to Megatron.

    Returns:
        ``fused_prologue`` and nothing; or None, with the reason where kernels could be expected.
        Whether it is right for the call, :func:`trusts_prologue` says.
    """
    if _choice() == "torch":
        return None, ""
    if why := refusal(x, x.new_empty(0, head_dim, head_dim)):
        return None, why if x.is_cuda else ""
    return _fused_prologue, ""


def _fused_prologue(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    from kha_megatron.ops.kernels.prologue_launch import fused_prologue  # which may not be possible

    return fused_prologue(*inputs)


def trusts_prologue(case: PrologueCase) -> bool | None:
    """Whether the prologue's kernels may be taken for these calls, as ``verdicts.trusts`` says."""
    return _choice() == "triton" or trusts(case)


def _takes_kernels(x: Tensor, weight: Tensor, variant: Variant) -> bool:
    if not _may_take_kernels(x, weight):
        return False
    if _choice() != "triton" and not trusts(KnockCase.of(x, variant)):
        return False
    _announce(_way())
    return True


def _choice() -> str:
    """``auto``, ``torch`` or ``triton``, as ``KHA_KERNELS`` says.

    Raises:
        ConfigError: it says something else.
    """
    choice = os.environ.get(KERNELS_VARIABLE, "auto")
    if choice not in ("auto", "torch", "triton"):
        raise ConfigError(f"{KERNELS_VARIABLE}={choice!r}: choose one of auto, torch, triton")
    return choice


def _may_take_kernels(x: Tensor, weight: Tensor) -> bool:
    """Whether they could, by ``KHA_KERNELS`` and by what they can do; says why not."""
    choice = _choice()
    if choice == "torch":
        _announce(f"plain torch ({KERNELS_VARIABLE}=torch)")
        return False
    why = refusal(x, weight)
    if why is None:
        return True
    if choice == "triton":
        raise ConfigError(f"{KERNELS_VARIABLE}=triton, but {why}: unset it, or set it to torch")
    _announce(f"plain torch: {why}")
    return False


@functools.cache
def _refusal(
    device: torch.device,
    dtype: torch.dtype,
    weight_device: torch.device,
    weight_dtype: torch.dtype,
    head_dim: int,
) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type != "cuda" and not _interpreted():
        return f"tensors are on {device.type}, and the kernels need a CUDA device"
    if why := triton_refusal():
        return why
    if device != weight_device:
        return f"activations are on {device} and matrices on {weight_device}"
    if dtype != weight_dtype:
        return f"activations are {dtype} and matrices {weight_dtype}"
    if dtype not in DTYPES:
        return f"there are kernels for {_words(DTYPES)} only, and this is {dtype}"
    if head_dim not in HEAD_DIMS:
        return f"there are kernels for head dims {_words(HEAD_DIMS)} only, and this is {head_dim}"
    if device.type == "cuda":
        architecture = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
        if architecture not in SHARED_MEMORY:
            return f"there are tilings for {_words(SHARED_MEMORY)} only, and this is {architecture}"
    return None


def triton_refusal() -> str | None:
    """Why the kernels cannot use the Triton that is here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    try:
        import triton
    except Exception as error:  # whatever one that does not fit its torch or its driver raises
        return f"Triton cannot be imported ({type(error).__name__}: {error})"
    numbers = re.findall(r"\d+", triton.__version__)
    if tuple(map(int, numbers[:2])) < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        return (
            f"the kernels need Triton {oldest}, which torch 2.9 brings, "
            f"and this is {triton.__version__}"
        )
    return None


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def _way() -> str:
    return "Triton's interpreter" if _interpreted() else "fused Triton kernels"


def _words(values: Any) -> str:
    return ", ".join(str(value) for value in values)


def _announce(way: str) -> None:
    announce(f"knocking runs in {way}", once=("knocking", way))


# torch.compile cannot look into a kernel's launch: it sees one operator for each pass.


@torch.library.custom_op("kha_megatron::knock", mutates_args=())
def _knock(x: Tensor, weight: Tensor, variant: str) -> Tensor:
    form = cast(Variant, variant)
    if _takes_kernels(x, weight, form):
        from kha_megatron.ops.kernels import knock_launch

        return knock_launch.knock_forward(x, weight.contiguous(), form)
    return knocking.knock(x, weight, form).contiguous()


@_knock.register_fake
def _(x: Tensor, weight: Tensor, variant: str) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("kha_megatron::knock_backward", mutates_args=())
def _knock_backward(x: Tensor, dy: Tensor, weight: Tensor, variant: str) -> tuple[Tensor, Tensor]:
    form = cast(Variant, variant)
    if not _takes_kernels(x, weight, form):
        dx, dw = knocking.gradients(x, dy, weight, form)
        return dx.contiguous(), dw.contiguous()
    from kha_megatron.ops.kernels import knock_launch

    arguments = x, dy.contiguous(), weight.contiguous(), form
    dx = knock_launch.knock_backward_input(*arguments)
    return dx, knock_launch.knock_backward_weight(*arguments)


@_knock_backward.register_fake
def _(x: Tensor, dy: Tensor, weight: Tensor, variant: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
    x, weight, ctx.variant = inputs
    ctx.save_for_backward(x, weight)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    if _may_take_kernels(x, weight):  # which of the two, the operator says when it runs
        return *_knock_backward(x, dy, weight, ctx.variant), None
    return *knocking.gradients(x, dy, weight, ctx.variant), None  # compiled with the rest


_knock.register_autograd(_gradients, setup_context=_keep)
