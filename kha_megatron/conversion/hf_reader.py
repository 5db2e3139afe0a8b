"""Read a Hugging Face model folder: ``config.json`` and safetensors, nothing that can execute."""

import json
import re
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kha_megatron.config import MATRICES, KHAConfig, Projection
from kha_megatron.errors import CheckpointError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_KNOCK = re.compile(r"\.[qkv]_knock\.")


class HFCheckpoint:
    """A model folder, opened for reading. Make it with :meth:`open`.

    Attributes:
        path: the folder.
        config: ``config.json`` as it is.
    """

    def __init__(self, path: Path, config: dict[str, Any], files: dict[str, Path]) -> None:
        self.path = path
        self.config = config
        self._files = files

    @classmethod
    def open(cls, path: str | Path) -> "HFCheckpoint":
        """Open a folder and read the headers of all its safetensors files, no tensor.

        Raises:
            CheckpointError: a file is missing, damaged, or not where an index may point.
        """
        path = Path(path)
        if not (path / CONFIG).is_file():
            raise CheckpointError(f"{path} has no {CONFIG}: name a Hugging Face model folder")
        config = _json_object(path / CONFIG)
        if (path / INDEX).is_file():
            return cls(path, config, _indexed(path))
        if (path / WEIGHTS).is_file():
            return cls(path, config, dict.fromkeys(_header(path / WEIGHTS), path / WEIGHTS))
        pickles = ", ".join(sorted(file.name for file in path.glob("*.bin")))
        raise CheckpointError(
            f"{path} has neither {WEIGHTS} nor {INDEX}"
            + (f" ({pickles} can execute code and is not read)" if pickles else "")
            + ": save the model with safetensors"
        )

    def keys(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self._files)

    def tensor(self, key: str) -> Tensor:
        """One tensor on the CPU in its stored dtype.

        Raises:
            CheckpointError: no such key.
        """
        if key not in self._files:
            raise CheckpointError(f"{self.path} holds no tensor {key}")
        with safe_open(self._files[key], framework="pt", device="cpu") as file:
            return file.get_tensor(key)

    @cached_property
    def kha(self) -> KHAConfig | None:
        """What is knocked, from ``kha_query``, ``kha_key`` and ``kha_value`` of ``config.json``.

        None for a model without them.

        Raises:
            ConfigError: a variant that does not exist.
        """
        return KHAConfig.from_entries(self.config)

    def knock_weights(self) -> dict[tuple[int, Projection], Tensor]:
        """The shared matrices by layer (from 0) and projection: ``[n, D, D]``, ``x @ W``.

        Stored as ``torch.nn.Linear`` weights, they are transposed and stacked here.

        Raises:
            CheckpointError: ``config.json`` records no knocking heads, or other matrices than the
                files hold.
        """
        if self.kha is None or not self.kha.variants:
            raise CheckpointError(
                f"{self.path / CONFIG} records no knocking heads (kha_query, kha_key, kha_value)"
            )
        layers = self.config.get("num_hidden_layers")
        if type(layers) is not int:
            raise CheckpointError(f"{self.path / CONFIG} has no num_hidden_layers")
        names = {
            (layer, projection): [knock_key(layer, projection, name) for name in MATRICES[variant]]
            for projection, variant in self.kha.variants.items()
            for layer in range(layers)
        }
        stored = {key for key in self._files if _KNOCK.search(key)}
        if differing := stored.symmetric_difference(chain.from_iterable(names.values())):
            raise CheckpointError(
                f"{self.path}: {CONFIG} records {self.kha} in {layers} layers, but "
                f"{len(differing)} matrices are missing or too many, {min(differing)} for one"
            )
        return {
            place: torch.stack([self.tensor(key).T for key in keys])
            for place, keys in names.items()
        }


def knock_key(layer: int, projection: Projection, matrix: str) -> str:
    """Name of one shared matrix: ``model.layers.0.self_attn.v_knock.up_proj.weight``.

    Args:
        layer: counted from 0.
        projection: the knocked tensor.
        matrix: its name in :data:`kha_megatron.config.MATRICES`.
    """
    return f"model.layers.{layer}.self_attn.{knock_name(projection, matrix)}"


def knock_name(projection: Projection, matrix: str) -> str:
    """The same below ``model.layers.0.self_attn.``: ``v_knock.up_proj.weight``."""
    linear = "proj" if matrix == "proj" else f"{matrix}_proj"
    return f"{projection[0]}_knock.{linear}.weight"


def _json_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is no readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a {type(value).__name__} instead of an object")
    return value


def _header(file: Path) -> list[str]:
    """Tensor names of a safetensors file, which checks the header against the file's length."""
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            return list(opened.keys())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{file} is damaged or cannot be read ({error}): copy it again"
        ) from error


def _indexed(path: Path) -> dict[str, Path]:
    weight_map = _json_object(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path / INDEX} has no weight_map")
    held: dict[str, set[str]] = {}
    for key, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".."):
            raise CheckpointError(
                f"{path / INDEX} points to {name!r}: shards must lie in the folder itself"
            )
        if name not in held:
            if not (path / name).is_file():
                raise CheckpointError(f"{path / name} is missing, {INDEX} names it: copy it again")
            held[name] = set(_header(path / name))
        if key not in held[name]:
            raise CheckpointError(f"{path / name} does not hold {key}, which {INDEX} says it does")
    return {key: path / name for key, name in weight_map.items()}
