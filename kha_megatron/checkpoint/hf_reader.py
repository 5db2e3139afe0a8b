"""Read a Hugging Face model directory: ``config.json`` and safetensors files. No code is run."""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kha_megatron.checkpoint.integrity import is_file_name
from kha_megatron.checkpoint.manifest import MANIFEST, read_manifest
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
"""If peft is installed, transformers applies the adapter that this file describes."""

_REMEDY = f"Copy the model again, or delete {MANIFEST} if you changed the model on purpose."


def is_hf_folder(path: Path) -> bool:
    """Return whether a directory holds a Hugging Face model."""
    return (path / CONFIG).is_file()


class HFCheckpoint:
    """A model directory opened for reading. ``config`` is the content of ``config.json``."""

    def __init__(
        self, path: Path, config: dict[str, Any], tensors: dict[str, tuple[Path, TensorEntry]]
    ) -> None:
        self.path = path
        self.config = config
        self._tensors = tensors
        self._digests = _read_digests(path, tensors)

    @classmethod
    def open(cls, path: str | Path) -> "HFCheckpoint":
        """Open a directory and read the headers of its safetensors files.

        Raises:
            CheckpointError: A file is missing or damaged, an index or a link leads out of the
                directory, ``manifest.json`` lists other tensors, or there is an adapter.
        """
        path = Path(path)
        if not is_hf_folder(path):
            raise CheckpointError(f"{path} has no {CONFIG}. Expected a Hugging Face directory.")
        if (path / ADAPTER).is_file():
            raise CheckpointError(f"{path} has {ADAPTER}. Merge the adapter with merge_and_unload.")
        config, weight_map = json_object(path / CONFIG), _weight_map(path)
        headers = {}
        for name in dict.fromkeys(weight_map.values()) or (WEIGHTS,):
            if not has_file(path, name):
                raise CheckpointError(f"{path / name} is missing. Copy the model again.")
            headers[name] = read_header(path / name)
        files: dict[str, str] = {}
        for name, entries in headers.items():  # includes tensors that the index does not list
            for key in entries:
                if (other := files.setdefault(key, name)) != name:
                    raise CheckpointError(
                        f"{path}: both {other} and {name} contain {key}, and other programs may "
                        "read a different one. Copy the model again."
                    )
        return cls(path, config, {k: (path / name, headers[name][k]) for k, name in files.items()})

    def identity(self) -> dict[str, Any]:
        """Return the source of a conversion, with a hash of ``config.json`` and the index."""
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
        """Return one tensor on the CPU in its stored dtype. Thread-safe.

        Raises:
            CheckpointError: There is no such tensor, or its hash differs from ``manifest.json``.
        """
        if key not in self._tensors:
            raise CheckpointError(f"{self.path} has no tensor {key}.")
        file, _ = self._tensors[key]
        tensor = read_tensor(file, key)
        if self._digests:
            found = hashlib.sha256(bytes_of(tensor)).hexdigest()
            if found != (expected := self._digests[key]):
                raise CheckpointError(
                    f"{file}: {key} is damaged or was changed. Expected SHA-256 {expected[:12]}... "
                    f"as in {MANIFEST}, got {found[:12]}... {_REMEDY}"
                )
        return tensor

    def linears(self, keys: Sequence[str]) -> Tensor:
        """Return the transposed weights of ``torch.nn.Linear`` layers, ``[n, in, out]``."""
        return torch.stack([self.tensor(key).T for key in keys])


def json_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raise CheckpointError if it cannot be read."""
    try:
        return {**json.loads(file.read_bytes())}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read as a JSON object: {error}.") from error


def _read_digests(path: Path, tensors: dict[str, tuple[Path, TensorEntry]]) -> dict[str, str]:
    """Return the SHA-256 of each tensor from the manifest, which must list the same tensors."""
    manifest = read_manifest(path)
    expected = {key: (dtype, shape) for key, (dtype, shape, _) in manifest.items()}
    found = {key: (NAMES[entry.dtype], list(entry.shape)) for key, (_, entry) in tensors.items()}
    for key in sorted(expected.keys() | found.keys()) if manifest else ():
        if found.get(key) != expected.get(key):
            raise CheckpointError(
                f"{path}: expected {key} to be {expected.get(key, 'absent')} as in {MANIFEST}, got "
                f"{found.get(key, 'no such tensor')}. {_REMEDY}"
            )
    return {key: digest for key, (_, _, digest) in manifest.items()}


def _weight_map(path: Path) -> dict[str, str]:
    """Return the file of each tensor from the index; empty for a model in one file.

    Like transformers, prefer ``model.safetensors`` to an index that another model left behind.
    """
    if (path / WEIGHTS).is_file():
        return {}
    if not (path / INDEX).is_file():
        raise CheckpointError(f"{path} has neither {WEIGHTS} nor {INDEX}. Save it as safetensors.")
    weight_map: Any = json_object(path / INDEX).get("weight_map")
    files = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not files or not all(map(is_file_name, files)):
        raise CheckpointError(f"{path / INDEX}: expected a weight_map to files in the directory.")
    return dict(weight_map)


def has_file(folder: Path, name: str) -> bool:
    """Return whether a model directory holds a file.

    Links must stay in the directory or lead into the blobs of the Hugging Face cache.

    Raises:
        CheckpointError: The file is a link that leads elsewhere.
    """
    path, home = (Path(os.path.realpath(place)) for place in (folder / name, folder))
    in_cache = home.parent.name == "snapshots" and path.parent == home.parent.parent / "blobs"
    if not in_cache and not path.is_relative_to(home):
        raise CheckpointError(f"{folder / name} is a link to {path}. Copy the file instead.")
    return path.is_file()


def copy_file(folder: Path, name: str, target: Path) -> None:
    """Copy a file of a model directory. Raise CheckpointError as :func:`has_file` does."""
    has_file(folder, name)
    shutil.copyfile(folder / name, target)
