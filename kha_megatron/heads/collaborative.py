"""Collaborative heads (Cordonnier et al. 2020, arXiv 2006.16362): one query and key for all heads.

The shared query and key have ``Dk`` features, which head ``i`` scales by a mixing vector ``m_i``.
Its logits are ``(X W_Q) diag(m_i) (X W_K)^T / sqrt(Dk)`` (equation 6).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kha_megatron.errors import ConfigError
from kha_megatron.heads.mechanism import (
    HeadFacts,
    HeadSizes,
    HeadTensor,
    Mechanism,
    Projection,
)
from kha_megatron.heads.ranks import Ranks

if TYPE_CHECKING:
    from torch import Tensor

MixingStart = Literal["blocks", "ones"]

FUSED_DIM = 256
"""Maximum head dim of fused attention kernels (FlashAttention, cuDNN)."""


@dataclass(frozen=True, kw_only=True)
class CollaborativeHeads(Mechanism):
    """Query and key projections that are shared by all heads, with a mixing vector per head.

    The KV cache holds ``dim + G D`` elements per token. QK-norm is applied after the mixing vector.
    Exported models fold ``W_Q diag(m_i)`` into ordinary query projections with one repeated key. If
    RoPE rotates all features of a head, exporting requires ``dim`` to equal ``kv_channels``.
    """

    name: ClassVar[str] = "collaborative"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({"collaborative": {}})
    own_projections: ClassVar[tuple[Projection, ...]] = ("query", "key")

    dim: int = FUSED_DIM
    """Dimension of the shared query and key (``D_k`` in the paper)."""
    start: MixingStart = "blocks"
    """Initialization of the mixing vectors. With ``blocks``, each head uses ``dim / H`` features of
    its own ("concatenate" in the authors' code). With ``ones``, every head uses all features."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim < 2 or self.dim % 2:
            raise ConfigError(f"collaborative.dim must be even and at least 2, got {self.dim}.")

    def tensors(self, sizes: HeadSizes) -> tuple[HeadTensor, ...]:
        projections = tuple(
            HeadTensor(
                name=f"collaborative_{projection}",
                shape=(self.dim, sizes.hidden_size),
                gradient="heads",
                heads=projection,
                initial=("normal",),
                hf=f"collaborative_{projection}",
                reads_input=True,
            )
            for projection in self.own_projections
        )
        mixing = HeadTensor(
            name="collaborative_mixing",
            shape=(sizes.query_heads, self.dim),
            gradient="heads",
            heads="query",
            initial=(self.start,),
            hf="collaborative_mixing",
            per_head=True,
        )
        return (*projections, mixing)

    def apply(
        self, tensors: "Mapping[str, Tensor]", weights: "Mapping[str, Tensor]", ranks: Ranks
    ) -> "dict[str, Tensor]":
        return {"query": tensors["query"] * weights["collaborative_mixing"]}

    @property
    def own_dim(self) -> int:
        return self.dim

    @property
    def is_foldable(self) -> bool:
        return True

    def flops(self, sizes: HeadSizes) -> int:
        return 4 * sizes.hidden_size * self.dim

    def activations(self, sizes: HeadSizes) -> int:
        return self.dim + sizes.query_heads * (self.dim - sizes.head_dim)

    def pair_flops(self, sizes: HeadSizes) -> int:
        return 2 * sizes.query_heads * (self.dim - sizes.head_dim)

    def unfused_reason(self, sizes: HeadSizes) -> str | None:
        if self.dim <= FUSED_DIM:
            return None
        return f"fused kernels support a head dim of at most {FUSED_DIM}, got {self.dim}"

    def unsupported_reason(self, facts: HeadFacts) -> str | None:
        if why := super().unsupported_reason(facts):
            return why
        if facts.fused_attention and self.dim > FUSED_DIM:
            return (
                f"Fused attention kernels support at most {FUSED_DIM} features per head, got "
                f"collaborative.dim={self.dim}. Reduce it or use --attention-backend "
                "unfused."
            )
        if facts.rotary_features > self.dim:
            return (
                f"collaborative.dim ({self.dim}) must be at least the number of rotary features "
                f"per head ({facts.rotary_features}). Increase collaborative.dim or reduce "
                "--rotary-percent (partial_rotary_factor)."
            )
        if self.start == "blocks" and self.dim < facts.query_heads:
            return (
                f"With collaborative.start=blocks, collaborative.dim ({self.dim}) must be at "
                f"least the number of heads ({facts.query_heads}). Increase it or use "
                "collaborative.start=ones."
            )
        return None


def fold_mixing(projection: "Tensor", mixing: "Tensor") -> "Tensor":
    """Fold mixing vectors ``[H, dim]`` into query projections of ordinary heads, ``W_Q diag(m_i)``.

    The product of the shared projection ``[dim, hidden]`` is computed in float64 and rounded once.
    The result has shape ``[H * dim, hidden]`` with heads outermost.
    """
    shared = projection.double()
    folded = projection.new_empty(len(mixing), *projection.shape)
    for head in range(len(folded)):
        folded[head] = mixing[head].double()[:, None] * shared
    return folded.flatten(0, 1)
