"""Where a training's own numbers go: Megatron's writers for TensorBoard and W&B."""

from collections.abc import Mapping
from typing import Any


def write_scalars(
    values: Mapping[str, float], iteration: int, *, tensorboard: Any, wandb: Any
) -> None:
    """Write the values of one iteration; call it where the writers are, or on every rank.

    Args:
        values: by their names in both.
        iteration: counted from 1.
        tensorboard: Megatron's ``SummaryWriter``, which is on the last rank; None elsewhere.
        wandb: Megatron's ``wandb`` module, likewise.
    """
    if tensorboard is not None:
        for name, value in values.items():
            tensorboard.add_scalar(name, value, iteration)
    if wandb is not None:
        wandb.log(dict(values), iteration)
