"""Common model config that Megatron's arguments and ``config.json`` are both parsed into."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from kha_megatron.heads import HeadTensor
from kha_megatron.model.fields import Field, flag, rows
from kha_megatron.model.model_config import ModelConfig
from kha_megatron.model.rules import build_head_facts


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Base class for RoPE scaling. Fields have the same names as in ``rope_parameters``."""

    rope_type: ClassVar[str]
    arguments: ClassVar[Mapping[str, str]]
    """Maps field names to Megatron arguments (only for fields that have one)."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling(Scaling):
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
class Yarn(Scaling):
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


@dataclass(frozen=True, kw_only=True)
class Architecture(ModelConfig):
    """Config of a decoder-only transformer with RMSNorm, SwiGLU and RoPE.

    Some fields are more specific than in :class:`ModelConfig`:

    - ``kv_channels`` is the value head dim for MLA and GLA.
    - ``moe_layer_freq`` always has one entry per layer in MoE models (1 = MoE, 0 = dense).
    - Multi-token prediction (MTP) layers are counted after the decoder layers.
    """

    if TYPE_CHECKING:  # these are never None here
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
    """Normalize the top-k router weights to sum to 1 (``norm_topk_prob`` in Hugging Face)."""
    moe_router_topk_scaling_factor: float | None = flag(None, hf="routed_scaling_factor")
    moe_router_num_groups: int | None = flag(None, hf="n_group")
    """Number of expert groups for group-limited routing (DeepSeek-V3)."""
    moe_router_group_topk: int | None = flag(None, hf="topk_group")
    moe_shared_expert_gate: bool = flag(False, hf="shared_expert_gate")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kha.check(build_head_facts(self))

    @cached_property
    def head_tensors(self) -> tuple[HeadTensor, ...]:
        """Parameters that the head mechanisms add to each layer."""
        return self.kha.tensors(self.head_sizes)

    def is_moe(self, layer: int) -> bool:
        return super().is_moe(min(layer, self.num_layers - 1))  # MTP layers are like the last one

    @property
    def is_uniform(self) -> bool:
        """True if all layers have the same parameters. GPTModel stacks them in this case."""
        return not self.num_experts or all(map(self.is_moe, range(self.num_layers)))

    def differences(self, other: "Architecture", ignored: tuple[str, ...] = ()) -> dict[str, Any]:
        """Return ``{name: (ours, theirs)}`` for all settings with different values.

        Does not compare the vocab size, the model class in Megatron, the dtype of the router (stock
        architectures cannot change it), or head mechanism settings that only matter in training.
        """
        ours, theirs = self._settings(ignored), other._settings(ignored)
        found = {name: (ours.get(name), theirs.get(name)) for name in ours | theirs}
        return {name: pair for name, pair in found.items() if pair[0] != pair[1]}

    def _settings(self, ignored: tuple[str, ...]) -> dict[str, Any]:
        skipped = {"vocab_size", "padded_vocab_size", "kha"}
        skipped.update(ignored, ["moe_router_dtype", "gpt_model"])
        found = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in skipped}
        for name, value in self.kha.to_dict(start=False).items():
            settings = value if isinstance(value, dict) else {"": value}
            for setting, chosen in settings.items():
                if setting not in _TRAINING_ONLY:
                    found[f"kha {name}.{setting}".rstrip(".")] = chosen
        return found


_TRAINING_ONLY = ("start", "balance", "balance_scale", "anneal")
"""Settings of head mechanisms that do not change the outputs of a trained model."""

ROWS: dict[str, Field] = {row.field: row for row in rows(Architecture)}
"""Lookup table from field names to Megatron and Hugging Face names."""
HF_KEYS: dict[str, str] = {name: row.hf for name, row in ROWS.items() if row.hf}

STYLE: dict[str, Any] = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "hidden_dropout": 0.0,
}
"""Settings that all supported models have in common."""

LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
"""These fields are only used for latent attention (MLA and GLA)."""
