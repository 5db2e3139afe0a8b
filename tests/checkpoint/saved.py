"""Small checkpoints without Megatron, for tests of what finds and judges them."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from torch import Tensor

from kha_megatron.checkpoint.torch_dist_writer import TorchDistWriter


def save(folder: Path, iteration: int, tensors: dict[str, Tensor], **arguments: Any) -> Path:
    """One iteration and a tracker file that names it, as ``--save`` leaves them.

    Args:
        folder: what ``--save`` names.
        iteration: its number.
        tensors: whole, by Megatron's names.
        arguments: Megatron's, which the checkpoint records.
    """
    path = folder / f"iter_{iteration:07d}"
    path.mkdir(parents=True)
    with TorchDistWriter(path) as writer:
        for key, tensor in tensors.items():
            writer.write(key, tensor, shape=tensor.shape, offsets=(0,) * tensor.ndim)
        common = {"args": Namespace(**arguments), "iteration": iteration}
        writer.close(common | {"checkpoint_version": 3.0}, {})
    (folder / "latest_checkpointed_iteration.txt").write_text(f"{iteration}\n")
    return path
