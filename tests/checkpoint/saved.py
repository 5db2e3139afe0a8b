"""Write small checkpoints without Megatron."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from torch import Tensor

from kha_megatron.checkpoint.torch_dist_writer import TorchDistWriter


def save(folder: Path, iteration: int, tensors: dict[str, Tensor], **arguments: Any) -> Path:
    """Write an iteration with whole tensors and Megatron's arguments, and the tracker file."""
    path = folder / f"iter_{iteration:07d}"
    path.mkdir(parents=True)
    with TorchDistWriter(path) as writer:
        for key, tensor in tensors.items():
            writer.write(
                key,
                tensor,
                shape=tensor.shape,
                offsets=(0,) * tensor.ndim,
            )
        common = {"args": Namespace(**arguments), "iteration": iteration}
        writer.close(common | {"checkpoint_version": 3.0}, {})
    (folder / "latest_checkpointed_iteration.txt").write_text(f"{iteration}\n")
    return path
