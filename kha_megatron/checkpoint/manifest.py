"""The two JSON files that a conversion writes beside its tensors.

``manifest.json`` of a Hugging Face directory lists the SHA-256, dtype and shape of every tensor and
is checked when the directory is read. ``converted_from.json`` of a Megatron checkpoint tells users
where the checkpoint comes from. Its hashes are in Megatron's ``integrity.json``.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kha_megatron.checkpoint.reading import read_json
from kha_megatron.errors import CheckpointError

MANIFEST = "manifest.json"
CONVERTED_FROM = "converted_from.json"
FORMAT = 1

Tensors = Mapping[str, Mapping[str, Any]]


def write_manifest(folder: Path, source: Mapping[str, Any], tensors: Tensors) -> None:
    """Write the manifest of a Hugging Face directory: ``{name: {file, dtype, shape, sha256}}``."""
    _write(folder / MANIFEST, {"format": FORMAT, "source": dict(source), "tensors": dict(tensors)})


def write_converted_from(folder: Path, source: Mapping[str, Any], tensors: Tensors) -> None:
    """Write what a Megatron checkpoint was converted from: ``{key: {dtype, shape}}``."""
    _write(folder / CONVERTED_FROM, {"source": dict(source), "tensors": dict(tensors)})


def _write(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, dict[str, Any]] | None:
    """Return the manifest's entry of each tensor; None if there is no manifest.

    Raises:
        CheckpointError: The manifest is damaged, or was not written by a conversion.
    """
    file = folder / MANIFEST
    try:
        content = read_json(file)
        tensors = content["tensors"]
        if content["format"] != FORMAT or not all(
            isinstance(entry["sha256"], str) for entry in tensors.values()
        ):
            raise ValueError("another format")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{file} is damaged, or not written by a conversion: copy it again, or delete it if "
            "the model need not be checked"
        ) from error
    return tensors
