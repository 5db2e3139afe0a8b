"""Collaborative heads (Cordonnier et al. 2020, arXiv 2006.16362): one query and one key for all.

The query and key projections are ``Dk`` features wide. Head ``i`` weighs them by a mixing vector
``m_i``: its logits are ``(X W_Q) diag(m_i) (X W_K)^T / sqrt(Dk)`` (equation 6).
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
"""Widest head of fused attention kernels (FlashAttention, cuDNN)."""


@dataclass(frozen=True, kw_only=True)
class CollaborativeHeads(Mechanism):
    """Width of the shared query and key, and initial value of the mixing vectors.

    The cache holds ``dim + G D`` numbers per token. QK-norm comes after the mixing vector. For
    export, ``W_Q diag(m_i)`` folds into ordinary query projections with one repeated key; where all
    features of a head rotate, this needs ``dim`` = ``kv_channels``.
    """

    name: ClassVar[str] = "collaborative"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({"collaborative": {}})
    own_projections: ClassVar[tuple[Projection, ...]] = ("query", "key")

    dim: int = FUSED_DIM
    """Features of the shared query and key (the paper's ``D_k``)."""
    start: MixingStart = "blocks"
    """``blocks``: each head starts with ``dim / H`` features of its own (the authors'
    "concatenate"). ``ones``: every head starts with all features."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim < 2 or self.dim % 2:
            raise ConfigError(f"Expected collaborative.dim to be even, got {self.dim}.")

    def tensors(self, sizes: HeadSizes) -> tuple[HeadTensor, ...]:
        """Return query and key projections ``[dim, hidden]`` and mixing vectors ``[H, dim]``."""
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
        """Weight the shared query ``[..., 1, dim]`` for each head: ``[..., heads, dim]``."""
        return {"query": tensors["query"] * weights["collaborative_mixing"]}

    @property
    def own_dim(self) -> int:
        """Width of the query and key."""
        return self.dim

    @property
    def is_foldable(self) -> bool:
        """Mixing vectors fold into the query projection of each head."""
        return True

    def flops(self, sizes: HeadSizes) -> int:
        """Count ``2 d dim`` for each of the two projections."""
        return 4 * sizes.hidden_size * self.dim

    def activations(self, sizes: HeadSizes) -> int:
        """Count the shared query, and the extra width of the heads' queries."""
        return self.dim + sizes.query_heads * (self.dim - sizes.head_dim)

    def pair_flops(self, sizes: HeadSizes) -> int:
        """Count logits of ``dim`` features per head instead of ``D``."""
        return 2 * sizes.query_heads * (self.dim - sizes.head_dim)

    def unfused_reason(self, sizes: HeadSizes) -> str | None:
        """Return why fused attention kernels cannot compute it, or None."""
        if self.dim <= FUSED_DIM:
            return None
        return f"its keys are {self.dim} features wide, and fused kernels support {FUSED_DIM}"

    def unsupported_reason(self, facts: HeadFacts) -> str | None:
        """Refuse MLA, GTA and a ``dim`` that does not fit the model."""
        if why := super().unsupported_reason(facts):
            return why
        if facts.fused_attention and self.dim > FUSED_DIM:
            return (
                f"Fused attention kernels support at most {FUSED_DIM} features per head, got "
                f"collaborative.dim={self.dim}. Reduce it or pass --attention-backend unfused."
            )
        if facts.rotary_features > self.dim:
            return (
                f"Expected collaborative.dim of at least {facts.rotary_features}, the rotary "
                f"features of a head, got {self.dim}. Increase it or reduce --rotary-percent "
                "(partial_rotary_factor)."
            )
        if self.start == "blocks" and self.dim < facts.query_heads:
            return (
                f"Expected collaborative.dim of at least {facts.query_heads} (one per head) with "
                f"start=blocks, got {self.dim}. Increase it or set collaborative.start=ones."
            )
        return None


def fold_mixing(projection: "Tensor", mixing: "Tensor") -> "Tensor":
    """Fold mixing vectors into the query projections of ordinary heads, ``W_Q diag(m_i)``.

    Computed in float64, one head at a time, and rounded once to the projection's dtype.

    Args:
        projection: ``[dim, hidden]``, the shared query projection.
        mixing: ``[H, dim]``.

    Returns:
        ``[H * dim, hidden]``, heads outermost.
    """
    shared = projection.double()
    folded = projection.new_empty(len(mixing), *projection.shape)
    for head in range(len(folded)):
        folded[head] = mixing[head].double()[:, None] * shared
    return folded.flatten(0, 1)
