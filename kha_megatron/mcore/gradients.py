"""Gradients between the backward pass and the optimizer step."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from megatron.core.distributed import finalize_model_grads
from megatron.core.utils import get_model_config
from torch import Tensor


def around_finalization(
    models: Sequence[Any], around: Callable[..., AbstractContextManager[None]]
) -> None:
    """Do something in every step before or after gradients are summed over ranks.

    Sets ``config.finalize_model_grads_func``, which Megatron's schedules call between backward and
    the optimizer step; what is already set there runs within.

    Args:
        models: the virtual pipeline stages of this rank.
        around: called with the models as they are wrapped for data parallelism, and the process
            groups that the schedule was given, if any.
    """
    config = get_model_config(models[0])
    finalize = config.finalize_model_grads_func or finalize_model_grads

    def finalized(chunks: list[Any], *args: Any, **kwargs: Any) -> None:
        with around(chunks, kwargs.get("pg_collection")):
            finalize(chunks, *args, **kwargs)

    config.finalize_model_grads_func = finalized


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Where data parallelism sums it, or autograd where there is none; None if it is not trained.

    Under FSDP2 a DTensor.
    """
    gradient = getattr(parameter, "main_grad", None)
    return parameter.grad if gradient is None else gradient
