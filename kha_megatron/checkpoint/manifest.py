"""Write and read ``manifest.json``: SHA-256, dtype and shape of every tensor of a model directory.

A converted Megatron checkpoint has ``converted_from.json`` instead, which tells users where it
comes from. Its hashes are in Megatron's ``integrity.json``.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kha_megatron.errors import CheckpointError

MANIFEST = "manifest.json"
CONVERTED_FROM = "converted_from.json"
FORMAT = 1


def write_manifest(
    folder: Path, source: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Any]]
) -> None:
    """Write the manifest of a Hugging Face directory.

    Args:
        folder: The directory.
        source: ``identity()`` of the reader of the converted checkpoint.
        tensors: ``{name: {file, dtype, shape, sha256}}``.
    """
    content = {"format": FORMAT, "source": dict(source), "tensors": dict(tensors)}
    (folder / MANIFEST).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, tuple[str, list[int], str]]:
    """Return dtype, shape and SHA-256 of each tensor; empty if there is no manifest.

    Raises:
        CheckpointError: The manifest is damaged, or was not written by a conversion.
    """
    file = folder / MANIFEST
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_bytes())
        if content["format"] != FORMAT:
            raise ValueError
        return {
            key: (entry["dtype"], entry["shape"], str(entry["sha256"]))
            for key, entry in content["tensors"].items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{file} is damaged, or was not written by kha_megatron. Copy it again, or delete it "
            "to load the model without checking its hashes."
        ) from error
