"""Write and read ``manifest.json`` with the SHA-256, dtype and shape of a model's tensors.

A converted Megatron checkpoint contains ``converted_from.json`` instead, which records the source
model. Its hashes are stored in Megatron's ``integrity.json``.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kha_megatron.errors import CheckpointError

MANIFEST = "manifest.json"
CONVERTED_FROM = "converted_from.json"
_FORMAT = 1


def write_manifest(
    folder: Path, source: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Any]]
) -> None:
    """Write ``manifest.json`` into a Hugging Face model directory.

    Args:
        folder: Model directory.
        source: Description of the converted checkpoint, from ``identity()`` of its reader.
        tensors: File, dtype, shape and SHA-256 of each tensor: ``{name: {"file": ..., ...}}``.
    """
    content = {"format": _FORMAT, "source": dict(source), "tensors": dict(tensors)}
    (folder / MANIFEST).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, tuple[str, list[int], str]]:
    """Read the dtype, shape and SHA-256 of each tensor. Returns an empty dict without a manifest.

    Raises:
        CheckpointError: If the manifest is corrupted or was written by another program.
    """
    file = folder / MANIFEST
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_bytes())
        if content["format"] != _FORMAT:
            raise ValueError
        return {
            key: (entry["dtype"], entry["shape"], str(entry["sha256"]))
            for key, entry in content["tensors"].items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{file} is corrupted or was not written by kha_megatron. Copy it again, or delete it "
            "to load the model without verifying its hashes."
        ) from error
