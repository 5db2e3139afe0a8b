"""Read a Hugging Face model folder: ``config.json`` and safetensors, nothing that can execute."""

import hashlib
import math
import os
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kha_megatron.checkpoint.buffers import bytes_of, from_file
from kha_megatron.checkpoint.manifest import MANIFEST, read_manifest
from kha_megatron.checkpoint.reading import (
    is_file_name,
    opened,
    read_bytes,
    read_json,
    regular_below,
)
from kha_megatron.checkpoint.safetensors_file import NAMES, Stored, TensorEntry, read_header
from kha_megatron.checkpoint.staging import SLICE
from kha_megatron.errors import CheckpointError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
"""Where peft is installed, transformers lays the adapter that it describes over the weights."""


def is_hf_folder(path: Path) -> bool:
    """Whether a folder holds a Hugging Face model rather than a Megatron checkpoint."""
    return os.path.isfile(path / CONFIG)  # of a path of any length


class HFCheckpoint:
    """A model folder, opened for reading. Make it with :meth:`open`.

    Attributes:
        path: the folder.
        config: ``config.json`` as it is.
    """

    def __init__(
        self, path: Path, config: dict[str, Any], tensors: dict[str, tuple[Path, Stored]]
    ) -> None:
        self.path = path
        self.config = config
        self._tensors = tensors
        self._digests = _listed(path, tensors)

    @classmethod
    def open(cls, path: str | Path) -> "HFCheckpoint":
        """Open a folder and read the headers of all its safetensors files, no tensor.

        Raises:
            CheckpointError: a file is missing, damaged, or not where an index may point, or
                ``manifest.json`` lists other tensors, or an adapter changes what they compute.
        """
        path = Path(path)
        if not is_hf_folder(path):
            raise CheckpointError(f"{path} has no {CONFIG}: name a Hugging Face model folder")
        if os.path.isfile(path / ADAPTER):
            raise CheckpointError(
                f"{path} has {ADAPTER}: its weights alone are another model than transformers "
                "loads where peft is installed: merge the adapter (peft's merge_and_unload), or "
                "move it out of the folder"
            )
        config, weight_map = json_object(path / CONFIG), _weight_map(path)
        names = dict.fromkeys(weight_map.values()) or (WEIGHTS,)
        headers = {name: _header(path, name) for name in names}
        for key, name in weight_map.items():
            if key not in headers[name]:
                raise CheckpointError(
                    f"{path / name} does not hold {key}, which {INDEX} says it does"
                )
        # transformers loads what the files hold, listed or not
        files = {key: name for name in names for key in headers[name]} | weight_map
        return cls(path, config, {k: (path / name, headers[name][k]) for k, name in files.items()})

    def identity(self) -> dict[str, Any]:
        """Which model this is, for the manifest of what is made from it.

        ``sha256`` is of the configuration and of the index, if there is one.
        """
        digest = hashlib.sha256(read_bytes(self.path / CONFIG))
        if (self.path / INDEX).is_file():
            digest.update(read_bytes(self.path / INDEX))
        return {
            "format": "huggingface",
            "path": str(self.path),
            "iteration": None,
            "sha256": digest.hexdigest(),
        }

    def verifying(self) -> AbstractContextManager[None]:
        """Around reading many tensors: each is compared with ``manifest.json`` as it is read."""
        return nullcontext()

    def keys(self) -> dict[str, TensorEntry]:
        """All tensors by name, sorted, with shapes and dtypes."""
        return {key: place.entry for key, (_, place) in sorted(self._tensors.items())}

    def tensor(self, key: str) -> Tensor:
        """One tensor on the CPU in its stored dtype. Safe to call from several threads.

        A large one is mapped, not copied (:func:`~kha_megatron.checkpoint.buffers.from_file`).
        What it returns has been compared with ``manifest.json``, if the folder has one.

        Raises:
            CheckpointError: no such key, or its bytes are damaged or were changed.
        """
        if key not in self._tensors:
            raise CheckpointError(f"{self.path} holds no tensor {key}")
        file, place = self._tensors[key]
        shape, dtype = place.entry.shape, place.entry.dtype
        try:
            with opened(file) as descriptor:
                tensor = from_file(descriptor, place.start, math.prod(shape), dtype).view(shape)
        except EOFError:
            raise CheckpointError(f"{file} is cut short: copy it again") from None
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
        wanted = self._digests.get(key)
        if wanted is not None and (found := hashlib.sha256(bytes_of(tensor)).hexdigest()) != wanted:
            raise CheckpointError(
                f"{file}: {key} is damaged or was changed: its SHA-256 begins with "
                f"{found[:12]}, {MANIFEST} says {wanted[:12]}: {_REMEDY}"
            )
        return tensor

    def linears(self, keys: Sequence[str]) -> Tensor:
        """Weights of square ``torch.nn.Linear`` layers as ``[n, in, out]``: ``x @ W``."""
        return torch.stack([self.tensor(key).T for key in keys])


def json_object(file: Path) -> dict[str, Any]:
    """What a file such as ``config.json`` holds.

    Raises:
        CheckpointError: it cannot be read, or is no object.
    """
    try:
        value = read_json(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is no readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a {type(value).__name__} instead of an object")
    return value


_REMEDY = f"copy it again, or delete {MANIFEST} if you changed the model on purpose"


def _listed(path: Path, tensors: dict[str, tuple[Path, Stored]]) -> dict[str, str]:
    """SHA-256 by tensor, from a manifest that lists just the tensors that the files hold."""
    listed = read_manifest(path)
    if listed is None:
        return {}
    for key in sorted(listed.keys() | tensors.keys()):
        if key not in tensors:
            raise CheckpointError(f"{path} lacks {key}, which {MANIFEST} lists: {_REMEDY}")
        entry = tensors[key][1].entry
        found = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape)}
        wanted = {name: listed.get(key, {}).get(name) for name in found}
        if found != wanted:
            raise CheckpointError(
                f"{path}: {key} is {found['dtype']} {found['shape']}, {MANIFEST} says "
                f"{wanted['dtype']} {wanted['shape']}: {_REMEDY}"
            )
    return {key: entry["sha256"] for key, entry in listed.items()}


def _weight_map(path: Path) -> dict[str, str]:
    """The file of each tensor, as the index has it; nothing for a model in one file.

    Saved over another model, one in one file leaves the other's index, and one in several files the
    other's one file. transformers takes the one file.
    """
    alone = (path / WEIGHTS).is_file()
    if (path / INDEX).is_file():
        weight_map = json_object(path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{path / INDEX} has no weight_map")
        for name in weight_map.values():
            if not is_file_name(name):
                raise CheckpointError(
                    f"{path / INDEX} points to {name!r}: shards must lie in the folder itself"
                )
        shards = set(weight_map.values()) - {WEIGHTS}
        if not (alone and shards):
            return weight_map
        if held := sorted(name for name in shards if os.path.isfile(path / name)):
            raise CheckpointError(
                f"{path} holds two models: {WEIGHTS}, which transformers loads, and {held[0]}, "
                f"which {INDEX} names: delete the one that is not meant"
            )
    if alone:
        return {}
    pickles = ", ".join(sorted(file.name for file in path.glob("*.bin")))
    raise CheckpointError(
        f"{path} has neither {WEIGHTS} nor {INDEX}"
        + (f" ({pickles} can execute code and is not read)" if pickles else "")
        + ": save the model with safetensors"
    )


def _header(path: Path, name: str) -> dict[str, Stored]:
    if not has_file(path, name):
        raise CheckpointError(f"{path / name} is missing or no file: copy the model again")
    return read_header(path / name)


def has_file(folder: Path, name: str) -> bool:
    """Whether a model's folder holds a file; it may be a link into the cache of the hub only.

    Raises:
        CheckpointError: it is a link that leads elsewhere, or a pipe, a device or a folder.
    """
    _, path = _found(folder, name)
    if os.path.lexists(path) and not os.path.isfile(path):
        raise CheckpointError(f"{folder / name} is no regular file: copy the model again")
    return os.path.isfile(path)


def copy_file(folder: Path, name: str, target: Path) -> None:
    """Copy what :func:`has_file` finds, from the descriptor of what is checked.

    Raises:
        CheckpointError: as there; or it was swapped meanwhile.
        OSError: ``target`` cannot be written.
    """
    try:
        source = open(regular_below(*_found(folder, name)), "rb")  # noqa: SIM115
    except OSError as error:
        raise CheckpointError(
            f"{folder / name} was replaced while the model was read ({error.strerror}): let nobody "
            "change the folder, and convert it again"
        ) from error
    with source, open(target, "wb") as copy:
        shutil.copyfileobj(source, copy, SLICE)


def _found(folder: Path, name: str) -> tuple[Path, Path]:
    """Where a file of a model really is: the folder that may hold it, and its path there."""
    path, home = (Path(os.path.realpath(place)) for place in (folder / name, folder))
    cache = home.parent.parent / "blobs"
    if home.parent.name == "snapshots" and path.parent == cache:
        return cache, path
    if not path.is_relative_to(home):
        raise CheckpointError(
            f"{folder / name} is a link to {path}: the files of a model must lie in its folder"
        )
    return home, path
