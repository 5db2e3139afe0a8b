"""What a decoder computes, in terms that belong to neither Megatron nor transformers.

Both sides are translated to and from this description (``megatron_arguments``, ``hf_configs``), and
the table of tensors is written against it. What it cannot say cannot be converted.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from kha_megatron.config import KHAConfig
from kha_megatron.heads import HeadFacts, HeadSizes, HeadTensor
from kha_megatron.model.qkv import QKVLayout

ScoreFunction = Literal["softmax", "sigmoid"]


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
class Rope:
    """Rotary position embedding."""

    base: float
    fraction: float = 1.0
    """Share of a head's features that is rotated."""
    scaling: Llama3Scaling | Yarn | None = None


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The mixture-of-experts layers."""

    count: int
    per_token: int
    size: int
    """Features inside one expert."""
    sparse: tuple[bool, ...]
    """For each decoder layer, whether it has experts."""
    score: ScoreFunction = "softmax"
    normalised: bool = True
    """Whether a token's weights sum to one before they are scaled."""
    scaling: float = 1.0
    bias: bool = False
    """Whether the router has a correction bias, which moves the choice of experts only."""
    shared_size: int = 0
    """Features inside the shared expert; 0 for none."""
    shared_gate: bool = False
    groups: int = 1
    """Groups of experts that a token's experts are chosen from (DeepSeek-V3); 1 for no grouping."""
    groups_per_token: int = 1


@dataclass(frozen=True, kw_only=True)
class Latent:
    """MLA and GLA: sizes of the compressed states and of the parts of a head."""

    query_rank: int | None
    """None for queries without a compressed state."""
    kv_rank: int
    """Of all latent heads together."""
    plain_dim: int
    """Features of a query or key head without position."""
    rotary_dim: int
    value_dim: int


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder-only transformer with RMSNorm, SwiGLU and RoPE.

    Raises:
        ConfigError: mechanisms of the heads that the attention cannot carry.
    """

    vocab_size: int
    """Entries, without padding."""
    padded_vocab_size: int
    """Rows of the embedding in a Megatron checkpoint."""
    hidden_size: int
    ffn_size: int
    """Features inside a dense MLP."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope: Rope
    tied: bool
    """Whether the output layer is the embedding."""
    qk_norm: bool = False
    """RMSNorm of every query and key head; with ``latent``, of the compressed states instead."""
    qkv_bias: bool = False
    init_std: float = 0.02
    attention_dropout: float = 0.0
    experts: Experts | None = None
    latent: Latent | None = None
    kha: KHAConfig = field(default_factory=KHAConfig)

    def __post_init__(self) -> None:
        self.kha.check(HeadFacts(multi_latent=self.latent is not None, qk_norm=self.qk_norm))

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts."""
        return self.experts is not None and self.experts.sparse[layer]

    @cached_property
    def qkv(self) -> QKVLayout:
        """The rows of ``linear_qkv``, which MLA and GLA have none of."""
        return QKVLayout(
            groups=self.kv_heads,
            queries=self.heads // self.kv_heads,
            head_dim=self.head_dim,
            tied=self.kha.attention == "gta",
        )

    @property
    def latent_heads(self) -> int:
        """Heads of the latent: more than one in GLA only."""
        return self.kha.latent_heads if self.kha.attention == "gla" else 1

    @cached_property
    def head_tensors(self) -> tuple[HeadTensor, ...]:
        """The parameters of one layer that its heads' mechanisms have."""
        latent = self.latent
        sizes = HeadSizes(
            query_heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=latent.plain_dim if latent else self.head_dim,
            value_dim=latent.value_dim if latent else None,
        )
        return self.kha.tensors(sizes)

    @property
    def is_uniform(self) -> bool:
        """Whether all layers are alike, so that Megatron stacks them in its checkpoints."""
        return self.experts is None or all(self.experts.sparse)
