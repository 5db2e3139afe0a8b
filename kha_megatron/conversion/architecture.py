"""What a decoder computes, for checkpoints of either side.

Both are translated to and from this description (``megatron_arguments``, ``hf_configs``), and the
table of tensors is written against it. What it cannot say cannot be converted. Its fields are those
of :class:`~kha_megatron.model.model.Model`, whose table has Megatron's and Hugging Face's names;
None and False stand for what a model has not.
"""

from dataclasses import dataclass, field
from functools import cached_property

from kha_megatron.config import KHAConfig
from kha_megatron.heads import HeadFacts, HeadTensor
from kha_megatron.model.fields import Field, rows, said
from kha_megatron.model.model import Model


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's stretched RoPE."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN, of multi-latent attention only."""

    factor: float
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    original_max_positions: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Architecture(Model):
    """A decoder-only transformer with RMSNorm, SwiGLU and RoPE.

    ``kv_channels`` is a value's width in MLA and GLA, ``moe_layer_freq`` a 0 or 1 for each layer
    where there are experts.

    Raises:
        ConfigError: mechanisms of the heads that the attention cannot carry.
    """

    scaling: Llama3Scaling | Yarn | None = None
    """Of RoPE."""
    normalised: bool = True
    """Whether the weights of a token's experts sum to one before they are scaled."""
    moe_router_topk_scaling_factor: float | None = said(
        "--moe-router-topk-scaling-factor", None, hf="routed_scaling_factor"
    )
    moe_router_num_groups: int | None = said("--moe-router-num-groups", None, hf="n_group")
    """Groups of experts that a token's experts are chosen from (DeepSeek-V3)."""
    moe_router_group_topk: int | None = said("--moe-router-group-topk", None, hf="topk_group")
    moe_shared_expert_gate: bool = said(
        "--moe-shared-expert-gate", False, attribute=None, hf="shared_expert_gate"
    )
    kha: KHAConfig = field(default_factory=KHAConfig)

    def __post_init__(self) -> None:
        latent = self.multi_latent_attention
        self.kha.check(HeadFacts(multi_latent=latent, qk_norm=self.qk_layernorm))
        object.__setattr__(self, "kha_attention", self.kha.attention)
        object.__setattr__(self, "kha_latent_heads", self.kha.latent_heads)

    @cached_property
    def head_tensors(self) -> tuple[HeadTensor, ...]:
        """The parameters of one layer that its heads' mechanisms have."""
        return self.kha.tensors(self.head_sizes)

    @property
    def is_uniform(self) -> bool:
        """Whether all layers are alike, so that Megatron stacks them in its checkpoints."""
        return not self.num_experts or all(map(self.is_moe, range(self.num_layers)))


ROWS: dict[str, Field] = {row.field: row for row in rows(Architecture)}
"""What Megatron and Hugging Face call each field."""

STYLE = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "hidden_dropout": 0.0,
}
"""What all of them have in common."""

LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
"""Fields of MLA and GLA."""
