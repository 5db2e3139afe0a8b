"""Read a Hugging Face model directory: ``config.json`` and safetensors files. No code is run."""

import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kha_megatron.checkpoint.manifest import MANIFEST, read_manifest
from kha_megatron.checkpoint.reading import is_file_name, read_json
from kha_megatron.checkpoint.safetensors_file import (
    NAMES,
    TensorEntry,
    bytes_of,
    read_header,
    read_tensor,
)
from kha_megatron.errors import CheckpointError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
"""If peft is installed, transformers applies the adapter that this file describes to the model."""

_REMEDY = f"copy it again, or delete {MANIFEST} if you changed the model on purpose"


def is_hf_folder(path: Path) -> bool:
    """Return whether a directory holds a Hugging Face model."""
    return (path / CONFIG).is_file()


class HFCheckpoint:
    """A model directory, opened for reading with :meth:`open`.

    Attributes:
        path: The directory.
        config: The content of ``config.json``.
    """

    def __init__(
        self, path: Path, config: dict[str, Any], tensors: dict[str, tuple[Path, TensorEntry]]
    ) -> None:
        self.path = path
        self.config = config
        self._tensors = tensors
        self._digests = _check_manifest(path, tensors)

    @classmethod
    def open(cls, path: str | Path) -> "HFCheckpoint":
        """Open a directory and read the headers of its safetensors files, but no tensor.

        Raises:
            CheckpointError: A file is missing or damaged, an index or a link leads out of the
                directory, ``manifest.json`` lists other tensors, or there is an adapter.
        """
        path = Path(path)
        if not is_hf_folder(path):
            raise CheckpointError(f"{path} has no {CONFIG}: name a Hugging Face model folder")
        if (path / ADAPTER).is_file():
            raise CheckpointError(
                f"{path} has {ADAPTER}, so transformers may load another model than its weights: "
                "merge the adapter (peft's merge_and_unload), or move the file away"
            )
        config, weight_map = json_object(path / CONFIG), _weight_map(path)
        headers = {}
        for name in dict.fromkeys(weight_map.values()) or (WEIGHTS,):
            if not has_file(path, name):
                raise CheckpointError(f"{path / name} is missing: copy the model again")
            headers[name] = read_header(path / name)
        for key, name in weight_map.items():
            if key not in headers[name]:
                raise CheckpointError(f"{path / name} does not hold {key}, which {INDEX} lists")
        # transformers also loads tensors that the index does not list
        files = {key: name for name, held in headers.items() for key in held} | weight_map
        return cls(path, config, {k: (path / name, headers[name][k]) for k, name in files.items()})

    def identity(self) -> dict[str, Any]:
        """Return the source of a conversion, with the hash of ``config.json`` and the index."""
        digest = hashlib.sha256((self.path / CONFIG).read_bytes())
        if (self.path / INDEX).is_file():
            digest.update((self.path / INDEX).read_bytes())
        return {
            "format": "huggingface",
            "path": str(self.path),
            "iteration": None,
            "sha256": digest.hexdigest(),
        }

    def keys(self) -> dict[str, TensorEntry]:
        """Return the shape and dtype of every tensor, sorted by name."""
        return {key: entry for key, (_, entry) in sorted(self._tensors.items())}

    def tensor(self, key: str) -> Tensor:
        """Return one tensor on the CPU in its stored dtype. Several threads may call this.

        If the directory has a ``manifest.json``, the hash of the tensor is checked.

        Raises:
            CheckpointError: There is no such tensor, or it is damaged.
        """
        if key not in self._tensors:
            raise CheckpointError(f"{self.path} holds no tensor {key}")
        file, _ = self._tensors[key]
        tensor = read_tensor(file, key)
        if self._digests and (
            (found := hashlib.sha256(bytes_of(tensor)).hexdigest())
            != (expected := self._digests[key])
        ):
            raise CheckpointError(
                f"{file}: {key} is damaged or was changed: its SHA-256 begins with "
                f"{found[:12]}, {MANIFEST} says {expected[:12]}: {_REMEDY}"
            )
        return tensor

    def linears(self, keys: Sequence[str]) -> Tensor:
        """Return the weights of square ``torch.nn.Linear`` layers, ``[n, in, out]``."""
        return torch.stack([self.tensor(key).T for key in keys])


def json_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raise CheckpointError if it cannot be read."""
    try:
        value = read_json(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is no readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a {type(value).__name__} instead of an object")
    return value


def _check_manifest(path: Path, tensors: dict[str, tuple[Path, TensorEntry]]) -> dict[str, str]:
    """Return the SHA-256 of each tensor from the manifest, which must list the same tensors."""
    listed = read_manifest(path)
    if listed is None:
        return {}
    for key in sorted(listed.keys() | tensors.keys()):
        if key not in tensors:
            raise CheckpointError(f"{path} lacks {key}, which {MANIFEST} lists: {_REMEDY}")
        entry = tensors[key][1]
        found = NAMES[entry.dtype], list(entry.shape)
        expected = tuple(listed.get(key, {}).get(name) for name in ("dtype", "shape"))
        if found != expected:
            raise CheckpointError(
                f"{path}: {key} is {found[0]} {found[1]}, {MANIFEST} says {expected[0]} "
                f"{expected[1]}: {_REMEDY}"
            )
    return {key: entry["sha256"] for key, entry in listed.items()}


def _weight_map(path: Path) -> dict[str, str]:
    """Return the file of each tensor from the index; empty for a model in one file.

    Like transformers, prefer ``model.safetensors`` to an index that another model left behind.
    """
    if (path / WEIGHTS).is_file():
        return {}
    if not (path / INDEX).is_file():
        raise CheckpointError(
            f"{path} has neither {WEIGHTS} nor {INDEX}: save the model with safetensors (other "
            "formats can execute code and are not read)"
        )
    weight_map = json_object(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path / INDEX} has no weight_map")
    for name in weight_map.values():
        if not is_file_name(name):
            raise CheckpointError(
                f"{path / INDEX} points to {name!r}: shards must lie in the folder itself"
            )
    return weight_map


def has_file(folder: Path, name: str) -> bool:
    """Return whether a model directory holds a file.

    Links must stay in the directory or lead into the blobs of the Hugging Face cache.

    Raises:
        CheckpointError: The file is a link that leads elsewhere, or not a regular file.
    """
    path, home = (Path(os.path.realpath(place)) for place in (folder / name, folder))
    in_cache = home.parent.name == "snapshots" and path.parent == home.parent.parent / "blobs"
    if not in_cache and not path.is_relative_to(home):
        raise CheckpointError(
            f"{folder / name} is a link to {path}: the files of a model must lie in its folder"
        )
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{folder / name} is no regular file: copy the model again")
    return path.is_file()


def copy_file(folder: Path, name: str, target: Path) -> None:
    """Copy a file of a model directory. Raise CheckpointError as :func:`has_file` does."""
    has_file(folder, name)
    shutil.copyfile(folder / name, target)
