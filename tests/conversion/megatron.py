"""Load and run a checkpoint on the ranks of ``tests.distributed``."""

import queue
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.checkpoint.torch_dist import Record
from tests.conversion.checkpoints import compute_logits, compute_predictions


def load_and_run(
    folder: str,
    ids: list[list[int]],
    layout: dict[str, int],
    dtype: str = "float32",
    save_to: str | None = None,
    predictions: int | None = None,
) -> np.ndarray | None:
    """Return the logits ``[B, S, padded vocabulary]`` of a checkpoint; None on earlier stages.

    Args:
        folder: The ``--save`` directory.
        ids: Token ids ``[B, S]``.
        layout: Parallel sizes.
        dtype: Dtype of the model.
        save_to: Iteration directory to save the model to.
        predictions: Number of MTP layers to build. Their logits are returned as well.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    from kha_megatron.conversion.megatron_model import build_model
    from kha_megatron.mcore.patches import ignore_saved_strides
    from tests.distributed import models

    ignore_saved_strides()
    models.initialize(**layout)
    checkpoint = MegatronCheckpoint.open(folder)
    overrides = {"params_dtype": getattr(torch, dtype), "bf16": dtype == "bfloat16"}
    overrides["mtp_num_layers"] = predictions
    model = build_model(checkpoint, layout | overrides)
    for parameter in model.parameters():  # as Megatron's Float16Module does
        parameter.data = parameter.data.to(getattr(torch, dtype))
    loaded, missing, unexpected = dist_checkpointing.load(
        {"model": model.sharded_state_dict()},
        str(checkpoint.path),
        strict=StrictHandling.RETURN_ALL,
        verify_integrity=True,
    )
    assert not unexpected, sorted(unexpected)[:6]
    # the checkpoint also has the states and norms of Transformer Engine's layers
    assert all(key.endswith("_extra_state") or "norm" in key for key in missing)
    assert loaded["checkpoint_version"] == 3.0
    model.load_state_dict(loaded["model"])
    if save_to is not None:
        _save(model, checkpoint, Path(save_to))
    compute = compute_predictions if predictions else compute_logits
    return compute(model.eval(), torch.tensor(ids))


def _save(model: Any, checkpoint: MegatronCheckpoint, folder: Path) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()  # as in ``checkpoints.save_and_run``
    if torch.distributed.get_rank() == 0:
        folder.mkdir()
    torch.distributed.barrier()
    args = {k: v for k, v in checkpoint.args.items() if not isinstance(v, Record)}
    state = {"model": model.sharded_state_dict(), "args": Namespace(**args)}
    dist_checkpointing.save(state | {"iteration": 1, "checkpoint_version": 3.0}, str(folder))
