"""Utilities for code between the backward pass and the optimizer step."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from megatron.core.distributed import finalize_model_grads
from megatron.core.utils import get_model_config
from torch import Tensor


def wrap_grad_finalization(
    models: Sequence[Any],
    around: Callable[..., AbstractContextManager[None]],
) -> None:
    """Run a context manager around ``finalize_model_grads`` (Megatron's gradient all-reduce).

    In each step, ``around`` is called with the wrapped model chunks and the schedule's process
    groups (or None).
    """
    config = get_model_config(models[0])
    finalize = config.finalize_model_grads_func or finalize_model_grads

    def finalized(chunks: list[Any], *args: Any, **kwargs: Any) -> None:
        with around(chunks, kwargs.get("pg_collection")):
            finalize(chunks, *args, **kwargs)

    config.finalize_model_grads_func = finalized


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Get ``main_grad`` or, if there is none, ``grad``. With FSDP2, this is a DTensor."""
    gradient = getattr(parameter, "main_grad", None)
    return parameter.grad if gradient is None else gradient
