"""RoPE scaling for contexts that are longer than in pretraining."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Base class for RoPE scaling. Fields have the same names as in ``rope_parameters``."""

    rope_type: ClassVar[str]
    arguments: ClassVar[Mapping[str, str]]
    """Maps field names to Megatron arguments (only for fields that have one)."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling(RopeScaling):
    rope_type = "llama3"
    arguments: ClassVar = {
        "factor": "rope_scaling_factor",
        "low_freq_factor": "rope_low_freq_factor",
        "high_freq_factor": "rope_high_freq_factor",
        "original_max_position_embeddings": "rope_original_max_position_embeddings",
    }

    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, kw_only=True)
class Yarn(RopeScaling):
    """YaRN scaling. For multi-latent attention (MLA), Megatron has no ``yarn_*`` arguments."""

    rope_type = "yarn"
    arguments: ClassVar = {
        "factor": "rotary_scaling_factor",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
        "original_max_position_embeddings": "yarn_original_max_position_embeddings",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    }

    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
