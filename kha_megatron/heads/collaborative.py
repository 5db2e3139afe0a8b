"""Collaborative heads (Cordonnier et al. 2020, arXiv 2006.16362): all share one query and one key.

The query projection and the key projection of a layer are ``Dk`` features wide, and each head ``i``
weighs these features by a vector of its own: its logits are
``(X W_Q) diag(m_i) (X W_K)^T / sqrt(Dk)``. Values stay as they are. The maths is in
``kha_megatron.ops.heads.collaborative``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from kha_megatron.errors import ConfigError
from kha_megatron.heads.mechanism import (
    HeadFacts,
    HeadSizes,
    HeadTensor,
    Mechanism,
    Projection,
    Start,
)

MixingStart = Literal["blocks", "ones"]

FUSED_DIM = 256
"""Widest head of fused attention kernels (FlashAttention, cuDNN)."""


@dataclass(frozen=True, kw_only=True)
class CollaborativeHeads(Mechanism):
    """How wide the shared queries and keys are, and how the mixing vectors begin.

    Keys are one head of ``dim`` features, so that a cache needs ``dim + G D`` numbers a token. The
    rotary embedding turns as many of these features as the model's own has, the first ones; QK-norm
    sees a head's ``dim`` features behind its mixing vector.

    Once trained, ``W_Q diag(m_i)`` is the query projection of an ordinary head
    (``ops.heads.collaborative.fold``), whose key is that of all others. A stock class computes it
    with that key repeated for each value head, and zeros behind the narrower of keys and values:
    where all of a head rotates, it needs ``dim`` = ``kv_channels``, else one that rotates a part.

    Raises:
        ConfigError: a value that its type does not list.
    """

    name: ClassVar[str] = "collaborative"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({"collaborative": {}})
    makes: ClassVar[tuple[Projection, ...]] = ("query", "key")

    dim: int = FUSED_DIM
    """Features of the shared query and key (the paper's ``D_k`` of all heads together)."""
    start: MixingStart = "blocks"
    """``blocks``: each head begins with ``dim / H`` features of its own, as multi-head attention
    with heads of that width (the authors' "concatenate"). ``ones``: every head begins with all
    features, all heads alike."""

    def __post_init__(self) -> None:
        if type(self.dim) is not int or self.dim < 2 or self.dim % 2:
            raise ConfigError(f"collaborative dim={self.dim!r}: give an even number from 2 up")
        self._check_choices()

    def tensors(self, sizes: HeadSizes) -> tuple[HeadTensor, ...]:
        """``collaborative_query`` and ``collaborative_key`` ``[dim, hidden]``, which every head
        meets, and ``collaborative_mixing`` ``[H, dim]``."""
        begins: Start = self.start
        shared: tuple[Projection, ...] = ("query", "key")
        return (
            *(
                HeadTensor(
                    name=f"collaborative_{projection}",
                    shape=(self.dim, sizes.hidden_size),
                    gradient="heads",
                    heads=projection,
                    starts=("normal",),
                    hf=f"collaborative_{projection}",
                    reads_input=True,
                )
                for projection in shared
            ),
            HeadTensor(
                name="collaborative_mixing",
                shape=(sizes.query_heads, self.dim),
                gradient="heads",
                heads="query",
                starts=(begins,),
                hf="collaborative_mixing",
                per_head=True,
            ),
        )

    @property
    def made_dim(self) -> int:
        """``dim``, for the query and the key."""
        return self.dim

    @property
    def folds(self) -> bool:
        """Mixing vectors do, into the query projection of each head."""
        return True

    def flops(self, sizes: HeadSizes) -> int:
        """``2 d dim`` for each of the two projections; mixing multiplies element by element."""
        return 4 * sizes.hidden_size * self.dim

    def saved(self, sizes: HeadSizes) -> int:
        """The shared query, and by how much the heads' queries are wider than others."""
        return self.dim + sizes.query_heads * (self.dim - sizes.head_dim)

    def pair_flops(self, sizes: HeadSizes) -> int:
        """Logits of ``dim`` features a head where others have ``D``."""
        return 2 * sizes.query_heads * (self.dim - sizes.head_dim)

    def unfused(self, sizes: HeadSizes) -> str | None:
        """Why fused attention kernels cannot compute it."""
        if self.dim <= FUSED_DIM:
            return None
        return f"its keys are {self.dim} features wide, and fused kernels take at most {FUSED_DIM}"

    def refusal(self, facts: HeadFacts) -> str | None:
        """Other kinds of attention, and what ``dim`` has no room for."""
        if why := super().refusal(facts):
            return why
        if facts.fused_attention and self.dim > FUSED_DIM:
            return (
                f"collaborative.dim={self.dim} on fused attention kernels, whose heads have at "
                f"most {FUSED_DIM} features: use collaborative.dim={FUSED_DIM} or less, or "
                "--attention-backend unfused"
            )
        if facts.rotary_features > self.dim:
            return self.too_narrow(facts.rotary_features)
        if self.start == "blocks" and self.dim < facts.query_heads:
            return (
                f"collaborative.start=blocks with dim={self.dim} for {facts.query_heads} heads "
                f"leaves heads without a feature: use collaborative.dim={facts.query_heads} or "
                "more, or collaborative.start=ones"
            )
        return None

    def too_narrow(self, features: int) -> str:
        """What to say of a rotary embedding that turns more features than there are."""
        return (
            f"collaborative.dim={self.dim}, and the rotary embedding of the model turns {features} "
            f"features: give collaborative.dim={features} or more, or a smaller --rotary-percent "
            "(partial_rotary_factor)"
        )
