"""TensorBoard and W&B logging."""

from collections.abc import Mapping

from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer


def write_scalars(values: Mapping[str, float], iteration: int) -> None:
    """Log a dict of scalars. Only Megatron's last rank has writers, so others do nothing."""
    tensorboard = get_tensorboard_writer()
    if tensorboard is not None:
        for name, value in values.items():
            tensorboard.add_scalar(name, value, iteration)
    wandb = get_wandb_writer()
    if wandb is not None:
        wandb.log(dict(values), iteration)
