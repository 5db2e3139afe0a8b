"""Collaborative heads (Cordonnier et al. 2020, https://arxiv.org/abs/2006.16362).

All heads share a single query projection and a single key projection. What differs between heads is
only a mixing vector ``m_i``, so that the logits of head ``i`` are (eq. 6)::

    (X W_Q) diag(m_i) (X W_K)^T / sqrt(D_k)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kha_megatron.errors import ConfigError
from kha_megatron.heads.mechanism import (
    Costs,
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
"""Largest head dim that fused attention kernels (FlashAttention, cuDNN) support."""


@dataclass(frozen=True, kw_only=True)
class CollaborativeHeads(Mechanism):
    """Query and key projections shared by all heads, with one mixing vector per head.

    If QK-norm is enabled, it is applied after the mixing vector. The KV cache holds only one key of
    ``dim`` elements per token, in addition to the values.

    Note: When a model is exported, the mixing vectors are folded into regular query projections and
    the shared key is repeated. If RoPE rotates all features of a head, this requires ``dim`` to be
    equal to ``kv_channels``.
    """

    name: ClassVar[str] = "collaborative"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({"collaborative": {}})

    dim: int = FUSED_DIM
    """Size of the shared query and key (``D_k`` in the paper)."""
    start: MixingStart = "blocks"
    """Initialization of the mixing vectors. With ``blocks``, each head starts with its own
    ``dim / num_heads`` features ("concatenate" in the authors' code). With ``ones``, every head
    uses all of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim < 2 or self.dim % 2:
            raise ConfigError(f"collaborative.dim must be even and at least 2, got {self.dim}.")

    def tensors(self, sizes: HeadSizes) -> tuple[HeadTensor, ...]:
        tensors = []
        for projection in self.own_projections:
            shared_projection = HeadTensor(
                name=f"collaborative_{projection}",
                shape=(self.dim, sizes.hidden_size),
                gradient="heads",
                heads=projection,
                initial=("normal",),
                hf=f"collaborative_{projection}",
                reads_input=True,
            )
            tensors.append(shared_projection)
        mixing_vectors = HeadTensor(
            name="collaborative_mixing",
            shape=(sizes.query_heads, self.dim),
            gradient="heads",
            heads="query",
            initial=(self.start,),
            hf="collaborative_mixing",
            per_head=True,
        )
        tensors.append(mixing_vectors)
        return tuple(tensors)

    def apply(
        self,
        tensors: "Mapping[str, Tensor]",
        weights: "Mapping[str, Tensor]",
        ranks: Ranks,
    ) -> "dict[str, Tensor]":
        return {"query": tensors["query"] * weights["collaborative_mixing"]}

    @property
    def own_projections(self) -> dict[Projection, int]:
        return {"query": self.dim, "key": self.dim}

    @property
    def keeps_value_features(self) -> bool:
        return True

    @property
    def is_foldable(self) -> bool:
        return True

    def fold(
        self,
        weights: "Mapping[str, Tensor]",
        sizes: HeadSizes,
        scale: float,
    ) -> "dict[str, Tensor]":
        mixing = weights["collaborative_mixing"].double() * scale
        return {
            "query": fold_mixing(weights["collaborative_query"], mixing),
            "key": weights["collaborative_key"].repeat(sizes.kv_heads, 1),
        }

    def costs(self, sizes: HeadSizes) -> Costs:
        """Count the two shared projections and the additional features of each query head.

        There are fewer features if ``dim`` is smaller than ``head_dim``, so costs can be negative.
        """
        projection_flops = 2 * sizes.hidden_size * self.dim  # a multiply-add is 2 FLOPs
        added_features = sizes.query_heads * (self.dim - sizes.head_dim)
        shared_query = self.dim  # saved to compute the gradient of the mixing vectors
        return Costs(
            flops=2 * projection_flops,  # queries and keys
            activations=shared_query + added_features,
            pair_flops=2 * added_features,
        )

    def unfused_reason(self, sizes: HeadSizes) -> str | None:
        if self.dim <= FUSED_DIM:
            return None
        return f"fused kernels support a head dim of at most {FUSED_DIM}, got {self.dim}"

    def unsupported_reason(self, facts: HeadFacts) -> str | None:
        reason = super().unsupported_reason(facts)
        if reason is not None:
            return reason
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
    """Fold the mixing vectors into one query projection per head, i.e. ``W_Q diag(m_i)``.

    Args:
        projection (Tensor): Shared projection of shape [dim, hidden_size].
        mixing (Tensor): Mixing vectors of shape [num_heads, dim].

    Returns:
        Tensor: Weight of shape [num_heads * dim, hidden_size]. Computed in float64, so it is
            rounded only once.
    """
    heads = len(mixing)
    shared_weight = projection.double()
    folded = projection.new_empty(heads, *projection.shape)
    for head in range(heads):
        feature_scales = mixing[head].double().unsqueeze(-1)
        folded[head] = feature_scales * shared_weight
    return folded.flatten(0, 1)
