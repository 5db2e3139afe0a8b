"""Knocking-Heads Attention (arXiv 2510.23052) as a plug-in for Megatron-Core.

Importing this package needs nothing but the standard library; each room imports what it uses
(``kha_megatron.mcore`` Megatron-Core, ``kha_megatron.hf`` transformers, and so on).
"""

from typing import Any

from kha_megatron.errors import KHAError
from kha_megatron.heads import Knock
from kha_megatron.heads.config import PRESETS, HeadsConfig

__all__ = ["PRESETS", "HeadsConfig", "KHAError", "Knock", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name != "KHAConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kha_megatron.announcements import announce
    from kha_megatron.heads.config import KHAConfig

    announce(
        "KHAConfig(value='mlp', gate=Gate(...)) is now HeadsConfig(Knock(value='mlp'), Gate(...)). "
        "Version 0.3 removes the old name.",
        once=name,
    )
    return KHAConfig
