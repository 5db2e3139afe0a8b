"""Transformer Engine's compiled extension: whether it is there, found without importing it.

The extra ``te-cpu`` installs Transformer Engine's Python alone. Megatron takes it for the whole,
and a plain ``import megatron.core`` then ends in a FileNotFoundError: Megatron falls back to its
own modules on an ImportError only.
"""

import sys
import sysconfig
from importlib import util
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any


def find() -> ModuleSpec | None:
    """Where Transformer Engine's Python is installed, hidden in this process or not."""
    modules: dict[str, Any] = sys.modules
    hidden = modules.get("transformer_engine", ...) is None
    if hidden:
        del modules["transformer_engine"]  # where it is hidden, nothing is found
    try:
        return util.find_spec("transformer_engine")
    finally:
        if hidden:
            modules["transformer_engine"] = None


def is_missing() -> bool:
    """Whether Transformer Engine is installed, and its extension for torch is not."""
    spec = find()
    if spec is None or spec.origin is None:
        return False
    file = "transformer_engine_torch*.so"  # where Transformer Engine looks for it itself
    places = (file, f"transformer_engine/{file}", f"transformer_engine/wheel_lib/{file}")
    folders = Path(spec.origin).parents[1], Path(sysconfig.get_paths()["purelib"])
    return not any(any(folder.glob(place)) for folder in folders for place in places)


def hide_incomplete() -> None:
    """Make an incomplete Transformer Engine look as if it were not installed, in this process.

    Does nothing where it has been imported, hidden or replaced already.
    """
    modules: dict[str, Any] = sys.modules
    if "transformer_engine" not in modules and is_missing():
        modules["transformer_engine"] = None  # makes `import` raise ImportError
