"""Reader for Megatron's ``torch_dist`` checkpoints. Does not need Megatron, GPUs or torchrun."""

import hashlib
import re
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from kha_megatron.checkpoint.foreign import refuse_foreign_checkpoint
from kha_megatron.checkpoint.integrity import FileChecks, read_hashes
from kha_megatron.checkpoint.reading import read_regular
from kha_megatron.checkpoint.torch_dist import (
    METADATA,
    Record,
    StoredTensor,
    TorchDistFolder,
    load_plain,
    reason,
)
from kha_megatron.checkpoint.tracker import (
    COMMIT_MARK,
    describe_complete,
    find_checkpoint,
    is_complete,
    newest,
)
from kha_megatron.errors import CheckpointError, show_value

LEGACY_COMMON = "common.pt"
"""Before Megatron-Core 0.19, this file had the training arguments and other common state."""

_BRIDGE_CONFIG = "run_config.yaml"
"""Megatron-Bridge writes this file instead of training arguments."""

_MAX_ELEMENTS = 2**16
"""Limit for each of the training arguments."""

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
"""Aliases for norm parameters. Transformer Engine fuses some norms into the next linear layer, and
Megatron only renames some of its local norms to match."""

_ANY_NORM = "|".join(re.escape(name) for name in chain.from_iterable(NORMS))
_NORM_PARAMETER = re.compile(rf"(.*\.|)({_ANY_NORM})(weight|bias)")
_OPTIMIZER_STATE = re.compile(r"(optimizer|chained_\d+)\.")


def other_names(key: str) -> list[str]:
    """Return all aliases of a norm parameter. Empty for any other parameter."""
    match = _NORM_PARAMETER.fullmatch(key)
    if match is None:
        return []
    prefix, norm, suffix = match.groups()
    aliases = []
    for names in NORMS:
        if norm in names:
            aliases += [prefix + name + suffix for name in names if name != norm]
    return aliases


class MegatronCheckpoint:
    """A single iteration of a Megatron checkpoint, opened for reading."""

    def __init__(self, path: Path, folder: TorchDistFolder) -> None:
        self.path = path
        self._folder = folder

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True) -> "MegatronCheckpoint":
        """Open a checkpoint.

        Args:
            path (str | Path): Either a single iteration, or a ``--save`` directory. For the latter,
                we open the checkpoint that training would resume from.
            verify (bool): Verify the hash of each file before reading it for the first time.

        Raises:
            CheckpointError: If there is no complete ``torch_dist`` checkpoint, or it is corrupted.
        """
        path = Path(path)
        if not is_complete(path) and newest(path) is None:
            refuse_foreign_checkpoint(path)
        path = find_checkpoint(path)
        if not is_complete(path):
            raise CheckpointError(
                f"{path} is incomplete, because its {COMMIT_MARK} is missing or corrupted. "
                f"{describe_complete(path.parent)}"
            )
        hashes = read_hashes(path) if verify else None
        checks = FileChecks(path, hashes or {})
        for name in (METADATA, COMMIT_MARK, LEGACY_COMMON):
            checks.check(name)
        folder = TorchDistFolder(path, checks)
        return cls(path, folder)

    def identity(self) -> dict[str, Any]:
        metadata = read_regular(self.path / METADATA)
        return {
            "format": "torch_dist",
            "path": str(self.path),
            "iteration": self.iteration,
            "sha256": hashlib.sha256(metadata).hexdigest(),
        }

    def keys(self) -> dict[str, StoredTensor]:
        """Return all model parameters (no optimizer state) by name.

        Note that Megatron stacks layers if they are all the same. In this case, there is no layer
        index in the name, and tensors have an additional dimension: ``[num_layers, ...]``.
        """
        parameters = {}
        for key, tensor in self._folder.tensors.items():
            if not _OPTIMIZER_STATE.match(key):
                parameters[key] = tensor
        return parameters

    def tensor(self, key: str, index: tuple[int, ...] = ()) -> Tensor:
        """Load a tensor (or a slice of it) to CPU. See :meth:`.TorchDistFolder.read`."""
        return self._folder.read(key, index)

    def layer_tensors(self, suffix: str) -> list[Tensor]:
        """Load ``decoder.layers.*.{suffix}`` of all layers that have it, in order."""
        stacked_key = LAYERS + suffix
        stacked = self._folder.tensors.get(stacked_key)
        if stacked is not None:
            num_layers = stacked.shape[0]
            return [self.tensor(stacked_key, (layer,)) for layer in range(num_layers)]
        key_of_layer = re.compile(rf"{re.escape(LAYERS)}([0-9]+)\.{re.escape(suffix)}")
        keys_by_layer = {}
        for key in self._folder.tensors:
            match = key_of_layer.fullmatch(key)
            if match is not None:
                layer = int(match[1])
                keys_by_layer[layer] = key
        return [self.tensor(keys_by_layer[layer]) for layer in sorted(keys_by_layer)]

    @cached_property
    def _common(self) -> dict[str, Any]:
        legacy = self.path / LEGACY_COMMON
        try:
            if legacy.is_file():
                return dict(load_plain(read_regular(legacy)))
            common = self._folder.read_object("common_state/shard_0_1")
            return dict(common[0])
        except CheckpointError:
            raise
        except Exception as error:  # a damaged pickle can raise anything
            raise CheckpointError(
                f"Could not read the training state of {self.path} ({reason(error)}). Load another "
                "checkpoint."
            ) from error

    @property
    def iteration(self) -> int | None:
        iteration = self._common.get("iteration")
        if type(iteration) is not int:
            return None
        return iteration

    @cached_property
    def args(self) -> dict[str, Any]:
        """Megatron's training arguments. Enums and other objects are :class:`.Record` instances."""
        args = self._common.get("args")
        if not isinstance(args, Record) or not isinstance(args.state, dict):
            if (self.path / _BRIDGE_CONFIG).exists():
                raise CheckpointError(
                    f"{self.path} was saved by Megatron-Bridge. Export it with Bridge's "
                    "AutoBridge.export_ckpt, after kha_megatron.bridge.register_bridge()."
                )
            raise CheckpointError(f"{self.path} does not contain Megatron's training arguments.")
        for name, value in args.state.items():
            if not _is_small(value):
                raise CheckpointError(
                    f"The argument {show_value(name)} in {self.path} has more than "
                    f"{_MAX_ELEMENTS:,} elements. The checkpoint is corrupted or malicious. Load "
                    "another checkpoint."
                )
        return args.state


def _is_small(value: Any) -> bool:
    """Whether a value can be printed, compared and hashed in little time.

    The size of the file does not limit the number of elements: if each of forty pairs contains the
    previous one twice, the last one has 2^40 elements.
    """
    unchecked = [value]
    num_checked = 0
    while unchecked:
        element = unchecked.pop()
        num_checked += 1
        if isinstance(element, dict):
            unchecked += element.keys()
            unchecked += element.values()
        elif isinstance(element, list | tuple | set):
            unchecked += element
        elif isinstance(element, Record):
            unchecked += (element.arguments, element.state)
        if num_checked + len(unchecked) > _MAX_ELEMENTS:
            return False
    return True
