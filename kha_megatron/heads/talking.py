"""Talking-heads attention (Shazeer et al. 2020, https://arxiv.org/abs/2003.02436).

Two learned [num_heads, num_heads] matrices mix information across heads: one is applied to the
attention logits (before the softmax), the other to the attention weights (after the softmax).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from kha_megatron.errors import ConfigError
from kha_megatron.heads.mechanism import Costs, HeadSizes, HeadTensor, Mechanism, Stage

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TalkingHeads(Mechanism):
    """Mix attention logits and weights across heads. Initialized to the identity.

    Note: There is no fused kernel for this. Even at initialization, outputs therefore differ by
    rounding from a model with fused attention, e.g. in bfloat16. Every layer materializes
    ``num_heads * seq_len**2`` logits and weights, so memory grows quickly with the sequence length.
    """

    name: ClassVar[str] = "talking"
    stages: ClassVar[tuple[Stage, ...]] = ("core",)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({"talking": {}})

    pre: bool = True
    """Mix the logits, before masking and softmax (``P_l`` in the paper)."""
    post: bool = True
    """Mix the attention weights after the softmax (``P_w`` in the paper)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.mixings:
            raise ConfigError(
                "At least one of talking.pre and talking.post must be true. To disable talking "
                "heads, use talking=none."
            )

    @property
    def keeps_value_features(self) -> bool:
        return True

    @property
    def mixings(self) -> tuple[str, ...]:
        names = []
        for name in ("pre", "post"):
            if getattr(self, name):
                names.append(name)
        return tuple(names)

    def tensors(self, sizes: HeadSizes) -> tuple[HeadTensor, ...]:
        heads = sizes.query_heads
        tensors = []
        for mixing in self.mixings:
            matrix = HeadTensor(
                name=f"talking_{mixing}",
                shape=(heads, heads),
                gradient="heads",
                heads="query",
                initial=("identity",),
                hf=f"talking_{mixing}",
            )
            tensors.append(matrix)
        return tuple(tensors)

    def mix_logits(
        self,
        logits: "Tensor",
        weights: "Mapping[str, Tensor]",
    ) -> "Tensor":
        if not self.pre:
            return logits
        return mix_heads(logits, weights["talking_pre"])

    def mix_scores(
        self,
        scores: "Tensor",
        weights: "Mapping[str, Tensor]",
    ) -> "Tensor":
        if not self.post:
            return scores
        return mix_heads(scores, weights["talking_post"])

    def projections_to_double(self) -> tuple[()]:
        return ()

    def costs(self, sizes: HeadSizes) -> Costs:
        heads = sizes.query_heads
        mixings = len(self.mixings)
        return Costs(
            pair_flops=2 * heads**2 * mixings,
            pair_activations=heads * (3 + mixings),
        )

    def unfused_reason(self, sizes: HeadSizes) -> str | None:
        return "heads mix their logits, but fused kernels process each head independently"


def mix_heads(x: "Tensor", weight: "Tensor") -> "Tensor":
    """Compute ``y[:, k] = sum_h(x[:, h] * weight[h, k])``."""
    mixed = weight.mT @ x.flatten(2)
    return mixed.unflatten(2, x.shape[2:])
