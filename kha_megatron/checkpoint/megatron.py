"""Read Megatron's ``torch_dist`` checkpoints in one process, whatever layout of ranks wrote them.

This needs no process group, no GPU and no Megatron, and executes nothing in the files
(:mod:`kha_megatron.checkpoint.torch_dist`).
"""

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
"""Where Megatron-Core before 0.19 saved the state that all ranks share."""

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
"""The names of one norm before ``weight`` or ``bias``. Transformer Engine's layers fuse some norms
into the next linear layer. Megatron's local layers rename some, but not the same, to match."""

_NORM = re.compile(
    rf"(.*\.|)({'|'.join(re.escape(name) for names in NORMS for name in names)})(weight|bias)"
)
_NOT_MODEL = re.compile(r"(optimizer|chained_\d+)\.")
"""Keys of optimizer state. Random states and the like are not stored as tensors."""


def other_names(key: str) -> list[str]:
    """Return the other names of a norm in checkpoints. Empty for other tensors."""
    if (match := _NORM.fullmatch(key)) is None:
        return []
    before, norm, kind = match.groups()
    (names,) = (names for names in NORMS if norm in names)
    return [before + name + kind for name in names if name != norm]


class MegatronCheckpoint:
    """One iteration of a Megatron training run, opened for reading with :meth:`open`.

    Attributes:
        path: The ``iter_0000123`` directory.
    """

    def __init__(self, path: Path, folder: TorchDistFolder) -> None:
        self.path = path
        self._folder = folder

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True) -> "MegatronCheckpoint":
        """Open one iteration, or a ``--save`` directory at the iteration that ``judge`` chooses.

        No tensor is read. ``verify`` checks the hash of each file before it is first read.

        Raises:
            CheckpointError: There is no complete ``torch_dist`` checkpoint, or a file is damaged.
        """
        path = resolve(Path(path))
        mark = path / COMMIT_MARK
        if not mark.is_file():
            raise CheckpointError(
                f"{path} has no {COMMIT_MARK}: the save never completed{choices(path.parent)}"
            )
        checks = FileChecks(path, (verify and read_hashes(path)) or {})
        for name in (COMMIT_MARK, METADATA, LEGACY_COMMON):
            checks.check(name)
        if not is_complete(path):
            raise CheckpointError(f"{mark} is damaged: take another checkpoint")
        return cls(path, TorchDistFolder.open(path, checks))

    def identity(self) -> dict[str, Any]:
        """Return the source of a conversion for its manifest."""
        iteration = self._common.get("iteration")
        return {
            "format": "torch_dist",
            "path": str(self.path),
            "iteration": iteration if type(iteration) is int else None,
            "sha256": hashlib.sha256((self.path / METADATA).read_bytes()).hexdigest(),
        }

    def keys(self) -> dict[str, StoredTensor]:
        """Return the whole shape and dtype of the model's tensors by Megatron's names.

        Layers of a homogeneous model are stacked: ``decoder.layers.mlp.linear_fc1.weight`` is
        ``[L, ...]``. See :meth:`layer_tensor`.
        """
        return {
            key: tensor for key, tensor in self._folder.tensors.items() if not _NOT_MODEL.match(key)
        }

    def tensor(self, key: str, index: tuple[int, ...] = ()) -> Tensor:
        """Return one whole tensor on the CPU, assembled from the shards of all ranks.

        Args:
            key: A key of :meth:`keys`.
            index: Read only this index of the first dimensions, such as a layer and an expert.

        Raises:
            CheckpointError: There is no such tensor, or a shard is damaged.
        """
        if key not in self._folder.tensors:
            raise CheckpointError(f"{self.path} holds no tensor {key}")
        return self._folder.read(key, index)

    def layer_tensor(self, layer: int, suffix: str) -> Tensor:
        """Return a tensor of one decoder layer, which may be stored stacked or on its own.

        Args:
            layer: Global index, from 0.
            suffix: The part of the name after ``decoder.layers.{layer}.``.

        Raises:
            CheckpointError: The layer has no such tensor, or a shard is damaged.
        """
        stacked = self._folder.tensors.get(LAYERS + suffix)
        if stacked is not None and 0 <= layer < stacked.shape[0]:
            return self._folder.read(LAYERS + suffix, (layer,))
        return self.tensor(f"{LAYERS}{layer}.{suffix}")

    def layers_with(self, suffix: str) -> list[int]:
        """Return the layers, from 0, for which :meth:`layer_tensor` has ``suffix``."""
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
                common = load_plain(legacy.read_bytes())
            else:
                common = self._folder.read_object("common_state/shard_0_1")[0]
            return dict(common)
        except CheckpointError:
            raise
        except Exception as error:
            source = legacy if legacy.is_file() else self.path
            raise CheckpointError(
                f"{source} holds no readable training state ({reason(error)}): take another "
                "checkpoint"
            ) from error

    @property
    def iteration(self) -> int:
        """The training iteration that was saved."""
        iteration = self._common.get("iteration")
        if type(iteration) is not int:
            raise CheckpointError(f"{self.path} does not record its iteration")
        return iteration

    @cached_property
    def args(self) -> dict[str, Any]:
        """The command line's arguments as Megatron saved them.

        Enums and other objects are inert :class:`.torch_dist.Record` values.
        """
        args = self._common.get("args")
        if not isinstance(args, Record) or not isinstance(args.state, dict):
            raise CheckpointError(
                f"{self.path} does not record its training arguments: it was not saved by "
                "Megatron's training loop"
            )
        return args.state
