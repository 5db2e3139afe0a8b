"""TensorBoard and W&B logging."""

from collections.abc import Mapping

from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer


def write_scalars(values: Mapping[str, float], iteration: int) -> None:
    """Log a dict of scalars. Only Megatron's last rank has writers, so others do nothing."""
    if (tensorboard := get_tensorboard_writer()) is not None:
        for name, value in values.items():
            tensorboard.add_scalar(name, value, iteration)
    if (wandb := get_wandb_writer()) is not None:
        wandb.log(dict(values), iteration)
