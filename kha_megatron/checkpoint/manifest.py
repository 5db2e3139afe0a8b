"""``manifest.json``: SHA-256, dtype and shape of every tensor that a conversion wrote."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kha_megatron.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1


def write_manifest(
    folder: Path, source: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Any]]
) -> None:
    """Write the manifest of a folder.

    Args:
        folder: where the tensors are.
        source: identity of what they were made from.
        tensors: ``{name: {file, dtype, shape, sha256}}``.
    """
    content = {"format": FORMAT, "source": dict(source), "tensors": dict(tensors)}
    (folder / MANIFEST).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, dict[str, Any]] | None:
    """What the manifest of a folder says of each tensor; None if there is none.

    Raises:
        CheckpointError: it is damaged, or no manifest of a conversion.
    """
    file = folder / MANIFEST
    try:
        content = json.loads(file.read_bytes())
        tensors = content["tensors"]
        if content["format"] != FORMAT or not all(
            isinstance(entry["sha256"], str) for entry in tensors.values()
        ):
            raise ValueError("another format")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{file} is damaged, or not written by a conversion: copy it again, or delete it if "
            "the model need not be checked"
        ) from error
    return tensors
