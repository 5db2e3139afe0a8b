"""Knocking-Heads Attention (arXiv 2510.23052) as a plug-in for Megatron-Core.

Importing this package needs nothing but the standard library; each room imports what it uses
(``kha_megatron.mcore`` Megatron-Core, ``kha_megatron.hf`` transformers, and so on).
"""

from kha_megatron.config import PRESETS, KHAConfig
from kha_megatron.errors import KHAError

__all__ = ["PRESETS", "KHAConfig", "KHAError", "__version__"]
__version__ = "0.1.0"
