"""Save checkpoints by time, in addition to ``--save-interval``."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.training import get_args, training

from kha_megatron.announcements import announce, is_first_rank
from kha_megatron.checkpoint.tracker import RELEASE, TRACKER, is_object_store, read_tracker
from kha_megatron.mcore import patches


def save_by_time(minutes: float, clock: Callable[[], float] = time.monotonic) -> None:
    """Save a checkpoint after each iteration that ends ``minutes`` after the last save.

    All ranks agree on the iteration. This costs one small all-reduce per iteration.
    """
    last_save = clock()

    def save(original: Any, *args: Any, **settings: Any) -> None:
        nonlocal last_save
        original(*args, **settings)
        last_save = clock()

    def save_if_due(original: Any, *args: Any) -> bool:
        model, optimizer, scheduler, iteration, *progress, train_data_iterator = args
        is_exiting = original(*args)
        if is_exiting:
            return True
        if iteration == get_args().train_iters:  # Megatron saves the last iteration
            return False
        is_due = torch.tensor(clock() - last_save >= 60 * minutes, dtype=torch.int, device="cuda")
        torch.distributed.all_reduce(is_due, op=torch.distributed.ReduceOp.MAX)
        if is_due:
            training.save_checkpoint_and_time(
                iteration,
                model,
                optimizer,
                scheduler,
                *progress,
                train_data_iterator=train_data_iterator,
            )
        return False

    patches.wrap_save_intervals(save=save, decide=save_if_due)


def keep_release(args: argparse.Namespace) -> None:
    """Disable ``--save-retain-interval`` if the last checkpoint is a release.

    Megatron expects the number of an iteration and would fail at the first save. Only rank 0 uses
    this argument.
    """
    is_used = args.save_retain_interval and args.save and is_first_rank()
    if not is_used or is_object_store(args.save):
        return
    tracker = Path(args.save) / TRACKER
    if read_tracker(tracker) == RELEASE:
        args.save_retain_interval = None
        announce(
            "Ignoring --save-retain-interval until the next start, because the last checkpoint in "
            f"{args.save} is a release checkpoint."
        )
