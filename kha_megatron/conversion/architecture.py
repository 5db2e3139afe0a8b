"""Describe a model independently of Megatron's arguments and Hugging Face's ``config.json``."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from kha_megatron.heads import HeadTensor
from kha_megatron.model.fields import Field, flag, rows
from kha_megatron.model.model_config import ModelConfig
from kha_megatron.model.rules import build_head_facts


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Scaled RoPE. The fields are named as in ``rope_parameters`` of ``config.json``."""

    rope_type: ClassVar[str]
    arguments: ClassVar[Mapping[str, str]]
    """Megatron's argument of a field."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling(Scaling):
    """RoPE scaling of Llama 3.1."""

    rope_type = "llama3"
    arguments = MappingProxyType({"factor": "rope_scaling_factor"})

    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, kw_only=True)
class Yarn(Scaling):
    """YaRN, for multi-latent attention only."""

    rope_type = "yarn"
    arguments = MappingProxyType(
        {
            "factor": "rotary_scaling_factor",
            "mscale": "mscale",
            "mscale_all_dim": "mscale_all_dim",
        }
    )

    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Architecture(ModelConfig):
    """A decoder-only transformer with RMSNorm, SwiGLU and RoPE.

    ``kv_channels`` is the width of a value head in MLA and GLA. ``moe_layer_freq`` has a 0 or 1 for
    each layer if the model has experts.

    Raises:
        ConfigError: The attention cannot have the requested head mechanisms.
    """

    if TYPE_CHECKING:  # never None where they are read
        num_layers: int
        vocab_size: int
        padded_vocab_size: int
        ffn_hidden_size: int
        max_position_embeddings: int
        num_experts: int
        moe_layer_freq: tuple[int, ...]
        moe_ffn_hidden_size: int
        moe_shared_expert_intermediate_size: int
        q_lora_rank: int
    scaling: Scaling | None = None
    normalised: bool = True
    """Whether the weights of a token's experts sum to one before they are scaled."""
    moe_router_topk_scaling_factor: float | None = flag(None, hf="routed_scaling_factor")
    moe_router_num_groups: int | None = flag(None, hf="n_group")
    """Groups of experts that a token's experts are chosen from (DeepSeek-V3)."""
    moe_router_group_topk: int | None = flag(None, hf="topk_group")
    moe_shared_expert_gate: bool = flag(False, hf="shared_expert_gate")

    def __post_init__(self) -> None:
        super().__post_init__()
        # the exported model, and Megatron with --attention-backend unfused, take heads of any width
        self.kha.check(replace(build_head_facts(self), fused_attention=False))
        object.__setattr__(self, "kha_attention", self.kha.attention)
        object.__setattr__(self, "kha_latent_heads", self.kha.latent_heads)

    @cached_property
    def head_tensors(self) -> tuple[HeadTensor, ...]:
        """Parameters of the head mechanisms in one layer."""
        return self.kha.tensors(self.head_sizes)

    @property
    def is_uniform(self) -> bool:
        """Whether all layers have the same tensors, so that Megatron stacks them."""
        return not self.num_experts or all(map(self.is_moe, range(self.num_layers)))

    def differences(self, other: "Architecture", ignored: tuple[str, ...] = ()) -> dict[str, Any]:
        """Return the settings in which two models differ, each with this and the other value.

        Ignores the size of the vocabulary and settings that only affect training.
        """
        ours, theirs = self._settings(ignored), other._settings(ignored)
        found = {name: (ours.get(name), theirs.get(name)) for name in ours | theirs}
        return {name: pair for name, pair in found.items() if pair[0] != pair[1]}

    def _settings(self, ignored: tuple[str, ...]) -> dict[str, Any]:
        left_out = {"vocab_size", "padded_vocab_size", "kha", "kha_attention", "kha_latent_heads"}
        left_out.update(ignored)
        found = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}
        for name, value in self.kha.to_dict(start=False).items():
            settings = value if isinstance(value, dict) else {"": value}
            for setting, held in settings.items():
                if setting not in _OF_TRAINING:
                    found[f"kha {name}.{setting}".rstrip(".")] = held
        return found


_OF_TRAINING = ("start", "balance", "balance_scale", "anneal")
"""Settings of head mechanisms that only affect training."""

ROWS: dict[str, Field] = {row.field: row for row in rows(Architecture)}
"""Megatron's and Hugging Face's name of each field."""
HF_KEYS: dict[str, str] = {name: row.hf for name, row in ROWS.items() if row.hf}

STYLE: dict[str, Any] = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "hidden_dropout": 0.0,
}
"""Fields with the same value in all supported models."""

LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
"""Fields of MLA and GLA."""
