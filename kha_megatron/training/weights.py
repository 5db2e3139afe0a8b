"""Keep NaN and Inf out of checkpoints, and stop runs that skip every optimizer step."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from kha_megatron.checkpoint.tracker import newest
from kha_megatron.errors import CheckpointError, NonFiniteError
from kha_megatron.mcore import patches
from kha_megatron.mcore.finite import find_non_finite_optimizer_state, find_non_finite_parameter
from kha_megatron.training.resume import path_to_load


def stop_on_non_finite_weights(models: list[Any], args: Namespace) -> None:
    """Check for NaN and Inf before each save, after each load and on skipped steps.

    Saves and loads also check the state of the optimizer.

    With dynamic loss scaling (``--fp16``), Megatron skips a step if gradients overflow, but it
    does not check for NaN. A single NaN in the parameters would make it skip all remaining steps.

    Args:
        models (list): Model chunks on this rank, not wrapped yet. Must be called on all ranks.
    """

    def find_problem(optimizer: Any) -> str | None:
        return find_non_finite_parameter(models) or find_non_finite_optimizer_state(optimizer)

    def save_finite(
        save: Any, iteration: int, model: Any, optimizer: Any, *arguments: Any, **options: Any
    ) -> Any:
        problem = find_problem(optimizer)
        if problem:
            raise NonFiniteError(
                f"{problem} after iteration {iteration}. No checkpoint was saved. {_remedy(args)}"
            )
        return save(iteration, model, optimizer, *arguments, **options)

    def load_finite(load: Any, model: Any, optimizer: Any, *arguments: Any, **options: Any) -> Any:
        result = load(model, optimizer, *arguments, **options)
        problem = find_problem(optimizer)
        if problem:
            raise CheckpointError(
                f"{problem} of the checkpoint in {path_to_load(args) or args.load}. Earlier "
                "checkpoints of this run were checked when they were saved. Choose one with "
                "--ckpt-step."
            )
        return result

    def step_with_limit(
        train_step: Any,
        forward: Any,
        data: Any,
        model: Any,
        optimizer: Any,
        *rest: Any,
        **options: Any,
    ) -> Any:
        result = train_step(forward, data, model, optimizer, *rest, **options)
        _, is_skipped, _, is_exiting, *_ = result
        if not is_skipped or is_exiting:
            return result
        problem = find_non_finite_parameter(models)
        if problem:
            raise NonFiniteError(f"{problem}, so every step would be skipped. {_remedy(args)}")
        if optimizer.get_loss_scale().item() <= args.min_loss_scale:
            raise NonFiniteError(
                f"The gradients overflow although the loss scale is at its minimum of "
                f"{args.min_loss_scale:g}, so every step would be skipped. {_remedy(args)}"
            )
        return result

    patches.wrap_checkpoints(save=save_finite, load=load_finite)
    if args.fp16 and not args.loss_scale:
        patches.wrap_training_step(step_with_limit)


def _remedy(args: Namespace) -> str:
    last = newest(Path(args.save)) if args.save else None
    start = f"from {last.name} in {args.save}" if last else "from scratch"
    return f"Restart {start}, with a lower --lr and --override-opt-param-scheduler."
