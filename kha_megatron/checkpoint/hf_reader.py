"""Minimal reader for Hugging Face models. It never runs code from the model directory."""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kha_megatron.checkpoint.foreign import (
    refuse_adapter,
    refuse_foreign_checkpoint,
    refuse_foreign_weights,
)
from kha_megatron.checkpoint.integrity import is_file_name
from kha_megatron.checkpoint.manifest import MANIFEST, read_manifest
from kha_megatron.checkpoint.reading import MAX_JSON_BYTES, read_regular
from kha_megatron.checkpoint.safetensors_file import (
    DTYPE_NAMES,
    TensorEntry,
    bytes_of,
    read_header,
    read_tensor,
)
from kha_megatron.errors import CheckpointError, download_hint
from kha_megatron.lfs import refuse_lfs_pointer

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_REMEDY = f"Copy the model again, or delete {MANIFEST} if you changed the model on purpose."


def is_hf_folder(path: Path) -> bool:
    """Return True if ``path`` is a Hugging Face model directory."""
    return (path / CONFIG).is_file()


class _FileEntry(NamedTuple):
    """A tensor and the file that contains it."""

    file: Path
    entry: TensorEntry


class HFCheckpoint:
    """An open Hugging Face model. ``config`` is the parsed ``config.json``."""

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        tensors: dict[str, _FileEntry],
    ) -> None:
        self.path = path
        self.config = config
        self._tensors = tensors
        self._digests = _read_digests(path, tensors)

    @classmethod
    def open(cls, path: str | Path) -> "HFCheckpoint":
        """Open a model directory. Only reads the headers of the safetensors files.

        Raises:
            CheckpointError: If files are missing or corrupted, point outside of the directory, or
                do not match ``manifest.json``. PEFT adapters are also rejected.
        """
        path = Path(path)
        if not is_hf_folder(path):
            refuse_foreign_checkpoint(path)
            raise CheckpointError(
                f"{CONFIG} not found in {path}. Is this a Hugging Face model directory?"
                f"{download_hint(path)}"
            )
        refuse_adapter(path)  # transformers would load it on top of the model
        config = json_object(path / CONFIG)
        weight_map = _weight_map(path)
        file_names = list(dict.fromkeys(weight_map.values())) if weight_map else [WEIGHTS]
        tensors: dict[str, _FileEntry] = {}
        for name in file_names:
            file = path / name
            if not has_file(path, name):
                raise CheckpointError(f"{file} not found. Copy the model again.")
            for key, entry in read_header(file).items():  # not just those in the index
                if key in tensors:
                    other_file = tensors[key].file
                    raise CheckpointError(
                        f"Duplicate tensor {key} in {other_file.name} and {name} of {path}. Remove "
                        "one of them, because libraries differ in which one they load."
                    )
                tensors[key] = _FileEntry(file, entry)
        return cls(path, config, tensors)

    def identity(self) -> dict[str, Any]:
        digest = hashlib.sha256(read_regular(self.path / CONFIG))
        index = self.path / INDEX
        if index.is_file():
            digest.update(read_regular(index))
        return {
            "format": "huggingface",
            "path": str(self.path),
            "iteration": None,
            "sha256": digest.hexdigest(),
        }

    def keys(self) -> dict[str, TensorEntry]:
        """Return the metadata of all tensors, sorted by name."""
        entries = {}
        for key in sorted(self._tensors):
            entries[key] = self._tensors[key].entry
        return entries

    def tensor(self, key: str) -> Tensor:
        """Load a tensor to CPU. Can be called from multiple threads.

        If there is a ``manifest.json``, this also verifies the SHA-256 of the tensor.
        """
        file = self._tensors[key].file
        tensor = read_tensor(file, key)
        if self._digests:
            expected = self._digests[key]
            digest = hashlib.sha256(bytes_of(tensor)).hexdigest()
            if digest != expected:
                raise CheckpointError(
                    f"Checksum mismatch for {key} in {file}: {MANIFEST} lists SHA-256 "
                    f"{expected[:12]}..., but the tensor has {digest[:12]}... {_REMEDY}"
                )
        return tensor

    def linears(self, keys: Sequence[str]) -> Tensor:
        """Load and stack weights of ``torch.nn.Linear``, which are transposed for ``x @ weight``.

        Returns:
            Tensor: ``[len(keys), in_features, out_features]``
        """
        return torch.stack([self.tensor(key).T for key in keys])


def json_object(file: Path) -> dict[str, Any]:
    """Like ``json.loads``, but raises CheckpointError unless the file is a JSON object."""
    refuse_lfs_pointer(file, CheckpointError)
    try:
        content = json.loads(read_regular(file, MAX_JSON_BYTES))
        return {**content}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"Could not read {file} as a JSON object: {error}.") from error


def _read_digests(path: Path, tensors: dict[str, _FileEntry]) -> dict[str, str]:
    """Load the checksums from the manifest, and check that it matches the tensors."""
    manifest = read_manifest(path)
    if not manifest:
        return {}
    for key in sorted(manifest.keys() | tensors.keys()):
        expected: Any = "absent"
        if key in manifest:
            listed = manifest[key]
            expected = (listed.dtype, listed.shape)
        actual: Any = "absent"
        if key in tensors:
            entry = tensors[key].entry
            actual = (DTYPE_NAMES[entry.dtype], list(entry.shape))
        if actual != expected:
            raise CheckpointError(
                f"{path} does not match its {MANIFEST}: {key} should be {expected}, but is "
                f"{actual}. {_REMEDY}"
            )
    return {key: listed.sha256 for key, listed in manifest.items()}


def _weight_map(path: Path) -> dict[str, str]:
    """Read the ``weight_map`` of the index (empty for single-file models).

    Like transformers, we prefer ``model.safetensors`` if both exist. In that case, the index might
    be left over from another model.
    """
    if (path / WEIGHTS).is_file():
        return {}
    if not (path / INDEX).is_file():
        refuse_foreign_weights(path)
        raise CheckpointError(
            f"Neither {WEIGHTS} nor {INDEX} found in {path}. Save the model with "
            "safe_serialization=True."
        )
    weight_map: Any = json_object(path / INDEX).get("weight_map")
    if not _is_weight_map(weight_map):
        raise CheckpointError(
            f"Invalid weight_map in {path / INDEX}: it must map tensors to files in the same "
            "directory."
        )
    return dict(weight_map)


def _is_weight_map(weight_map: Any) -> bool:
    if not isinstance(weight_map, dict) or not weight_map:
        return False
    return all(is_file_name(name) for name in weight_map.values())


def has_file(folder: Path, name: str) -> bool:
    """Check if a model directory contains a file. See :func:`_real_path` for symlinks."""
    return _real_path(folder, name).is_file()


def copy_file(folder: Path, name: str, target: Path) -> None:
    """Copy a file from a model directory. See :func:`_real_path` for symlinks."""
    shutil.copyfile(_real_path(folder, name), target)


def _real_path(folder: Path, name: str) -> Path:
    """Resolve symlinks in the path of a file.

    Raises:
        CheckpointError: If the path leads out of the directory, except to the blobs of the Hugging
            Face cache.
    """
    real_path = Path(os.path.realpath(folder / name))
    real_folder = Path(os.path.realpath(folder))
    is_in_cache = False
    if real_folder.parent.name == "snapshots":  # the cache has snapshots/COMMIT and blobs
        blobs = real_folder.parent.parent / "blobs"
        is_in_cache = real_path.parent == blobs
    if not is_in_cache and not real_path.is_relative_to(real_folder):
        raise CheckpointError(
            f"{folder / name} is a symbolic link to {real_path}, outside of the model directory. "
            "Replace the link by a copy of the file."
        )
    return real_path
