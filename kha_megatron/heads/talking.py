"""Talking-heads attention (Shazeer et al. 2020, arXiv 2003.02436): heads mix logits and weights.

A learned ``[H, H]`` matrix mixes the logits of all heads before the softmax, and a second one mixes
the attention weights after the softmax.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from kha_megatron.errors import ConfigError
from kha_megatron.heads.mechanism import HeadFacts, HeadSizes, HeadTensor, Mechanism, Stage

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TalkingHeads(Mechanism):
    """Settings of mixing before and after the softmax, which is a bit-exact no-op at
    initialization.

    Since no fused kernel supports talking heads, a layer materializes ``H L^2`` logits and weights
    for ``L`` tokens.
    """

    name: ClassVar[str] = "talking"
    stages: ClassVar[tuple[Stage, ...]] = ("core",)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({"talking": {}})

    pre: bool = True
    """Whether to mix logits before the mask and the softmax (``P_l`` in the paper)."""
    post: bool = True
    """Whether to mix weights after the softmax (``P_w`` in the paper)."""
    max_tokens: int = field(default=2048, compare=False)
    """Maximum sequence length. This setting is not stored in checkpoints."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.pre or self.post):
            raise ConfigError("At least one of talking.pre and talking.post must be true.")

    @property
    def mixings(self) -> tuple[str, ...]:
        return tuple(word for word in ("pre", "post") if getattr(self, word))

    def tensors(self, sizes: HeadSizes) -> tuple[HeadTensor, ...]:
        heads = sizes.query_heads
        return tuple(
            HeadTensor(
                name=f"talking_{mixing}",
                shape=(heads, heads),
                gradient="heads",
                heads="query",
                initial=("identity",),
                hf=f"talking_{mixing}",
            )
            for mixing in self.mixings
        )

    def attend(
        self,
        query: "Tensor",
        key: "Tensor",
        value: "Tensor",
        weights: "Mapping[str, Tensor]",
        *,
        scale: float,
        mask: "Tensor | None" = None,
        dropout: "Callable[[Tensor], Tensor] | None" = None,
    ) -> "tuple[Tensor, Tensor]":
        """Compute scaled dot-product attention with talking heads (section 2).

        Logits are mixed before masking, because ``-inf * 0`` is NaN. With identity matrices, the
        result is bit-identical to ordinary attention. The softmax is computed in float32 or wider.

        Args:
            query: All heads of the layer, of shape ``[B, H, S, D]``.
            key: Tensor of shape ``[B, G, K, D]``. Each KV head is used by ``H / G`` consecutive
                heads.
            value: Tensor of shape ``[B, G, K, V]``.
            weights: ``talking_pre`` and ``talking_post`` of shape ``[H, H]``, if enabled.
            mask: Broadcastable to ``[B, H, S, K]``: either booleans that are True for masked keys,
                or values added to the mixed logits. Queries without visible keys attend to all keys
                equally.

        Returns:
            Output ``[B, H, S, V]`` and attention weights ``[B, H, S, K]`` before dropout.
        """
        import torch

        shared = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
        # same matmul as in Megatron's attention, so that results are bit-identical
        logits = torch.baddbmm(
            query.new_empty(1, 1, 1),
            query.flatten(0, 1),
            key.flatten(0, 1).mT,
            beta=0.0,
            alpha=scale,
        ).unflatten(0, query.shape[:2])
        if self.pre:
            logits = mix_heads(logits, weights["talking_pre"])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if mask is not None:
            lowest = torch.finfo(logits.dtype).min
            hides = mask.dtype == torch.bool
            logits = logits.masked_fill(mask, lowest) if hides else (logits + mask).clamp(lowest)
        scores = logits.softmax(-1).to(query.dtype)
        if self.post:
            scores = mix_heads(scores, weights["talking_post"])
        dropped = scores if dropout is None else dropout(scores)
        output = torch.bmm(dropped.flatten(0, 1), value.flatten(0, 1))
        return output.unflatten(0, query.shape[:2]), scores

    def projections_to_double(self) -> tuple[()]:
        return ()

    def unsupported_reason(self, facts: HeadFacts) -> str | None:
        return super().unsupported_reason(facts) or self.too_long(facts.tokens)

    def too_long(self, tokens: int) -> str | None:
        """Return an error message if a sequence is longer than ``max_tokens``, otherwise None."""
        if tokens <= self.max_tokens:
            return None
        return (
            f"The sequence length ({tokens}) exceeds talking.max_tokens={self.max_tokens}. Each "
            f"head materializes {tokens} x {tokens} logits, so reduce --seq-length or, if there is "
            f"enough memory, pass --heads talking.max_tokens={tokens}."
        )

    def pair_flops(self, sizes: HeadSizes) -> int:
        return 2 * sizes.query_heads**2 * len(self.mixings)

    def pair_activations(self, sizes: HeadSizes) -> int:
        return sizes.query_heads * (3 + len(self.mixings))

    def communication(self, sizes: HeadSizes, tp: int, width: int) -> tuple[int, int]:
        features = sizes.dim("key") + sizes.dim("value")
        turned = sizes.query_heads * features // tp
        gathered = max(sizes.kv_heads, tp) * features
        return width * (turned + gathered), width * (turned + gathered)

    def unfused_reason(self, sizes: HeadSizes) -> str | None:
        return "heads mix their logits, but fused kernels process each head independently"


def mix_heads(x: "Tensor", weight: "Tensor") -> "Tensor":
    """Mix heads: output head ``k`` is the sum over heads ``h`` of ``x_h * weight[h, k]``."""
    return (weight.mT @ x.flatten(2)).unflatten(2, x.shape[2:])
