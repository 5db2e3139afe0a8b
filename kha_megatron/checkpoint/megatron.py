"""Read Megatron's ``torch_dist`` checkpoints in one process, without Megatron or a GPU."""

import hashlib
import re
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from kha_megatron.checkpoint.integrity import FileChecks, read_hashes
from kha_megatron.checkpoint.torch_dist import (
    METADATA,
    Record,
    StoredTensor,
    TorchDistFolder,
    load_plain,
    reason,
)
from kha_megatron.checkpoint.tracker import COMMIT_MARK, choices, is_complete, resolve
from kha_megatron.errors import CheckpointError

LEGACY_COMMON = "common.pt"
"""File of the state that all ranks share before Megatron-Core 0.19."""

LAYERS = "decoder.layers."

NORMS = (
    (
        "self_attention.linear_qkv.layer_norm_",
        "input_layernorm.",
        "self_attention.linear_qkv_down_proj.layer_norm_",
    ),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    ("self_attention.linear_q_up_proj.layer_norm_", "self_attention.q_layernorm."),
    ("self_attention.linear_kv_up_proj.layer_norm_", "self_attention.kv_layernorm."),
)
"""The names of each norm. Transformer Engine's layers fuse some norms into the next linear layer,
and Megatron's local layers rename only some of them to match."""

_NORM = re.compile(
    rf"(.*\.|)({'|'.join(re.escape(name) for names in NORMS for name in names)})(weight|bias)"
)
_NOT_MODEL = re.compile(r"(optimizer|chained_\d+)\.")
"""Keys of optimizer state."""


def other_names(key: str) -> list[str]:
    """Return the other names of a norm. Empty for other tensors."""
    if (match := _NORM.fullmatch(key)) is None:
        return []
    before, norm, kind = match.groups()
    (names,) = (names for names in NORMS if norm in names)
    return [before + name + kind for name in names if name != norm]


class MegatronCheckpoint:
    """One iteration of a Megatron training run, ``path``, opened for reading."""

    def __init__(self, path: Path, folder: TorchDistFolder) -> None:
        self.path = path
        self._folder = folder

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True) -> "MegatronCheckpoint":
        """Open an iteration, or the one to load from a ``--save`` directory.

        ``verify`` checks the hash of each file before it is first read.

        Raises:
            CheckpointError: There is no complete ``torch_dist`` checkpoint, or a file is damaged.
        """
        path = resolve(Path(path))
        if not is_complete(path):
            raise CheckpointError(
                f"{path} is incomplete: its {COMMIT_MARK} is missing or damaged. "
                f"{choices(path.parent)}"
            )
        checks = FileChecks(path, (read_hashes(path) if verify else None) or {})
        for name in (METADATA, COMMIT_MARK, LEGACY_COMMON):
            checks.check(name)
        return cls(path, TorchDistFolder(path, checks))

    def identity(self) -> dict[str, Any]:
        """Return the source of a conversion, with a hash of ``.metadata``."""
        iteration = self._common.get("iteration")
        return {
            "format": "torch_dist",
            "path": str(self.path),
            "iteration": iteration if type(iteration) is int else None,
            "sha256": hashlib.sha256((self.path / METADATA).read_bytes()).hexdigest(),
        }

    def keys(self) -> dict[str, StoredTensor]:
        """Return the shape and dtype of the model's tensors by Megatron's names.

        Layers of a homogeneous model are stacked, ``[L, ...]``, and their names have no index.
        """
        return {
            key: tensor for key, tensor in self._folder.tensors.items() if not _NOT_MODEL.match(key)
        }

    def tensor(self, key: str, index: tuple[int, ...] = ()) -> Tensor:
        """Return one whole tensor on the CPU, as :meth:`.TorchDistFolder.read` does."""
        if key not in self._folder.tensors:
            raise CheckpointError(f"{self.path} has no tensor {key}.")
        return self._folder.read(key, index)

    def layer_tensor(self, layer: int, suffix: str) -> Tensor:
        """Return ``decoder.layers.{layer}.{suffix}``, which may be stored stacked or on its own."""
        stacked = self._folder.tensors.get(LAYERS + suffix)
        if stacked is not None and 0 <= layer < stacked.shape[0]:
            return self._folder.read(LAYERS + suffix, (layer,))
        return self.tensor(f"{LAYERS}{layer}.{suffix}")

    def layers_with(self, suffix: str) -> list[int]:
        """Return the indices of the layers that have a tensor ``suffix``."""
        stacked = self._folder.tensors.get(LAYERS + suffix)
        if stacked is not None:
            return list(range(stacked.shape[0]))
        single = re.compile(re.escape(LAYERS) + r"(\d+)\." + re.escape(suffix))
        return sorted(int(m[1]) for key in self._folder.tensors if (m := single.fullmatch(key)))

    @cached_property
    def _common(self) -> dict[str, Any]:
        """The state that all ranks share: arguments, iteration, scheduler."""
        legacy = self.path / LEGACY_COMMON
        try:
            if legacy.is_file():
                return dict(load_plain(legacy.read_bytes()))
            return dict(self._folder.read_object("common_state/shard_0_1")[0])
        except CheckpointError:
            raise
        except Exception as error:  # a damaged pickle can raise anything
            why = f"no readable training state ({reason(error)})"
            raise CheckpointError(f"{self.path} has {why}. Load another one.") from error

    @property
    def iteration(self) -> int:
        """The training iteration."""
        iteration = self._common.get("iteration")
        if type(iteration) is not int:
            raise CheckpointError(f"{self.path} does not record its iteration.")
        return iteration

    @cached_property
    def args(self) -> dict[str, Any]:
        """Megatron's arguments. Enums and other objects are :class:`.torch_dist.Record` values."""
        args = self._common.get("args")
        if not isinstance(args, Record) or not isinstance(args.state, dict):
            raise CheckpointError(f"{self.path} has no training arguments of Megatron's loop.")
        return args.state
