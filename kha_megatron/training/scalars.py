"""Write a training's own scalars to TensorBoard and W&B."""

from collections.abc import Mapping
from typing import Any


def write_scalars(
    values: Mapping[str, float], iteration: int, *, tensorboard: Any, wandb: Any
) -> None:
    """Write the values of one iteration with Megatron's writers.

    Args:
        values: by name.
        iteration: counted from 1.
        tensorboard: Megatron's ``SummaryWriter`` on the last rank, None elsewhere.
        wandb: Megatron's ``wandb`` module on the last rank, None elsewhere.
    """
    if tensorboard is not None:
        for name, value in values.items():
            tensorboard.add_scalar(name, value, iteration)
    if wandb is not None:
        wandb.log(dict(values), iteration)
