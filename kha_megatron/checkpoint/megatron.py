"""Read Megatron's ``torch_dist`` checkpoints in one process, whatever layout of ranks wrote them.

No process group, no GPU, no Megatron import, and nothing in the files is executed
(:mod:`kha_megatron.checkpoint.torch_dist`).
"""

import hashlib
import re
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from kha_megatron.checkpoint.integrity import FileChecks
from kha_megatron.checkpoint.reading import read_bytes, read_json
from kha_megatron.checkpoint.torch_dist import (
    METADATA,
    Record,
    StoredTensor,
    TorchDistFolder,
    load_plain,
    reason,
)
from kha_megatron.checkpoint.tracker import COMMIT_MARK, choices, resolve
from kha_megatron.errors import CheckpointError

LEGACY_COMMON = "common.pt"
"""Where Megatron-Core kept what all ranks have in common before 0.19."""

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
"""What one norm is called, before ``weight`` or ``bias``: Transformer Engine's layers fuse some
into the linear layer behind, and Megatron's local ones rename some, but not the same, to match."""

_NORM = re.compile(
    rf"(.*\.|)({'|'.join(re.escape(name) for names in NORMS for name in names)})(weight|bias)"
)
_NOT_MODEL = re.compile(r"(optimizer|chained_\d+)\.")
"""Keys of optimizer state; random states and the like are not stored as tensors."""


def other_names(key: str) -> list[str]:
    """What else a norm may be called in a checkpoint of other layers; nothing for other tensors."""
    if (match := _NORM.fullmatch(key)) is None:
        return []
    before, norm, kind = match.groups()
    (names,) = (names for names in NORMS if norm in names)
    return [before + name + kind for name in names if name != norm]


class MegatronCheckpoint:
    """One iteration of a Megatron training run, opened for reading. Make it with :meth:`open`.

    Attributes:
        path: the ``iter_0000123`` folder.
    """

    def __init__(self, path: Path, folder: TorchDistFolder) -> None:
        self.path = path
        self._folder = folder

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True) -> "MegatronCheckpoint":
        """Open a ``--save`` folder at the iteration that ``tracker.judge`` takes, or one iteration.

        Every shard is checked to exist and to be long enough; no tensor is read. With ``verify``
        a file that ``integrity.json`` lists is hashed before anything is read from it, the shards
        when their first tensor is.

        Raises:
            CheckpointError: there is no complete ``torch_dist`` checkpoint; the message names the
                file that is missing or damaged.
        """
        path = resolve(Path(path))
        mark = path / COMMIT_MARK
        if not mark.is_file():
            if any(path.glob("mp_rank_*")):
                raise CheckpointError(
                    f"{path} is in Megatron's old torch format: let Megatron convert it with "
                    "--ckpt-convert-format torch_dist --ckpt-convert-save FOLDER"
                )
            raise CheckpointError(
                f"{path} has no {COMMIT_MARK}: the save never completed{choices(path.parent)}"
            )
        checks = FileChecks.of(path) if verify else FileChecks(path)
        for name in (COMMIT_MARK, METADATA, LEGACY_COMMON):
            checks.check(name)
        try:
            backend = read_json(mark)["sharded_backend"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"{mark} is damaged: take another checkpoint") from error
        if backend != "torch_dist":
            raise CheckpointError(
                f"{mark} names the format {backend!r}, and only torch_dist can be read: save with "
                "--ckpt-format torch_dist"
            )
        return cls(path, TorchDistFolder.open(path, checks))

    def verifying(self) -> AbstractContextManager[None]:
        """Around reading many tensors: shards are hashed beside the reading, not before it.

        Leaving the block waits for the hashes and raises ``CheckpointError`` if a shard that was
        read from is damaged, so what is made of the tensors must not be published inside of it::

            with staged_folder(target) as folder:
                with checkpoint.verifying():
                    ...  # read tensors, write them to folder
        """
        return self._folder.checks.beside()

    def identity(self) -> dict[str, Any]:
        """Which checkpoint this is, for the manifest of what is made from it."""
        iteration = self._common.get("iteration")
        return {
            "format": "torch_dist",
            "path": str(self.path),
            "iteration": iteration if type(iteration) is int else None,
            "sha256": hashlib.sha256(read_bytes(self.path / METADATA)).hexdigest(),
        }

    def keys(self) -> dict[str, StoredTensor]:
        """The model's tensors as Megatron stores them, by name, with whole shapes and dtypes.

        Layers of a homogeneous model are stacked: ``decoder.layers.mlp.linear_fc1.weight`` is
        ``[L, ...]``. See :meth:`layer_tensor`.
        """
        return {
            key: tensor for key, tensor in self._folder.tensors.items() if not _NOT_MODEL.match(key)
        }

    def tensor(self, key: str, index: tuple[int, ...] = ()) -> Tensor:
        """One whole tensor on the CPU, assembled from the shards of all ranks.

        Like :meth:`layer_tensor`, safe to call from several threads.

        Args:
            key: a key of :meth:`keys`.
            index: take only this index of the first dimensions, such as a layer and an expert.

        Raises:
            CheckpointError: no such key, or a damaged shard.
        """
        if key not in self._folder.tensors:
            raise CheckpointError(f"{self.path} holds no tensor {key}")
        return self._folder.read(key, index)

    def layer_tensor(self, layer: int, suffix: str) -> Tensor:
        """A tensor of one decoder layer, stored stacked (homogeneous models) or by itself.

        Args:
            layer: global, counted from 0.
            suffix: what follows ``decoder.layers.{layer}.``.

        Raises:
            CheckpointError: the layer has no such tensor, or a damaged shard.
        """
        stacked = self._folder.tensors.get(LAYERS + suffix)
        if stacked is not None and 0 <= layer < stacked.shape[0]:
            return self._folder.read(LAYERS + suffix, (layer,))
        return self.tensor(f"{LAYERS}{layer}.{suffix}")

    def layers_with(self, suffix: str) -> list[int]:
        """The layers, counted from 0, for which :meth:`layer_tensor` has ``suffix``."""
        stacked = self._folder.tensors.get(LAYERS + suffix)
        if stacked is not None:
            return list(range(stacked.shape[0]))
        single = re.compile(re.escape(LAYERS) + r"(\d+)\." + re.escape(suffix))
        return sorted(int(m[1]) for key in self._folder.tensors if (m := single.fullmatch(key)))

    @cached_property
    def _common(self) -> dict[str, Any]:
        """What every rank had in common: arguments, iteration, scheduler."""
        legacy = self.path / LEGACY_COMMON
        try:
            if legacy.is_file():
                common = load_plain(read_bytes(legacy))
            else:
                common = self._folder.read_object("common_state/shard_0_1")[0]
            if not isinstance(common, dict):
                raise TypeError(f"it is a {type(common).__name__}")
        except CheckpointError:
            raise
        except Exception as error:
            source = legacy if legacy.is_file() else self.path
            raise CheckpointError(
                f"{source} holds no readable training state ({reason(error)}): take another "
                "checkpoint"
            ) from error
        return common

    @property
    def iteration(self) -> int:
        """The training iteration that was saved.

        Raises:
            CheckpointError: the checkpoint does not record it, or is damaged.
        """
        iteration = self._common.get("iteration")
        if type(iteration) is not int:
            raise CheckpointError(f"{self.path} does not record its iteration")
        return iteration

    @cached_property
    def args(self) -> dict[str, Any]:
        """The command line's arguments as Megatron saved them.

        Plain values are themselves; enums and other objects are inert
        :class:`~kha_megatron.checkpoint.torch_dist.Record` values.

        Raises:
            CheckpointError: the checkpoint does not record them, or is damaged.
        """
        args = self._common.get("args")
        if not isinstance(args, Record) or not isinstance(args.state, dict):
            raise CheckpointError(
                f"{self.path} does not record its training arguments: it was not saved by "
                "Megatron's training loop"
            )
        return args.state
