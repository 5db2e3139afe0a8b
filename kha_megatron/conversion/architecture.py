"""Model configs of which all sizes are known."""

from typing import TYPE_CHECKING, Any

from kha_megatron.model.config import ModelConfig

if TYPE_CHECKING:
    Architecture = Any
else:
    Architecture = ModelConfig
