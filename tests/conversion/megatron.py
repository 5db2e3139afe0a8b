"""Load and run a checkpoint on the ranks of ``tests.distributed``."""

import queue
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.checkpoint.torch_dist import Record


def load_and_run(
    folder: str,
    ids: list[list[int]],
    layout: dict[str, int],
    dtype: str = "float32",
    save_to: str | None = None,
) -> np.ndarray | None:
    """Return the logits ``[B, S, padded vocabulary]`` of a checkpoint; None on earlier stages.

    Args:
        folder: The ``--save`` directory.
        ids: Token ids ``[B, S]``.
        layout: Parallel sizes.
        dtype: Dtype of the model.
        save_to: Iteration directory to save the model to.
    """
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.validation import StrictHandling

    from kha_megatron.conversion.megatron_model import build
    from tests.distributed import models

    models.initialize(**layout)
    checkpoint = MegatronCheckpoint.open(folder)
    overrides = {"params_dtype": getattr(torch, dtype), "bf16": dtype == "bfloat16"}
    model = build(checkpoint, layout | overrides)
    for parameter in model.parameters():  # as Megatron's Float16Module does
        parameter.data = parameter.data.to(getattr(torch, dtype))
    loaded = dist_checkpointing.load(
        {"model": model.sharded_state_dict()},
        str(checkpoint.path),
        strict=StrictHandling.RAISE_UNEXPECTED,
    )
    model.load_state_dict(loaded["model"])
    if save_to is not None:
        _save(model, checkpoint, Path(save_to))
    tokens = torch.tensor(ids)
    batch, length = tokens.shape
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    with torch.no_grad():
        if not first:
            hidden = torch.empty(length, batch, model.config.hidden_size)
            torch.distributed.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
            model.set_input_tensor(hidden)
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        output = model.eval()(tokens, torch.arange(length).expand_as(tokens), mask)
        if not last:
            torch.distributed.send(output, parallel_state.get_pipeline_model_parallel_next_rank())
            return None
    return output.float().numpy()


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
