"""Mixture-of-Head attention (MoH, arXiv 2410.11842): a router weighs heads, and turns some off.

The first ``S`` query heads are shared: every token has them. Of the ``R`` others, the routed ones,
a token has the ``K`` that its router scores highest; the rest give nothing for it. The maths is in
``kha_megatron.ops.heads.moh``, equations by the paper's numbers. Where the paper and the authors'
code (SkyworkAI/MoH) differ, a setting names both.
"""

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

from kha_megatron.errors import ConfigError
from kha_megatron.heads.mechanism import HeadFacts, HeadSizes, HeadTensor, Mechanism, Stage

Router = Literal["learned", "query_norm"]
Source = Literal["code", "paper"]
RouterStart = Literal["normal", "zeros"]


@dataclass(frozen=True, kw_only=True)
class MixtureOfHeads(Mechanism):
    """How many heads a token has, who chooses them, and what they weigh.

    Say ``shared`` and ``active``, or ``share``, or ``share`` and one of the two.

    Raises:
        ConfigError: a value that its type does not list, or numbers of heads that say too little
            or contradict each other.
    """

    name: ClassVar[str] = "moh"
    stages: ClassVar[tuple[Stage, ...]] = ("qkv", "output")
    presets: ClassVar = MappingProxyType(
        {"moh_50": {"share": 0.5}, "moh_75": {"share": 0.75}, "moh_90": {"share": 0.9}}
    )

    shared: int | None = None
    """``S``: heads, the first ones of the layer, that every token has (section 4.4)."""
    active: int | tuple[int, ...] | None = None
    """``K``: routed heads that a token has, in every layer or one number for each layer."""
    share: float | None = None
    """Heads that a token has over all heads, ``(S + K) / H``, rounded to whole heads: the paper's
    "activated". Of them half, rounded down, are shared where nothing else is said."""
    router: Router = "learned"
    """``learned`` scores heads by a projection of the layer's input (equations 5 and 6),
    ``query_norm`` by the norms of their queries, without parameters (section 4.4): of what the
    knock gives, before QK-norm, behind which all norms are alike."""
    quantized: bool = False
    """Whether the heads that a token has weigh 1 each, and the router learns from the gradient as
    if it had weighed them (equations 9 and 10): how a trained model is made one of MoH."""
    scale: Source = "code"
    """``paper`` weighs as equation 5 says: with a learned router a token's weights sum to 1 at
    most. ``code``: a head weighs about 1, and norms of queries are divided by their spread over the
    routed heads."""
    balance: float = 0.01
    """``beta`` of equation 8, with which the load-balance loss is trained on; 0 is none."""
    balance_scale: Source = "code"
    """``paper`` is equation 7, summed over layers. ``code`` is its ``R``-fold and the mean over
    layers."""
    anneal: int = 0
    """Iterations in which the routed heads of a token go from all ``R`` to ``K``; 0 is none. A
    trained model begins without losing heads."""
    start: RouterStart = "normal"
    """How the learned router begins. At ``zeros`` with ``scale=code`` all heads weigh 1."""

    def __post_init__(self) -> None:
        if isinstance(self.active, list):  # as JSON has it
            object.__setattr__(self, "active", tuple(self.active))
        self._check_choices()
        for setting in ("balance", "anneal"):
            value = getattr(self, setting)
            kinds = (int, float) if setting == "balance" else (int,)
            if type(value) not in kinds or not 0 <= value < float("inf"):
                raise ConfigError(f"moh {setting}={value!r}: use 0 or more")
        if self.router == "query_norm" and self.start != type(self).start:
            raise ConfigError(f"moh start={self.start} without a router to start: leave it out")
        self._check_numbers()

    def _check_numbers(self) -> None:
        several = isinstance(self.active, tuple)
        active = self.active if isinstance(self.active, tuple) else (self.active,)
        for value in (self.shared, *active):
            if value is not None and (type(value) is not int or value < 0):
                raise ConfigError(f"moh has {value!r} as a number of heads: use whole numbers")
        if not active or 0 in active:
            raise ConfigError(f"moh active={self.active}: use 1 or more routed heads")
        if self.shared == 0 and self.router == "learned":
            raise ConfigError(
                "moh shared=0 with a learned router, which weighs shared heads against routed ones "
                "(equation 6): use 1 or more, or router=query_norm"
            )
        if self.share is not None and (
            type(self.share) not in (int, float) or not 0 < self.share <= 1
        ):
            raise ConfigError(f"moh share={self.share!r}: use more than 0 and at most 1")
        given = [name for name in ("shared", "active", "share") if getattr(self, name) is not None]
        if given in ([], ["shared"], ["active"]):
            raise ConfigError(
                f"moh with {', '.join(given) or 'no number of heads'}: say moh.shared and "
                "moh.active, or moh.share, as in moh.share=0.75"
            )
        if len(given) == 3 or (several and self.share is not None):
            raise ConfigError(
                f"moh shared={self.shared} active={self.active} share={self.share} say one thing "
                "twice: give shared and active, and leave share out"
            )

    def shared_heads(self, heads: int) -> int:
        """``S`` of a layer that has ``heads`` query heads."""
        if self.shared is not None:
            return self.shared
        assert self.share is not None
        assert not isinstance(self.active, tuple)
        on = round(self.share * heads)
        return on // 2 if self.active is None else on - self.active

    def active_heads(self, heads: int, iteration: int | None = None) -> int:
        """``K`` of a layer that has ``heads`` query heads.

        Where every layer has a number of its own, ask :meth:`for_layer`.

        Args:
            iteration: how many are behind the model in its training, of which ``anneal`` take part;
                None for a trained one.
        """
        shared, active = self.shared_heads(heads), self.active
        assert not isinstance(active, tuple)
        if active is None:
            assert self.share is not None
            active = round(self.share * heads) - shared
        if iteration is None or iteration >= self.anneal:
            return active
        routed = heads - shared
        return routed - (routed - active) * iteration // self.anneal

    def for_layer(self, layer: int) -> Self:
        """With the one number of active heads of this layer."""
        if not isinstance(self.active, tuple):
            return self
        return replace(self, active=self.active[layer])

    def tensors(self, sizes: HeadSizes) -> tuple[HeadTensor, ...]:
        """``moh_router`` ``[H + 2, hidden]``: ``W_s``, ``W_r`` and ``W_h`` (equations 5 and 6)."""
        if self.router == "query_norm":
            return ()
        return (
            HeadTensor(
                name="moh_router",
                shape=(sizes.query_heads + 2, sizes.hidden_size),
                gradient="whole",
                heads="query",
                starts=(self.start,),
                hf="moh_router",
                reads_input=True,
            ),
        )

    def flops(self, sizes: HeadSizes) -> int:
        """Those of the router; norms and weights are products of elements, which are left out."""
        return 2 * sum(tensor.size for tensor in self.tensors(sizes))

    def spared(self, sizes: HeadSizes) -> tuple[int, int]:
        """Of each head that a token does not have, its rows of the output projection, its logits
        and its part of the values' sum; its query too where the router does not read it."""
        heads, hidden = sizes.query_heads, sizes.hidden_size
        idle = heads - self.shared_heads(heads) - self.active_heads(heads)
        query, value = sizes.dim("query"), sizes.dim("value")
        projected = value + (query if self.router == "learned" else 0)
        return 2 * idle * hidden * projected, 2 * idle * (query + value)

    def saved(self, sizes: HeadSizes) -> int:
        """What attention gives and, of each head, some four numbers of float32 that the weights are
        made of; the query in float32 too, where its norm is the score. At most an eighth more than
        is kept; a number of float32 is two elements of 16 bits."""
        heads = sizes.query_heads
        queries = 2 * heads * sizes.dim("query") if self.router == "query_norm" else 0
        return heads * (sizes.dim("value") + 10) + queries

    def sent(self, sizes: HeadSizes, tp: int, width: int) -> tuple[int, int]:
        """In float32: norms of queries to all ranks, and back the gradients of all heads' weights,
        of which each rank has its own heads'."""
        of_heads = 4 * sizes.query_heads
        return (of_heads if self.router == "query_norm" else 0), of_heads

    def acts_at(self, stage: Stage) -> bool:
        """A learned router leaves queries to themselves."""
        return super().acts_at(stage) and (stage == "output" or self.router == "query_norm")

    @property
    def adds_loss(self) -> bool:
        """For a balanced load."""
        return self.balance > 0

    @property
    def is_exact_at_start(self) -> bool:
        """Where a token begins with all heads, which weigh 1."""
        return self.quantized and (self.anneal > 0 or self.share == 1)

    def to_dict(self) -> dict[str, Any]:
        """As :meth:`Mechanism.to_dict`, with numbers for each layer as JSON has them."""
        values = super().to_dict()
        return values | {"active": list(self.active)} if isinstance(self.active, tuple) else values

    @property
    def drops_heads(self) -> bool:
        """It does."""
        return True

    def doubled(self) -> tuple[()]:
        """Nothing: it adds no tensor, and the heads that a token has weigh 1 each (section 4.4).

        Raises:
            ConfigError: heads would be weighed besides, by a router that has learnt nothing.
        """
        if self.router == "learned" or not self.quantized:
            raise ConfigError(
                f"{self} weighs a trained model's heads by numbers that it has not learnt: use "
                "moh.router=query_norm and moh.quantized=true"
            )
        return ()

    def refusal(self, facts: HeadFacts) -> str | None:
        """Other kinds of attention, and numbers that the model's heads or layers cannot honour."""
        if why := super().refusal(facts):
            return why
        layers, heads = facts.layers, facts.query_heads
        several = self.active if isinstance(self.active, tuple) else ()
        if layers and several and len(several) != layers:
            return (
                f"moh active={list(several)} names {len(several)} layers, and the model has "
                f"{layers}: give one number, or {layers}"
            )
        if not heads:
            return None
        least, shared = int(self.router == "learned"), self.shared_heads(heads)
        if not least <= shared < heads:
            return (
                f"{self} shares {shared} of {heads} heads: use moh.shared from {least} to "
                f"{heads - 1}, which leaves some to route"
            )
        routed = heads - shared
        wanted = several or (self.active_heads(heads),)
        if wrong := [active for active in wanted if not 1 <= active <= routed]:
            return (
                f"{self} has {wrong[0]} active of {routed} routed heads ({heads} heads, {shared} "
                f"of them shared): use moh.active from 1 to {routed}"
            )
        return None
