"""``manifest.json`` has the SHA-256, dtype and shape of each tensor in a converted HF model.

Converted Megatron checkpoints have ``integrity.json`` (hashes) and ``converted_from.json`` (source
model) instead.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kha_megatron.checkpoint.reading import MAX_JSON_BYTES, read_regular
from kha_megatron.errors import CheckpointError

MANIFEST = "manifest.json"
CONVERTED_FROM = "converted_from.json"
_FORMAT = 1


def write_manifest(
    folder: Path,
    source: Mapping[str, Any],
    tensors: Mapping[str, Mapping[str, Any]],
) -> None:
    """Write ``manifest.json`` to a Hugging Face model directory.

    Args:
        source: ``identity()`` of the source checkpoint.
        tensors: Dicts with ``file``, ``dtype``, ``shape`` and ``sha256``, by tensor name.
    """
    content = {"format": _FORMAT, "source": dict(source), "tensors": dict(tensors)}
    serialized = json.dumps(content, indent=2) + "\n"
    (folder / MANIFEST).write_text(serialized, encoding="utf-8")


class ManifestEntry(NamedTuple):
    dtype: str
    shape: list[int]
    sha256: str


def read_manifest(folder: Path) -> dict[str, ManifestEntry]:
    """Read the entries of all tensors, or an empty dict if there is no manifest.

    Raises:
        CheckpointError: If the manifest is corrupted or was not written by us.
    """
    file = folder / MANIFEST
    if not file.exists():
        return {}
    try:
        content = json.loads(read_regular(file, MAX_JSON_BYTES))
        if content["format"] != _FORMAT:
            raise ValueError
        entries = {}
        for key, entry in content["tensors"].items():
            digest = str(entry["sha256"])
            entries[key] = ManifestEntry(entry["dtype"], entry["shape"], digest)
        return entries
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{file} is corrupted or was not written by kha_megatron. Copy it again, or delete it "
            "to load the model without verifying its hashes."
        ) from error
