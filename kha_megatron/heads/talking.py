"""Talking-heads attention (Shazeer et al. 2020, arXiv 2003.02436): heads mix logits and weights.

Between ``Q K^T`` and the softmax, and again between the softmax and the values, a learnt ``[H, H]``
matrix mixes what all heads of a layer have for the same query and key. The maths is in
``kha_megatron.ops.heads.talking``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

from kha_megatron.errors import ConfigError
from kha_megatron.heads.mechanism import HeadFacts, HeadSizes, HeadTensor, Mechanism, Stage


@dataclass(frozen=True, kw_only=True)
class TalkingHeads(Mechanism):
    """Which of the two mixings there are. Both start as the identity: a bit-exact no-op.

    No fused kernel computes it: a layer holds ``H L^2`` logits for each sequence of ``L`` tokens,
    and as many weights, so it is for short sequences.

    Raises:
        ConfigError: neither mixing, or a limit that is none.
    """

    name: ClassVar[str] = "talking"
    stages: ClassVar[tuple[Stage, ...]] = ("core",)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({"talking": {}})

    pre: bool = True
    """Whether logits are mixed before the mask and the softmax (the paper's ``P_l``)."""
    post: bool = True
    """Whether weights are mixed behind the softmax (the paper's ``P_w``). With one key/value head
    this is a linear map of what the heads give, which the output projection can do as well."""
    max_tokens: int = field(default=2048, compare=False)
    """Longest sequence to attend to; how a model is run, not what it is."""

    def __post_init__(self) -> None:
        self._check_choices()
        if not (self.pre or self.post):
            raise ConfigError("talking with pre=false and post=false mixes nothing: leave it out")
        if type(self.max_tokens) is not int or self.max_tokens < 1:
            raise ConfigError(f"talking max_tokens={self.max_tokens!r}: give a number from 1 up")

    @property
    def mixings(self) -> tuple[str, ...]:
        """``pre`` and ``post``, those that there are."""
        return tuple(word for word in ("pre", "post") if getattr(self, word))

    def tensors(self, sizes: HeadSizes) -> tuple[HeadTensor, ...]:
        """``talking_pre`` and ``talking_post`` ``[H, H]``: from all heads (rows) to all heads.

        Under tensor parallelism a rank has all heads and some of the query tokens, with or without
        sequence parallelism, so its gradient is a partial sum as that of a head-shared matrix is.
        """
        heads = sizes.query_heads
        return tuple(
            HeadTensor(
                name=f"talking_{mixing}",
                shape=(heads, heads),
                gradient="heads",
                heads="query",
                starts=("identity",),
                hf=f"talking_{mixing}",
            )
            for mixing in self.mixings
        )

    def doubled(self) -> tuple[()]:
        """Nothing: both mixings begin at the identity."""
        return ()

    def refusal(self, facts: HeadFacts) -> str | None:
        """Other kinds of attention, and sequences that are too long."""
        return super().refusal(facts) or self.too_long(facts.tokens)

    def too_long(self, tokens: int) -> str | None:
        """Why a sequence of so many tokens is refused, with the remedy; None if it is not."""
        if tokens <= self.max_tokens:
            return None
        return (
            f"talking heads on {tokens} tokens, more than talking.max_tokens={self.max_tokens}: no "
            f"fused kernel mixes heads, so each holds {tokens} x {tokens} logits of every sequence "
            f"in every layer: shorten --seq-length, or give --heads talking.max_tokens={tokens}"
        )

    def pair_flops(self, sizes: HeadSizes) -> int:
        """``2 H^2`` for each mixing of what the heads have for one query and one key."""
        return 2 * sizes.query_heads**2 * len(self.mixings)

    def pair_saved(self, sizes: HeadSizes) -> int:
        """In 16 bits: what each mixing reads, the softmax in float32, and what meets the values."""
        return sizes.query_heads * (3 + len(self.mixings))

    def sent(self, sizes: HeadSizes, tp: int, width: int) -> tuple[int, int]:
        """Queries and outputs turned from a rank's heads to its tokens, and back; the keys and
        values of all heads to all ranks, and their gradients back. Ranks that share a key/value
        head each bring it."""
        features = sizes.dim("key") + sizes.dim("value")
        turned = sizes.query_heads * features // tp
        gathered = max(sizes.kv_heads, tp) * features
        return width * (turned + gathered), width * (turned + gathered)

    def unfused(self, sizes: HeadSizes) -> str | None:
        """Why fused attention kernels cannot compute it."""
        return "heads mix their logits, of which fused kernels never hold more than one head's"
