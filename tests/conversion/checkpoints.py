"""Checkpoints as Megatron really writes them, made by the ranks of ``tests.distributed``."""

import queue
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from kha_megatron.config import KHAConfig

ITERATION = 7


def save_gpt(
    folder: str,
    kha: KHAConfig | None,
    layout: dict[str, int],
    config: dict[str, Any],
    args: dict[str, Any],
) -> dict[str, np.ndarray]:
    """Save a GPTModel the way Megatron's training does; the knocked one unless ``kha`` is None.

    Returns:
        This rank's parameters by their names in the model.
    """
    # imported by the ranks only: the readers under test must do without Megatron
    import torch
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.transformer.enums import AttnBackend

    from tests.distributed import models

    # Megatron would start a manager process for this queue, which a daemonic rank may not; a
    # synchronous save fills and empties it in the rank itself
    filesystem_async._results_queue = queue.Queue()
    models.initialize(**layout)
    transformer = models.transformer_config(**layout, **config)
    model = models.gpt_model(
        transformer,
        kha or KHAConfig(),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    record = {f"kha_{name}": value for name, value in asdict(kha).items()} if kha else {}
    state = {
        "model": model.sharded_state_dict(),
        "optimizer": {
            "state": ShardedTensor.from_rank_offsets(
                "optimizer.state.exp_avg.decoder.final_layernorm.weight",
                torch.zeros(5),
                (0, rank, size),
            ),
            "chained": ShardedTensor.from_rank_offsets(
                "chained_1.optimizer.distributed.param", torch.zeros(5), (0, rank, size)
            ),
        },
        "rng_state": ShardedObject("rng_state", [np.arange(3)], (size,), (rank,)),
        "args": Namespace(**record, attention_backend=AttnBackend.auto, seq_length=12, **args),
        "iteration": ITERATION,
        "checkpoint_version": 3.0,
    }
    path = Path(folder) / f"iter_{ITERATION:07d}"
    if rank == 0:
        path.mkdir(parents=True)
    torch.distributed.barrier()
    dist_checkpointing.save(state, str(path))
    if rank == 0:
        (Path(folder) / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    return {
        name: parameter.detach().float().numpy().copy()
        for name, parameter in model.named_parameters()
    }
