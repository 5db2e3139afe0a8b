"""Save checkpoints so that neither a crash nor another run can damage them.

Megatron lets all ranks write into ``iter_0000002``, and marks it as complete afterwards. If another
run takes over the directory in between, the shards of both runs end up in one checkpoint. So we let
Megatron write into ``.iter_0000002.partial-<run>``, and rename that directory at the end.
"""

import os
import shutil
import uuid
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE
from megatron.training import get_args
from megatron.training.global_vars import get_tensorboard_writer

from kha_megatron.announcements import announce
from kha_megatron.checkpoint.integrity import verify_hashes, write_and_hash, write_hashes
from kha_megatron.checkpoint.ownership import Ownership
from kha_megatron.checkpoint.staging import staged_file
from kha_megatron.checkpoint.tracker import (
    TRACKER,
    clear_for_overwriting,
    is_object_store,
    partial_save,
    partial_saves,
    publish,
    record_commit,
)
from kha_megatron.errors import ConfigError
from kha_megatron.mcore import patches


def make_saves_safe(ownership: Ownership | None) -> None:
    """Patch Megatron's checkpointing.

    - Write each checkpoint to a directory of this run, and rename it once it is complete.
    - Before overwriting a complete checkpoint, remove its commit mark. Otherwise, a job killed
      during the save would resume from the old checkpoint, even after a rollback.
    - Write the tracker file atomically, and record the time of the commit.
    - Before the first shard and before the rename, call ``ownership.check()``. It stops the save if
      another run has taken over the ``--save`` directory.
    - Load non-tensor state with ``weights_only=True``.
    - Flush TensorBoard on each save, so that resumed runs have no gaps in their curves.
    - Hash files with :mod:`kha_megatron.checkpoint.integrity`, each rank its own shards.

    Args:
        ownership: The claim on the ``--save`` directory. None on ranks other than 0, without
            ``--save``, and for object stores.
    """
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)

    def check_owner() -> None:
        if ownership is not None:
            ownership.check()

    def save_and_publish(
        save: Any, state: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if is_object_store(checkpoint_dir):  # it cannot rename directories
            return save(state, checkpoint_dir, *args, **kwargs)
        final_dir = Path(checkpoint_dir)
        partial_dir = partial_save(final_dir, _run_id())

        def finish() -> None:
            if dist.get_rank() == 0:
                check_owner()
                publish(partial_dir, final_dir)

        if dist.get_rank() == 0:
            check_owner()
            clear_for_overwriting(final_dir)
            partial_dir.mkdir(parents=True, exist_ok=True)
        async_request = save(state, str(partial_dir), *args, **kwargs)
        if async_request is None:
            finish()
        else:  # --async-save
            async_request.add_finalize_fn(finish)
        return async_request

    def commit(write_mark: Any, config: Any, checkpoint_dir: Any) -> None:
        check_owner()
        if not is_object_store(checkpoint_dir):
            record_commit(Path(checkpoint_dir))
        write_mark(config, checkpoint_dir)

    patches.replace_integrity_manifest(write_hashes, verify_hashes)
    patches.wrap_checkpoint_files(
        open_tracker=_open_atomically,
        save=save_and_publish,
        commit=commit,
        write=_write_shards,
    )


def _open_atomically(open_file: Any, file: Any, mode: str = "r", **options: Any) -> Any:
    """Open a file for Megatron. The tracker file is staged, and replaced when it is closed."""
    is_tracker = mode == "w" and Path(file).name == TRACKER
    if not is_tracker or is_object_store(file):
        return open_file(file, mode, **options)
    return _open_staged(Path(file))


@contextmanager
def _open_staged(file: Path) -> Iterator[Any]:
    with staged_file(file) as staged, staged.open("w") as stream:
        yield stream


def _write_shards(
    async_save: Any, strategy: Any, state: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any
) -> Any:
    """Prepare to write and hash the shards of this rank."""
    tensorboard = get_tensorboard_writer()
    if tensorboard is not None:
        tensorboard.flush()
    dist.barrier()  # rank 0 has created the directory
    request = async_save(strategy, state, checkpoint_dir, *args, **kwargs)
    is_hashed = get_args().verify_integrity and not is_object_store(checkpoint_dir)
    writes_shards = request.async_fn is not None
    if writes_shards and is_hashed:
        return request._replace(async_fn=partial(write_and_hash, request.async_fn))
    return request


def check_optimizer_of_experts(models: list[torch.nn.Module], args: Namespace) -> None:
    """Check that Megatron can save the optimizer state of experts. Must be called on all ranks.

    Experts that are not sharded like other parameters have an optimizer of their own. Rank 0 saves
    what is common to all ranks, but its optimizer of experts is empty if the first pipeline stage
    has none.
    Megatron then fails in its first save, or saves a checkpoint that it cannot load.

    Raises:
        ConfigError: If it would fail in this run.
    """
    if not args.save or args.no_save_optim or not dist.is_initialized():
        return
    if args.use_distributed_optimizer:
        is_affected = not HAVE_APEX_OR_TE
        cause = "--use-distributed-optimizer and torch's Adam"
    else:
        is_affected = args.bf16 or args.fp16
        cause = "half precision and without --use-distributed-optimizer"
    if not is_affected:
        return
    has_experts = any(_has_expert_parameters(model) for model in models)
    has_experts_by_rank = [has_experts] * dist.get_world_size()
    dist.all_gather_object(has_experts_by_rank, has_experts)
    if any(has_experts_by_rank) and not has_experts_by_rank[0]:
        raise ConfigError(
            f"The first pipeline stage has no MoE layers. With {cause}, Megatron cannot save and "
            "resume the optimizer of experts that another stage has. Move a MoE layer to the first "
            "stage, or add --no-save-optim."
        )


def _has_expert_parameters(model: torch.nn.Module) -> bool:
    """Whether Megatron gives parameters of a model to the optimizer of experts."""
    return any(not getattr(parameter, "allreduce", True) for parameter in model.parameters())


def remove_partial_saves(folder: Path) -> None:
    """Delete what killed runs have left of their last save. Only call this as owner of ``folder``.

    If such a run is still alive on a node that was cut off, its save fails.
    """
    for path in partial_saves(folder):
        announce(f"removing {path}, which was left by an interrupted save")
        shutil.rmtree(path, ignore_errors=True)


@cache
def _run_id() -> str:
    """Return a random ID of this run, the same on all ranks. Must be called on all ranks."""
    run_id = [uuid.uuid4().hex[:8]]
    dist.broadcast_object_list(run_id, src=0)
    return run_id[0]
