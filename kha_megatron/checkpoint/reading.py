"""Read JSON files that may be damaged."""

import json
from pathlib import Path
from typing import Any


def read_json(file: Path) -> Any:
    """Return the content of a JSON file. Raise OSError or ValueError if that is impossible."""
    try:
        return json.loads(file.read_bytes())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def is_file_name(name: Any) -> bool:
    """Return whether a value read from a file names a file in the same directory."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")
